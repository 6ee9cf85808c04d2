"""`python -m tools.paper.figure7`; the program is tools/experiments/figure7.py."""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from pathlib import Path

if __name__ == "__main__":  # run as a file, only tools/paper is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.experiments.figure7 import main

if __name__ == "__main__":
    main()
