"""Runs a step by its name: `python -m tools.corpus NAME FLAGS`; without a name, lists the steps."""

import sys
from collections.abc import Sequence
from importlib import import_module

from megatron.config.parse import user_errors
from tools.corpus.pipeline import STEPS
from tools.corpus.settings import program

OTHERS = ("run", "plan", "urls", "harvest")
TOKENISE = "python tools/preprocess_data.py"


def list_steps() -> None:
    """Print every step, with its command."""
    print("A corpus from raw dumps to training shards.  In this order:\n")
    for name in STEPS:
        show(name)
    print("\nAnd beside them:\n")
    for name in OTHERS:
        show(name)
    print("\nAll in one run, as a file describes it:\n\n  python -m tools.corpus run corpus.toml")


def show(name: str) -> None:
    first = (import_module(module_of(name)).__doc__ or "").partition("\n")[0]
    command = TOKENISE if name == "tokenise" else f"python -m tools.corpus {name}"
    print(f"  {name:14} {first}\n  {'':14} {command} --help")


def module_of(name: str) -> str:
    return STEPS.get(name, f"tools.corpus.{name}")


def main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("--help", "-h"):
        with user_errors({}):
            list_steps()
    elif argv[0] == "tokenise":
        import_module(module_of("tokenise")).main(argv[1:])
    elif argv[0] in (*STEPS, *OTHERS):
        program(module_of(argv[0]), argv[1:])
    else:
        print(
            f"error: {argv[0]} is unknown; {', '.join([*STEPS, *OTHERS])} would work",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
