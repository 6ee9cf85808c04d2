"""Rules for the fields of a config; each raises UsageError."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

from megatron.errors import UsageError, flag


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
