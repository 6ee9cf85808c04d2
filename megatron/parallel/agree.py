"""If any rank raises, every rank raises: none goes on alone or waits for a rank that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from safetensors import SafetensorError

from megatron.parallel.mesh import Mesh

T = TypeVar("T")


class AgreedError(Exception):
    """Raised on every rank with the same message, which is all that a user needs."""


class AgreedOSError(AgreedError, OSError):
    """An OSError of a rank."""


def agree(mesh: Mesh, action: Callable[[], T], what: str = "saving") -> list[T]:
    """Run `action` and return its results on all ranks. If it fails on any, every rank raises an
    OSError that names the first failing rank and says that `what` failed."""
    value, failure, cause = None, None, None
    try:
        value = action()
    except Exception as error:
        is_expected = isinstance(error, OSError)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        failure, cause = (is_expected, f"on rank {mesh.describe_rank()}: {text}"), error
    outcomes: list[Any] = mesh.control.gather((value, failure))
    if failures := [each for _, each in outcomes if each is not None]:
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        is_expected, text = failures[0]
        kind = AgreedOSError if is_expected else OSError  # whose traceback is needed
        raise kind(f"{what} failed {text}{more}") from cause
    return [outcome for outcome, _ in outcomes]


def on_all_ranks(mesh: Mesh, action: Callable[[], T]) -> T:
    """Runs `action` on each rank and returns its value there. If it raises ValueError, OSError or
    ImportError (a library is missing) on any rank, every rank raises the first such error, with all
    its attributes. For bad input: the error names its rank only if rank 0 does not fail, as where
    one host lacks a folder.

    Any other error is a bug in the program and is raised only on the rank where it occurs.
    """
    failure: Exception | None = None
    try:
        value = action()
    except (ValueError, OSError, ImportError) as error:
        failure = error
    except SafetensorError as error:
        failure = OSError(str(error))
    for rank, first in enumerate(mesh.control.gather(failure)):
        if first is not None:
            if rank > 0:
                first.add_note(f"on rank {rank}")
            raise first from failure
    return value
