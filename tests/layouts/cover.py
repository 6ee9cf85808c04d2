"""Which cases there are: every valid product of the factors, and a cover of what they join."""

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


def joined(row: Row) -> Iterator[object]:
    """What a row shows together: all pairs of values, and more where layouts have failed."""
    values = dict(zip(FACTORS, row, strict=True))
    yield from combinations(values.items(), 2)
    layout = values["layout"]
    yield layout, values["model"], values["dropout"]
    if not values["precision"]:
        for name in ("model", "recomputation", "dropout", "micro-batches"):
            yield "fp64", layout, name, values[name]


def cover() -> list[Row]:
    """Every layout with GPT-2 and no option; then greedily few rows, until all is shown that
    `joined` can show."""
    bits: dict[object, int] = {}
    rows = {
        row: sum(1 << bits.setdefault(each, len(bits)) for each in joined(row))
        for row in every_row()
    }
    plain = [row for row in rows if row[1] == "gpt2" and not any(row[2:])]
    left, found = (1 << len(bits)) - 1, []
    while left:
        best = plain.pop(0) if plain else max(rows, key=lambda row: (rows[row] & left).bit_count())
        left &= ~rows[best]
        found.append(best)
    return found


def case_of(row: Row) -> Case:
    layout, model, *options = row
    return Case(layout, model, frozenset(filter(None, options)))
