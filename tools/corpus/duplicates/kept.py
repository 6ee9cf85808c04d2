"""The shards of what stays."""

from pathlib import Path
from typing import Any

import numpy as np

from tools.corpus.duplicates.index import Index
from tools.corpus.records import Count, Funnel
from tools.corpus.settings import StepSettings
from tools.corpus.shards import placed, read_lines, write_shard

COPY, NEAR = "exact copy", "near-duplicate"


def write_unit(
    unit: int, settings: StepSettings, folder: Path, index: Index, removed: tuple[Path, ...]
) -> dict[str, Any]:
    """Copy the lines of the documents of a unit that stay; the others' lines go into `folder`."""
    place = index.units[unit]
    first, last = index.firsts[unit : unit + 2].tolist()
    goes = lines_of(removed, first, last)
    with placed(folder / f"{place.name}.jsonl") as file:
        file.writelines(line for _, line in goes.values())
    rows = np.load(index.folder / place.name / "documents.npy")
    offsets, sizes = rows["offset"].tolist(), rows["bytes"].tolist()
    names = index.names(np.arange(first, last))
    funnel = Funnel()
    with write_shard(settings.output, f"part-{place.name}", settings.compress) as shard:
        row = 0
        for line in read_lines(place):
            if row == len(offsets) or line.offset != offsets[row]:
                continue  # it holds no document, as the index has noted
            source, size = names[row][1], sizes[row]
            gone = goes.get(first + row)
            row += 1
            if gone is None:
                funnel.output.setdefault(source, Count()).add(size)
                shard.write(line.content)
            else:
                reason = funnel.dropped.setdefault(COPY if gone[0] else NEAR, {})
                reason.setdefault(source, Count()).add(size)
    return {"funnel": funnel.to_json(), "shard": shard.facts}


def lines_of(removed: tuple[Path, ...], first: int, last: int) -> dict[int, tuple[bool, bytes]]:
    """{number: (whether it is an exact copy, its line of duplicates.jsonl)}, by number."""
    found: dict[int, tuple[bool, bytes]] = {}
    for path in removed:
        rows = np.load(path)
        rows = rows[np.searchsorted(rows["number"], first) : np.searchsorted(rows["number"], last)]
        with path.with_suffix(".jsonl").open("rb") as file:
            for number, line, copy in rows.tolist():
                file.seek(line)
                found[number] = copy, file.readline()
    return dict(sorted(found.items()))
