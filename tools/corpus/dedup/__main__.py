"""Starts the step: `python -m tools.corpus.dedup`."""

from tools.corpus.settings import program

program("tools.corpus.dedup")
