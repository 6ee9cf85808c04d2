"""Settings: one frozen dataclass per component, programs compose them, parse() fills them.

The text under a field is its --help; a field that a subclass gives another default keeps it.
"""

from importlib.util import find_spec

if find_spec("tyro") is None:  # the first import of every program
    raise SystemExit(
        "error: what this program needs is not installed: `bash scripts/setup.sh`, then "
        "`source .venv/bin/activate`"
    )
