"""Records of two runs compared: their settings, and the figures that equal runs have in common.

Importing this needs no torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from math import inf, isfinite
from pathlib import Path
from typing import Any

from megatron.checkpoint.resume import CONFIG_JSON
from megatron.errors import UsageError, flag
from tools.report.numbers import NONE, aligned
from tools.report.record import Facts, Lines, epoch_figures, is_epoch, read_record, record_of

Figures = Mapping[str, Mapping[int, float | None]]
# Places of files, which differ between any two runs.
PLACES = ("--save", "--load", "--metrics-file", "--tensorboard-dir", "command")
WIDEST = 48  # characters of a value in a table; longer ones have lines of their own


def read_run(given: Path, name: str) -> Lines:
    """The valid lines of a run's record. name: the argument, for messages. Raises UsageError."""
    file = record_of(given)
    if not file.is_file():
        raise UsageError(name, given, "the folder of a --save, or its metrics.jsonl")
    lines = read_record(file)
    if not lines:
        raise UsageError(name, given, "the record of a run; this has no line that holds")
    return lines


def compare_records(a: Sequence[Facts], b: Sequence[Facts], tolerance: float) -> Facts:
    """Everything that `shown` shows, as JSON. a, b: see read_run. tolerance: the largest relative
    difference of figures that count as equal."""
    starts = [[line for line in lines if "config" in line] for lines in (a, b)]
    unknown = [run for run, lines in zip("AB", starts, strict=True) if not lines]
    changed = {} if unknown else differing(*(settings_of(lines[0]) for lines in starts))
    of_a, of_b = figures_of(a), figures_of(b)
    steps_a, steps_b = ({n for of in each.values() for n in of} for each in (of_a, of_b))
    return {
        "settings": [
            {"setting": name, "a": changed[name][0], "b": changed[name][1]}
            for name in sorted(changed, key=lambda name: name in PLACES)
        ],
        "unknown": unknown,
        "changes": {"a": changes(starts[0]), "b": changes(starts[1])},
        "steps": {"a": sorted(steps_a), "b": sorted(steps_b), "common": len(steps_a & steps_b)},
        "figures": [row(n, of_a[n], of_b[n], tolerance) for n in of_a if n in of_b],
        "only_a": [name for name in of_a if name not in of_b],
        "only_b": [name for name in of_b if name not in of_a],
    }


def settings_of(start: Facts) -> Facts:
    """{"--lr": 0.001, ..., "versions torch": "2.13.0"}: settings by flag, and the other facts of a
    line of a start."""
    found = {
        flag(key): each
        for part in start.get("config", {}).values()
        if isinstance(part, Mapping)
        for key, each in part.items()
    }
    if (text := found.pop("--hf-config", None)) is not None:
        found |= {f"{CONFIG_JSON}{key}": each for key, each in json.loads(text).items()}
    for name, value in start.items():
        if isinstance(value, dict) and name != "config":
            found |= {f"{name} {key}": each for key, each in value.items()}
        elif name not in ("step", "started", "config", "torch"):  # versions have torch's
            found[name] = value
    return found


def differing(a: Facts, b: Facts) -> dict[str, tuple[Any, Any]]:
    """{name: (value in a, value in b)}; NONE where there is no such setting."""
    pairs = {name: (a.get(name, NONE), b.get(name, NONE)) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changes(starts: Sequence[Facts]) -> list[Facts]:
    """Settings that a run changed when it resumed."""
    return [
        {"step": after["step"], "setting": name, "before": old, "after": new}
        for before, after in pairwise(starts)
        for name, (old, new) in differing(settings_of(before), settings_of(after)).items()
        if name not in PLACES
    ]


def figures_of(lines: Sequence[Facts]) -> dict[str, dict[int, float | None]]:
    """{name: {step: value}} of the figures that follow from settings and data alone; None for a
    value that is not finite."""
    found: dict[str, dict[int, float | None]] = defaultdict(dict)
    for line in lines:
        # Loss, terms, learning rate and norm come before the times and what callbacks add.
        own = takewhile(lambda name: name != "elapsed_seconds", line) if "loss" in line else ()
        scaling = (name for name in ("loss_scale", "skipped_steps") if name in line)
        validation = (name for name in line if name.startswith("validation_"))
        epoch = epoch_figures(line) if is_epoch(line) else ()
        for name in (*own, *scaling, *validation, *epoch):
            if name != "step":
                found[name][line["step"]] = line[name]
    return dict(found)


def relative_gap(a: float | None, b: float | None) -> float:
    """|b - a| / |a|; infinite if a is 0, or one of them alone is not finite."""
    if a == b:
        return 0.0
    return abs(b - a) / abs(a) if a and b is not None else inf


def row(
    name: str, a: Mapping[int, float | None], b: Mapping[int, float | None], tolerance: float
) -> Facts:
    """Where a figure of two runs parts; None where it does not, or a difference is infinite."""
    gaps = {step: relative_gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())}
    first = next((step for step, gap in gaps.items() if gap > tolerance), None)
    most = max(gaps, key=lambda step: gaps[step], default=None)

    def at(step: int | None) -> Facts:
        gap = None if step is None else gaps[step]
        known = gap if gap is not None and isfinite(gap) else None
        values = {"a": None, "b": None} if step is None else {"a": a[step], "b": b[step]}
        return {"step": step, **values, "difference": known}

    is_same = most is None or not gaps[most]
    return {
        "figure": name,
        "common_steps": len(gaps),
        "first": at(first),
        "largest": at(None if is_same else most),
    }


