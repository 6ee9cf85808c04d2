"""A toy step of two stages, which numbers its documents.

Files beside its input cause faults: kill-once, kill-always, raise and wait at the document "fatal".
The file `waiting` gets the id of the process that waits.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.files import atomic_writer
from tests.dist import PATIENCE
from tests.files import before_calls
from tests.tools.corpus.lines import write_jsonl
from tools.corpus.engine import StepRun, Task, keep_rejected, sum_counts
from tools.corpus.files import DocumentCounts, Unit, dump_record, read_documents, write_shard
from tools.corpus.settings import ShardSettings, program

TOY = "tests.tools.corpus.steps_of_tests"


@dataclass(frozen=True, kw_only=True)
class Settings(ShardSettings):
    mark: str = "!"
    """The words at the end of every text."""

    words: Path | None = None
    """A file that changes nothing but the fingerprint."""


def run(settings: Settings) -> None:
    with StepRun("toy", settings) as step:
        if step.done:
            return
        counts = step.stage(
            "count",
            count,
            [Task(unit.name, (unit,), unit.stop - unit.start) for unit in step.units],
        )
        starts = itertools.accumulate([0, *counts])
        tasks = [
            Task(unit.name, (unit, settings, start), unit.stop - unit.start)
            for unit, start in zip(step.units, starts, strict=False)
        ]
        results = step.stage("number", number, tasks)
        shards = [result["shard"] for result in results]
        step.finish(sum_counts(results), shards, numbered=sum(counts))


def count(unit: Unit) -> int:
    return sum(1 for _ in read_documents(unit, DocumentCounts()))


def number(unit: Unit, settings: Settings, start: int) -> dict[str, object]:
    accounting = DocumentCounts()
    with write_shard(settings.output, f"part-{unit.name}", settings.compress) as shard:
        for k, document in enumerate(read_documents(unit, accounting), start):
            if document.text == "fatal":
                fail(unit, document.offset)
            record = document.record | {"text": document.text + settings.mark, "number": k}
            accounting.keep(record)
            shard.write(dump_record(record))
    keep_rejected(settings, unit, accounting)
    return {"accounting": accounting.to_json(), "shard": shard.facts}


def fail(unit: Unit, offset: int) -> None:
    folder = Path(unit.file).parent
    if (folder / "raise").exists():
        raise ValueError(f"{unit.file}, byte {offset}: a fatal document")
    if (folder / "wait").exists():
        with atomic_writer(folder / "waiting") as file:
            file.write(str(os.getpid()).encode())
        time.sleep(PATIENCE)
    if (folder / "kill-always").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        (folder / "kill-once").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def corpus(folder: Path, files: int = 3, fatal: int | None = None) -> Path:
    """Files of 40 documents, cut into 4 units each by --unit 500B.

    fatal: the number of the file that has a document of this kind.
    """
    for k in range(files):
        records: list[dict[str, Any]] = [
            {"text": f"document {i} of {k}", "n": i} for i in range(40)
        ]
        if k == fatal:
            records[20]["text"] = "fatal"
        write_jsonl(folder / f"{k}.jsonl", records)
    with (folder / "0.jsonl").open("a") as file:
        file.write("no document\n")
    return folder


def toy(folder: Path, output: Path, **more: Any) -> Settings:
    files = tuple(sorted(folder.glob("*.jsonl")))
    return Settings(input=files, output=output, **{"workers": 1, "unit": "500B", **more})


@contextlib.contextmanager
def recorded() -> Iterator[list[Path]]:
    """The markers of the tasks that steps do here meanwhile."""
    markers: list[Path] = []
    with before_calls(lambda _, given: markers.append(given[0]), "tools.corpus.engine.execute"):
        yield markers


if __name__ == "__main__":
    program(TOY)
