"""Figures of several seeds: their median and their spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, lowest and highest of each figure over the seeds; of mappings one by one. Counts that
    all seeds agree on are left out."""
    return _of_each(rows, lambda values: None if _is_count(values) else _spread(values))


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the seeds, and counts that all agree on."""
    return _of_each(rows, lambda values: values[0] if _is_count(values) else median(values))


def _of_each(rows: Sequence[Mapping[str, Any]], of: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """of: the values of a figure; None leaves it out, and so does a value that is no number."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, Mapping):
            found[name] = _of_each(values, of)
        elif all(map(is_number, values)) and (figure := of(values)) is not None:
            found[name] = figure
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _is_count(values: Sequence[float]) -> bool:
    return isinstance(values[0], int) and len(set(values)) == 1


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
