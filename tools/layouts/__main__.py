"""Show what a layout is, without running it: a word for each program."""

import os
import sys
from collections.abc import Mapping, Sequence

from megatron.config.parse import parse_call, user_errors
from tools.layouts.picture import picture

PROGRAMS = {"picture": picture}


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; returns the exit status."""
    with user_errors(environ):
        parse_call(PROGRAMS, arguments, environ)()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
