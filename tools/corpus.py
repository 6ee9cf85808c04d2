"""Run a step of the corpus by its name: see tools/corpus/__main__.py."""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import sys

from tools.corpus.__main__ import main

if __name__ == "__main__":
    main(sys.argv[1:])
