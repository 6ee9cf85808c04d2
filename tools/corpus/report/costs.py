"""Time and memory of the steps; their settings, versions and checksums."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from tools.corpus.report.charts import bar_cells
from tools.corpus.report.funnel import share, size
from tools.corpus.report.steps import Facts, Folder, Step, Steps, text_bytes
from tools.corpus.report.texts import own_facts
from tools.page import NONE, decimal, duration, row, table, whole

LEAST = 0.1  # seconds from which a speed is shown
LISTED = 40  # files of a folder that are listed one by one


def headline(steps: Steps) -> list[tuple[str, str, str]]:
    """CPU time and memory of all steps, if any of them has recorded them."""
    stages = [stage for step in steps for stage in stages_of(step)]
    if not stages:
        return []
    cpu = sum(stage["cpu_seconds"] for stage in stages)
    wall = sum(stage["seconds"] for stage in stages)
    return [
        (took(cpu), "of CPU time", f"{took(wall)} by the clock"),
        (size(max(stage["peak_bytes"] for stage in stages)), "peak memory", "of one process"),
    ]


def stages_of(step: Step) -> list[Facts]:
    """The stages of all folders of the step, merged by name."""
    merged: dict[str, Facts] = {}
    stages = [stage for folder in step.folders if folder.run for stage in folder.run["stages"]]
    for stage in stages:
        if not stage["tasks"]:
            continue
        first = merged.setdefault(stage["stage"], stage)
        if first is not stage:
            sums = {key: first[key] + stage[key] for key in ("seconds", "cpu_seconds")}
            peak = max(first["peak_bytes"], stage["peak_bytes"])
            merged[stage["stage"]] = {**first, **sums, "peak_bytes": peak}
    return list(merged.values())


def took(seconds: float) -> str:
    """The time in a suitable unit."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else duration(seconds)


def costs(steps: Steps) -> str:
    """A row for each step, and under it one for each stage."""
    total = sum(stage["cpu_seconds"] for step in steps for stage in stages_of(step))
    rows = []
    for step in steps:
        stages, read = stages_of(step), text_bytes(step.funnel.input)
        name = step.name.capitalize()
        if not stages:
            rows.append(row((f"{name}: no run.json", NONE, NONE, NONE, NONE, NONE, ""), "step"))
            continue
        sums = {key: sum(each[key] for each in stages) for key in ("seconds", "cpu_seconds")}
        peak = max(each["peak_bytes"] for each in stages)
        rows.append(_cost_row(name, {**sums, "peak_bytes": peak}, read, total, "step"))
        rows += [_cost_row(each["stage"], each, read, total) for each in stages]
    head = ("step, and its stages", "wall", "CPU", "MB / CPU s", "peak memory", "of all CPU", "")
    return table(head, rows, "costs") + NOTE


NOTE = (
    '<p class="soft">Wall: of the run that ended the step.  CPU: of all its tasks, in whichever '
    "run they were done.  MB / CPU s: text that the step read, for each second of one core.  "
    "Memory: the largest process.</p>"
)


def _cost_row(name: str, cost: Facts, read: int, total: float, kind: str = "") -> str:
    cpu = cost["cpu_seconds"]
    cells = (
        name,
        seconds(cost["seconds"]),
        seconds(cpu),
        decimal(read / 1e6 / cpu, 1) if cpu >= LEAST else NONE,
        size(cost["peak_bytes"]),
    )
    part = share(cpu, total)
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="{kind}">{texts}{bar_cells(part)}</tr>'


def seconds(number: float) -> str:
    return f"{number:,.1f} s"


def provenance(steps: Steps, faults: Sequence[str] | None) -> str:
    """Boxes that unfold, with all that is needed to make the same output again and to check it."""
    return verdict(faults) + "".join(
        f"<details><summary>{escape(folder.step.capitalize())}, "
        f"<code>{escape(folder.path.name)}</code></summary>{_provenance(folder)}</details>"
        for folder in steps.folders
    )


def verdict(faults: Sequence[str] | None) -> str:
    if faults is None:
        return '<p class="soft">The shards were not read again for this page; --verify does it.</p>'
    if not faults:
        return "<p>Every shard of every step is there and has the checksum in its manifest.</p>"
    items = "".join(f"<br><code>{escape(fault)}</code>" for fault in faults)
    return f'<p class="fault"><b>{len(faults)} shards are not as they were written</b>{items}</p>'


def _provenance(folder: Folder) -> str:
    manifest, run = folder.manifest, folder.run or {}
    settings = manifest["settings"] | run.get("settings", {}) | run.get("machine", {})
    files = "".join(
        f"<h3>{title}</h3>{_files(manifest[key])}"
        for key, title in (("inputs", "Read"), ("shards", "Written"))
        if manifest.get(key)
    )
    pairs = "".join(
        table(head, [row((name, _shown(value))) for name, value in facts.items()], "mono")
        for head, facts in (
            (("setting", ""), settings),
            (("version of", ""), manifest.get("versions", {})),
        )
        if facts
    )
    return f'<div class="pair">{pairs}{own_facts(folder)}</div>{files}'


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _files(files: Sequence[Facts]) -> str:
    rows = [
        row((str(each["name"]), f"{each['bytes']:,}", str(each["sha256"])))
        for each in files[:LISTED]
    ]
    more = len(files) - LISTED
    note = f'<p class="soft">and {whole(more)} more, in manifest.json</p>' if more > 0 else ""
    return table(("file", "bytes", "SHA-256"), rows, "mono") + note
