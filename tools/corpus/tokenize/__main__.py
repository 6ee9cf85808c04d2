"""`python -m tools.corpus.tokenize`, an earlier spelling of `python tools/corpus.py tokenise`."""

import sys

from tools.corpus.tokenize.step import main

if __name__ == "__main__":
    main(sys.argv[1:])
