"""Grouping rows by their keys.

From files of unsorted rows (key, number), a file a band, to the groups of two members or more: here
by the stages of tools.corpus.dedup, its files written and read again, and 100 MB for a part of a
band. Keys are random; about every tenth is that of another row, too. All have to find the same
groups. Peers read parquet and use all cores. Memory is what a process takes above its
modules.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, is_installed, scratch

OURS, RATE, PEAK = "this project", "M rows per CPU second", "peak MB"
BAND = "a band at a time"
PEERS = [f"{name}, {how}" for name in ("polars", "DuckDB") for how in (BAND, "all bands at once")]
STAGES = ("tools.corpus.duplicates.grouping", "tools.corpus.duplicates.index")
Groups = Iterable[Sequence[int]]  # (groups, members, sum of their numbers) of some bands


def make_rows(folder: Path, bands: int, rows: int) -> None:
    random = np.random.default_rng(1234)
    for band in range(bands):
        keys = random.integers(1 << 64, size=rows, dtype=np.uint64)
        copies, originals = random.integers(rows, size=(2, rows // 20))
        keys[copies] = keys[originals]
        keys.tofile(folder / f"{band:02}.keys")
        if is_installed("polars"):
            import polars

            table = polars.DataFrame({"key": keys, "number": np.arange(rows)})
            table = table.with_columns(band=polars.lit(band, polars.UInt8))
            table.write_parquet(folder / f"{band:02}.parquet")


def ours(files: Sequence[Path]) -> Groups:
    """Blocks sorted, then one part of a band at a time."""
    from tools.corpus.duplicates.grouping import group, parts_of, read_part
    from tools.corpus.duplicates.index import BLOCK, Block, Index, sort_keys

    folder, rows, blocks = files[0].parent, files[0].stat().st_size // 8, []
    for first in range(0, rows, BLOCK):
        blocks.append(Block(0, f"{first:09}", min(BLOCK, rows - first)))
        where = {"count": blocks[-1].documents, "offset": 8 * first}
        keys = np.stack([np.fromfile(file, np.uint64, **where) for file in files])
        (folder / blocks[-1].name).mkdir(exist_ok=True)
        for name, array in sort_keys(keys).items():
            np.save(folder / blocks[-1].name / f"{name}.npy", array)
    index = Index(folder, (), tuple(blocks))
    for part in parts_of(range(len(files)), rows, 100_000_000):
        members, starts = group(*read_part(index, part))
        yield len(starts) - 1, len(members), int(members.sum())


def in_polars(files: Sequence[Path]) -> Groups:
    import polars

    table = polars.scan_parquet(files).group_by("band", "key").agg("number")
    table = table.filter(polars.col("number").list.len() > 1).collect(engine="streaming")
    members = table["number"].explode()
    yield len(table), len(members), members.sum()


def in_duckdb(files: Sequence[Path]) -> Groups:
    import duckdb

    lists = f"select list(number) as numbers from read_parquet({[*map(str, files)]}) "
    lists += "group by band, key having count(*) > 1"
    sums = "select count(*), sum(len(numbers)), sum(list_sum(numbers))"
    yield duckdb.sql(f"{sums} from ({lists})").fetchall()[0]


def run(rank: Rank, name: str, folder: str, rows: int) -> Turn:
    files = sorted(Path(folder).glob("*.keys" if name == OURS else "*.parquet"))
    sets = [[each] for each in files] if BAND in name else [files]
    find = ours if name == OURS else in_polars if "polars" in name else in_duckdb

    def turn() -> dict[str, Any]:
        found = [each for files in sets for each in find(files)]
        return {"rows": rows, "groups": [int(sum(column)) for column in zip(*found, strict=True)]}

    return turn


def contenders(flags: Flags, rows: int = 40_000_000, bands: int = 25) -> Iterator[Contender]:
    """Group rows, those of all bands together; a band is a file."""
    make_rows(scratch(), bands, rows // bands)
    for name in (OURS, *PEERS):
        arguments = {"name": name, "folder": str(scratch()), "rows": rows}
        needs = STAGES if name == OURS else ("polars", name.split(",")[0].lower())
        memory = 200 * rows / 1e9 if "all bands" in name else 0.0
        yield Contender(name, run, arguments, needs=needs, memory=memory, same={"groups": 0})


COLUMNS = (
    Column(RATE, "rows", "{:.2f}", per="cpu", unit=1e6),
    Column("M rows per second", "rows", "{:.2f}", per="wall", unit=1e6),
    Column("this project's CPU speed / its", "cpu", "{:.2f}", "its / first"),
    Column(PEAK, "peak_bytes", "{:,.0f}", unit=1e6),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    lambda found: f"{found.median('', OURS, RATE):.1f} million rows per CPU second.",
    rounds=3,
    warm_up=0,
    together=False,
    picture="bars",
    drawn=(RATE, PEAK),
)

if __name__ == "__main__":
    QUESTION.run()
