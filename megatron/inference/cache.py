"""Keys and values of the tokens read so far, so that a token that follows is read alone.

    b rows   a heads   t tensor-parallel size, read off the tensors   d head size

Where query heads share keys and values, a/t stands for the heads that have them on this rank.

Texts of unequal length end in the same column, so that each step appends one column to all rows:

    column       0  1  2  3  4
    first = 0    t  h  e     i     row 0 is full
    first = 2    -  -  i  n  n     row 1 begins at column 2; what stands before is never looked at
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """One pair of [b, a/t, capacity, d] a layer, filled from the left; made at its first use."""

    def __init__(self, capacity: int, first: Tensor | None = None) -> None:
        """capacity: columns at most. first: [b] each row's first column; None where all are 0."""
        self.capacity = capacity
        self.first = first
        self.length = 0  # columns that all layers hold
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}
        self.other: Any = None
        """A cache of transformers, in which a model of it has its keys and values instead."""

    def append(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the layer `name`, of which k, v [b, a/t, s, d] are the last.

        The columns count as read once every layer has them: see `advance`.
        """
        end = self.length + k.shape[2]
        assert end <= self.capacity, f"{end} columns in a cache of {self.capacity}"
        if name not in self._entries:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._entries[name] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self._entries[name]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, columns: int) -> None:
        self.length += columns

    def mask(self, columns: int, device: torch.device) -> Tensor | None:
        """Where the next `columns` queries may look: bool [b or 1, 1, columns, all columns].

        None where the attention core needs none: all queries at once, or one that sees all.
        A query before its row's first column sees itself alone: attention over nothing is NaN.
        """
        if self.first is None and (self.length == 0 or columns == 1):
            return None
        keys = torch.arange(self.length + columns, device=device)
        queries = keys[self.length :, None]
        if self.first is None:
            return (keys <= queries)[None, None]
        is_real = keys >= self.first[:, None, None]
        return ((keys <= queries) & is_real | (keys == queries))[:, None]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, int64 [m]."""
        self.first = None if self.first is None else self.first[rows]
        if self.other is not None:
            self.other.batch_select_indices(rows)
        self._entries = {
            name: (keys[rows], values[rows]) for name, (keys, values) in self._entries.items()
        }
