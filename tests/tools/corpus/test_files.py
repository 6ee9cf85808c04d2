"""Every line of every file exactly once, whatever is wrong with it; counts that show a lost
document; files whole or not there."""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from megatron.data import json_lines
from megatron.data.files import atomic_writer
from tests.refusals import refusal
from tools.corpus import files

COMPRESSION: dict[str, tuple[Callable[[bytes], bytes], Callable[[], Any]]] = {
    ".gz": (gzip.compress, lambda: zlib.decompressobj(31)),
    ".zst": (zstd.compress, zstd.ZstdDecompressor),
    ".bz2": (bz2.compress, bz2.BZ2Decompressor),
    ".xz": (partial(lzma.compress, preset=0), lzma.LZMADecompressor),
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


def lines_of_units(
    path: Path, unit_bytes: int, longest: int = json_lines.LONGEST_LINE
) -> list[json_lines.Line]:
    of_units = (
        json_lines.read_lines(unit.file, unit.start, unit.stop, longest=longest)
        for unit in files.cut([path], unit_bytes)
    )
    return [*chain.from_iterable(of_units)]


def read_all(path: Path, *sizes: int) -> list[tuple[int, bytes | None]]:
    lines = lines_of_units(path, *sizes)
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


@pytest.mark.parametrize("seed", range(12))
def test_units_cover_every_line_exactly_once(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    path = tmp_path / "in.jsonl"
    content = random_content(dice, dice.randint(1, 30))
    path.write_bytes(content)
    longest = dice.choice([1, 7, 30, 10_000])
    expected = lines_of(content, longest)
    for unit_bytes in (1, 2, 3, 7, 16, 31, 100, 10_000):
        assert read_all(path, unit_bytes, longest) == expected
    for ending, (compress, _) in COMPRESSION.items():
        packed = tmp_path / f"in.jsonl{ending}"
        packed.write_bytes(compress(content))
        assert read_all(packed, 7, longest) == expected


def test_units_share_the_bytes_of_all_files_out_evenly(tmp_path: Path) -> None:
    for name, size in (("a.jsonl", 1000), ("b.jsonl", 0), ("c.jsonl", 149), ("d.jsonl.gz", 999)):
        (tmp_path / name).write_bytes(b"x" * size)
    units = files.cut(json_lines.find_shards([tmp_path]), 100)
    assert [(unit.number, Path(unit.file).name, unit.start, unit.stop) for unit in units] == [
        *((k, "a.jsonl", 100 * k, 100 * k + 100) for k in range(10)),
        (10, "c.jsonl", 0, 74),
        (11, "c.jsonl", 74, 149),
        (12, "d.jsonl.gz", 0, 999),
    ]


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


@pytest.mark.parametrize("ending", COMPRESSION)
def test_a_damaged_compressed_file_yields_what_is_before(ending: str, tmp_path: Path) -> None:
    dice = random.Random(1)
    content = b"".join(dice.randbytes(50).hex().encode() + b"\n" for _ in range(30_000))
    compress, decompressor = COMPRESSION[ending]
    packed = compress(content)
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(packed[: len(packed) // 2])
    whole = decompressor().decompress(packed[: len(packed) // 2]).split(b"\n")[:-1]
    assert len(whole) > 2500
    *before, last = lines_of_units(path, 1000)
    assert [line.content for line in before] == whole
    assert not any(line.fault for line in before)
    assert last.fault
    assert last.offset == sum(len(line) + 1 for line in whole)
    path.write_bytes(content)  # not what its name says
    [line] = lines_of_units(path, 1000)
    assert line.fault
    assert line.offset == 0


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.txt.gz"])
def test_a_failing_disk_is_not_taken_for_a_damaged_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # whose first byte cannot be read
    with pytest.raises(OSError, match=rf"\[Errno {errno.EIO}\]"):
        list(json_lines.read_shard(tmp_path / name, 0, 1))


def test_a_folder_is_read_in_order_and_without_the_files_of_the_step(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl.zst", "c.json", "d.jsonl.gz", "e.jsonl.xz"]
    names += ["notes.txt", "more.txt.gz"]
    others = ["manifest.json", "run.json", "rejected.jsonl", "duplicates.jsonl", ".hidden"]
    for name in [*names, *others, "f.jsonl.123.part", "page.md"]:
        (tmp_path / name).touch()
    (tmp_path / "g.jsonl").mkdir()
    with pytest.warns(UserWarning, match=r"f\.jsonl\.123\.part.* g\.jsonl.* page\.md"):
        assert [path.name for path in json_lines.find_shards([tmp_path])] == sorted(names)
    with pytest.warns(UserWarning, match=r"b\.jsonl"):
        texts = json_lines.find_shards([tmp_path], (".txt",))
    assert [path.name for path in texts] == ["more.txt.gz", "notes.txt"]
    named = [tmp_path / "notes.txt", tmp_path / "a.jsonl.zst"]
    assert json_lines.find_shards(named) == named


def test_a_text_file_is_one_document_whatever_its_unit(tmp_path: Path) -> None:
    text = "Two lines,\nof which é is one. " * 9
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode())[:-20])
    (tmp_path / "d.txt").write_bytes(b"\xff")
    (tmp_path / "e.txt").write_text("   \n")
    (tmp_path / "f.txt").touch()
    os.truncate(tmp_path / "f.txt", json_lines.LONGEST_LINE + 1)
    units = files.cut(json_lines.find_shards([tmp_path]), 100)
    assert [Path(unit.file).name for unit in units] == [f.name for f in sorted(tmp_path.iterdir())]
    accounting = files.DocumentCounts()
    found = [each for unit in units for each in files.read_documents(unit, accounting)]
    assert [each.text for each in found] == [text, text]
    assert [each.record["id"] for each in found] == ["a.txt", "b.txt"]
    assert [Path(bad["file"]).name for bad in accounting.rejected] == [
        f"{name}.txt{'.gz' * (name == 'c')}" for name in "cdef"
    ]


@pytest.mark.parametrize(
    ("compression", "ending"), [("none", ".jsonl"), ("gzip", ".jsonl.gz"), ("zstd", ".jsonl.zst")]
)
def test_a_shard_has_the_same_bytes_twice_and_says_what_it_holds(
    compression: files.Compression, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, name, facts = [b"%d" % k * 50 for k in range(5000)], f"part-00007{ending}", list[Any]()
    for folder in (tmp_path / "a", tmp_path / "b"):
        monkeypatch.setattr("time.time", lambda: len(facts) * 1e9)
        with files.write_shard(folder, "part-00007", compression) as shard:
            for line in lines:
                shard.write(line)
            assert not (folder / name).exists()
        facts.append(shard.facts)
    content = (tmp_path / "a" / name).read_bytes()
    assert content == (tmp_path / "b" / name).read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    expected = {"name": name, "documents": 5000, "bytes": len(content), "sha256": checksum}
    assert facts == [expected] * 2
    with json_lines.open_shard(tmp_path / "a" / name) as stream:
        assert stream.read() == b"".join(line + b"\n" for line in lines)


def test_a_file_is_replaced_whole_by_each_that_writes_it(tmp_path: Path) -> None:
    """As when a worker that was given up is still at work."""
    path = tmp_path / "out"
    with atomic_writer(path) as first:
        first.write(b"fir")
        with atomic_writer(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"st")
    with suppress(KeyboardInterrupt), atomic_writer(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def nested(depth: int) -> bytes:
    """A record of that many levels, itself the first."""
    return b'{"text": "good", "more": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_deep_nesting_is_set_aside_and_what_is_taken_can_be_written() -> None:
    for depth in (json_lines.DEEPEST + 2, 254, 255, 1000, 1023, 1024, 1025, 10**6):
        error = refusal(partial(json_lines.parse_record, nested(depth)))
        assert str(json_lines.DEEPEST) in str(error)
    for depth in range(2, json_lines.DEEPEST + 2):
        for more in (b"", b', "n": 123456789012345678901234567890'):
            record = json_lines.parse_record(nested(depth)[:-1] + more + b"}")
            assert json_lines.parse_record(files.dump_record(record)) == record


@pytest.mark.parametrize(
    "more",
    [
        b'"n": 18446744073709551615',
        b'"n": 18446744073709551616',
        b'"n": -9223372036854775809',
        b'"n": [0, {"a": 123456789012345678901234567890123456789}]',
        b'"n": 123456789012345678901234567890, "name": "sch\xc3\xb6n"',
        b'"n": 1e300, "m": -0.0, "k": 1.5, "b": true, "z": null',
        b'"a": {"b": [{"c": "\xe2\x80\xa8 \\u0000 \\ud83d\\ude00"}, []], "": {}}',
        b'"a": "\\n \\r \\u000b \xc2\x85 \xe2\x80\xa8"',
        b'"a": "\\n \\r \\u000b \xc2\x85 \xe2\x80\xa8", "n": 123456789012345678901234567890',
    ],
)
def test_other_fields_survive_on_one_line(more: bytes) -> None:
    line = b'{"text": "good", ' + more + b"}"
    expected = json.loads(line)
    record = json_lines.parse_record(line)
    assert repr(record) == repr(expected)
    written = files.dump_record(record)
    assert repr(json.loads(written)) == repr(expected)
    assert len(written.splitlines()) == 1
    assert rb"\u00f6" not in written


def test_the_last_of_duplicate_keys_counts_and_no_number_costs_the_document() -> None:
    for number in (b"NaN", b"-Infinity", b"1e400"):  # which JSON does not have
        record = json_lines.parse_record(b'{"text": "good", "n": ' + number + b"}")
        assert json.loads(files.dump_record(record)) == {"text": "good", "n": None}
    assert json_lines.parse_record(b'{"text": "a", "text": "b"}') == {"text": "b"}
    assert json_lines.parse_record(b'{"text": "a", "text": "b", "n": NaN}')["text"] == "b"
    refusal(partial(json_lines.parse_record, b'{"text": "a", "text": 3}'))


def test_millions_of_bad_lines_are_listed_in_order_in_little_memory() -> None:
    accounting, more = files.DocumentCounts(), files.DocumentCounts()
    for k in range(30_000):
        accounting.set_aside("file", k, b"x", "no document")
    assert [bad["offset"] for bad in accounting.rejected] == list(range(30_000))
    more.set_aside("other", 7, b"x", "no document")
    next(iter(accounting.rejected))  # left in the middle
    accounting.add(more)
    *_, before, last = accounting.rejected
    assert (before["offset"], last["file"], len(accounting.rejected)) == (29_999, "other", 30_001)


def counts_of(kept: int, dropped: int, pieces: int) -> files.DocumentCounts:
    """Counts of five documents that came in."""
    record = {"text": "a", "source": "s"}
    accounting = files.DocumentCounts(pieces=pieces)
    for _ in range(5):
        accounting.enter(record)
    for _ in range(kept):
        accounting.keep(record)
    for _ in range(dropped):
        accounting.drop(record, "reason")
    return accounting


def test_counts_balance_only_with_every_document_and_travel_as_json() -> None:
    for numbers in ((5, 0, 0), (2, 3, 0), (6, 1, 2), (0, 5, 0)):
        counts_of(*numbers).check("step")
    for numbers in ((4, 0, 0), (2, 4, 0), (5, 1, 0), (5, 0, 1)):
        with pytest.raises(RuntimeError):
            counts_of(*numbers).check("step")
    total = files.DocumentCounts()
    for accounting in (counts_of(2, 3, 0), counts_of(6, 1, 2)):
        total.add(files.DocumentCounts.from_json(json.loads(json.dumps(accounting.to_json()))))
    total.check("step")

    found = {name: total.to_json()[name]["documents"] for name in ("input", "output")}
    assert (found, total.pieces) == ({"input": 10, "output": 8}, 2)
    assert total.to_json()["dropped"]["reason"]["sources"] == {"s": {"documents": 4, "bytes": 4}}


@pytest.mark.parametrize("given", [None, ""])
def test_a_document_without_an_id_is_named_by_its_text(given: Any) -> None:
    text = "schön"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    records: list[dict[str, Any]] = [{"text": text, "id": given}, {"text": text}]
    assert [*map(files.document_id, records)] == [name] * 2
    assert files.document_id({"text": "a", "id": "x"}) == "x"
    assert files.document_id({"text": "a", "id": 0}) == "0"
    assert [files.source_of(each) for each in ({}, {"source": None})] == ["unnamed"] * 2


def test_keys_are_the_same_everywhere_and_toss_independently() -> None:
    assert files.keyed_hash("k", "schön") == 0x55D19794D2B4B4FFA15DED09C0ADF95E
    first, second = ([files.keyed_hash(key, str(k)) >> 127 for k in range(4000)] for key in "ab")
    for tosses in (first, second, [a ^ b for a, b in zip(first, second, strict=True)]):
        assert abs(sum(tosses) - 2000) < 200
