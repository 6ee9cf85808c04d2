"""Train a model at several layouts and compare the numbers: see tools/layouts/compare.py."""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys

from tools.layouts.compare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
