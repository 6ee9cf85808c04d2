"""Starts the step: `python tools/corpus.py dedup`."""

from tools.corpus.settings import program

program("tools.corpus.dedup")
