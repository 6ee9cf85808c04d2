"""Splits documents into train/ and valid/ (29 : 1 in section 4.1), shuffled, in bounded memory.

A document's side and its place come from two keyed hashes of its id.  So it is always on the same
side, whatever else the corpus has, and the output does not depend on how the input was cut.
Training packs neighbouring documents and relies on this shuffle: the manifests of OUTPUT,
OUTPUT/train and OUTPUT/valid say "shuffled".

Stage 1 sorts each unit by a key: side first, then place.  Stage 2 takes a range of keys from
every sorted unit, sorts again and writes one shard.  Shards are equal ranges of a fair hash, so
their sizes differ only by chance: by some 1 % with 50,000 documents of web text per shard.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.files import atomic_writer
from megatron.data.json_lines import MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus.engine import StepRun, Task, keep_rejected, sum_funnels
from tools.corpus.files import (
    Funnel,
    Unit,
    document_id,
    documents,
    keyed_hash,
    read_documents,
    write_shard,
)
from tools.corpus.settings import StepSettings, parse_size, program, say

SIDES = ("train", "valid")
KEYS = 1 << 64  # the lower half is train, the upper half valid
HALF = KEYS // 2
OBJECT_BYTES = 200  # Python's overhead for each line


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
    ratio: str = "29:1"
    """Ratio of training documents to validation documents, TRAIN:VALID."""

    seed: int = 1234
    """Seed of the hashes; another seed gives another choice and another order."""

    shard_size: str = "128MB"
    """Approximate size of a shard before compression; at most a third of --memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts  # noqa: B018, the properties check what they read
        if 3 * self.shard_bytes > self.memory_bytes:
            raise UsageError(
                "--memory",
                self.memory,
                f"three times --shard-size {self.shard_size}, as a shard is sorted in memory",
                works=("--memory", f"{-(-3 * self.shard_bytes // 10**6)}MB"),
            )

    @property
    def parts(self) -> tuple[int, int]:
        """(train, valid) of --ratio."""
        try:
            train, valid = map(int, self.ratio.split(":"))
        except ValueError:
            train, valid = 0, 0
        if train < 1 or valid < 1:
            raise UsageError("--ratio", self.ratio, "two whole numbers", works=("--ratio", "29:1"))
        return train, valid

    @property
    def shard_bytes(self) -> int:
        return parse_size("--shard-size", self.shard_size)


def run(settings: Settings) -> None:
    files = [f"{side}/{name}" for side in SIDES for name in ("part-*", MANIFEST, WORK)]
    with StepRun("split", settings, files=files) as step:
        if step.done:
            return
        for side in SIDES:
            open_side(step.output / side)
        tasks = [Task(unit.name, (unit, settings), unit.stop - unit.start) for unit in step.units]
        scattered = step.stage("scatter", scatter, tasks)
        check_sides(settings, scattered)
        shards = step.stage("gather", gather, gather_tasks(settings, scattered))
        facts = [side_facts(side, scattered, shards) for side in range(len(SIDES))]
        if settings.shard is None:
            for each in facts:
                finish_side(step, each)
        step.finish(
            sum_funnels(scattered),
            [
                {**s, "name": f"{each['side']}/{s['name']}"}
                for each in facts
                for s in each["shards"]
            ],
            shuffled=True,
            sides={each["side"]: each["output"] for each in facts},
            largest_shard_to_mean={each["side"]: evenness(each["shards"]) for each in facts},
        )


class Place(NamedTuple):
    side: int
    """0 is train, 1 valid."""
    key: int
    """64 bits: the side, then the place among its documents."""
    toss: int
    """64 fair bits; the lowest go to valid."""


def place(settings: Settings, identity: str) -> Place:
    train, valid = settings.parts
    toss = keyed_hash(f"side {settings.seed}", identity) >> 64
    side = int(toss * (train + valid) < valid << 64)
    return Place(side, side * HALF + (keyed_hash(f"order {settings.seed}", identity) >> 65), toss)


def scatter(unit: Unit, settings: Settings) -> dict[str, Any]:
    """Write the unit's lines in the order of their keys.  Returns the facts for stage 2.

    A unit of more than half of --memory, as a compressed file may be, becomes several runs.
    """
    funnel, sides = Funnel(), [Funnel() for _ in SIDES]
    line_bytes = [0] * len(SIDES)
    lowest, highest = KEYS, -1
    lines: list[tuple[int, bytes]] = []
    runs = held = 0
    for document in read_documents(unit, funnel):
        side, key, toss = place(settings, document_id(document.record))
        funnel.keep(document.record)
        sides[side].keep(document.record)
        line_bytes[side] += len(document.line) + 1
        lowest, highest = min(lowest, toss), max(highest, toss)
        lines.append((key, document.line))
        held += len(document.line) + OBJECT_BYTES
        if 2 * held > settings.memory_bytes:
            write_run(settings, unit.number, runs, lines)
            runs, held, lines = runs + 1, 0, []
    if lines:
        write_run(settings, unit.number, runs, lines)
        runs += 1
    keep_rejected(settings, unit, funnel)
    return {
        "funnel": funnel.to_json(),
        "sides": [each.to_json() for each in sides],
        "line_bytes": line_bytes,
        "runs": runs,
        "tosses": [lowest, highest],
    }


def run_files(settings: Settings, unit: int, number: int) -> tuple[Path, Path]:
    """(file of the lines, file of the index) of one sorted run."""
    stem = settings.output / WORK / "runs" / f"{unit:05}-{number}"
    return stem.with_suffix(".lines"), stem.with_suffix(".index")


