"""Settings: one frozen dataclass per component; programs compose them and parse() fills them.

The text below a field is its --help, and stays when a subclass gives the field another default.
"""

from importlib.util import find_spec

if find_spec("tyro") is None:  # the first import of every program
    raise SystemExit(
        "error: what this program needs is not installed: `bash scripts/setup.sh`, then "
        "`source .venv/bin/activate`"
    )
