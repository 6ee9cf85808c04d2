"""What a benchmark says of its figures: a table, a record as JSON, a page and a picture.

A record is what one run has measured on one machine. A JSON file holds the newest record of each
kind of processor, and a page shows the one that was measured last, then what the others say.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Column, Figures, Flags, Question
from benchmarks.processes import ROOT, Measured, cpu_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
NOISY = 0.05  # share of the cores that other programs may take
NOTES = "\n## Notes\n"


class Environment:
    """The machine, and how busy others kept it between `with` and its end."""

    def __init__(self, packages: Sequence[str], device: str) -> None:
        self.packages, self.device = packages, device
        self.facts: Record = {}

    def __enter__(self) -> Environment:
        self.started = datetime.now(UTC)
        self.before = busy_seconds(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = (datetime.now(UTC) - self.started).total_seconds()
        busy, own = busy_seconds() - self.before[0], cpu_seconds() - self.before[1]
        cores = os.cpu_count() or 1
        self.facts = {
            "date": f"{self.started:%Y-%m-%d}",
            "commit": commit(),
            "processor": processor(),
            "cores": cores,
            "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
            "python": platform.python_version(),
            **{name: version(name) for name in self.packages},
            "seconds": round(seconds),
            "others_share_of_cores": round(max(0.0, busy - own) / (seconds * cores), 3),
        }
        if self.device == "cuda":
            import torch

            self.facts["gpu"] = torch.cuda.get_device_name()


def busy_seconds() -> float:
    """CPU seconds of this machine's cores in use by anyone, what its host has taken included."""
    user, nice, system, _, _, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """Name, family and model, and the instruction sets that decide how fast matmuls are."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    known = facts.get("flags", "").split()
    sets = [each for each in INSTRUCTIONS if each in known]
    name = facts.get("model name", platform.machine())
    return (
        f"{name} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}; "
        f"{', '.join(sets) or 'no vector instructions'})"
    )


def commit() -> str:
    from megatron.train.state import commit as of_tree

    whole = of_tree(ROOT) or "unknown"
    return whole[:9] + ("-dirty" if whole.endswith("-dirty") else "")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def command() -> str:
    """By which this run was started; of files of this machine the name alone."""
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    each = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nodes = f"--nnodes {size // each} " if size > each else ""
    program = f"torchrun {nodes}--nproc-per-node {each}" if size > 1 else "python"
    return f"{program} benchmarks/{Path(sys.argv[0]).name} {shlex.join(words)}".rstrip()


@dataclass(frozen=True)
class Cell:
    """The median over rounds; low, high: its 95 % bootstrap interval, from three rounds on."""

    median: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str, *, is_ratio: bool) -> str:
        middle = form.format(self.median)
        if not is_ratio or self.low is None:
            return middle
        return f"{middle} ({form.format(self.low)} to {form.format(self.high)})"


def cell(values: Sequence[float]) -> Cell:
    if len(values) < 3:
        return Cell(float(np.median(values)))
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Cell(float(np.median(values)), float(low), float(high))


class Results:
    """A record by group, name of the contender, and title of the column."""

    def __init__(self, question: Question, record: Record) -> None:
        self.question, self.record = question, record
        self.columns = {each.title: each for each in question.columns}
        self.rows = [(each["group"], each["name"]) for each in record["contenders"]]
        self.reasons = {key: each["reason"] for key, each in self._by_key()}
        self.rounds = {
            key: [with_medians(r) for r in each["rounds"]] for key, each in self._by_key()
        }

    def _by_key(self) -> Iterator[tuple[tuple[str, str], Record]]:
        return zip(self.rows, self.record["contenders"], strict=True)

    def cell(self, group: str, name: str, title: str) -> Cell | None:
        """None where there is nothing to show."""
        if (group, name) not in self.rounds:
            return None
        own = self.rounds[group, name]
        first = next(key for key in self.rows if key[0] == group)
        base = own if first == (group, name) else self.rounds[first]
        base = base if len(base) == len(own) else [{}] * len(own)  # the first was not measured
        column = self.columns[title]
        values = [column.value(*pair) for pair in zip(own, base, strict=True)]
        return None if not values or None in values else cell(values)

    def median(self, group: str, name: str, title: str) -> float:
        """NaN where there is nothing to show."""
        found = self.cell(group, name, title)
        return float("nan") if found is None else found.median

    def range(self, title: str, form: str = "{:.2f}") -> str:
        """ "1.2 to 1.8": of the medians of all rows that have this cell; "?" if there is none."""
        cells = [self.cell(*row, title) for row in self.rows]
        found = [each.median for each in cells if each is not None]
        if not found:
            return "?"
        low, high = form.format(min(found)), form.format(max(found))
        return low if low == high else f"{low} to {high}"

    def table(self) -> str:
        has_groups = any(group for group, _ in self.rows)
        header = [*([""] if has_groups else []), "", *self.columns]
        rows = []
        for group, name in self.rows:
            cells = [self._text(group, name, column) for column in self.columns.values()]
            if reason := self.reasons[group, name]:
                cells = [f"not measured: {reason}", *[""] * (len(cells) - 1)]
            rows.append([*([group] if has_groups else []), name, *cells])
        if len(rows) == 1:  # upright, so that many columns can be read
            return markdown(
                header[:1] + rows[0][:1], list(zip(header[1:], rows[0][1:], strict=True))
            )
        return markdown(header, rows)

    def _text(self, group: str, name: str, column: Column) -> str:
        found = self.cell(group, name, column.title)
        return "" if found is None else found.text(column.form, is_ratio=bool(column.ratio))

    def notes(self) -> list[str]:
        """Of contenders, each once, and of the run."""
        found: dict[str, None] = {}
        for (_, name), rounds in self.rounds.items():
            found |= dict.fromkeys(f"{name}: {note}" for each in rounds for note in each["notes"])
        share = self.record["others_share_of_cores"]
        noise = f"A noisy run: other programs took {100 * share:.0f} % of the cores."
        return [*found, *([noise] if share > NOISY else [])]


def with_medians(figures: Figures) -> Figures:
    return figures | {key: median(figures[key]) for key in ("wall", "cpu")}


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(" +", " ", f"| {' | '.join(map(str, line))} |") for line in lines)


def about(record: Record) -> str:
    """The machine and the settings, in a line."""
    apart = {"contenders", "command", "others_share_of_cores"}
    return ", ".join(f"{name} {value}" for name, value in record.items() if name not in apart)


def report(
    question: Question, flags: Flags, measured: Sequence[Measured], environment: Environment
) -> str:
    """Print, and write what the flags ask for; why the run is a failure, or nothing."""
    record: Record = {
        "command": command(),
        **environment.facts,
        **question.settings,
        "contenders": [
            {
                "group": each.contender.group,
                "name": each.contender.name,
                "reason": each.reason,
                "rounds": each.rounds,
            }
            for each in measured
        ],
    }
    results = Results(question, record)
    parts = [about(record), results.table(), question.result(results), *results.notes()]
    print("\n\n".join(filter(None, parts)), flush=True)
    records = [record]
    if flags.json is not None:
        if flags.json.exists():
            former = json.loads(flags.json.read_text())
            records += [each for each in former if machine(each) != machine(record)]
        flags.json.write_text(json.dumps(records) + "\n")
    if flags.page is not None:
        write_page(flags.page, question, records)
    return question.failure(results)


def machine(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("processor", "cores", "gpu"))


def write_page(file: Path, question: Question, records: Sequence[Record]) -> None:
    """The newest record with its picture, the others' tables; below "## Notes" nothing changes."""
    results, *others = (Results(question, each) for each in records)
    notes = file.read_text().partition(NOTES)[2] if file.exists() else ""
    parts = [f"# {question.title}", question.result(results)]
    parts += [f"    {results.record['command']}", about(results.record), *results.notes()]
    if question.picture:
        picture = file.with_suffix(".png")
        draw(picture, results)
        parts.append(f"![{question.title}]({picture.name})")
    parts += [results.table(), question.method.strip()]
    for each in others:
        parts += [f"## On {each.record['processor']}", question.result(each)]
        parts += [f"    {each.record['command']}", about(each.record), *each.notes(), each.table()]
    text = "\n\n".join(filter(None, parts)) + "\n"
    file.write_text(text + (NOTES + notes if notes else ""))


