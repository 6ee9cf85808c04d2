"""Every line of every file exactly once, whatever is wrong with it; files whole or not there."""

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from megatron.data.files import atomic_writer
from megatron.data.json_lines import LONGEST_LINE, Line, find_shards, open_shard, read_lines
from tools.corpus.files import Compression, Funnel, cut, read_documents, write_shard

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".zst": zstd.ZstdDecompressor,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}


def lines_of(content: bytes, longest: int) -> list[tuple[int, bytes | None]]:
    """(offset, content) of the lines that are not blank; content None of those over longest."""
    found: list[tuple[int, bytes | None]] = []
    offset = 0
    for line in io.BytesIO(content):
        stripped = line.rstrip(b"\r\n")
        if stripped.strip():
            too_long = len(line.removesuffix(b"\n")) > longest
            found.append((offset, None if too_long else stripped))
        offset += len(line)
    return found


def lines_of_units(path: Path, unit_bytes: int, longest: int = LONGEST_LINE) -> list[Line]:
    units = cut([path], unit_bytes)
    return [
        line
        for unit in units
        for line in read_lines(unit.file, unit.start, unit.stop, longest=longest)
    ]


def read_all(path: Path, unit_bytes: int, longest: int) -> list[tuple[int, bytes | None]]:
    lines = lines_of_units(path, unit_bytes, longest)
    return [(line.offset, None if line.fault else line.content) for line in lines]


def random_content(dice: random.Random, unit: int) -> bytes:
    lengths = [0, 0, 1, 2, unit - 2, unit - 1, unit, unit + 1, 2 * unit, 5 * unit]
    lines = []
    for _ in range(dice.randint(0, 40)):
        length = max(0, dice.choice(lengths))
        body = b" " * length if dice.random() < 0.1 else dice.randbytes(length)
        body = body.replace(b"\n", b"n").replace(b"\r", b"r")
        lines.append(body + dice.choice([b"\n", b"\n", b"\r\n"]))
    content = b"".join(lines)
    return content.rstrip(b"\r\n") if dice.random() < 0.4 else content


