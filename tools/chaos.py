"""Inject faults into a training, and say what they cost: see tools/chaos/__main__.py.

python tools/chaos.py --faults scripts/chaos/hours.toml --output runs/chaos -- \\
    torchrun --nproc-per-node 2 pretrain_gpt2.py --preset small.toml --save-interval 100
python tools/chaos.py --faults faults.toml --output runs/other -- python train.py --to {save}
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from pathlib import Path

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.chaos.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
