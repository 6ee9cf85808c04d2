"""Which cases there are: every valid product of the factors, and a cover of their pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from tests.layouts.matrix import Case

# What each factor may be; "" for what is the default.
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": (
        "tensor=2",
        "tensor=4",
        "data=2",
        "tensor=2,data=2",
        "tensor=2,sequence",
        "tensor=4,sequence",
        "tensor=2,data=2,sequence",
    ),
    "model": ("gpt2", "bert", "bert-post-ln"),
    "precision": ("", "fp32", "bf16", "fp16"),
    "recomputation": ("", "full", "selective"),
    "dropout": ("", "dropout"),
    "micro-batches": ("", "accumulate"),
    "mask": ("", "documents"),
    "head": ("", "untied"),
    "loss": ("", "whole-logits"),
}
OF_GPT2 = {"documents", "whole-logits"}
Row = tuple[str, ...]


def is_valid(row: Row) -> bool:
    return "gpt2" in row or not OF_GPT2 & {*row}


def every_row() -> Iterator[Row]:
    return filter(is_valid, product(*FACTORS.values()))


def cover() -> list[Row]:
    """Rows in which every pair of values that is valid occurs, greedily few."""
    bits: dict[tuple[int, str, int, str], int] = {}
    rows = {}
    for row in every_row():
        pairs = [(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)]
        rows[row] = sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)
    left, found = (1 << len(bits)) - 1, []
    while left:
        best = max(rows, key=lambda row: (rows[row] & left).bit_count())
        left &= ~rows[best]
        found.append(best)
    return found


def case_of(row: Row) -> Case:
    layout, model, *options = row
    return Case(layout, model, frozenset(filter(None, options)))
