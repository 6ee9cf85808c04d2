"""Charts in the page's own colours: SVG if there is a scale, plain elements for bars.

Scaled drawings are 360 units wide and shown at about that width everywhere, so that their text
keeps its size on a phone.  All texts are escaped here.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tools.page import NONE

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 6, 12, 34


class Segment(NamedTuple):
    """A part of a stacked bar."""

    size: float
    colour: str
    """A CSS colour."""


def flow(
    before: Sequence[Segment], after: Sequence[Segment], losses: Sequence[Segment], total: float
) -> str:
    """Segments that narrow from `before` to `after`; losses split off to the right.

    before and after pair up by position.  total: the size that fills the width.  The drawing
    stretches to the box that it is in.
    """
    shapes, top, bottom = [], 0.0, 0.0
    for old, new in zip(before, after, strict=True):
        shapes.append(_ribbon(top, top + old.size, bottom, bottom + new.size, total, old.colour))
        top, bottom = top + old.size, bottom + new.size
    edge = max(top, bottom)
    for loss in losses:
        # Losses grow out of the right edge of the input.
        end = min(bottom + loss.size, edge)
        shapes.append(_ribbon(top, top, bottom, end, total, loss.colour))
        bottom = end
    return (
        '<svg class="flow" viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def _ribbon(a: float, b: float, c: float, d: float, total: float, colour: str) -> str:
    """From a to b at the top to c to d at the bottom, straight at both ends."""
    if max(b - a, d - c) <= 0:
        return ""
    a, b, c, d = (round(1000 * x / (total or 1), 2) for x in (a, b, c, d))
    return (
        f'<path fill="{colour}" d="M{a} 0V16C{a} 52 {c} 48 {c} 84V100H{d}V84'
        f'C{d} 48 {b} 52 {b} 16V0Z"/>'
    )


class Axis(NamedTuple):
    """A scale from low to high, with the places of its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]
    title: str

    def across(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 2)

    def up(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 2)


def count_axis(largest: float, title: str) -> Axis:
    """From zero to a round number, in steps of 1, 2 or 5 times a power of ten."""
    largest = max(largest, 1)
    raw = largest / 4
    power = 10 ** math.floor(math.log10(raw))
    step = max(next(f * power for f in (1, 2, 5, 10) if f * power >= raw), 1)
    ticks = [step * k for k in range(math.ceil(largest / step) + 1)]
    return Axis(0, ticks[-1], ticks, [short(tick) for tick in ticks], title)


def short(number: float) -> str:
    """The number for a tick, with two digits or so: 1,500 as 1.5k."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:g}{letter}"
    return f"{number:g}"


class Bar(NamedTuple):
    """A bar of a histogram."""

    start: float
    stop: float
    size: float
    note: str
    """Shown while the pointer rests on the bar."""


def histogram(
    bars: Sequence[Bar],
    across: Axis,
    unit: str,
    mark: float | None = None,
    behind: Sequence[Bar] = (),
) -> str:
    """unit: what is counted.  mark: a value to draw a line at.  behind: paler bars."""
    up = count_axis(max(bar.size for bar in (*bars, *behind)), unit)
    shapes = _bars(behind, across, up, "pale") + _bars(bars, across, up, "bar")
    return _frame(shapes + _mark(across, mark), across, up)


def _bars(bars: Sequence[Bar], across: Axis, up: Axis, kind: str) -> str:
    shapes = []
    for bar in bars:
        x, stop, y = across.across(bar.start), across.across(bar.stop), up.up(bar.size)
        height = round(HEIGHT - BOTTOM - y, 2)
        width = round(max(stop - x - 1, 0.5), 2)
        shapes.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}">'
            f"<title>{escape(bar.note)}</title></rect>"
        )
    return "".join(shapes)


def curve(
    points: Sequence[tuple[float, float]], across: Axis, up: Axis, mark: float | None = None
) -> str:
    path = "L".join(f"{across.across(x)} {up.up(y)}" for x, y in points)
    return _frame(f'<path class="curve" d="M{path}"/>' + _mark(across, mark), across, up)


def _mark(across: Axis, value: float | None) -> str:
    if value is None or not across.low <= value <= across.high:
        return ""
    x = across.across(value)
    return f'<path class="mark" d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>'


def _frame(content: str, across: Axis, up: Axis) -> str:
    """The drawing between its scales."""
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    grid = "".join(f'<path class="grid" d="M{LEFT} {up.up(tick)}H{right}"/>' for tick in up.ticks)
    beside = "".join(
        f'<text x="{LEFT - 6}" y="{up.up(tick) + 3.5}" text-anchor="end">{escape(label)}</text>'
        for tick, label in zip(up.ticks, up.labels, strict=True)
    )
    below = "".join(
        f'<text x="{across.across(tick)}" y="{floor + 14}" text-anchor="middle">'
        f"{escape(label)}</text>"
        for tick, label in zip(across.ticks, across.labels, strict=True)
    )
    title = (
        f'<text class="title" x="{right}" y="{HEIGHT - 4}" text-anchor="end">'
        f"{escape(across.title)}</text>"
    )
    label = escape(f"{up.title} by {across.title}", quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{grid}{content}{beside}{below}{title}</svg>"
    )


def bar_cells(share: float | None, of: float = 1.0, behind: float = 0.0) -> str:
    """Two table cells: a share in per cent, and a bar.

    of: the share that fills the width.  behind: a share that a paler bar shows.
    """
    bars = "".join(
        f'<i class="{kind}" style="width:{100 * min(part / (of or 1.0), 1.0):.1f}%"></i>'
        for kind, part in (("pale", behind), ("", share or 0.0))
        if part > 0
    )
    return f'<td>{portion(share)}</td><td class="barred"><b>{bars}</b></td>'


def portion(share: float | None) -> str:
    """Per cent, HTML; a share over 0 is not shown as 0, a share under 1 not as 100 %."""
    if share is None:
        return NONE
    if 0 < share < 0.00005:
        return "&lt; 0.01 %"
    if 0.99995 <= share < 1:
        return "&gt; 99.99 %"
    return f"{100 * share:.2f} %"
