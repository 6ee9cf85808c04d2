"""Splits documents into train/ and valid/ (29 : 1 in section 4.1), shuffled, in bounded memory.

    python tools/corpus.py split --input unique --output split
    python tools/corpus.py split --input unique --output split --ratio 99:1 --shard-size 64MB

A document's side and its place come from two keyed hashes of its id.  So it is always on the same
side, whatever else the corpus has, and the output does not depend on how the input was cut.
Training packs neighbouring documents and relies on this shuffle: the manifests of OUTPUT,
OUTPUT/train and OUTPUT/valid say "shuffled".

Stage 1 sorts each unit by a key: side first, then place.  Stage 2 takes a range of keys from
every sorted unit, sorts again and writes one shard.  Shards are equal ranges of a fair hash, so
their sizes differ only by chance: by some 1 % with 50,000 documents of web text per shard.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.json_lines import MANIFEST, WORK
from megatron.errors import UsageError
from tools.corpus import external, files
from tools.corpus.engine import SHARDS, StepRun, Task, keep_rejected, remove, sum_counts, write_json
from tools.corpus.settings import ShardSettings, parse_size, program, say

SIDES = ("train", "valid")
HALF = external.KEYS // 2  # keys below are of train, the others of valid
OBJECT_BYTES = 200  # Python's overhead for each line


@dataclass(frozen=True, kw_only=True)
class Settings(ShardSettings):
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
                f"three times {{}} {self.shard_size}, as a shard is sorted in memory",
                "--shard-size",
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
    written = [f"{side}/{name}" for side in SIDES for name in (SHARDS, MANIFEST, WORK)]
    with StepRun("split", settings, files=written) as step:
        if step.done:
            return
        for side in SIDES:  # without a manifest, the folder is not yet whole for readers
            (step.output / side / WORK).mkdir(parents=True, exist_ok=True)
            (step.output / side / MANIFEST).unlink(missing_ok=True)
        tasks = [Task(unit.name, (unit, settings), unit.stop - unit.start) for unit in step.units]
        scattered = step.stage("scatter", scatter_unit, tasks)
        counts = [
            sum_counts([{"accounting": each["sides"][side]} for each in scattered]).to_json()[
                "output"
            ]
            for side in range(len(SIDES))
        ]
        train, valid = (count["documents"] for count in counts)
        if not train and not valid:
            step.list_dropped(sum_counts(scattered))  # says why
        if not train or not valid:
            raise UsageError(
                "--ratio",
                settings.ratio,
                f"closer to 1:1, or of more documents: {train} hash to train/, {valid} to valid/",
            )
        gathered = step.stage("gather", gather_shard, gather_tasks(settings, scattered))
        shards: list[dict[str, Any]] = []
        evenness = {}
        for side, count in zip(SIDES, counts, strict=True):
            mine = [each["shard"] for each in gathered if each["side"] == side]
            mine = [shard for shard in mine if shard["documents"]]
            if settings.shard is None:
                finish_side(step, {"side": side, "output": count, "shards": mine})
            shards += [{**shard, "name": f"{side}/{shard['name']}"} for shard in mine]
            sizes = [shard["bytes"] for shard in mine]
            evenness[side] = round(max(sizes) * len(sizes) / sum(sizes), 4)
        step.finish(
            sum_counts(scattered),
            shards,
            shuffled=True,
            sides=dict(zip(SIDES, counts, strict=True)),
            largest_shard_to_mean=evenness,
        )


def place(settings: Settings, identity: str) -> tuple[int, int]:
    """(side, key of 64 bits: the side, then the place among its documents)."""
    train, valid = settings.parts
    toss = files.keyed_hash(f"side {settings.seed}", identity) >> 64
    side = int(toss * (train + valid) < valid << 64)
    return side, side * HALF + (files.keyed_hash(f"order {settings.seed}", identity) >> 65)


def scatter_unit(unit: files.Unit, settings: Settings) -> dict[str, Any]:
    """Write the unit's lines in the order of their keys.  Returns the facts for stage 2.

    A unit of more than half of --memory, as a compressed file may be, becomes several runs.
    """
    accounting, sides = files.DocumentCounts(), [files.DocumentCounts() for _ in SIDES]
    line_bytes = [0] * len(SIDES)
    lines: list[tuple[int, bytes]] = []
    runs = size = 0
    for document in files.read_documents(unit, accounting):
        side, key = place(settings, files.document_id(document.record))
        accounting.keep(document.record)
        sides[side].keep(document.record)
        line_bytes[side] += len(document.line) + 1
        lines.append((key, document.line))
        size += len(document.line) + OBJECT_BYTES
        if 2 * size > settings.memory_bytes:
            write_run(run_files(settings, unit.number, runs), lines)
            runs, size, lines = runs + 1, 0, []
    if lines:
        write_run(run_files(settings, unit.number, runs), lines)
        runs += 1
    keep_rejected(settings, unit, accounting)
    return {
        "accounting": accounting.to_json(),
        "sides": [each.to_json() for each in sides],
        "line_bytes": line_bytes,
        "runs": runs,
    }


def run_files(settings: Settings, unit: int, number: int) -> tuple[Path, Path]:
    """A run: the file of its lines, and uint64 [2, n], sorted keys and where each line ends."""
    stem = settings.output / WORK / "runs" / f"{unit:05}-{number}"
    return stem.with_suffix(".lines"), stem.with_suffix(".index")


def write_run(run: tuple[Path, Path], lines: list[tuple[int, bytes]]) -> None:
    lines.sort()
    with files.scratch_writer(run[0]) as stream:
        stream.writelines(line + b"\n" for _, line in lines)
    ends = itertools.accumulate(len(line) + 1 for _, line in lines)
    with files.scratch_writer(run[1]) as stream:
        stream.write(np.array([[key for key, _ in lines], list(ends)], np.uint64).tobytes())


def gather_tasks(settings: Settings, scattered: Sequence[dict[str, Any]]) -> list[Task]:
    """One task per shard; their number depends on the bytes of a side and on nothing else."""
    runs = [each["runs"] for each in scattered]
    tasks = []
    for side in range(len(SIDES)):
        total = sum(each["line_bytes"][side] for each in scattered)
        shards = -(-total // settings.shard_bytes)
        for k in range(shards):
            start, stop = (side * HALF + HALF * at // shards for at in (k, k + 1))
            arguments = (side, k, start, stop, runs, settings)
            tasks.append(Task(f"{side}-{k:05}", arguments, total // shards))
    return tasks


def gather_shard(
    side: int, number: int, start: int, stop: int, runs: list[int], settings: Settings
) -> dict[str, Any]:
    """Write the shard of the keys `start` to `stop` - 1, from the sorted runs of every unit."""
    lines = [
        line
        for unit, count in enumerate(runs)
        for run in range(count)
        for line in read_run(run_files(settings, unit, run), start, stop)
    ]
    lines.sort()
    folder = settings.output / SIDES[side]
    with files.write_shard(folder, f"part-{number:05}", settings.compress) as shard:
        for _, line in lines:
            shard.write(line)
    return {"side": SIDES[side], "shard": shard.facts}


def read_run(run: tuple[Path, Path], start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(key, line) of the keys `start` to `stop` - 1."""
    keys, ends = np.memmap(run[1], np.uint64, "r").reshape(2, -1)
    where = external.span(keys, start, stop)
    if where.start == where.stop:
        return
    begin = int(ends[where.start - 1]) if where.start else 0
    with run[0].open("rb") as stream:
        stream.seek(begin)
        lines = stream.read(int(ends[where.stop - 1]) - begin).split(b"\n")[:-1]
    yield from zip(keys[where].tolist(), lines, strict=True)


def finish_side(step: StepRun, facts: dict[str, Any]) -> None:
    """Write the manifest of train/ or valid/, and remove shards that do not belong to it."""
    folder = step.output / facts["side"]
    names = {shard["name"] for shard in facts["shards"]}
    # An empty shard, or one of an interrupted run; other files are somebody's.
    remove(path for path in folder.glob(SHARDS) if path.name not in names and path.is_file())
    manifest = {"step": "split", "shuffled": True, "settings": step.parameters, **facts}
    write_json(folder / MANIFEST, manifest)
    (folder / WORK).rmdir()
    say(f"split: {facts['output']['documents']} documents to {folder}")


if __name__ == "__main__":
    program("tools.corpus.split")
