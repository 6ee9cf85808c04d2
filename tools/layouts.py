"""Show what a layout is, without running it: see tools/layouts/__main__.py."""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.layouts.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
