"""Keys and values of the tokens read so far, so that each step reads only the next token.

    b rows   a heads   t tensor-parallel size, read off the tensors   d head size

Where query heads share keys and values, a/t stands for the number of key/value heads on this rank.

Texts of unequal length end in the same column, so that each step appends one column to all rows:

    column       0  1  2  3  4
    first = 0    t  h  e     i     row 0 is full
    first = 2    -  -  i  n  n     row 1 begins at column 2; no token attends to earlier columns
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """One pair [b, a/t, capacity, d] per layer, allocated at first use and filled from the left."""

    def __init__(self, capacity: int, first: Tensor | None = None) -> None:
        """capacity: columns at most. first: [b] each row's first column; None where all are 0."""
        self.capacity = capacity
        self.first = first
        self.length = 0  # columns that all layers hold
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}
        self.other: Any = None
        """A cache of transformers, which holds the keys and values of its models instead."""

    def append(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [b, a/t, s, d]; returns all keys and values of the layer `name`.

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
        """Where the next `columns` queries may attend: bool [b or 1, 1, columns, all columns].

        None if the attention core needs no mask: all queries at once, or one that sees all keys.
        A query before its row's first column sees only itself: attention over nothing is NaN.
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
        """Keep only these rows, int64 [m]."""
        self.first = None if self.first is None else self.first[rows]
        if self.other is not None:
            self.other.batch_select_indices(rows)
        self._entries = {
            name: (keys[rows], values[rows]) for name, (keys, values) in self._entries.items()
        }
