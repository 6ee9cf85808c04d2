"""Grouping rows by their keys.

The input is files of unsorted keys, one file per band; the output is the rows that share a key with
other rows. This project runs the stages of tools.corpus.dedup, writes and reads files, and has 100
MB for a part of a band. polars and DuckDB use all cores, with one band at a time in memory.
Keys are random; about every tenth is also that of another row. All have to find the same groups.
Memory is the peak of a process without its imported modules.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from megatron.libraries import Library
from tools.corpus.dedup.candidates import ROW_BYTES
from tools.corpus.dedup.index import BLOCK, Block, Index, Part
from tools.corpus.external import Words, count_parts, group, write_sorted

duckdb, polars = Library("duckdb"), Library("polars")

OURS, RATE, PEAK = "this project", "M rows per CPU second", "peak MB"


def read(files: Sequence[Path], start: int = 0, count: int = -1) -> Words:
    """[files, count]"""
    return np.stack([np.fromfile(file, np.uint64, count, offset=8 * start) for file in files])


def ours(files: Sequence[Path]) -> list[Any]:
    """[groups, members, sum of row numbers] of each part: sorts blocks, then groups each part."""
    rows, blocks = files[0].stat().st_size // 8, []
    for start in range(0, rows, BLOCK):
        keys = read(files, start, BLOCK)
        blocks.append(Block(0, f"{start:09}", keys.shape[1]))
        write_sorted(files[0].parent / blocks[-1].name, keys)
    index, found = Index(files[0].parent, (), tuple(blocks)), []
    parts = count_parts(rows, 100_000_000, ROW_BYTES)
    for part in (Part(column, k, parts) for column in range(len(files)) for k in range(parts)):
        members, starts = group(*index.read_part(part))
        found.append([len(starts) - 1, len(members), members.sum()])
    return found


def in_polars(band: Words) -> Any:
    rows = {"key": band, "number": np.arange(len(band), dtype=np.uint32)}
    table = polars.DataFrame(rows).group_by("key").agg("number")
    table = table.filter(polars.col("number").list.len() > 1)
    members = table["number"].explode()
    return len(table), len(members), members.cast(polars.Int64).sum()


def in_duckdb(band: Words) -> Any:
    duckdb.register("rows", {"key": band, "number": np.arange(len(band), dtype=np.uint32)})
    lists = "select list(number) as numbers from rows group by key having count(*) > 1"
    sums = "count(*), sum(len(numbers)), sum(list_sum(numbers))"
    return duckdb.sql(f"select {sums} from ({lists})").fetchall()[0]


PEERS = {"polars": in_polars, "duckdb": in_duckdb}


def run(rank: Rank, name: str, folder: str, rows: int) -> Turn:
    files = sorted(Path(folder).glob("*.keys"))

    def turn() -> Figures:
        found = ours(files) if name == OURS else [PEERS[name](read([file])[0]) for file in files]
        return {"rows": rows, "groups": [*map(int, np.sum(found, axis=0))]}

    return turn


def contenders(flags: Flags, rows: int = 40_000_000, bands: int = 25) -> Iterator[Contender]:
    """Group rows; `rows` counts those of all bands together."""
    random = np.random.default_rng(0)
    for band in range(bands):
        keys = random.integers(1 << 64, size=rows // bands, dtype=np.uint64)
        copies, originals = random.integers(len(keys), size=(2, len(keys) // 20))
        keys[copies] = keys[originals]
        keys.tofile(scratch() / f"{band:02}.keys")
    for name in (OURS, *PEERS):
        arguments = {"name": name, "folder": str(scratch()), "rows": rows}
        needs = [] if name == OURS else [name]
        yield Contender(name, run, arguments, needs=needs, same={"groups": 0})


QUESTION = Question(
    contenders,
    (
        Column(RATE, "rows", "{:.2f}", per="cpu", unit=1e6),
        Column("M rows per second", "rows", "{:.2f}", per="wall", unit=1e6),
        Column("this project's CPU speed / its", "cpu", "{:.2f}", "its / first"),
        Column(PEAK, "peak_bytes", "{:,.0f}", unit=1e6),
    ),
    lambda found: (
        f"Grouping runs at {found.median('', OURS, RATE):.1f} million rows per CPU second."
    ),
    rounds=3,
    warm_up=0,
    together=False,
    drawn=(RATE, PEAK),
)

if __name__ == "__main__":
    QUESTION.run()
