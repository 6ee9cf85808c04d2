"""Reports the figures of a benchmark as a table, a JSON record, a page and a picture.

A record holds the measurements of one run on one machine. A JSON file holds the newest record of
each kind of processor. A page shows the most recent record, and then the others.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from itertools import product
from math import comb
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from benchmarks.harness import Column, Contender, Figures, Question
from benchmarks.processes import ROOT, Agents, cpu_seconds
from megatron.data.files import atomic_writer, write_atomically
from megatron.libraries import Library, failure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

figures = Library("matplotlib.figure")

Record = dict[str, Any]
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors")
NOISY = 0.05  # share of the cores that other programs may take
NOTES = "\n## Notes\n"
NOT_MEASURED = "(not measured)"


class Machine:
    """Facts about the machine, and the CPU use of other programs since this object was created."""

    def __init__(self, contenders: Sequence[Contender], device: str, agents: Agents) -> None:
        needed = {name.partition(".")[0] for each in contenders for name in each.needs}
        found = importlib.metadata.distributions()
        installed = {each.name.replace("-", "_"): each.version for each in found}
        names = [name for name in (*PACKAGES, *sorted(needed)) if name in installed]
        self.agents, self.started = agents, datetime.now(UTC)
        self.before = busy_seconds(), cpu_seconds()
        self.known: Record = {
            "command": command(),
            "date": f"{self.started:%Y-%m-%d}",
            "commit": commit(),
            "processor": processor(),
            "cores": os.cpu_count() or 1,
            "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
            "python": platform.python_version(),
            **{name: installed[name] for name in names},
        }
        if device == "cuda":
            import torch

            self.known["gpu"] = torch.cuda.get_device_name()

    def facts(self) -> Record:
        """Facts about the run so far; every launched process calls this."""
        seconds, here = (datetime.now(UTC) - self.started).total_seconds(), platform.node()
        by_host = self.agents.gather([here, cpu_seconds() - self.before[1]])
        own = sum(used for host, used in by_host if host == here)
        share = (busy_seconds() - self.before[0] - own) / (seconds * self.known["cores"])
        share = round(min(max(0.0, share), 1.0), 3)  # ticks of a short run add up to a little more
        others = {"seconds": round(seconds), "others_share_of_cores": share}
        return self.known | others


def busy_seconds() -> float:
    """CPU seconds of this machine's cores, used by any program or stolen by its host."""
    user, nice, system, _, _, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """Name, family and model, and the instruction sets that decide the speed of matmuls."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    sets = ", ".join(each for each in INSTRUCTIONS if each in facts.get("flags", "").split())
    name, family = facts.get("model name", platform.machine()), facts.get("cpu family", "?")
    kind = f"family {family}, model {facts.get('model', '?')}"
    return f"{name} ({kind}; {sets or 'no vector instructions'})"


def commit() -> str:
    from megatron.train.machine import commit as of_tree

    whole = of_tree(ROOT) or "none"
    return whole[:9] + ("-dirty" if whole.endswith("-dirty") else "")


def command() -> str:
    """The command of this run, with absolute paths reduced to the file's name."""
    words = [Path(w).name if w.startswith("/") else w for w in sys.argv[1:]]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    each = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nodes = f"--nnodes {size // each} " if size > each else ""
    program = f"torchrun {nodes}--nproc-per-node {each}" if size > 1 else "python"
    return f"{program} benchmarks/{Path(sys.argv[0]).name} {shlex.join(words)}".rstrip()


class Cell(NamedTuple):
    """The median over rounds; low, high: its interval, with three rounds or more."""

    median: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str, *, is_ratio: bool) -> str:
        middle = form.format(self.median)
        if not is_ratio or self.low in (None, self.high):
            return middle
        return f"{middle} ({form.format(self.low)} to {form.format(self.high)})"


