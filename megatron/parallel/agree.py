"""If any rank raises, every rank raises: none goes on alone or waits for one that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from safetensors import SafetensorError

from megatron.parallel.mesh import Mesh

T = TypeVar("T")


def agree(mesh: Mesh, action: Callable[[], T], what: str = "saving") -> list[T]:
    """What `action` returned on each rank; where it failed on one, an OSError on all of them that
    names the first such rank, and `what` failed there."""
    value, failure, cause = None, None, None
    try:
        value = action()
    except Exception as error:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        failure, cause = f"on rank {mesh.describe_rank()}: {kind}{error}", error
    outcomes: list[Any] = mesh.control.gather((value, failure))
    if failures := [text for _, text in outcomes if text is not None]:
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise OSError(f"{what} failed {failures[0]}{more}") from cause
    return [outcome for outcome, _ in outcomes]


def refuse_alike(mesh: Mesh, action: Callable[[], object]) -> None:
    """Raise the ValueError or OSError of `action` on every rank, as the first rank has it that has
    one, with all its attributes: bad input, which the user is told of without a rank's name.

    Anything else is an error of the program, and is raised where it is.
    """
    own: Exception | None = None
    try:
        action()
    except (ValueError, OSError) as error:
        own = error
    except SafetensorError as error:
        own = OSError(str(error))
    failures = [each for each in mesh.control.gather(own) if each is not None]
    if failures:
        raise failures[0] from own
