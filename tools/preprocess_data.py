"""From JSON lines or text files to token files: see tools/corpus/tokenize/step.py."""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import sys

from tools.corpus.tokenize.step import main

if __name__ == "__main__":
    main(sys.argv[1:])
