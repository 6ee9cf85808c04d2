"""The command: `python -m tools.corpus.report --help`."""

from tools.corpus.program import program

program("tools.corpus.report")
