"""Figures of several seeds: their median and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, lowest and highest of each figure over the seeds; of mappings one by one. Counts that
    all seeds agree on are left out."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, Mapping):
            found[name] = summarise(values)
        elif all(map(is_number, values)) and not _is_count(values):
            found[name] = {"median": median(values), "min": min(values), "max": max(values)}
    return found


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the seeds, and counts that all agree on."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, Mapping):
            found[name] = medians(values)
        elif all(map(is_number, values)):
            found[name] = value if _is_count(values) else median(values)
    return found


def _is_count(values: Sequence[float]) -> bool:
    return isinstance(values[0], int) and len(set(values)) == 1


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
