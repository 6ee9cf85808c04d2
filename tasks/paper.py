"""The paper's results, zero-shot (table 3) and fine-tuned (table 5), to compare with a result."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from megatron.errors import UsageError


@dataclass(frozen=True)
class Columns:
    """A task's columns of a table."""

    table: int
    figures: tuple[str, ...]
    """Their names in the task's record."""
    values: Mapping[str, tuple[float, ...]]
    """The paper's figures, by model."""
    note: str
    """Data that the paper's figures were measured on."""
    source: str = ""
    """Input that gives a record with these figures, where not every input does."""
    best_before: Mapping[str, float] = field(default_factory=dict)
    """The best results before the paper, where its abstract names them."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Combined figures, which equal the paper's only if the record also has these parts of them."""

    def missing(self, figures: Collection[str]) -> list[str]:
        """The table's figures that a record with these figures lacks."""
        return [
            each
            for each in self.figures
            if each not in figures or not {*self.parts.get(each, ())} <= {*figures}
        ]


PARAMETERS = {
    "355M": 355e6, "2.5B": 2.5e9, "8.3B": 8.3e9, "336M": 336e6, "1.3B": 1.3e9, "3.9B": 3.9e9,
}  # fmt: skip
MEDIANS = "the paper's are medians of 5 seeds on the development set (table 6: batch, rate, epochs)"
PAPER = {
    "WIKITEXT103": Columns(
        3,
        ("word_perplexity",),
        {"355M": (19.31,), "2.5B": (12.76,), "8.3B": (10.81,)},
        "the paper's are of the test file (wiki.test.tokens, 245,566 original tokens) with a "
        "window of 1024 and --overlapping-eval 32; another file or window is not comparable",
        best_before={"word_perplexity": 15.8},
    ),
    "LAMBADA": Columns(
        3,
        ("strict_accuracy",),
        {"355M": (0.4518,), "2.5B": (0.6173,), "8.3B": (0.6651,)},
        "the paper's are of the whole test set, 5,153 passages; another set is not comparable",
        best_before={"strict_accuracy": 0.632},
    ),
    "MNLI": Columns(
        5,
        ("matched_accuracy", "mismatched_accuracy"),
        {"336M": (0.897, 0.900), "1.3B": (0.909, 0.910), "3.9B": (0.914, 0.914)},
        MEDIANS,
        "--valid-data of two files, with matched in the name of one and mismatched in the other's",
    ),
    "QQP": Columns(
        5,
        ("accuracy",),
        {"336M": (0.923,), "1.3B": (0.926,), "3.9B": (0.927,)},
        MEDIANS,
        "--valid-data of a single file",
    ),
    "SQUAD 1.1": Columns(
        5,
        ("f1", "exact_match"),
        {
            "336M": (94.2, 88.0),
            "1.3B": (94.9, 89.1),
            "3.9B": (95.5, 90.0),
            "3.9B ensemble": (95.8, 90.5),
        },
        MEDIANS,
    ),
    "SQUAD 2.0": Columns(
        5,
        ("f1", "exact_match"),
        {
            "336M": (88.1, 84.8),
            "1.3B": (90.2, 87.1),
            "3.9B": (91.2, 88.5),
            "3.9B ensemble": (91.7, 89.0),
        },
        MEDIANS,
    ),
    "RACE": Columns(
        5,
        ("accuracy", "middle_accuracy", "high_accuracy"),
        {
            "336M": (0.830, 0.869, 0.815),
            "1.3B": (0.873, 0.904, 0.861),
            "3.9B": (0.895, 0.918, 0.886),
            "3.9B ensemble": (0.909, 0.931, 0.900),
        },
        "the paper's are medians of 5 seeds on the test set (table 6: batch, rate, epochs); the "
        "development set is not comparable",
        "--valid-data with middle/ and high/",
        best_before={"accuracy": 0.894},
        parts={"accuracy": ("middle_accuracy", "high_accuracy")},
    ),
}


def columns_of(task: str) -> Columns:
    """Raises UsageError for a task that the paper's tables do not have."""
    if task not in PAPER:
        raise UsageError(
            "--compare-paper",
            None,
            f"given with a task of the paper's tables, {', '.join(PAPER)}",
            works=("--no-compare-paper",),
        )
    return PAPER[task]


def check_figures(task: str, figures: Collection[str]) -> None:
    """Warn of the table's figures that the record will lack; UsageError as in `columns_of`."""
    columns = columns_of(task)
    if missing := columns.missing(figures):
        partly = [each for each in missing if each in figures]
        why = f" ({' and '.join(partly)} of a part of the data is another figure)" if partly else ""
        warnings.warn(
            f"--compare-paper: the record will have no {' and no '.join(missing)} to stand beside "
            f"table {columns.table}{why}; {columns.source} would give it",
            stacklevel=2,
        )


def compare(task: str, here: Mapping[str, Mapping[str, float]], parameters: int) -> dict[str, Any]:
    """The rows of the table and these figures, JSON; the model nearest in size is marked.

    here: figures by the label of their row, such as "this_model". Figures that are not in the table
    are left out, missing ones are null; the note names those that cover only a part of the data.
    """
    columns = columns_of(task)
    rows: dict[str, dict[str, float | None]] = {}
    for name, figures in here.items():
        missing = columns.missing(figures)
        rows[name] = {x: None if x in missing else figures[x] for x in columns.figures}
    partly = [each for each in columns.parts if any(row[each] is None for row in rows.values())]
    notes = [
        f"{each} is left out here: the paper's is of {' and '.join(columns.parts[each])}"
        for each in partly
    ]
    single = [name for name in columns.values if name in PARAMETERS]
    nearest = min(single, key=lambda name: abs(log(PARAMETERS[name] / parameters)))
    return {
        "table": columns.table,
        "figures": list(columns.figures),
        "here": rows,
        "rows": [
            {
                "model": name,
                **dict(zip(columns.figures, values, strict=True)),
                "nearest": name == nearest,
            }
            for name, values in columns.values.items()
        ],
        "best_before": dict(columns.best_before),
        "note": "; ".join([columns.note, *notes]),
    }


def as_text(comparison: Mapping[str, Any], parameters: int) -> str:
    """The same as lines of text."""
    figures = comparison["figures"]
    lines = [f"paper, table {comparison['table']}: {', '.join(figures)}"]
    for row in comparison["rows"]:
        mark = "  <- nearest in size" if row["nearest"] else ""
        lines.append(f"  {row['model']:>13}{_text(row, figures)}{mark}")
    if before := comparison["best_before"]:
        row = {each: before.get(each) for each in figures}
        lines.append(f"  {'before':>13}{_text(row, figures)}  <- best before the paper")
    for name, values in comparison["here"].items():
        label = f"{parameters / 1e6:.4g} M"
        lines.append(f"  {label:>13}{_text(values, figures)}  <- {name.replace('_', ' ')}")
    return "\n".join([*lines, comparison["note"]])


def _text(row: Mapping[str, float | None], figures: list[str]) -> str:
    values = [row[each] for each in figures]
    return "".join("           -" if each is None else f"  {each:10.4f}" for each in values)