def write_run(settings: Settings, unit: int, number: int, lines: list[tuple[int, bytes]]) -> None:
    """Write a sorted run.  Index: n keys, then n + 1 offsets, of the lines and of their end."""
    lines.sort()
    offsets = itertools.accumulate((len(line) + 1 for _, line in lines), initial=0)
    text, index = run_files(settings, unit, number)
    with atomic_writer(text) as file:
        file.writelines(line + b"\n" for _, line in lines)
    with atomic_writer(index) as file:
        file.write(np.array([key for key, _ in lines], np.uint64).tobytes())
        file.write(np.array(list(offsets), np.uint64).tobytes())


def check_sides(settings: Settings, scattered: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if a side has no document."""
    counts = [documents(sum_side(scattered, side).output) for side in range(len(SIDES))]
    if all(counts):
        return
    lowest = min(each["tosses"][0] for each in scattered)
    highest = max(each["tosses"][1] for each in scattered)
    cure = "at least 2 documents of different ids are needed: more documents would work"
    if lowest < highest:
        if counts[1]:
            valid, train = smallest_share(1 - Fraction(highest, KEYS))
        else:
            train, valid = smallest_share(Fraction(lowest, KEYS))
        cure = f"more documents, or --ratio {train}:{valid}, would work"
    raise ValueError(
        f"--ratio {settings.ratio} of {sum(counts)} documents puts {counts[0]} into train/ and "
        f"{counts[1]} into valid/, which decides a hash of the id; {cure}"
    )


def smallest_share(above: Fraction) -> tuple[int, int]:
    """(a, b), one of them 1, for which b / (a + b) is just over `above`."""
    if above < Fraction(1, 2):
        return math.ceil(1 / above) - 2, 1
    return 1, math.floor(above / (1 - above)) + 1


def sum_side(scattered: Sequence[dict[str, Any]], side: int) -> Funnel:
    return sum_funnels([{"funnel": each["sides"][side]} for each in scattered])


def gather_tasks(settings: Settings, scattered: Sequence[dict[str, Any]]) -> list[Task]:
    """One task per shard; their number depends on the bytes of a side and on nothing else."""
    runs = [each["runs"] for each in scattered]
    tasks = []
    for side in range(len(SIDES)):
        total = sum(each["line_bytes"][side] for each in scattered)
        shards = -(-total // settings.shard_bytes)
        bounds = [side * HALF + HALF * k // shards for k in range(shards + 1)]
        tasks += [
            Task(f"{side}-{k:05}", (side, k, bounds[k], bounds[k + 1], runs, settings),
                 total // shards)
            for k in range(shards)
        ]  # fmt: skip
    return tasks


def gather(
    side: int, number: int, start: int, stop: int, runs: list[int], settings: Settings
) -> dict[str, Any]:
    """Write the shard of the keys `start` to `stop` - 1, from the sorted runs of every unit."""
    lines = [
        line
        for unit, count in enumerate(runs)
        for run in range(count)
        for line in read_slice(*run_files(settings, unit, run), start, stop)
    ]
    lines.sort()
    folder = settings.output / SIDES[side]
    with write_shard(folder, f"part-{number:05}", settings.compress) as shard:
        for _, line in lines:
            shard.write(line)
    return {"side": SIDES[side], "shard": shard.facts}


def read_slice(text: Path, index: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(key, line) of the keys `start` to `stop` - 1 of a sorted run."""
    table = np.memmap(index, np.uint64, "r")
    keys, offsets = np.split(table, [len(table) // 2])
    first = int(np.searchsorted(keys, np.uint64(start)))
    last = int(np.searchsorted(keys, np.uint64(stop - 1), "right"))
    with text.open("rb") as file:
        file.seek(int(offsets[first]))
        lines = file.read(int(offsets[last] - offsets[first])).split(b"\n")[:-1]
    yield from zip(keys[first:last].tolist(), lines, strict=True)


def side_facts(
    side: int, scattered: Sequence[dict[str, Any]], shards: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Facts of a side's documents for its manifest; shards without documents are left out."""
    name = SIDES[side]
    mine = [each["shard"] for each in shards if each["side"] == name]
    return {
        "side": name,
        "output": sum_side(scattered, side).to_json()["output"],
        "shards": [shard for shard in mine if shard["documents"]],
    }


def open_side(folder: Path) -> None:
    """Mark the folder as not yet whole, for readers."""
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)


def finish_side(step: StepRun, facts: dict[str, Any]) -> None:
    """Write the manifest of train/ or valid/, and remove files that do not belong to it."""
    folder = step.output / facts["side"]
    belongs = {shard["name"] for shard in facts["shards"]} | {MANIFEST, WORK}
    for path in folder.iterdir():
        if path.name not in belongs:  # an empty shard, or one of an interrupted run
            path.unlink()
    manifest = {"step": "split", "shuffled": True, "settings": step.parameters, **facts}
    with atomic_writer(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    (folder / WORK).rmdir()
    say(f"split: {facts['output']['documents']} documents to {folder}")


def evenness(shards: Sequence[dict[str, Any]]) -> float:
    """Bytes of the largest shard, divided by the mean."""
    sizes = [shard["bytes"] for shard in shards]
    return round(max(sizes) * len(sizes) / sum(sizes), 4)


if __name__ == "__main__":
    program("tools.corpus.split")
