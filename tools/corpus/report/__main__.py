"""The command: `python -m tools.corpus.report --help`."""

from tools.corpus.settings import program

program("tools.corpus.report")
