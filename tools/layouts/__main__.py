"""Show what a layout is, without running it.

    python tools/layouts.py picture --layout tensor=4:2d                     # a table
    python tools/layouts.py picture --layout tensor=4:2d --output FILE.svg

The word picture shows which block of each matrix every rank holds: see tools/layouts/picture.py.
A LAYOUT is one of tools/compare_layouts.py.

Exit status: 0, or 2 for a wrong argument.
"""

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
