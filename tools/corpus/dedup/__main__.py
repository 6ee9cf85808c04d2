"""`python -m tools.corpus.dedup`, an earlier spelling of `python tools/corpus.py dedup`."""

from tools.corpus.settings import program

if __name__ == "__main__":
    program("tools.corpus.dedup")
