"""Pretrain BERT (paper, section 5.2); megatron/train/pretrain.py tells the story.

    torchrun --nproc-per-node 2 pretrain_bert.py --preset scripts/presets/bert_336m.toml \\
        --tensor-model-parallel-size 2 --data-path P_text_sentence --save checkpoints
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megatron.train.pretrain import pretrain


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    pretrain(arguments, environ, "bert")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