def status_of(result: Facts) -> int:
    """0 the figures are equal, 1 they differ, 2 nothing could be compared."""
    if any(each["first"]["step"] is not None for each in result["figures"]):
        return 1
    return 0 if any(each["common_steps"] for each in result["figures"]) else 2


def shown(result: Facts, tolerance: float) -> str:
    """The result of compare_records as text."""
    table, long = [["setting", "A", "B"]], []
    for each in result["settings"]:
        cells = [each["setting"], setting_in_words(each["a"]), setting_in_words(each["b"])]
        (long if max(map(len, cells)) > WIDEST else table).append(cells)
    lines = aligned(table).splitlines() if table[1:] else []
    lines += [f"{name}\n  A: {one}\n  B: {other}" for name, one, other in long]
    lines = ["Settings that differ\n", *lines] if lines else ["All settings are the same."]
    if result["unknown"]:
        lines = [f"The record of {' and that of '.join(result['unknown'])} has no settings."]
    for run, name in (("A", "a"), ("B", "b")):
        lines += [
            f"{run} changed {each['setting']} at step {each['step']}: "
            f"{setting_in_words(each['before'])}, then {setting_in_words(each['after'])}"
            for each in result["changes"][name]
        ]
    lines.append("")
    steps = result["steps"]
    if steps["a"] != steps["b"]:
        known = [f"{run} has figures of {extent(steps[run.lower()])}" for run in ("A", "B")]
        lines.append(f"{', '.join(known)}; {steps['common']} steps are in both\n")
    rows = [[each["figure"], said(each, tolerance)] for each in result["figures"]]
    lines += [aligned(rows)] if rows else ["There is no figure that both have."]
    for run, name in (("A", "only_a"), ("B", "only_b")):
        lines += [f"only {run} has {', '.join(result[name])}"] if result[name] else []
    parted = [each for each in result["figures"] if each["first"]["step"] is not None]
    if parted:
        step = min(each["first"]["step"] for each in parted)
        names = [each["figure"] for each in parted if each["first"]["step"] == step]
        lines.append(f"\nThe runs part at step {step}: {', '.join(names)}")
    elif status_of(result) == 2:
        lines.append("\nNothing is compared: no step has a figure in both runs")
    return "\n".join(lines)


def said(each: Facts, tolerance: float) -> str:
    first, largest, count = each["first"], each["largest"], each["common_steps"]
    steps = "the common step" if count == 1 else f"all {count} common steps"
    if not count:
        return "no step is in both runs"
    if largest["step"] is None:
        return f"the same at {steps}"
    most = f"largest {ratio(largest['difference'])} at step {largest['step']}"
    if first["step"] is None:
        return f"within {tolerance:g} at {steps}; {most}"
    both = " and ".join("no number" if x is None else f"{x!r}" for x in (first["a"], first["b"]))
    return f"first differs at step {first['step']}: {both} ({ratio(first['difference'])}); {most}"


def ratio(difference: float | None, absent: str = "infinity") -> str:
    return absent if difference is None else f"{difference:.1e}"


def extent(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "no step"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


def setting_in_words(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
