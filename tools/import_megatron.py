"""Reads a GPT-2 that Megatron-LM of 2019 or 2020 saved: python tools/import_megatron.py --from DIR
--output CKPT --vocab-file vocab.json --merge-file merges.txt --num-attention-heads 16

The files are pickles, and are read as data: nothing that they name is imported or run. The
checkpoint has the weights, in their stored dtype, and the tokenizer. The other program is not
available to compare logits with. Before the checkpoint gets its name, this program checks that it
reads back bit for bit and computes finite logits.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from pathlib import Path

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.launch import interruptible
from tools.convert.legacy.megatron_2019 import main

if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
