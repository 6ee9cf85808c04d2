"""Train a model at several layouts and compare the numbers: see tools/layouts/compare.py."""

if not __package__:  # run as a file, only tools/ is on the path
    __import__("start")

import os
import sys

from tools.layouts.compare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
