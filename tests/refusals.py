"""Refusals of a program or a function: the field, and whether the cure it suggests works."""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

from megatron.errors import CommandLineError, UsageError

Program = Callable[[list[str]], object]
ALIASES = {"--model-parallel-size": "--tensor-model-parallel-size"}
TYRO = (  # tyro's messages, up to the flag or word that is wrong
    r"(?:Unrecognized options: |Error parsing |invalid choice .*? for argument '"
    r"|Missing value for argument '|Missing from\s.*?(?::\s+|\.py\s+(?=--)))([\w-]+)"
)
ERRORS = (ValueError, OSError, RuntimeError, TypeError)


def refused(
    program: Program,
    words: Sequence[str] | str,
    *,
    retry: Program | None = None,
    whole: bool = True,
) -> str:
    """The field that the program refuses; fails where it accepts the words.

    program: ends with status 2 or raises an error. Where the error says which arguments work,
    `retry`, by default the program, runs again with these in place of the refused ones. whole:
    whether it must accept them; else it may end with status 2 for another field.
    """
    words = shlex.split(words) if isinstance(words, str) else list(words)
    error = refusal(lambda: program(words))
    if isinstance(error, UsageError) and error.works:
        cured = mended(words, error)
        try:
            (retry or program)(cured)
        except (SystemExit, *ERRORS) as stop:
            again = cause_of(stop)
            is_refused = isinstance(stop, SystemExit | UsageError) and field_of(again) != error.flag
            assert is_refused, f"{shlex.join(cured)}: {again}"
            assert not whole, f"{shlex.join(cured)}: {again}"
    return field_of(error)


def by_last_flag(listed: str) -> list[tuple[str, str]]:
    """(arguments, the last flag among them), which stand in lines and between " | "."""
    rows = [row for line in listed.strip().split("\n") for row in line.split(" | ")]
    return [(row, f"--{row.rpartition('--')[2].split()[0].partition('=')[0]}") for row in rows]


def leaving_nothing(program: Program) -> Program:
    """The program; where it is refused, nothing new may be at --output, nor half written."""

    def run(words: list[str]) -> None:
        to = Path(words[words.index("--output") + 1])
        before = {*to.parent.glob(f"*{to.name}*")}
        try:
            program(words)
        except (SystemExit, *ERRORS):
            assert {*to.parent.glob(f"*{to.name}*")} == before
            raise

    return run


def refusal(
    call: Callable[[], object],
    *named: str,
    field: str = "",
    kind: type[Exception] | UnionType = Exception,
    lines: int = 2,
) -> Any:
    """The error with which a call ends. It is of this kind, begins with the field and names all of
    `named`; its message has at most so many lines, but for tyro's."""
    try:
        call()
    except (SystemExit, *ERRORS) as stop:
        error = cause_of(stop)
        is_short = str(error).count("\n") < lines or isinstance(error, CommandLineError)
        assert is_short, str(error)
        assert isinstance(error, kind), repr(error)
        assert not field or field_of(error) == field, error
        assert all(each in str(error) for each in named), error
        return error
    pytest.fail("it was accepted")


def cause_of(stop: BaseException) -> Exception:
    """The error behind an end with status 2, or the error itself."""
    if isinstance(stop, SystemExit):
        assert stop.code == 2, f"status {stop.code}"
        assert isinstance(stop.__cause__, Exception), "no error stands behind the status"
        return stop.__cause__
    assert isinstance(stop, Exception)
    return stop


def field_of(error: Exception | str) -> str:
    """The flag or the file that an error, or a program's text on stderr, begins with."""
    if isinstance(error, UsageError):
        return error.flag
    text = error.rpartition("error: ")[2] if isinstance(error, str) else str(error)
    if found := re.search(TYRO, " ".join(re.sub("[─-╿]", "", text).split())):  # in a box
        return found[1].replace("_", "-")
    return re.split(r"[\s:,;]", text.strip(), maxsplit=1)[0]


def mended(words: Sequence[str], error: UsageError) -> list[str]:
    """The arguments with what works in place of the flag that is refused, and its values."""
    kept, is_refused = [], False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            is_refused = ALIASES.get(name, name) == error.flag
        if not is_refused:
            kept.append(word)
    return [*kept, *error.works]
