"""The shards of the documents that stay."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.files import atomic_writer
from megatron.data.json_lines import read_shard
from tools.corpus.duplicates.index import Index, mapped
from tools.corpus.files import Count, Funnel, write_shard
from tools.corpus.settings import StepSettings

COPY, NEAR = "same normalised text", "near-duplicate"


def write_unit(
    unit: int, settings: StepSettings, folder: Path, index: Index, removed: tuple[Path, ...]
) -> dict[str, Any]:
    """Copy lines of a unit's documents that stay; write those of duplicates.jsonl to `folder`."""
    place = index.units[unit]
    goes = write_lines(folder / f"{place.name}.jsonl", index, unit, removed)
    funnel = Funnel()
    documents = index.rows(unit)
    document = next(documents, None)
    with write_shard(settings.output, f"part-{place.name}", settings.compress) as shard:
        for line in read_shard(place.file, place.start, place.stop):
            if document is None or line.offset != document[1]:
                continue  # holds no document; the index has counted it
            number, _, size, source = document
            if number in goes:
                counts = funnel.dropped.setdefault(COPY if goes[number] else NEAR, {})
            else:
                counts = funnel.output
                shard.write(line.content)
            counts.setdefault(source, Count()).add(size)
            document = next(documents, None)
    assert document is None
    return {"funnel": funnel.to_json(), "shard": shard.facts}


def write_lines(
    target: Path, index: Index, unit: int, removed: tuple[Path, ...]
) -> dict[int, bool]:
    """Write the unit's lines of duplicates.jsonl; {number: whether another has its text too}."""
    first, last = index.unit_firsts[unit : unit + 2]
    found = []
    for path in removed:
        rows = mapped(path)
        start, end = np.searchsorted(rows["number"], [first, last])
        found += [(*row, path.with_suffix(".jsonl")) for row in rows[start:end].tolist()]
    found.sort()
    with atomic_writer(target) as file, contextlib.ExitStack() as stack:
        sources = {path: stack.enter_context(path.open("rb")) for *_, path in found}
        for _, line, _, path in found:
            sources[path].seek(line)
            file.write(sources[path].readline())
    return {number: copy for number, _, copy, _ in found}