@pytest.mark.parametrize("seed", range(20))
def test_units_cover_every_line_exactly_once(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    path = tmp_path / "in.jsonl"
    content = random_content(dice, dice.randint(1, 30))
    path.write_bytes(content)
    longest = dice.choice([1, 7, 30, 10_000])
    expected = lines_of(content, longest)
    for unit_bytes in (1, 2, 3, 7, 16, 31, 100, 10_000):
        assert read_all(path, unit_bytes, longest) == expected
    for ending, compress in COMPRESSORS.items():
        packed = tmp_path / f"in.jsonl{ending}"
        packed.write_bytes(compress(content))
        assert read_all(packed, 7, longest) == expected


def test_units_share_the_bytes_of_all_files_out_evenly(tmp_path: Path) -> None:
    for name, size in (("a.jsonl", 1000), ("b.jsonl", 0), ("c.jsonl", 149), ("d.jsonl.gz", 999)):
        (tmp_path / name).write_bytes(b"x" * size)
    units = cut(find_shards([tmp_path]), 100)
    assert [unit.number for unit in units] == list(range(len(units))) == list(range(13))
    by_file: dict[str, list[tuple[int, int]]] = {}
    for unit in units:
        by_file.setdefault(Path(unit.file).name, []).append((unit.start, unit.stop))
    assert by_file["a.jsonl"] == [(100 * k, 100 * k + 100) for k in range(10)]
    assert by_file["c.jsonl"] == [(0, 74), (74, 149)]
    assert by_file["d.jsonl.gz"] == [(0, 999)]


def test_a_byte_order_mark_does_not_cost_the_first_document(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n")
    assert read_all(path, 100, 100) == [(3, b"{}"), (6, b"\xef\xbb\xbf")]


def test_a_line_of_any_length_is_set_aside_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "before"}\n')
        file.truncate(1 << 28)  # a sparse file
        file.seek(1 << 28)
        file.write(b'\n{"text": "after"}\n')
    tracemalloc.start()
    lines = lines_of_units(path, 32_000_000, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.offset for line in lines] == [0, 19, (1 << 28) + 1]
    assert [bool(line.fault) for line in lines] == [False, True, False]
    assert str((1 << 28) - 19 + 1) in str(lines[1].fault)  # bytes
    assert len(lines[1].content) <= 200
    assert peak < 64 << 20  # a quarter of the line; threads of other tests count too


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what this process reads")
def test_units_inside_one_long_line_do_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * (20 << 20))
    before = bytes_read()
    lines = lines_of_units(path, 1 << 20, 1 << 20)
    assert [line.offset for line in lines] == [0]
    assert bytes_read() - before < 3 * (20 << 20)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_compressed_file_cut_in_the_middle_yields_what_is_before(
    ending: str, tmp_path: Path
) -> None:
    dice = random.Random(1)
    content = b"".join(dice.randbytes(50).hex().encode() + b"\n" for _ in range(30_000))
    packed = COMPRESSORS[ending](content)
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(packed[: len(packed) // 2])
    whole = DECOMPRESSORS[ending]().decompress(packed[: len(packed) // 2]).split(b"\n")[:-1]
    assert len(whole) > 2500
    *before, last = lines_of_units(path, 1000)
    assert [line.content for line in before] == whole
    assert not any(line.fault for line in before)
    assert last.fault
    assert last.offset == sum(len(line) + 1 for line in whole)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_file_that_is_not_what_its_name_says_is_one_fault(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(b'{"text": "plain"}\n' * 100)
    [line] = lines_of_units(path, 1000)
    assert line.fault
    assert line.offset == 0


def test_a_failing_disk_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").symlink_to("/proc/self/mem")  # whose first byte cannot be read
    with pytest.raises(OSError, match=rf"\[Errno {errno.EIO}\]"):
        list(read_lines(str(tmp_path / "in.jsonl.gz"), 0, 1))


def test_a_folder_is_read_in_order_and_without_the_files_of_the_step(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl.zst", "c.json", "d.jsonl.gz", "e.jsonl.xz"]
    names += ["notes.txt", "more.txt.gz"]
    others = ["manifest.json", "run.json", "rejected.jsonl", "duplicates.jsonl", ".hidden"]
    for name in [*names, *others, "f.jsonl.123.part", "page.md"]:
        (tmp_path / name).touch()
    (tmp_path / "g.jsonl").mkdir()
    with pytest.warns(UserWarning, match=r"f\.jsonl\.123\.part.* g\.jsonl.* page\.md"):
        assert [path.name for path in find_shards([tmp_path])] == sorted(names)
    with pytest.warns(UserWarning, match=r"b\.jsonl"):
        texts = find_shards([tmp_path], (".txt",))
    assert [path.name for path in texts] == ["more.txt.gz", "notes.txt"]
    named = [tmp_path / "notes.txt", tmp_path / "a.jsonl.zst"]
    assert find_shards(named) == named


def test_a_text_file_is_one_document_whatever_its_unit(tmp_path: Path) -> None:
    text = "Two lines,\nof which é is one. " * 9
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode())[:-20])
    (tmp_path / "d.txt").write_bytes(b"\xff")
    (tmp_path / "e.txt").write_text("   \n")
    (tmp_path / "f.txt").touch()
    os.truncate(tmp_path / "f.txt", LONGEST_LINE + 1)
    units = cut(find_shards([tmp_path]), 100)
    assert [Path(unit.file).name for unit in units] == [f.name for f in sorted(tmp_path.iterdir())]
    funnel = Funnel()
    found = [each for unit in units for each in read_documents(unit, funnel)]
    assert [each.text for each in found] == [text, text]
    assert [each.record["id"] for each in found] == ["a.txt", "b.txt"]
    assert [Path(bad["file"]).name for bad in funnel.rejected] == [
        f"{name}.txt{'.gz' * (name == 'c')}" for name in "cdef"
    ]


@pytest.mark.parametrize(
    ("compression", "ending"), [("none", ".jsonl"), ("gzip", ".jsonl.gz"), ("zstd", ".jsonl.zst")]
)
def test_a_shard_has_the_same_bytes_twice_and_says_what_it_holds(
    compression: Compression, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b"%d" % k * 50 for k in range(5000)]
    facts = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr("time.time", lambda: len(facts) * 1e9)
        with write_shard(folder, "part-00007", compression) as shard:
            for line in lines:
                shard.write(line)
            assert not (folder / f"part-00007{ending}").exists()
        facts.append(shard.facts)
    content = (tmp_path / "a" / f"part-00007{ending}").read_bytes()
    assert content == (tmp_path / "b" / f"part-00007{ending}").read_bytes()
    assert facts[0] == facts[1]
    assert facts[0] == {
        "name": f"part-00007{ending}",
        "documents": 5000,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with open_shard(tmp_path / "a" / f"part-00007{ending}") as stream:
        assert stream.read() == b"".join(line + b"\n" for line in lines)


def test_an_interrupted_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def interrupted() -> None:
        with atomic_writer(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    """As when a worker that was given up is still at work."""
    path = tmp_path / "out"
    with atomic_writer(path) as first:
        first.write(b"fir")
        with atomic_writer(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"st")
    assert path.read_bytes() == b"first"
