"""A pipeline schedule as numbers, as text and as a picture. Needs no torch."""

from itertools import product
from typing import Any

from megatron.parallel.schedules import DURATIONS, LETTERS, Facts, Lists, simulate
from tools.report.figures import PALETTE, Axes, picture

MOST_UNITS = 48  # of time, in a picture made of text
COLOURS = {
    "forward": PALETTE["c0"],
    "backward": PALETTE["c1"],
    "backward_input": PALETTE["c5"],
    "backward_weight": PALETTE["c2"],
}


def record(lists: Lists, facts: Facts) -> dict[str, Any]:
    """The JSON that --json writes. An action is written as stage, letter (LETTERS), micro-batch."""
    return {
        "actions": [[str(action) for action in actions] for actions in lists],
        "in_flight": list(facts.in_flight),
        "idle_share": facts.idle_share,
        "micro_batches": facts.micro_batches,
        "virtual": facts.virtual,
    }


def summary(lists: Lists, facts: Facts) -> str:
    in_flight = " ".join(map(str, facts.in_flight))
    return (
        f"{len(lists)} ranks, {facts.virtual} virtual stages of each, "
        f"{facts.micro_batches} micro-batches\n"
        f"idle time: {100 * facts.idle_share:.2f} % of the ideal time "
        f"(a forward takes 1, a backward 2, each half of it 1)\n"
        f"micro-batches in flight by rank, of all its virtual stages: {in_flight}"
    )


def text(lists: Lists, facts: Facts) -> str:
    """A line for each rank: what starts in each unit of time (- continues, . idle); and a summary.

    An action is written as in JSON, without its stage if a rank has only one.
    """
    rows = []
    for actions, starts in zip(lists, simulate(lists), strict=True):
        row: list[str] = []
        for action, start in zip(actions, starts, strict=True):
            label = str(action) if facts.virtual > 1 else f"{LETTERS[action.direction]}{action[2]}"
            row += ["."] * (start - len(row)) + [label] + ["-"] * (DURATIONS[action.direction] - 1)
        rows.append(row)
    units = max(map(len, rows))
    width = max(len(cell) for row in rows for cell in row)
    lines = [
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row[:MOST_UNITS]).rstrip()
        for rank, row in enumerate(rows)
    ]
    if units > MOST_UNITS:
        lines.append(f"(the first {MOST_UNITS} of {units} units of time; --picture draws all)")
    return "\n".join([*lines, "", summary(lists, facts)])


def draw(ending: str, lists: Lists, facts: Facts) -> bytes:
    """A Gantt chart: a row for each rank, a bar for each action with its micro-batch. The later the
    virtual stage in the model, the darker the bar."""
    starts = simulate(lists)
    inches = min(60.0, 3 + 0.25 * (max(times[-1] for times in starts) + 2))

    def paint(axes: Axes) -> None:
        for (direction, colour), rank in product(COLOURS.items(), range(len(lists))):
            for action, start in zip(lists[rank], starts[rank], strict=True):
                if action.direction != direction:
                    continue
                chunk = action.stage // len(lists)
                bar = axes.barh(
                    rank,
                    DURATIONS[direction],
                    left=start,
                    color=colour,
                    alpha=min(1.0, 0.35 + 0.65 * (chunk + 1) / facts.virtual),
                    edgecolor="white",
                    label=direction.replace("_", ", "),
                )
                if inches < 60:  # there is room for it
                    axes.bar_label(bar, [str(action.micro_batch)], label_type="center", fontsize=7)
        axes.set_yticks(range(len(lists)), [f"rank {rank}" for rank in range(len(lists))])
        axes.invert_yaxis()
        axes.set_xlabel("time")
        shown = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        axes.figure.legend(shown.values(), shown, loc="outside lower center", ncols=4, fontsize=8)

    size = inches, 1.7 + 0.4 * len(lists)
    return picture(paint, ending, size, title=summary(lists, facts))
