"""Show what a layout is, without running it: see tools/layouts/__main__.py."""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import sys

from tools.layouts.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
