"""Rules for the fields of a config, one line each; a rule that a config breaks raises UsageError.

A field is set if its value is not the default. None, "not given", passes every rule of a value; so
does False where the default is None.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from math import inf
from operator import le
from pathlib import Path
from typing import Any

from megatron.errors import UsageError, flag, spelling


def positive(config: Any, *fields: str) -> None:
    """Refuse 0, negative numbers, infinity and NaN."""
    _check(config, fields, "above 0", lambda value: 0 < value < inf, 1)


def non_negative(config: Any, *fields: str) -> None:
    """Refuse negative numbers, infinity and NaN."""
    _check(config, fields, "0 or above", lambda value: 0 <= value < inf, 0)


def not_empty(config: Any) -> None:
    """Refuse an empty text in any field: most often a variable of the shell that is not set."""
    for each in fields(config):
        if getattr(config, each.name) == "":
            raise UsageError(flag(each.name), "''", "left out, or not empty")


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


def at_most(
    config: Any, field: str, most: float, name: str, text: str = "{}", *, works: object = None
) -> None:
    """Refuse a value above `most`, the value of another flag or file, whose name is `name`.

    text: what `most` is, with {} for the name. works: what works in its place, if not `most`.
    """
    value = getattr(config, field)
    if value is not None and not value <= most:
        raise UsageError(flag(field), value, f"at most {text} {most}", name, works=works or most)


def divides(config: Any, field: str, whole: int, name: str) -> None:
    """Refuse a value that does not divide `whole`, the value of another flag, whose name is
    `name`."""
    value = getattr(config, field)
    if value is not None and whole % value:
        divisors = [n for n in range(1, min(whole, 2 * value) + 1) if whole % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - value), -n))
        raise UsageError(flag(field), value, f"a divisor of {{}} {whole}", name, works=nearest)


def needs(config: Any, field: str, *others: str) -> None:
    """Refuse a field that is set where none of the others is."""
    if not any(is_set(config, other) for other in others):
        names = " or ".join(["{}"] * len(others))
        _refuse_set(config, field, f"given with {names}", *map(flag, others))


def excludes(config: Any, field: str, *others: str, because: str = "") -> None:
    """Refuse a field that is set where one of the others is, too."""
    if both := [other for other in others if is_set(config, other)]:
        names = [spelling(other, getattr(config, other))[0] for other in both]
        reason = f", {because}" if because else ""
        without = " and ".join(["{}"] * len(names))
        _refuse_set(config, field, f"given without {without}{reason}", *names)


def left_out(config: Any, field: str, reason: str, *others: str, works: object = None) -> None:
    """Refuse a field that is set, for a reason outside its config: "with {}", "--mock-data".

    others: see UsageError. works: the value that works in its place, if not the default.
    """
    _refuse_set(config, field, f"left out {reason}", *others, works=works)


def is_set(config: Any, field: str) -> bool:
    value, default = getattr(config, field), _default(config, field)
    return value != default and (value is not False or default is True)


def _default(config: Any, field: str) -> Any:
    return getattr(type(config), field, None)


def _refuse_set(config: Any, field: str, allowed: str, *others: str, works: object = None) -> None:
    """The default is what works, if the rule names nothing else."""
    if is_set(config, field):
        name, *values = spelling(field, getattr(config, field))
        value = _default(config, field) if works is None else works
        cure = () if value in (None, ()) else spelling(field, value)
        raise UsageError(name, " ".join(values) or None, allowed, *others, works=cure)


def _check(
    config: Any, fields: Sequence[str], allowed: str, holds: Callable[[Any], bool], works: object
) -> None:
    """The default is what works; or, if it does not pass or there is none, `works`."""
    for field in fields:
        value, default = getattr(config, field), _default(config, field)
        if value is not None and not holds(value):
            some = works if default is None or not holds(default) else default
            raise UsageError(flag(field), value, allowed, works=some)


def writable(config: object, field: str, ending: str = "") -> None:
    """Refuse a file that cannot be written, or replaced. The field is a Path or None; the file's
    folder must exist and be writable, and its name must end in `ending`."""
    path: Path | None = getattr(config, field)
    if path is None:
        return
    in_place = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    is_other = path.exists() and not path.is_file()  # a folder, or a device such as /dev/stdout
    if in_place and not is_other and path.name.endswith(ending):
        return
    folder = path.parent if in_place else Path()
    name = "result.json" if is_other else path.name
    works = str((folder / name).with_suffix(ending or Path(name).suffix))
    kind = f"*{ending} file" if ending else "file"
    raise UsageError(flag(field), path, f"a {kind} in a folder that can be written", works=works)


def fillable(flag: str, folder: Path) -> None:
    """Refuse a folder that can be neither made nor written to."""
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise UsageError(flag, folder, "a folder that can be written, there already or not")
