"""Inject faults into a training, and say what they cost: see tools/chaos/__main__.py.

python tools/chaos.py --faults scripts/chaos/hours.toml --output runs/chaos -- \\
    torchrun --nproc-per-node 2 pretrain_gpt2.py --preset small.toml --save-interval 100
python tools/chaos.py --faults faults.toml --output runs/other -- python train.py --to {save}
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys

from tools.chaos.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
