"""The .bin/.idx format: its bytes, what verify() finds, and offsets past 2^31."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron.data.description import Description
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter, token_dtype
from megatron.data.sources import open_corpus
from megatron.data.verify import check_counts, check_sequences, verify
from tests.data.samples import write_data, write_index, write_sentences, write_sparse

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0]]
SENTENCES = [[[5, 6], [7]], [[8, 9, 10]], [[11], [12]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_data(tmp_path / "p", DOCUMENTS)
    return tmp_path / "p"


def change(prefix: Path, suffix: str, position: int, content: bytes) -> None:
    """Overwrite bytes of a file in place."""
    with Path(f"{prefix}{suffix}").open("r+b") as stream:
        stream.seek(position)
        stream.write(content)


@pytest.mark.parametrize(
    ("vocab_size", "code", "letter"), [(100, 8, "H"), (65_499, 8, "H"), (65_500, 4, "i")]
)
def test_bytes_are_those_of_the_format(
    tmp_path: Path, vocab_size: int, code: int, letter: str
) -> None:
    write_data(tmp_path / "p", DOCUMENTS, vocab_size=vocab_size)
    size = struct.calcsize(letter)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    index += struct.pack("<3i", 4, 2, 6)
    index += struct.pack("<3q", 0, 4 * size, 6 * size)
    index += struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "p.idx").read_bytes() == index
    assert (tmp_path / "p.bin").read_bytes() == struct.pack(f"<12{letter}", *chain(*DOCUMENTS))
    data = IndexedDataset(str(tmp_path / "p"))
    starts = data.pointers // data.dtype.itemsize
    assert [
        data.tokens[start : start + size].tolist()
        for start, size in zip(starts, data.sizes, strict=True)
    ] == DOCUMENTS
    assert data.token_range(range(1, 3)) == range(4, 12)
    report = verify(str(tmp_path / "p"))
    assert (report.documents, report.tokens, report.highest_id) == (3, 12, 13)


def test_sentences_are_sequences_of_their_documents(tmp_path: Path) -> None:
    """The bytes that Megatron writes with --split-sentences, added one by one or together."""
    described = write_sentences(tmp_path / "p", SENTENCES)
    assert (described.documents, described.sentences, described.tokens) == (3, 5, 8)
    assert Description.read(str(tmp_path / "p")) == described
    with IndexedDatasetWriter(str(tmp_path / "q"), token_dtype(100), sentences=True) as writer:
        sizes, counts = np.array([2, 1, 3, 1, 1], np.int32), np.array([2, 1, 2], np.int32)
        writer.add(np.arange(5, 13, dtype=np.uint16), sizes, counts)
        writer.commit(tokenizer_type="t", tokenizer_fingerprint="f", vocab_size=100, eod=None)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 4)
    index += struct.pack("<5i5q4q", 2, 1, 3, 1, 1, 0, 4, 6, 12, 14, 0, 2, 3, 5)
    for name in "pq":
        assert (tmp_path / f"{name}.idx").read_bytes() == index
        assert (tmp_path / f"{name}.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    report = verify(str(tmp_path / "p"))
    assert (report.documents, report.sequences, report.tokens) == (3, 5, 8)
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"q{suffix}").unlink()
    assert {file.name for file in tmp_path.iterdir()} == {"p.bin", "p.idx", "p.json"}
    (tmp_path / "p.json").unlink()
    assert IndexedDataset(str(tmp_path / "p")).token_range(range(1, 3)) == range(3, 8)
    assert not verify(str(tmp_path / "p")).described


def test_sentences_are_told_from_documents(tmp_path: Path) -> None:
    """By the sidecar, or without one by the index."""
    write_sentences(tmp_path / "s", SENTENCES)
    write_data(tmp_path / "d", DOCUMENTS)
    for described in (True, False):
        for name, is_split in (("s", True), ("d", False)):
            data = IndexedDataset(str(tmp_path / name))
            description = Description.read(str(tmp_path / name)) if described else None
            check_sequences(data, description, sentences=is_split)
            how = "without" if is_split else "with"
            with pytest.raises(ValueError, match=f"/{name} holds .* wrote {how} --split-sentences"):
                check_sequences(data, description, sentences=not is_split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(34 + 4, "<2i", (0, 4))], "sequence 2 does not start"),
        ([(34 + 20 + 40 + 8, "<q", (0,))], "a document without a sentence"),
        ([(34 + 20 + 40 + 8, "<2q", (3, 2))], "documents are not in order"),
        ([(34 + 4, "<2i", (0, 4)), (34 + 20 + 16, "<q", (4,))], "a sentence without a token"),
    ],
)
def test_verify_finds_damaged_sentences(
    tmp_path: Path, changes: list[tuple[int, str, tuple[int, ...]]], message: str
) -> None:
    write_sentences(tmp_path / "p", SENTENCES)
    for position, form, numbers in changes:
        change(tmp_path / "p", ".idx", position, struct.pack(form, *numbers))
    with pytest.raises(ValueError, match=message):
        verify(str(tmp_path / "p"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_and_overlong_files(prefix: Path, suffix: str) -> None:
    length = Path(f"{prefix}{suffix}").stat().st_size
    for new, message in [(length - 2, "cut short"), (length + 2, "too long")]:
        os.truncate(f"{prefix}{suffix}", new)
        with pytest.raises(ValueError, match=message):
            IndexedDataset(str(prefix))


@pytest.mark.parametrize(
    ("suffix", "position", "content", "message"),
    [
        (".idx", 0, b"X", "no index"),
        (".idx", 9, b"\x02", "version 2"),
        (".idx", 17, b"\x07", "token type 7"),
        (".idx", 18, struct.pack("<Q", 2**63), "cut short"),
        (".idx", 34, struct.pack("<2i", 2, 4), "sequence 1 does not start"),
        (".idx", 34, struct.pack("<i", -(2**31)), "overflowed"),
        (".idx", 46, struct.pack("<3q", 8, 0, 12), "sequence 0 does not start"),
        (".idx", 54, struct.pack("<q", -(2**31)), "overflowed"),
        (".idx", 70 + 8, struct.pack("<2q", 2, 1), "documents are not in order"),
        (".idx", 70 + 8, struct.pack("<q", 0), "p.idx has changed"),
        (".bin", 0, struct.pack("<2H", 6, 5), "p.bin has changed"),
        (".bin", 4, struct.pack("<H", 100), "id 100, outside a vocabulary of 100"),
        (".json", 0, b"[", "JSON object of tokenizer_type"),
    ],
)
def test_verify_finds_damage(
    prefix: Path, suffix: str, position: int, content: bytes, message: str
) -> None:
    verify(str(prefix))
    change(prefix, suffix, position, content)
    with pytest.raises(ValueError, match=message):
        verify(str(prefix))


def test_verify_without_sidecar_finds_a_negative_id(tmp_path: Path) -> None:
    write_data(tmp_path / "p", DOCUMENTS, vocab_size=70_000)
    (tmp_path / "p.json").unlink()
    change(tmp_path / "p", ".bin", 0, struct.pack("<i", -3))
    with pytest.raises(ValueError, match="negative id -3"):
        verify(str(tmp_path / "p"))


def test_files_of_two_data_sets(tmp_path: Path) -> None:
    write_data(tmp_path / "p", DOCUMENTS)
    write_data(tmp_path / "q", [[1] * 6, [1] * 6])
    (tmp_path / "q.json").replace(tmp_path / "p.json")
    with pytest.raises(ValueError, match="holds 3 documents, but .*p.json says 2"):
        verify(str(tmp_path / "p"))
    write_sentences(tmp_path / "p", SENTENCES)
    other = write_sentences(tmp_path / "q", [[[5, 6, 7]], [[8, 9, 10]], [[11], [12]]])
    with pytest.raises(ValueError, match="holds 5 sentences, but .*p.json says 4"):
        check_counts(IndexedDataset(str(tmp_path / "p")), other)


def test_an_interrupted_writer_leaves_what_was_there(prefix: Path) -> None:
    before = {file.name: file.read_bytes() for file in prefix.parent.iterdir()}
    dtype = token_dtype(100)

    def interrupted() -> None:
        with IndexedDatasetWriter(str(prefix), dtype) as writer:
            writer.add(np.zeros(7, dtype), np.array([7], np.int32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {file.name: file.read_bytes() for file in prefix.parent.iterdir()} == before
    write_data(prefix, [[1, 2]])
    assert verify(str(prefix)).tokens == 2
    assert {file.name for file in prefix.parent.iterdir()} == before.keys()


def test_tokens_are_read_and_not_mapped(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end, though the system gives what is beyond 2 GiB in pieces."""
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:3]], offset)
    )
    data = IndexedDataset(str(prefix))
    tokens = data.tokens
    some = tokens[3:6]
    assert (some.tolist(), tokens[4], tokens[-1], tokens[5:5].tolist()) == ([0, 8, 0], 8, 0, [])
    some[:] = 1  # the caller's own
    assert tokens[3:100].tolist() == [*chain(*DOCUMENTS)][3:]
    with pytest.raises(IndexError):
        tokens[12]
    maps = Path("/proc/self/maps").read_text()
    assert f"{prefix}.idx" in maps
    assert f"{prefix}.bin" not in maps
    os.truncate(f"{prefix}.bin", 10)  # under a run
    assert tokens[:5].tolist() == [5, 6, 7, 0, 8]
    with pytest.raises(OSError, match="p.bin has become shorter"):
        tokens[4:6]


