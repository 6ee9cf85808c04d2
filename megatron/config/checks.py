"""The error of every wrong setting, and the checks of one field that the configs share."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import le
from pathlib import Path
from typing import Any


class UsageError(ValueError):
    """A flag's value that cannot be used.

        UsageError("--seq-length", 2048, "at most --max-position-embeddings 1024",
                   works=("--seq-length", "1024"))

    reads `--seq-length 2048: must be at most --max-position-embeddings 1024; --seq-length 1024
    works`. works: arguments that are accepted in place of the flag and its value; the tests of
    refusals run them.
    """

    def __init__(
        self, flag: str, value: object, allowed: str, *, works: tuple[str, ...] = ()
    ) -> None:
        super().__init__(flag, value, allowed)  # a copy for another rank is made from them
        self.flag, self.value, self.allowed, self.works = flag, value, allowed, works

    def __str__(self) -> str:
        text = self.flag if self.value is None else f"{self.flag} {self.value}"
        cure = f"; {' '.join(self.works)} works" if self.works else ""
        return f"{text}: must be {self.allowed}{cure}"


class OutOfMemoryError(RuntimeError):
    """An allocation of a rank failed; the message says what helps (megatron/train/memory.py)."""


def flag(field: str) -> str:
    """The command line's spelling of a field: --seq-length for seq_length."""
    return "--" + field.replace("_", "-")


def switch(field: str, on: bool) -> str:
    """The command line's spelling of a field that is true or false: --bf16, --no-bf16."""
    return flag(field if on else f"no_{field}")


def setting(field: str, value: Any) -> str:
    """The spelling of a field and its value in a TOML file: append_eod = false."""
    return f"{field} = {json.dumps(value, default=str)}"


def positive(config: Any, *fields: str) -> None:
    """Refuse 0, negative numbers, infinity and NaN. Here and below None passes: the flag was not
    given."""
    _check(config, fields, "above 0", lambda value: 0 < value < math.inf, 1)


def non_negative(config: Any, *fields: str) -> None:
    """Refuse negative numbers, infinity and NaN."""
    _check(config, fields, "0 or above", lambda value: 0 <= value < math.inf, 0)


def fraction(config: Any, *fields: str) -> None:
    """Refuse numbers outside [0, 1)."""
    _check(config, fields, "in [0, 1)", lambda value: 0 <= value < 1, 0.1)


def share(config: Any, *fields: str) -> None:
    """Refuse numbers outside [0, 1]."""
    _check(config, fields, "in [0, 1]", lambda value: 0 <= value <= 1, 0.5)


def at_least(config: Any, **least: int) -> None:
    """Refuse values below these numbers, by field."""
    for field, number in least.items():
        _check(config, [field], f"at least {number}", partial(le, number), number)


def _check(
    config: Any, fields: Sequence[str], allowed: str, holds: Callable[[Any], bool], works: object
) -> None:
    for field in fields:
        value, default = getattr(config, field), getattr(type(config), field, None)
        if value is not None and not holds(value):
            some = works if default is None or not holds(default) else default
            raise UsageError(flag(field), value, allowed, works=(flag(field), str(some)))


def writable(config: object, field: str, ending: str = "") -> None:
    """Refuse a file that cannot be written. The field is a Path or None; the file's folder must
    exist, and its name must end in `ending`."""
    path: Path | None = getattr(config, field)
    if path is None:
        return
    name, allowed, works = flag(field), "", path
    if path.is_dir():
        allowed, works = "a file, not a folder", path / f"result{ending or '.json'}"
    elif not path.parent.is_dir():
        allowed, works = "in a folder that is there", Path(path.name)
        works = works.with_suffix(ending or path.suffix)
    elif not path.name.endswith(ending):
        allowed, works = f"a file whose name ends in {ending}", path.with_suffix(ending)
    if allowed:
        raise UsageError(name, path, allowed, works=(name, str(works)))
