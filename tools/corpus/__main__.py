"""Runs a step by its name; without a name, lists the steps.

python tools/corpus.py run --input raw --output corpus
python tools/corpus.py dedup --input clean --output unique
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from megatron.config import help as helps
from megatron.config.parse import user_errors
from megatron.errors import UsageError
from tools.corpus.pipeline import STEPS
from tools.corpus.settings import program

OTHERS = ("run", "plan", "urls", "harvest")
MODULES = STEPS | {name: f"tools.corpus.{name}" for name in OTHERS}


def list_steps() -> None:
    """Print every step, with its command."""
    for title, names in (
        ("A corpus from raw dumps to training shards.  In this order:\n", STEPS),
        ("\nAnd beside them:\n", OTHERS),
    ):
        print(title)
        for name in names:
            about = (import_module(MODULES[name]).__doc__ or "").partition("\n")[0]
            command = f"python tools/corpus.py {name}"
            if name == "tokenise":
                command = "python tools/preprocess_data.py"
            print(f"  {name:14} {about}\n  {'':14} {command} -h")
    print(helps.with_examples("", helps.examples(list_steps)), end="")


def main(argv: Sequence[str]) -> None:
    with user_errors({}):
        if not argv or argv[0] in helps.WORDS:
            list_steps()
        elif argv[0] == "tokenise":
            import_module(MODULES["tokenise"]).main(argv[1:])
        elif argv[0] in MODULES:
            program(MODULES[argv[0]], argv[1:])
        else:
            raise UsageError(argv[0], None, f"one of {', '.join(MODULES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
