"""The paper's zero-shot results (table 3), to stand beside a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from megatron.config.checks import SettingError


@dataclass(frozen=True)
class Column:
    """A task's column of table 3."""

    figure: str
    """What the task's record calls it."""
    values: Mapping[str, float]
    """By model."""
    note: str
    """On what the paper's figures were measured."""


PARAMETERS = {"355M": 355e6, "2.5B": 2.5e9, "8.3B": 8.3e9}
TABLE_3 = {
    "WIKITEXT103": Column(
        "word_perplexity",
        {"355M": 19.31, "2.5B": 12.76, "8.3B": 10.81},
        "the paper's are of the test file (wiki.test.tokens, 245,566 original tokens) with a "
        "window of 1024 and --overlapping-eval 32; another file or window is not comparable",
    ),
    "LAMBADA": Column(
        "strict_accuracy",
        {"355M": 0.4518, "2.5B": 0.6173, "8.3B": 0.6651},
        "the paper's are of the whole test set, 5,153 passages; another set is not comparable",
    ),
}


def column_of(task: str) -> Column:
    """Raises SettingError for a task that table 3 does not have."""
    if task not in TABLE_3:
        raise SettingError(
            f"--compare-paper: the paper's table 3 has no {task}; {' and '.join(TABLE_3)} would "
            "work, or --no-compare-paper"
        )
    return TABLE_3[task]


def compare(task: str, value: float, parameters: int) -> dict[str, Any]:
    """The rows of table 3 beside this value, JSON; the model nearest in size is marked."""
    column = column_of(task)
    nearest = min(PARAMETERS, key=lambda name: abs(log(PARAMETERS[name] / parameters)))
    rows = [
        {"model": name, column.figure: each, "nearest": name == nearest}
        for name, each in column.values.items()
    ]
    return {"table": 3, "figure": column.figure, "here": value, "rows": rows, "note": column.note}


def as_text(comparison: Mapping[str, Any], parameters: int) -> str:
    """The same as lines for a person."""
    figure = comparison["figure"]
    lines = [f"paper, table 3: {figure}"]
    for row in comparison["rows"]:
        mark = "  <- nearest in size" if row["nearest"] else ""
        lines.append(f"  {row['model']:>12}  {row[figure]:10.4f}{mark}")
    lines.append(f"  {parameters / 1e6:10.4g} M  {comparison['here']:10.4f}  <- this model")
    return "\n".join([*lines, comparison["note"]])
