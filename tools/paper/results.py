"""Output of each figure: a table, a picture and all numbers, under one name."""

import io
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.data.files import atomic_writer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Facts = dict[str, Any]
ENDINGS = ("json", "md", "png")
# From the palette of Okabe and Ito, which colour-blind readers can tell apart; dashes differ, too.
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"


def result_files(output: Path, name: str) -> tuple[Path, ...]:
    return tuple(output / f"{name}.{ending}" for ending in ENDINGS)


def write_results(output: Path, name: str, runs: Sequence[Facts], text: str, png: bytes) -> None:
    """text: Markdown."""
    numbers = json.dumps({"machine": machine(), "runs": runs}).encode()
    contents = (numbers + b"\n", f"{text}\n".encode(), png)
    for path, content in zip(result_files(output, name), contents, strict=True):
        with atomic_writer(path) as file:
            file.write(content)


def machine() -> Facts:
    return {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def points(lines: Sequence[Facts], name: str) -> list[tuple[int, float]]:
    """(step, value) of the lines of a record that have this value, not null."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def as_png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
