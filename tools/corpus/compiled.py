"""Loops compiled by numba, where it can be imported; each has a twin in plain numpy.

Nobody needs a compiler: numba brings its own, and what it makes is cached beside the sources.
"""

from collections.abc import Callable
from typing import TypeVar

try:
    import numba
except ImportError:  # the twins are used then
    numba = None

HAVE_NUMBA = numba is not None
F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function` compiled at its first call; as it is where there is no numba."""
    if numba is None:
        return function
    return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
