"""The errors that a program reports in one message, and the spelling of settings in them. A leaf:
it imports nothing of megatron."""

import json
import shlex
from typing import Any


class UsageError(ValueError):
    """A flag's value that cannot be used.

        UsageError("--seq-length", 2048, "at most --max-position-embeddings 1024",
                   works=("--seq-length", "1024"))

    reads `--seq-length 2048: must be at most --max-position-embeddings 1024; --seq-length 1024
    works`. works: arguments that are accepted in place of the flag and its value, or only another
    value of the flag; the tests of refusals run them.
    """

    def __init__(self, flag: str, value: object, allowed: str, *, works: object = ()) -> None:
        super().__init__(flag, value, allowed)  # a copy for another rank is made from them
        self.flag, self.value, self.allowed = flag, value, allowed
        self.works: tuple[str, ...] = works if isinstance(works, tuple) else (flag, str(works))

    def __str__(self) -> str:
        text = self.flag if self.value is None else f"{self.flag} {self.value}"
        cure = f"; {shlex.join(self.works)} works" if self.works else ""
        return f"{text}: must be {self.allowed}{cure}"


class CommandLineError(ValueError):
    """The command line does not fit the flags of a program; the message is tyro's."""


class OutOfMemoryError(RuntimeError):
    """An allocation of a rank failed; the message says what helps (megatron/train/machine.py)."""


def flag(field: str) -> str:
    """The command line's spelling of a field: --seq-length for seq_length."""
    return "--" + field.replace("_", "-")


def switch(field: str, on: bool) -> str:
    """The command line's spelling of a field that is true or false: --bf16, --no-bf16."""
    return flag(field if on else f"no_{field}")


def spelling(field: str, value: Any) -> tuple[str, ...]:
    """A field and its value as arguments: ("--seed", "1"), ("--no-bf16",), ("--data-path", "a")."""
    if isinstance(value, bool):
        return (switch(field, value),)
    return (flag(field), *map(str, value if isinstance(value, list | tuple) else [value]))


def setting(field: str, value: Any) -> str:
    """The spelling of a field and its value in a TOML file: append_eod = false."""
    return f"{field} = {json.dumps(value, default=str, ensure_ascii=False)}"
