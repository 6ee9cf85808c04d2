"""Converts checkpoints of the PyTorch tutorial "Train your large model on multiple GPUs with tensor
parallelism" to checkpoints of this project and back, so that a run resumes in the other program.

    python tools/convert_dcp.py import --from checkpoint-dist --output checkpoints --vocab-file
        bpe_50K.json --global-batch-size 32
    python tools/convert_dcp.py export --from checkpoints --output checkpoint-dist

Weights, Adam's moments, the learning rate schedule and the position in the data are converted.
Input is a folder that torch.distributed.checkpoint saved from {"model": ..., "optimizer": ...} on
any number of processes, of plain tensors or DTensors, the optimizer's state by position or name,
with lrscheduler.pt; tools/convert/legacy/dcp_tutorial.py lists its entries. Pickles in it are read
as data: nothing that they name is imported or run.
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
from tools.convert.legacy.dcp_tutorial import main

if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
