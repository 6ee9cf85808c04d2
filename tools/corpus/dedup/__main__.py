"""`python -m tools.corpus.dedup`, an earlier spelling of `python tools/corpus.py dedup`."""

from tools.corpus.settings import program

program("tools.corpus.dedup")
