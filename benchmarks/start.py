"""Run by a program of this folder that is run as a file: refuses an older Python, and finds the
repository, also where Python does not look into the folder (PYTHONSAFEPATH)."""

import sys
from pathlib import Path

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
