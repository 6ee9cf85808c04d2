"""Show what a layout is, without running it: see tools/layouts/__main__.py."""

if not __package__:  # run as a file, only tools/ is on the path
    __import__("start")

import os
import sys

from tools.layouts.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
