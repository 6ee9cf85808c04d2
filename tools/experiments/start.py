"""A program of this folder that is run as a file imports this, which refuses an older Python and
finds the repository."""

import sys
from pathlib import Path

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
