"""The report as text and as a page: figures, a timeline, and the faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tools.report.figures import PALETTE, draw
from tools.report.numbers import NONE, aligned, duration, percent, whole
from tools.report.sections import Figure, Number, Page, Part, Section, Share, Table, Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "first start": "soft", "steps": "c0", "evaluation": "c1", "save": "c3", "repeated": "accent",
    "stopped": "c5", "detection": "c2", "restart": "rest", "load": "c4", "end": "line",
}  # fmt: skip
ROWS = 12  # of the timeline, at most
LEAST = 60.0  # seconds of a row, at the least
SHOWN = 500  # faults in the table


def verdict(report: Mapping[str, Any]) -> str:
    compared = report["weights"]
    if report["failure"]:
        return f"The run failed: {report['failure'].splitlines()[0]}."
    if compared is None:
        return "There are no weights to compare."
    within = f" within {compared['tolerance']:g}" if compared["tolerance"] else " in every bit"
    if compared["equal"]:
        return f"The final weights equal those of the undisturbed run{within}."
    return f"The final weights differ from those of the undisturbed run: {compared['differ'][0]}."


def summary(report: Mapping[str, Any]) -> str:
    """The text that the program prints at its end."""
    wall, seconds = report["wall_seconds"], report["seconds"]
    rows = [(kind, duration(each), percent(each / wall)) for kind, each in seconds.items()]
    lines = [
        f"{len(report['faults'])} faults, useful {percent(report['useful_share'])} of "
        f"{duration(wall)}; undisturbed {duration(report['undisturbed_seconds'])}",
        aligned(rows),
        *(f"not injected: {each}" for each in report["not_injected"]),
        *(f"no cause was named for fault {number}" for number in report["unnamed"]),
        verdict(report),
        *report["failure"].splitlines()[1:],
    ]
    return "\n".join(lines)


def page(report: Mapping[str, Any]) -> Page:
    wall, seconds = report["wall_seconds"], report["seconds"]
    lead = f"{len(report['faults'])} faults were injected. {verdict(report)}"
    steps = report["steps_repeated"]
    numbers = [
        Number(percent(report["useful_share"]), "useful time", f"of {duration(wall)}"),
        Number(whole(len(report["faults"])), "faults", f"seed {report['seed']}"),
        Number(whole(steps), "steps repeated", duration(seconds["repeated"])),
    ]
    shares = [(kind, duration(each), Share(each / wall)) for kind, each in seconds.items() if each]
    sections = [
        Section("Timeline", [*timeline(report)]),
        Section("Where the time went", [Table(("", "seconds", "share"), shares), parts(report)]),
        Section("Faults by kind", [kinds(report)]),
        Section("Faults", [*remarks(report), faults(report)]),
    ]
    return Page("Useful time under faults", lead, sections, numbers)


def timeline(report: Mapping[str, Any]) -> Iterator[Figure]:
    wall = report["wall_seconds"]
    rows = max(1, min(ROWS, ceil(wall / LEAST)))
    legend = [(PALETTE[COLOURS[kind]], kind) for kind, each in report["seconds"].items() if each]
    caption = f"Rank 0 from the start; each row is {duration(wall / rows)}, a mark is a fault"
    paint = partial(_paint, report=report, rows=rows)
    figure = draw(paint, caption, (5.4, 0.8 + 0.36 * rows), legend)
    titles = {f'<g id="{_name(each)}">': each for each in report["faults"]}

    def titled(opening: re.Match[str]) -> str:
        fault = titles[opening[0]]
        of_rank = "" if fault["rank"] is None else f" of rank {fault['rank']}"
        text = f"{fault['number']}: {fault['label']}{of_rank}, in {fault['phase']}"
        return f"{opening[0]}<title>{escape(text)}</title>"

    yield replace(figure, svg=re.sub(r'<g id="fault\d+">', titled, figure.svg))


def _name(fault: Mapping[str, Any]) -> str:
    """The id of its mark in the drawing."""
    return f"fault{fault['number']}"


def _paint(axes: Axes, report: Mapping[str, Any], rows: int) -> None:
    length = report["wall_seconds"] / rows
    for kind, begin, end in report["spans"]:
        for row in range(int(begin / length), min(rows, int(end / length) + 1)):
            left, right = max(begin, row * length), min(end, (row + 1) * length)
            if right > left:
                at = left - row * length
                axes.barh(row, right - left, 0.6, at, color=PALETTE[COLOURS[kind]], linewidth=0)
    for fault in report["faults"]:
        row = min(rows - 1, int(fault["seconds"] / length))
        at = fault["seconds"] - row * length
        axes.plot([at], [row - 0.4], "v", color=PALETTE["ink"], markersize=4, gid=_name(fault))
    axes.set_xlim(0, length)
    axes.set_ylim(rows - 0.4, -0.7)
    axes.set_yticks(range(rows), [duration(row * length) for row in range(rows)])
    axes.set_xlabel("seconds of the row")


def _mean(figure: Mapping[str, float] | None, is_time: bool = True) -> str:
    if figure is None:
        return NONE
    if not is_time:
        return f"{figure['mean']:.1f} / {figure['largest']:.0f}"
    return f"{duration(figure['mean'])} / {duration(figure['largest'])}"


def kinds(report: Mapping[str, Any]) -> Table:
    head = (
        "fault",
        "count",
        "ended it",
        "detection",
        "restart",
        "steps repeated",
        "over cold start",
    )
    rows = []
    for each in report["by_kind"]:
        over = each["restart_over_cold_start"]
        rows.append((
            each["label"],
            whole(each["count"]),
            whole(each["ended"]),
            _mean(each["detection_seconds"]),
            _mean(each["restart_seconds"]),
            _mean(each["steps_repeated"], is_time=False),
            NONE if over is None else f"{over:.2f}",
        ))  # fmt: skip
    note = (
        "Mean / largest. Detection: from the fault to the end of the last rank. Restart: from "
        "there until the checkpoint is loaded. Over cold start: seconds from the end of the ranks "
        "to the first step done, over those of the first start."
    )
    return Table(head, rows, note=note)


def parts(report: Mapping[str, Any]) -> Table:
    """The parts of starts, where the record of the run has them."""
    starts = report["start_seconds"]
    names = dict.fromkeys(name for start in starts for name in start)
    values = {name: [start[name] for start in starts if name in start] for name in names}
    rows = [(name, duration(fmean(each)), duration(max(each))) for name, each in values.items()]
    return Table(("part of a start", "mean", "largest"), rows)


def remarks(report: Mapping[str, Any]) -> Iterator[Part]:
    for each in report["not_injected"]:
        yield Text(f"Not injected: {each}.", "note")
    for number in report["unnamed"]:
        yield Text(f"The run named no cause for fault {number}.", "warning")


def faults(report: Mapping[str, Any]) -> Table:
    head = ("", "at", "fault", "rank", "in", "step", "detection", "restart", "repeated", "cause")
    rows = [[*_row(each)] for each in report["faults"][:SHOWN]]
    more = len(report["faults"]) - SHOWN
    note = f"and {whole(more)} more, in report.json" if more > 0 else ""
    return Table(head, rows, left=(2, 9), note=note)


def _row(row: Mapping[str, Any]) -> Iterator[str]:
    def shown(value: float | None, text: Any = whole) -> str:
        return NONE if value is None else str(text(value))

    yield whole(row["number"])
    yield duration(row["seconds"])
    yield row["label"]
    yield shown(row["rank"])
    yield row["phase"]
    yield shown(row["step"])
    yield shown(row["detection_seconds"], duration)
    yield shown(row["restart_seconds"], duration)
    yield shown(row["steps_repeated"])
    said: Sequence[str] = [text for text in (row["note"], row["cause"]) if text]
    yield "; ".join(said) or ("no cause named" if row["ended"] else "the run went on")
