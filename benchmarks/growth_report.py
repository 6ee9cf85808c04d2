"""How steeply what `growth.py` has measured grows: powers, and distances from a straight line."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.machine import markdown

Point = dict[str, Any]


def exponent(values: Sequence[float], heights: Sequence[float]) -> float:
    """k of the power x^k that comes nearest, on logarithmic axes."""
    return float(np.polyfit(np.log(values), np.log(heights), 1)[0])


def bend(values: Sequence[float], heights: Sequence[float]) -> float:
    """How far the furthest point is from the straight line that fits best, a + b x, as a share."""
    x, y = np.array(values, float), np.array(heights)
    columns = np.stack([1 / y, x / y], axis=1)
    line = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)[0]
    return float(np.abs(columns @ line - 1).max())


def growth(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Of time and of memory, measured and on paper."""
    values = [each["value"] for each in points]
    found = {}
    for figure in ("seconds", "bytes"):
        for where, heights in (
            (figure, [each[figure] for each in points]),
            (f"{figure} on paper", [each["paper"][figure] for each in points]),
        ):
            found[where] = {
                "ratio": heights[-1] / heights[0],
                "exponent": exponent(values, heights),
                "bend": bend(values, heights),
            }
    return found


def summary(record: dict[str, Any]) -> str:
    """Of every axis how much its last point takes of its first, the powers, and the bends."""
    rows = []
    for axis, points in record["axes"].items():
        found = record["growth"][axis]
        for figure, name in (("seconds", "time"), ("bytes", "memory")):
            pair = found[figure], found[f"{figure} on paper"]
            rows.append(
                [
                    f"{axis}, {points[0]['value']:,} to {points[-1]['value']:,}",
                    name,
                    *(f"{each['ratio']:.2f}" for each in pair),
                    *(f"{each['exponent']:.2f}" for each in pair),
                    *(f"{100 * each['bend']:.0f} %" for each in pair),
                ]
            )
    header = ["axis", "", "last / first", "on paper", "exponent", "on paper", "bend", "on paper"]
    return markdown(header, rows)


def every_point(record: dict[str, Any]) -> str:
    rows = [
        [
            axis,
            f"{each['value']:,}",
            f"{each['seconds']:.3f}",
            f"{each['paper']['seconds']:.3f}",
            f"{each['paper']['flops'] / each['seconds'] / 1e9:.0f}",
            f"{each['bytes'] / 2**20:,.0f}",
            f"{each['paper']['bytes'] / 2**20:,.0f}",
            f"{each['paper']['communicated'] / 2**20:,.0f}",
        ]
        for axis, points in record["axes"].items()
        for each in points
    ]
    header = ["axis", "", "seconds", "on paper", "GFLOP/s of a rank", "MiB of a rank", "on paper"]
    return markdown([*header, "MiB sent by a rank"], rows)
