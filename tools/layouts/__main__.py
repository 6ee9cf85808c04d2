"""Show what a layout is, without running it: a word for each program."""

import os
import sys
from collections.abc import Mapping, Sequence

from megatron.config.parse import parse_call, whole_program
from tools.layouts.picture import picture

PROGRAMS = {"picture": picture}


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; returns the exit status."""
    with whole_program(environ):
        parse_call(PROGRAMS, arguments, environ)()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