def test_threads_read_the_same_tokens(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 60_000, 20_000).astype(np.uint16)
    write_data(tmp_path / "p", [numbers], vocab_size=60_000)
    tokens = IndexedDataset(str(tmp_path / "p")).tokens
    starts = list(range(0, 19_000, 97))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda start: tokens[start : start + 1000], starts))
    for start, part in zip(starts, parts, strict=True):
        assert np.array_equal(part, numbers[start : start + 1000])


def test_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    """Of a sparse data set above 4 GiB; verify() checks its whole index before it reads tokens."""
    last = [3, 1, 4, 1, 5]
    prefix, first = tmp_path / "p", write_sparse(tmp_path / "p", last)
    data = IndexedDataset(str(prefix))
    found = data.token_range(range(2, 3))
    assert found == range(first, first + 5)
    assert data.tokens[found.start : found.stop].tolist() == last
    (shard,) = data.shards
    assert [chunk.tolist() for chunk in shard.chunks(step=first, size=8)] == [[0] * 8, last]
    with (
        pytest.warns(UserWarning, match="p.json is not there"),
        pytest.raises(ValueError, match="id 5, outside a vocabulary of 5"),
    ):
        open_corpus([str(prefix)], None, 5)
    change(prefix, ".idx", 34 + 12 + 24 + 8, struct.pack("<2q", 2, 1))
    with pytest.raises(ValueError, match="documents are not in order"):
        verify(str(prefix))
    change(prefix, ".idx", 34 + 12 + 16, struct.pack("<q", 2 * first - 2**32))
    with pytest.raises(ValueError, match="too long, or its index is damaged"):
        verify(str(prefix))


def test_writer_offsets_past_2_to_the_31(tmp_path: Path) -> None:
    """The index of a data set of 2^32 bytes, whose tokens are not written: a gigabyte of zeros
    stands for itself."""

    class Zeros(np.ndarray):
        def tobytes(self, order: str = "C") -> bytes:
            return b""

    zeros = np.broadcast_to(np.uint16(0), 2**30).view(Zeros)
    with IndexedDatasetWriter(str(tmp_path / "p"), token_dtype(100)) as writer:
        for _ in range(5):
            writer.add(zeros, np.array([2**30], np.int32))
        writer.commit(tokenizer_type="t", tokenizer_fingerprint="f", vocab_size=100, eod=None)
    write_index(tmp_path / "q", [2**30] * 5, range(6))
    assert (tmp_path / "p.idx").read_bytes() == (tmp_path / "q.idx").read_bytes()
