"""File systems that fail, for tests of all that saves."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

FOLDER_CALLS = [f"pathlib.Path.{name}" for name in ("mkdir", "replace", "unlink")]


@contextmanager
def before_calls(act: Callable[[str, Sequence[Any]], object], *calls: str) -> Iterator[None]:
    """`act` gets the name and the arguments of each of these calls before it happens: "os.fsync",
    "pathlib.Path.rename". The call raises whatever `act` raises."""

    def watched(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def act_and_call(*given: Any, **more: Any) -> Any:
            act(call, given)
            return original(*given, **more)

        return act_and_call

    with pytest.MonkeyPatch.context() as patch:
        for call in calls:
            place, _, name = call.rpartition(".")
            owner = resolve_name(place)
            patch.setattr(owner, name, watched(call, getattr(owner, name)))
        yield


def failing(
    call: str, error: int | Exception = errno.EIO, *, of: str = ""
) -> AbstractContextManager[None]:
    """Let a call fail; of: only for files with this in their path, the new one of a rename too."""

    def fail(_: str, given: Sequence[Any]) -> None:
        if of in " ".join(str(each) for each in given if isinstance(each, str | Path)):
            raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return before_calls(fail, call)


class Killed(BaseException):
    pass


@contextmanager
def cut_off(after: int, *calls: str) -> Iterator[list[str]]:
    """After so many of these calls none happens, as in a process that is gone, and the block ends.
    Yields the names of those that do not happen: none where the block comes to its own end."""
    numbers, lost = count(), list[str]()

    def end(call: str, _: Sequence[Any]) -> None:
        if next(numbers) >= after:
            lost.append(call)
            raise Killed

    with suppress(Killed), before_calls(end, *calls):
        yield lost
