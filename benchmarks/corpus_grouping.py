"""Grouping the rows of bands by their keys beside polars and DuckDB, in turn in one run.

    python benchmarks/corpus_grouping.py [--rows N] [--rounds N] [--json FILE]

From files of unsorted rows (band, key, number), a file a band, to the groups of two members or
more: here by the stages of tools.corpus.dedup, its files written and read again.  Each contestant
runs in a process of its own, and all have to find the same groups.  Peers that are not installed
are named and left out: pip install polars duckdb.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_watch import Taken, measure_apart
from benchmarks.machine import JsonFile, facts, installed, markdown, spread, told, write_json
from tools.corpus.duplicates.grouping import group, parts_of, read_part
from tools.corpus.duplicates.index import BLOCK, Block, Index, sort_keys
from tools.corpus.shards import Unit

MEMORY = 100_000_000  # bytes that a part of a band may take


class Groups(NamedTuple):
    """What was found, in numbers that do not depend on any order."""

    groups: int
    members: int
    sum: int
    """Of the numbers of all members."""


@dataclass(frozen=True)
class Rows:
    """`bands` files of `documents` rows each in a folder, plain (keys alone) and as parquet."""

    folder: str
    bands: int
    documents: int
    block: int
    """Documents of one block of the index."""

    def file(self, band: int, ending: str) -> Path:
        return Path(self.folder, f"{band:02}.{ending}")


def make_rows(rows: Rows, with_parquet: bool) -> None:
    """Random keys; about every tenth is one that another document of the band has too."""
    random = np.random.default_rng(1234)
    for band in range(rows.bands):
        keys = random.integers(1 << 64, size=rows.documents, dtype=np.uint64)
        copies, originals = random.integers(rows.documents, size=(2, rows.documents // 20))
        keys[copies] = keys[originals]
        keys.tofile(rows.file(band, "keys"))
        if with_parquet:
            import polars

            columns = {"key": keys, "number": np.arange(rows.documents)}
            table = polars.DataFrame(columns).with_columns(band=polars.lit(band, polars.UInt8))
            table.write_parquet(rows.file(band, "parquet"))


def group_ours(rows: Rows) -> Groups:
    """The stages of the step: blocks sorted, then one part of a band at a time."""
    index = sort_blocks(rows)
    found = []
    for part in parts_of(range(rows.bands), rows.documents, MEMORY):
        members, starts = group(*read_part(index, part))
        found.append((len(starts) - 1, len(members), int(members.sum())))
    return Groups(*map(sum, zip(*found, strict=True)))


def sort_blocks(rows: Rows) -> Index:
    firsts = range(0, rows.documents, rows.block)
    blocks = tuple(
        Block(0, f"{k:05}", min(rows.block, rows.documents - first))
        for k, first in enumerate(firsts)
    )
    for block, first in zip(blocks, firsts, strict=True):
        folder = Path(rows.folder, block.name)
        folder.mkdir(exist_ok=True)
        columns = (rows.file(band, "keys") for band in range(rows.bands))
        keys = np.stack(
            [np.fromfile(f, np.uint64, block.documents, offset=8 * first) for f in columns]
        )
        for name, array in sort_keys(keys).items():
            np.save(folder / f"{name}.npy", array)
    return Index(Path(rows.folder), (Unit(0, "", 0, 0, 0, 0),), blocks)


def group_in_polars(rows: Rows, at_once: bool = False) -> Groups:
    import polars

    found = []
    for files in file_sets(rows, at_once):
        table = (
            polars.scan_parquet(files)
            .group_by("band", "key")
            .agg("number")
            .filter(polars.col("number").list.len() > 1)
            .collect(engine="streaming")
        )
        members = table["number"].explode()
        found.append((len(table), len(members), members.sum()))
    return Groups(*map(sum, zip(*found, strict=True)))


def group_in_duckdb(rows: Rows, at_once: bool = False) -> Groups:
    import duckdb

    found = []
    for files in file_sets(rows, at_once):
        names = [str(file) for file in files]
        found.append(
            duckdb.sql(
                "select count(*), sum(len(numbers)), sum(list_sum(numbers)) from "
                f"(select list(number) as numbers from read_parquet({names}) "
                "group by band, key having count(*) > 1)"
            ).fetchall()[0]
        )
    return Groups(*(int(sum(column)) for column in zip(*found, strict=True)))


def file_sets(rows: Rows, at_once: bool) -> list[list[Path]]:
    files = [rows.file(band, "parquet") for band in range(rows.bands)]
    return [files] if at_once else [[file] for file in files]


def group_in_polars_at_once(rows: Rows) -> Groups:
    return group_in_polars(rows, at_once=True)


def group_in_duckdb_at_once(rows: Rows) -> Groups:
    return group_in_duckdb(rows, at_once=True)


GROUPERS: dict[str, tuple[str | None, Callable[[Rows], Groups]]] = {
    "ours": (None, group_ours),
    "polars, a band at a time": ("polars", group_in_polars),
    "polars, all bands at once": ("polars", group_in_polars_at_once),
    "DuckDB, a band at a time": ("duckdb", group_in_duckdb),
    "DuckDB, all bands at once": ("duckdb", group_in_duckdb_at_once),
}


def grouping(
    rows: int = 40_000_000,
    bands: int = 25,
    rounds: int = 3,
    json_file: JsonFile = None,
) -> None:
    """Rows per CPU second and peak memory of each contestant.

    Args:
        rows: in all bands together.
        bands: a file each.
        rounds: times that all are timed in turn.
        json_file: where every round's figures are written.
    """
    groupers = installed(GROUPERS)
    if "polars, a band at a time" not in groupers:  # it writes the parquet files
        groupers = {name: each for name, each in groupers.items() if "DuckDB" not in name}
    taken: dict[str, list[Taken]] = {name: [] for name in groupers}
    with tempfile.TemporaryDirectory() as folder:
        made = Rows(folder, bands, rows // bands, BLOCK)
        make_rows(made, with_parquet=len(groupers) > 1)
        for number in range(rounds):
            for name in list(groupers) if number % 2 else list(groupers)[::-1]:
                taken[name].append(measure_apart(groupers[name], made))
    results = {each.result for runs in taken.values() for each in runs}
    assert len(results) == 1, f"not the same groups: {results}"
    record = facts("numpy", "polars", "duckdb") | {"rows": rows, "groups": results.pop().groups}
    print(told(record))
    print(grouping_table(rows, taken))
    runs_of = {name: [asdict(each) for each in runs] for name, runs in taken.items()}
    write_json(json_file, record | {"runs": runs_of})


def grouping_table(rows: int, taken: dict[str, list[Taken]]) -> str:
    lines = [
        [
            name,
            spread([rows / each.cpu_seconds / 1e6 for each in runs], 2),
            spread([rows / each.wall_seconds / 1e6 for each in runs], 2),
            f"{max(each.peak for each in runs) / 1e6:.0f}",
            f"{max(each.before for each in runs) / 1e6:.0f}",
        ]
        for name, runs in taken.items()
    ]
    header = ["who", "M rows per CPU second", "M rows per second", "peak, MB", "of it before, MB"]
    return markdown(header, lines)


if __name__ == "__main__":
    tyro.cli(grouping)
