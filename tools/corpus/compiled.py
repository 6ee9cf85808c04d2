"""Loops compiled by numba, which brings its own compiler and caches its output beside the sources,
and the hash that they share."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from megatron.libraries import load

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function`, compiled at its first call; `.py_func` is as it was written."""
    return load("numba").njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]


MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S27, S30, S31 = (np.uint64(shift) for shift in (27, 30, 31))


@compiled
def mix(word: Any) -> Any:
    """A bijection of 64 bits that spreads every bit over all (the finaliser of splitmix64).

    word: uint64, or an array of them.
    """
    word = (word ^ (word >> S30)) * MIX_1
    word = (word ^ (word >> S27)) * MIX_2
    return word ^ (word >> S31)