def cell(values: Sequence[float]) -> Cell:
    """The median, with the interval between order statistics that contains the true median in 95 %
    of cases. Fewer than six values have no such interval; it is then from lowest to highest."""
    n, ordered = len(values), sorted(values)
    if n < 3:
        return Cell(median(values))
    sure = [k for k in range(n // 2) if sum(comb(n, j) for j in range(k + 1)) <= 0.025 * 2**n]
    k = max(sure, default=0)
    return Cell(median(values), ordered[k], ordered[-1 - k])


def _range(cells: Sequence[Cell], form: str = "{:.2f}") -> str:
    medians = [each.median for each in cells]
    ends = [form.format(each) for each in (min(medians), max(medians))] if cells else [NOT_MEASURED]
    return " to ".join(dict.fromkeys(ends))


class Results:
    """A record, indexed by row, (group, name of the contender), and by column title.

    rounds: figures of each round, with the contender's facts; only the facts if not measured.
    """

    def __init__(self, question: Question, record: Record) -> None:
        self.question, self.record = question, record
        self.contenders = {(each["group"], each["name"]): each for each in record["contenders"]}
        self.rows = list(self.contenders)
        self.rounds = {
            row: [each["facts"] | with_medians(figures) for figures in each["rounds"] or [{}]]
            for row, each in self.contenders.items()
        }
        self.columns = {each.title: each for each in question.columns}
        shown = [t for t, x in self.columns.items() if any(self.values(r, x) for r in self.rows)]
        self.columns = {title: self.columns[title] for title in shown or self.columns}

    def values(self, row: tuple[str, str], column: Column) -> list[Any]:
        """One value per round; empty where a figure is missing."""
        own, first = self.rounds[row], (row[0], self.contenders[row]["first"])
        base = [{}] if first == row else self.rounds.get(first, [{}])
        base = base if len(base) == len(own) else base[:1] * len(own)  # one is not measured
        try:
            return [column.value(*pair) for pair in zip(own, base, strict=True)]
        except KeyError:
            return []

    def cell(self, group: str, name: str, title: str) -> Cell | None:
        """None where there is nothing to show."""
        is_there = (group, name) in self.rounds and title in self.columns
        values = self.values((group, name), self.columns[title]) if is_there else []
        return cell(values) if values else None

    def median(self, group: str, name: str, title: str) -> float:
        """NaN where there is nothing to show."""
        found = self.cell(group, name, title)
        return float("nan") if found is None else found.median

    def range(self, title: str, form: str = "{:.2f}") -> str:
        """Range of the medians of all rows that have this cell, such as "1.2 to 1.8"."""
        cells = [self.cell(*row, title) for row in self.rows]
        return _range([each for each in cells if each], form)

    def ratios(self, title: str, leave_out: Collection[str] = (), *, of: str = "") -> str:
        """This column by contender, such as "DTensor 1.20 (1.15 to 1.30)", or the range of its
        medians where several groups have it, without contenders of the names in leave_out. of: a
        figure that is true where a claim is made."""
        found = dict[str, list[Cell]]()
        for group, name in self.rows:
            cell = self.cell(group, name, title)
            if cell and name not in leave_out and (not of or self.rounds[group, name][0][of]):
                found.setdefault(name, []).append(cell)
        texts = {
            name: one.text("{:.2f}", is_ratio=True) if not others else _range([one, *others])
            for name, (one, *others) in found.items()
        }
        return "; ".join(f"{name} {text}" for name, text in texts.items()) or NOT_MEASURED

    def table(self) -> str:
        width = 2 if any(group for group, _ in self.rows) else 1
        lines = [[*[""] * width, *self.columns]]
        for row in self.rows:
            cells = [(self.cell(*row, title), each) for title, each in self.columns.items()]
            texts = [c.text(x.form, is_ratio=bool(x.ratio)) if c else "" for c, x in cells]
            reason = self.contenders[row]["reason"]
            name = f"{row[1]} (not measured: {reason})" if reason else row[1]
            lines.append([*[row[0], name][-width:], *texts])
        if len(lines) == 2:  # transposed, so that many columns can be read
            lines = [list(pair) for pair in zip(*lines, strict=True)][width - 1 :]
        return markdown(lines[0], lines[1:])

    def notes(self) -> list[str]:
        """Notes of the contenders, without repetitions, and of the run."""
        found = dict.fromkeys(
            f"{name}: {note}"
            for (_, name), rounds in self.rounds.items()
            for figures in rounds
            for note in figures.get("notes", ())
        )
        share = self.record["others_share_of_cores"]
        noise = f"A noisy run: other programs took {100 * share:.0f} % of the cores."
        return [*found, *([noise] if share > NOISY else [])]


def with_medians(figures: Figures) -> Figures:
    return figures | {key: median(figures[key]) for key in ("wall", "cpu") if key in figures}


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(re.sub(" +", " ", f"| {' | '.join(map(str, line))} |") for line in lines)


def about(record: Record) -> str:
    """The machine and the settings, in one line."""
    apart = {"contenders", "command", "others_share_of_cores"}
    return ", ".join(f"{name} {value}" for name, value in record.items() if name not in apart)


def report(question: Question, page: Path | None, records: Sequence[Record]) -> Results:
    """Print the first record, and write a page of all records."""
    results = Results(question, records[0])
    parts = [about(records[0]), results.table(), question.result(results), *results.notes()]
    print("\n\n".join(filter(None, parts)), flush=True)
    if page is not None:
        write_page(page, question, records)
    return results


def others_in(file: Path | None, record: Record) -> list[Record]:
    """Records in a file that are from other machines."""
    found = json.loads(file.read_text()) if file is not None and file.exists() else []
    if not isinstance(found, list):
        raise ValueError(f"--json {file}: no record of this benchmark; name another file")
    return [each for each in found if machine(each) != machine(record)]


def machine(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("processor", "cores", "gpu"))


def write_page(file: Path, question: Question, records: Sequence[Record]) -> None:
    """The newest record with its picture, tables of the others; keeps text below "## Notes"."""
    title, method = question.text
    results, *others = (Results(question, each) for each in records)
    notes = file.read_text().partition(NOTES)[2] if file.exists() else ""
    parts = [f"# {title}", question.result(results), f"    {results.record['command']}"]
    parts += [about(results.record), *results.notes()]
    if question.picture and (why := failure("matplotlib")):
        parts.append(f"No picture: {why}.")
    elif question.picture:
        with atomic_writer(file.with_suffix(".png")) as stream:
            draw(stream, results)
        parts.append(f"![{title}]({file.stem}.png)")
    parts += [results.table(), method]
    for each in others:
        parts += [f"## On {each.record['processor']}", question.result(each)]
        parts += [f"    {each.record['command']}", about(each.record), *each.notes(), each.table()]
    text = "\n\n".join(filter(None, parts)) + "\n"
    text += NOTES + notes if notes else ""
    write_atomically(file, text.encode())


COLOURS = ("#c44e52", "#333333", "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#8c9aae")


def draw(stream: BinaryIO, results: Results) -> None:
    """Writes a PNG. bars: one panel per drawn column, without empty ones and empty rows.
    lines, along the contenders' x: one panel per drawn column and group."""
    drawn = results.question.drawn or [next(iter(results.columns))]
    is_bars, shown = results.question.picture == "bars", results.rows
    if is_bars:
        drawn = [each for each in drawn if any(results.cell(*row, each) for row in shown)] or drawn
        shown = [row for row in shown if any(results.cell(*row, each) for each in drawn)] or shown
        panels = [*product(drawn, [""])]
        high, wide, height = 1, len(drawn), 1.2 + 0.35 * len(shown)
    else:  # groups of contenders without an x have no panel
        along_x = (group for group, name in shown if results.contenders[group, name]["x"])
        groups = dict.fromkeys(along_x) or {"": None}
        panels = [*product(drawn, groups)]
        high, wide, height = len(drawn), len(groups), 3.2 * len(drawn)
    names = 0.07 * max(len("".join(row)) for row in shown) if is_bars else 0.0
    width = max(7, names + 3.6 * wide)
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    places = figure.subplots(high, wide, squeeze=False, sharey=is_bars).flat
    for axes, (column, group) in zip(places, panels, strict=True):
        if is_bars:
            bars(axes, results, column, shown)
        else:
            lines(axes, results, column, group)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(stream, format="png", dpi=110)


def bars(axes: Axes, results: Results, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """The one that all are compared with has its own colour."""
    firsts = {results.contenders[row]["first"] for row in rows}
    for place, (group, name) in enumerate(rows):
        if (found := results.cell(group, name, title)) is not None:
            colour = COLOURS[0 if firsts == {name} else -1]
            drawn = axes.barh(place, found.median, color=colour)
            if found.low is None or found.high is None:
                axes.bar_label(drawn, [results.columns[title].form.format(found.median)], padding=3)
                continue
            errors = [[found.median - found.low], [found.high - found.median]]
            axes.errorbar(found.median, place, xerr=errors, color=COLOURS[1], capsize=2)
    axes.margins(x=0.15)
    names = [f"{group}: {name}" if group else name for group, name in rows]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)  # leaves space for rows without this column
    axes.set_xlabel(title)


def lines(axes: Axes, results: Results, titles: str, group: str) -> None:
    """titles: column titles, separated by " | "; each column is one line."""
    rows = [row for row in results.rows if row[0] == group]
    for colour, title in zip(COLOURS, titles.split(" | "), strict=False):
        cells = [(results.contenders[row]["x"], results.cell(*row, title)) for row in rows]
        if points := sorted((x, each.median) for x, each in cells if each is not None):
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=title)
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(*zip(*((x, f"{x:,g}") for x, _ in points), strict=True), fontsize=7)
            axes.minorticks_off()
            axes.legend(fontsize=7, frameon=False)
    axes.set_xlabel(group)


def rows(record: Record) -> list[Record]:
    """One flat row per contender, to compare runs: medians over rounds; mfu and hfu in percent;
    predicted seconds; profile figures from the last round."""
    found = []
    for each in record["contenders"]:
        row: Record = {"model": each["group"], "contender": each["name"]}
        if each["reason"]:
            found.append(row | {"reason": each["reason"]})
            continue
        rounds = [with_medians(figures) for figures in each["rounds"]]
        wall = median(figures["wall"] for figures in rounds)
        row |= {"seconds": wall, "peak_gib": median(x["peak_bytes"] for x in rounds) / 2**30}
        if "tokens" in rounds[0]:
            row["tokens_per_s"] = median(x["tokens"] / x["wall"] for x in rounds)
        row |= {key: each["facts"][key] / wall for key in ("mfu", "hfu") if key in each["facts"]}
        row |= {key: each["facts"][key] for key in ("predicted",) if key in each["facts"]}
        last = rounds[-1]
        row |= {
            key: last[key] for key in ("launches", "host_ms", "reads", "device_ms") if key in last
        }
        found.append(row)
    return found


def gather(folder: Path, names: Sequence[str]) -> None:
    """Write gpu.json: the machine, and the rows of the newest record of each NAME.json."""
    files = [folder / f"{name}.json" for name in names]
    records = {file.stem: json.loads(file.read_text())[0] for file in files if file.is_file()}
    known = next(iter(records.values()), {})
    facts = ("date", "commit", "gpu", "processor", "cores", "memory_gb", "python", *PACKAGES)
    whole: Record = {key: known[key] for key in facts if key in known}
    whole["without_figures"] = [name for name in names if name not in records]
    whole["rows"] = [{"run": name} | row for name, each in records.items() for row in rows(each)]
    write_atomically(folder / "gpu.json", (json.dumps(whole, indent=1) + "\n").encode())
