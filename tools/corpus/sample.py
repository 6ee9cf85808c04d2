"""Draws a small sample of a corpus, by a seed, from places all over it."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.json_lines import LONGEST_LINE, find_shards, is_text, read_lines
from tools.corpus.parts import find_parts, is_packed, walk_loose

PLACES = 16


class File(NamedTuple):
    path: Path
    size: int
    whole: bool
    """It is one document; lines are taken from other files."""


def input_files(settings: Any) -> Iterator[File]:
    """The files that a step with these settings reads, without empty ones."""
    if not hasattr(settings, "format"):
        sizes = {path: path.stat().st_size for path in find_shards(settings.input)}
        yield from (File(path, size, is_text(path)) for path, size in sizes.items() if size)
        return
    parts, loose = find_parts(settings.input, settings.format, settings.unit_bytes)
    units = {part.unit.file: part.unit.size for part in parts}
    yield from (File(Path(name), size, is_text(name)) for name, size in units.items())
    for each in loose:
        folder = each.root if each.root.is_dir() else each.root.parent
        for name, status in walk_loose(each.root):
            if status.st_size:
                yield File(folder / name, status.st_size, True)


def draw(files: Iterable[File], total: int, budget: int, seed: int, folder: Path) -> list[Path]:
    """Copy about `budget` of the `total` bytes, equally much from PLACES parts of the whole.

    The beginning of a compressed file is taken, because it cannot be read from the middle; its
    reader rejects the broken end.  Returns the copies, each in a folder of its own.
    """
    stretches = list(choose_stretches(total, budget, seed))
    starts: dict[Path, int] = {}
    copies: list[Path] = []
    begin = 0
    for file in files:
        stretches = [pair for pair in stretches if pair[1] > begin]
        inside = [
            (max(0, start - begin), min(file.size, stop - begin))
            for start, stop in stretches
            if start < begin + file.size
        ]
        begin += file.size
        for start, stop in inside:
            if file.whole or is_packed(file.path.name):
                more = LONGEST_LINE + 1 if file.whole else stop - start
                starts[file.path] = min(file.size, starts.get(file.path, 0) + more)
            else:
                lines = read_lines(file.path, start, stop)
                content = b"".join(line.content + b"\n" for line in lines if line.fault is None)
                copies += copy(file.path, content, folder / f"{len(copies):03}")
    for path, length in starts.items():
        with path.open("rb") as stream:
            copies += copy(path, stream.read(length), folder / f"{len(copies):03}")
    return copies


def choose_stretches(total: int, budget: int, seed: int) -> Iterator[tuple[int, int]]:
    """One stretch in each of PLACES equal parts of `total` bytes; all if the budget is as large."""
    coin = random.Random(seed)
    for k in range(PLACES):
        low, high = total * k // PLACES, total * (k + 1) // PLACES
        length = min(max(1, budget // PLACES), high - low)
        start = coin.randint(low, high - length)
        yield start, start + length


def copy(file: Path, content: bytes, folder: Path) -> list[Path]:
    """A list of the copy; an empty list if there is no content."""
    if not content:
        return []
    folder.mkdir(parents=True)
    target = folder / file.name
    target.write_bytes(content)
    return [target]
