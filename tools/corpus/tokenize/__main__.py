"""Starts the step: `python tools/corpus.py tokenize`."""

import sys

from tools.corpus.tokenize.step import main

if __name__ == "__main__":
    main(sys.argv[1:])
