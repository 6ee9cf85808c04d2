"""Loops compiled by numba, where it can be imported; each has a twin in plain numpy.

No compiler has to be installed: numba brings its own, and caches its output beside the sources.
"""

import warnings
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any, TypeVar

import numpy as np

from megatron.libraries import failure, load

LACK = failure("numba")
HAVE_NUMBA = not LACK
if LACK and parent_process() is None:  # workers do not warn
    warnings.warn(f"{LACK}; without it plain numpy is used, which is slower", stacklevel=1)

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function`, compiled at its first call; unchanged where there is no numba."""
    if LACK:
        return function
    return load("numba").njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]


MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S27, S30, S31 = (np.uint64(shift) for shift in (27, 30, 31))


@compiled
def mix(word: Any) -> Any:
    """A bijection of 64 bits that spreads every bit over all (the finaliser of splitmix64).

    word: uint64, or in the plain twins an array of uint64.
    """
    word = (word ^ (word >> S30)) * MIX_1
    word = (word ^ (word >> S27)) * MIX_2
    return word ^ (word >> S31)
