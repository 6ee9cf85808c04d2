"""Pretrain a model of any kind; megatron/train/pretrain.py has the implementation.

    torchrun --nproc-per-node 2 pretrain.py --model gpt2 --preset quickstart \\
        --tensor-model-parallel-size 2 --data-path P_text_document --save checkpoints
    python pretrain.py --model llama --preset miniature_llama --mock-data --vocab-size 1000
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from collections.abc import Mapping, Sequence

from megatron.train.pretrain import pretrain


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    pretrain(arguments, environ)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
