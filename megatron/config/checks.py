"""Checks of one field that the sections share; each error names the flag and a cure."""

import math
from pathlib import Path
from typing import Any


class UsageError(ValueError):
    """A flag's value that cannot be used.

        UsageError("--seq-length", 2048, "at most --max-position-embeddings 1024",
                   works=("--seq-length", "1024"))

    reads `--seq-length 2048: must be at most --max-position-embeddings 1024; --seq-length 1024
    works`. works: arguments that, in place of the flag and its value, are accepted: the tests of
    refusals run them. With one argument alone it is the whole message.
    """

    def __init__(
        self,
        flag: str,
        value: object = None,
        allowed: str | None = None,
        *,
        works: tuple[str, ...] = (),
    ) -> None:
        self.flag, self.value, self.allowed, self.works = flag, value, allowed, works
        text = flag if value is None else f"{flag} {value}"
        text += f": must be {allowed}" if allowed else ""
        text += f"; {' '.join(works)} works" if works else ""
        super().__init__(text)


def flag(field: str) -> str:
    """The command line's spelling of a field: --seq-length of seq_length."""
    return "--" + field.replace("_", "-")


def switch(field: str, on: bool) -> str:
    """The command line's spelling of a field that is true or false: --bf16, --no-bf16."""
    return flag(field if on else f"no_{field}")


def _smallest(section: Any, field: str) -> str:
    """A cure for a number that is too small, in the kind of number that the field takes."""
    if isinstance(getattr(section, field), int):
        return "1"
    return str(getattr(type(section), field, None) or 1e-5)


def positive(section: Any, *fields: str) -> None:
    """Refuse 0, negative numbers, infinity and NaN."""
    for field in fields:
        value = getattr(section, field)
        if not 0 < value < math.inf:
            raise UsageError(
                f"{flag(field)} {value} should be above 0; "
                f"{flag(field)} {_smallest(section, field)} would work"
            )


def optional_positive(section: Any, *fields: str) -> None:
    """As positive, but None (the flag was not given) passes."""
    positive(section, *(field for field in fields if getattr(section, field) is not None))


def non_negative(section: Any, *fields: str) -> None:
    """Refuse negative numbers, infinity and NaN."""
    for field in fields:
        value = getattr(section, field)
        if not 0 <= value < math.inf:
            raise UsageError(
                f"{flag(field)} {value} should be 0 or above; {flag(field)} 0 would work"
            )


def fraction(section: Any, *fields: str) -> None:
    """Refuse what is not in [0, 1)."""
    for field in fields:
        value = getattr(section, field)
        if not 0 <= value < 1:
            raise UsageError(
                f"{flag(field)} {value} should be in [0, 1); {flag(field)} 0.1 would work"
            )


def share(section: Any, *fields: str) -> None:
    """Refuse what is not in [0, 1]; each field has a default."""
    for field in fields:
        value = getattr(section, field)
        if not 0 <= value <= 1:
            usual = getattr(type(section), field)
            raise UsageError(
                f"{flag(field)} {value} should be in [0, 1]; {flag(field)} {usual} would work"
            )


def writable(section: object, name: str, ending: str = "") -> None:
    """The field, a Path or None, names a file that can be written: its folder is there, and its
    name ends so."""
    path: Path | None = getattr(section, name)
    if path is None:
        return
    if path.is_dir():
        cure = f"{flag(name)} {path / 'result.json'}"
        raise UsageError(f"{flag(name)} {path} is a folder; {cure} would work")
    if not path.parent.is_dir():
        raise UsageError(
            f"{flag(name)} {path}: there is no folder {path.parent}; "
            f"mkdir -p {path.parent}, or {flag(name)} {path.name}, would work"
        )
    if not path.name.endswith(ending):
        raise UsageError(
            f"{flag(name)} {path}: its ending says nothing of what is written; "
            f"{flag(name)} {path.with_suffix(ending)} would work"
        )
