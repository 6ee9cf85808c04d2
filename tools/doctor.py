"""Find what a run here would use, and what is wrong with it: see tools/doctor/__main__.py."""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys

from tools.doctor.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