COLOURS = ("#c44e52", "#333333", "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#8c9aae")


def draw(file: Path, results: Results) -> None:
    """A PNG: bars of contenders, a panel for each drawn column; lines along the contenders' x, a
    panel for each group and drawn column; or curves of a figure that is a list, a panel a group."""
    from matplotlib.figure import Figure

    question = results.question
    groups = list(dict.fromkeys(group for group, _ in results.rows))
    drawn = question.drawn or (next(iter(results.columns)),)
    kind = question.picture
    shape = (1, len(drawn)) if kind == "bars" else (len(drawn), len(groups))
    height = 1.2 + 0.35 * len(results.rows) if kind == "bars" else 3.2 * shape[0]
    figure = Figure(figsize=(max(7, 3.6 * shape[1]), height), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for row, column in np.ndindex(*shape):
        axes = grid[row][column]
        if kind == "bars":
            bars(axes, results, drawn[column])
        elif kind == "lines":
            lines(axes, results, groups[column], drawn[row])
        else:
            curves(axes, results, groups[column], drawn[row])
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def bars(axes: Axes, results: Results, title: str) -> None:
    for place, (group, name) in enumerate(results.rows):
        found = results.cell(group, name, title)
        if found is None:
            continue
        is_first = results.rows.index((group, name)) == [g for g, _ in results.rows].index(group)
        errors = [
            [found.median - (found.low or found.median)],
            [(found.high or found.median) - found.median],
        ]
        axes.barh(place, found.median, xerr=errors, color=COLOURS[0 if is_first else -1], capsize=2)
    names = [f"{group}: {name}" if group else name for group, name in results.rows]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(title)


def lines(axes: Axes, results: Results, group: str, titles: str) -> None:
    """titles: of columns, several separated by " | ", each a line."""
    places = {c.name: c.x for c in results.question.contenders if c.group == group}
    for colour, title in zip(COLOURS, titles.split(" | "), strict=False):
        found = {
            places[name]: results.cell(g, name, title) for g, name in results.rows if g == group
        }
        points = [(x, each.median) for x, each in sorted(found.items()) if each is not None]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=title)
    axes.set(xscale="log", yscale="log", xlabel=group)
    ticks = sorted(x for x in places.values() if x is not None)
    axes.set_xticks(ticks, [f"{x:,g}" for x in ticks], fontsize=7)
    axes.set_xticks([], minor=True)
    axes.legend(fontsize=7, frameon=False)


def curves(axes: Axes, results: Results, group: str, key: str) -> None:
    rows = [row for row in results.rows if row[0] == group and results.rounds[row]]
    for colour, row in zip(COLOURS * len(rows), rows, strict=False):
        axes.plot(results.rounds[row][-1][key], color=colour, linewidth=0.8, label=row[1])
    axes.set(title=group, ylabel=key)
    axes.legend(fontsize=7, frameon=False)
