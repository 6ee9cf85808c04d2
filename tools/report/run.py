"""A run on a page, from its metrics.jsonl: how far it is, its curves, where its time goes, its
layout, evaluations, samples and settings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from itertools import product
from math import prod
from typing import Any

from megatron.config.parallel import TrainingParallelConfig
from megatron.errors import UsageError, flag
from tools.layouts.layout import Layout, layout_of, parse_layout
from tools.layouts.picture import layout_figure
from tools.report.curves import Against, draw_curves, left_out, unit_of
from tools.report.figures import SERIES, Axes, draw
from tools.report.numbers import NONE, duration, percent, whole
from tools.report.record import Facts, Lines, epoch_figures, is_epoch
from tools.report.sections import (
    Commands,
    Figure,
    Grid,
    Items,
    Mark,
    Number,
    Page,
    Part,
    Quote,
    Section,
    Share,
    Table,
    Text,
)

PHASES = ("forward", "backward", "forward and backward", "p2p", "reduction", "optimizer")
WAITS = ("p2p", "reduction")  # phases in which a rank waits for others
LEAST_WAIT = 0.0005  # seconds of a phase that counts as waiting: it shows as 1 ms
EQUAL = 1.05  # times the median that the slowest rank may take until the page calls it slow

# Numbers of what is shown.
RECENT = 20  # lines that tell whether it is always the same rank
EVALUATIONS = 5
SAMPLES = 8
RANKS = 16  # above, the table of ranks is folded


def run_page(name: str, lines: Lines, against: Against = "steps") -> Page:
    """lines: at least one, of a run that has started."""
    place = max((n for n, line in enumerate(lines) if "started" in line), default=0)
    since = lines[place:]  # what holds for the newest layout
    start = since[0] if "started" in since[0] else {}
    logged = [line for line in lines if "loss" in line]
    lead = state_of(lines)
    sections = []
    if logged:
        lost = [Text(text, "warning") for text in left_out(name, lines)]
        curves = draw_curves({name: lines}, against)
        sections = [Section("Curves", [*lost, Grid(curves)])]
    else:
        lead += " No step is logged yet."
    sections += [
        Section("Where time goes", [*time_parts(since)]),
        Section("Layout", [*layout_parts(start, since)]),
        Section("Evaluations", [*evaluation_parts(lines)]),
        Section("Samples", [*sample_parts(lines)]),
        Section("Settings", [*setting_parts(start)], folded=True),
    ]
    shown = [section for section in sections if section.parts]
    return Page(name, lead, shown, [*headline(lines, start)])


def number_of(value: Any) -> str:
    """A number of a line in about five digits; the record has null for one that is not finite."""
    if not isinstance(value, int | float):
        return "not finite" if value is None else str(value)
    return whole(value) if isinstance(value, int) or abs(value) >= 1e4 else f"{value:#.5g}"


def state_of(lines: Lines) -> str:
    """Says when the run started and how it ended, if it has; without such lines, where it is."""
    starts = [line for line in lines if "started" in line]
    last = lines[-1]
    if starts:
        moment = datetime.fromisoformat(starts[0]["started"])
        text = f"Started {moment:%Y-%m-%d %H:%M %Z}"
    elif "ended" in last:
        text = "Started"
    else:
        return f"At step {whole(last['step'])}."
    if again := [str(line["step"]) for line in starts[1:]]:
        text += f", resumed at step {', '.join(again)}"
    if "ended" not in last:
        return f"{text}, and has not ended."
    reason = "with its last step" if last["ended"] == "train_iters" else f"by {last['ended']}"
    return f"{text}, ended {reason}, status {last.get('exit_code', 0)}."


def headline(lines: Lines, start: Facts) -> Iterator[Number]:
    step = max(line["step"] for line in lines)
    steps = start.get("config", {}).get("training", {}).get("train_iters")
    note = f"of {whole(steps)}, {percent(step / steps, 0)}" if steps else ""
    yield Number(whole(step), "step", note)
    last = next((line for line in reversed(lines) if "loss" in line), None)
    if last is None:
        return
    yield Number(number_of(last["loss"]), "loss", f"at step {whole(last['step'])}")
    checked = [line for line in lines if "validation_loss" in line]
    if checked:
        loss, at = checked[-1]["validation_loss"], checked[-1]["step"]
        yield Number(number_of(loss), "validation loss", f"at step {whole(at)}")
    unit = unit_of(lines)
    if (rate := last.get(f"{unit}_per_second")) is not None:
        seconds = last.get("step_seconds")
        note = "" if seconds is None else f"{1000 * seconds:,.0f} ms a step"
        yield Number(whole(rate), f"{unit} per second", note)
    if (mfu := last.get("mfu")) is not None:
        yield Number(percent(mfu), "MFU", "of the peak of the devices")
    if (peak := last.get("peak_memory_bytes")) is not None:
        yield Number(f"{peak / 2**30:.1f} GiB", "memory", "peak of the fullest rank")
    if (left := last.get("seconds_left")) and "ended" not in lines[-1]:
        yield Number(duration(left), "left", "at the pace so far")


def time_parts(lines: Lines) -> Iterator[Part]:
    """Phases of the median and the slowest rank, who waits for whom, the wait for data, and the
    newest profile. lines: since the newest start."""
    timed = [line for line in lines if "median_phases" in line and "slowest_phases" in line]
    if timed:
        yield phase_figure(timed[-1])
        yield from waiting(timed)
    if share := next((x["data_wait_share"] for x in reversed(lines) if "data_wait_share" in x), 0):
        yield f"The run waits for data during {percent(share, 2)} of its time."
    if profiled := [line for line in lines if "profile" in line]:
        yield profile_table(profiled[-1])


def profile_table(line: Facts) -> Table:
    """line: with the profile of --profile-step-start, seconds of a step by part for each rank."""
    by_rank = line["profile"]
    step = sum(sum(each.values()) for each in by_rank)
    parts = {name for each in by_rank for name in each}
    totals = {name: sum(each.get(name, 0.0) for each in by_rank) for name in parts}
    shown = by_rank[:RANKS] if len(by_rank) > 1 else []
    rows = [
        (
            name,
            f"{1000 * total / len(by_rank):,.1f}",
            Share(total / step),
            *(f"{1000 * each.get(name, 0.0):,.1f}" for each in shown),
        )
        for name, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    ]
    head = (f"profile up to step {line['step']}, ms", "mean", "of a step")
    return Table((*head, *(f"rank {rank}" for rank in range(len(shown)))), rows)


def phase_figure(line: Facts) -> Figure:
    sides = ["median", "slowest"]
    if line["median_rank"] == line["slowest_rank"]:
        sides = sides[:1]
    found = {name for side in sides for name in line[f"{side}_phases"]}
    names = [name for name in PHASES if name in found] + sorted(found.difference(PHASES))
    colours = dict(zip(names, SERIES * len(names), strict=False))

    def paint(axes: Axes) -> None:
        for place, side in enumerate(sides):
            left = 0.0
            for name, colour in colours.items():
                width = 1000 * line[f"{side}_phases"].get(name, 0.0)
                axes.barh(place, width, left=left, color=colour, height=0.6)
                left += width
        ranks = [f"{side}\nrank {line[f'{side}_rank']}" for side in sides]
        axes.set_yticks(range(len(sides)), ranks if len(sides) > 1 else ["step"])
        axes.invert_yaxis()
        axes.set(xlabel="ms")
        axes.grid(axis="x")

    caption = f"Phases of the step before step {line['step']}"
    height = 0.7 + 0.45 * len(sides)
    return draw(paint, caption, (5.4, height), [(colour, name) for name, colour in colours.items()])


def waiting(timed: Lines) -> Iterator[str]:
    """Sentences about the ranks that are late, and those that wait for them. timed: lines with
    phases."""
    last = timed[-1]
    rank, host, slow = last["slowest_rank"], last["slowest_host"], last["slowest_seconds"]
    median = last["median_seconds"]
    if rank == last["median_rank"] or not median:
        return
    times = f"{slow / median:.2f} x the median ({1000 * slow:,.0f} ms against {1000 * median:,.0f})"
    if slow < EQUAL * median:
        yield f"All ranks take about the same time: the slowest, rank {rank}, takes {times}."
        return
    spent = ((name, last["median_phases"].get(name, 0.0)) for name in WAITS)
    waits = " and ".join(
        f"{1000 * each:,.0f} ms in {name}" for name, each in spent if each >= LEAST_WAIT
    )
    text = f"Rank {rank} on host {host} takes {times} for forward and backward."
    yield f"{text} Others wait for it: rank {last['median_rank']}, the median, " + (
        f"spends {waits}." if waits else "shows no wait of its own in p2p or reduction."
    )
    recent = timed[-RECENT:]
    if len(recent) > 1:
        count = sum(line["slowest_rank"] == rank for line in recent)
        yield f"It was the slowest in {count} of the last {len(recent)} lines."


def layout_parts(start: Facts, lines: Lines) -> Iterator[Part]:
    """Coordinates and memory of each rank, and the picture of the layout. lines: since `start`."""
    if not (sizes := start.get("layout")):
        return
    axes = {name.removesuffix("_parallel_size"): number for name, number in sizes.items()}
    ranks = prod(axes.values())
    if (layout := find_layout(start, ranks)) is not None:
        yield f"{layout.name}: {whole(ranks)} rank{'s' * (ranks > 1)}."
        # An own schedule has no name there, and changes no block.
        if ranks > 1:
            yield layout_picture(replace(layout, schedule=None).name)
    memories = [line[key] for line in lines if (key := "peak_memory_bytes_by_rank") in line]
    memory = memories[-1] if memories else None
    rows = [*rank_rows(axes, memory)]
    head: list[str] = ["rank", *axes]
    if memory:
        head += ["peak memory", "of the fullest rank's"]
    table = Table(head, rows, left=())
    if len(rows) > RANKS:
        yield Section(f"Each of the {whole(len(rows))} ranks", [table], folded=True)
    elif len(rows) > 1:
        yield table


def rank_rows(
    axes: Mapping[str, int], memory: Sequence[int] | None
) -> Iterator[tuple[str | Share, ...]]:
    """axes: their sizes, slowest first. memory: bytes, by rank."""
    for rank, place in enumerate(product(*map(range, axes.values()))):
        row: tuple[str | Share, ...] = (str(rank), *map(str, place))
        if memory and rank < len(memory):
            row += f"{memory[rank] / 2**30:.2f} GiB", Share(memory[rank] / max(memory))
        yield row


def find_layout(start: Facts, ranks: int) -> Layout | None:
    """The layout of the settings; None if the record has none, or those of another version."""
    config = start.get("config", {})
    try:
        parallel = TrainingParallelConfig(**config["parallel"])
        return layout_of(parallel, ranks, config["model"].get("num_layers") or 1)
    except (KeyError, TypeError, ValueError):
        return None


@cache
def layout_picture(name: str) -> Figure | str:
    """The reason in place of the figure for a layout that has none."""
    try:
        return layout_figure(parse_layout(name))
    except UsageError as error:
        return f"There is no picture of this layout: {error}."


def evaluation_parts(lines: Lines) -> Iterator[Part]:
    """Tables of the newest evaluations of pretraining, and of the newest epochs of fine-tuning, the
    newest first."""
    validated = [line for line in lines if "validation_loss" in line][-EVALUATIONS:]
    keys = [key for key in (validated or [{}])[-1] if key.startswith("validation_")]
    epochs = [line for line in lines if is_epoch(line)][-EVALUATIONS:]
    figures = ["epoch", *epoch_figures((epochs or [{}])[-1])]
    for found, names in ((validated, keys), (epochs, figures)):
        head = ["step", *(name.removeprefix("validation_").replace("_", " ") for name in names)]
        rows = [
            [whole(line["step"]), *(number_of(line[x]) if x in line else NONE for x in names)]
            for line in found[::-1]
        ]
        if rows:
            yield Table(head, rows, left=())


def sample_parts(lines: Lines) -> Iterator[Part]:
    """The newest samples."""
    samples = [line for line in lines if "sample" in line and "text" in line]
    for line in [each for each in samples if each["step"] == samples[-1]["step"]][:SAMPLES]:
        prompt, text = str(line.get("prompt", "")), str(line["text"])
        yield Quote([Mark(prompt), text], f"step {line['step']}")


def setting_parts(start: Facts) -> Iterator[Part]:
    if "command" in start:
        yield Commands([start["command"]])
    facts = {name: start.get(name) for name in ("device", "dtype", "commit", "data")}
    if (count := start.get("parameters")) is not None:
        facts["parameters"] = whole(count)
    versions = start.get("versions", {}).items()
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in versions) or None
    if shown := [(name, str(value)) for name, value in facts.items() if value is not None]:
        yield Items(shown)
    rows = [
        (flag(key), value if isinstance(value, str) else json.dumps(value), part)
        for part, settings in start.get("config", {}).items()
        if isinstance(settings, Mapping)
        for key, value in settings.items()
        if value not in (None, [], "")
    ]
    if rows:
        yield Table(("setting", "value", "part"), rows, left=(0, 1, 2))
