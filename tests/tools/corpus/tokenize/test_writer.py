"""Writing, replacing and verifying data sets: nothing half written, every damage found."""

import itertools
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset, token_dtype
from tests.data import samples
from tests.files import FOLDER_CALLS, before_calls, cut_off
from tests.refusals import refusal
from tools.corpus.tokenize import writer
from tools.corpus.tokenize.writer import IndexedDatasetWriter, move_data_set, verify

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0]]
SENTENCES = [[[5, 6], [7]], [[8, 9, 10]], [[11], [12]]]
Shards = list[list[list[int]]]
SHARDS = [[[5, 6, 7, 0], [8, 0]], [[9, 10, 0]], [[11, 0], [12, 13, 14, 15, 16, 0], [17, 0]]]
TOKENIZER = {"vocab.json": b"vocabulary", "merges.txt": b"merges"}


def names(folder: Path) -> set[str]:
    """The files; a writer that is killed leaves what it staged (*.part)."""
    return {file.name for file in folder.iterdir() if file.is_file() and file.suffix != ".part"}


def tokenizer_of(prefix: str) -> dict[str, bytes]:
    folder = Path(f"{prefix}.tokenizer")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_interrupted_writer_leaves_what_was_there(tmp_path: Path) -> None:
    prefix, dtype = tmp_path / "p", token_dtype(100)
    samples.write_data(prefix, DOCUMENTS)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    with suppress(KeyboardInterrupt), IndexedDatasetWriter(str(prefix), dtype) as writer:
        writer.add(np.zeros(7, dtype), np.array([7], np.int32))
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    samples.write_data(prefix, [[1, 2]])
    assert verify(str(prefix)).tokens == 2
    assert {file.name for file in tmp_path.iterdir()} == before.keys()


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
    samples.write_index(tmp_path / "q", [2**30] * 5, range(6))
    assert (tmp_path / "p.idx").read_bytes() == (tmp_path / "q.idx").read_bytes()


def test_verify_reports_what_is_there(tmp_path: Path) -> None:
    samples.write_data(tmp_path / "d", DOCUMENTS)
    samples.write_sentences(tmp_path / "s", SENTENCES)
    samples.write_shards(tmp_path / "h", SHARDS[::-1])  # the highest id is in the first
    for name, expected in (("d", (3, 3, 12, 13)), ("s", (3, 5, 8, 12)), ("h", (6, 6, 19, 17))):
        for described in (True, False)[: 1 if name == "h" else 2]:
            report = verify(str(tmp_path / name))
            counts = report.documents, report.sequences, report.tokens, report.highest_id
            assert (counts, report.described) == (expected, described)
            (tmp_path / f"{name}.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("suffix", "position", "content", "named"),
    [
        (".idx", 0, b"X", "p.idx"),
        (".idx", 9, b"\x02", "version 2"),
        (".idx", 17, b"\x07", "type 7"),
        (".idx", 18, struct.pack("<Q", 2**63), "p.idx"),
        (".idx", 34, struct.pack("<2i", 2, 4), "sequence 1"),
        (".idx", 34, struct.pack("<i", -(2**31)), "-2147483648"),
        (".idx", 46, struct.pack("<3q", 8, 0, 12), "sequence 0"),
        (".idx", 54, struct.pack("<q", -(2**31)), "-2147483648"),
        (".idx", 70 + 8, struct.pack("<2q", 2, 1), "p.idx"),
        (".idx", 70 + 8, struct.pack("<q", 0), "p.idx"),
        (".bin", 0, struct.pack("<2H", 6, 5), "p.bin"),
        (".bin", 4, struct.pack("<H", 100), "id 100"),
        (".json", 0, b"[", "p.json"),
    ],
)
def test_verify_finds_damage(
    tmp_path: Path, suffix: str, position: int, content: bytes, named: str
) -> None:
    """A sidecar that has samples of the files refuses all of it when the data set is opened."""
    prefix = tmp_path / "p"
    samples.write_data(prefix, DOCUMENTS)
    sidecar = prefix.with_suffix(".json").read_bytes()
    samples.forget_samples(prefix)
    samples.change(prefix, suffix, position, content)
    assert named in str(refusal(lambda: verify(str(prefix))))
    if suffix != ".json":
        prefix.with_suffix(".json").write_bytes(sidecar)
        assert str(refusal(lambda: IndexedDataset(str(prefix)))).startswith(str(prefix))


@pytest.mark.parametrize("size", [writer.CHUNK, 2])  # 2: the places are in two chunks
def test_verify_finds_documents_out_of_order_without_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    prefix = tmp_path / "p"
    samples.write_data(prefix, DOCUMENTS)
    prefix.with_suffix(".json").unlink()
    samples.change(prefix, ".idx", 70 + 8, struct.pack("<2q", 2, 1))
    monkeypatch.setattr(writer, "CHUNK", size)
    assert "not in order" in str(refusal(lambda: verify(str(prefix))))


@pytest.mark.parametrize(
    "changes",
    [
        [(34 + 4, "<2i", (0, 4))],
        [(34 + 20 + 40 + 8, "<q", (0,))],
        [(34 + 20 + 40 + 8, "<2q", (3, 2))],
        [(34 + 4, "<2i", (0, 4)), (34 + 20 + 16, "<q", (4,))],
    ],
    ids=["places", "a document of no sentence", "order", "a sentence of no token"],
)
def test_verify_finds_damaged_sentences(
    tmp_path: Path, changes: list[tuple[int, str, tuple[int, ...]]]
) -> None:
    prefix = tmp_path / "p"
    samples.write_sentences(prefix, SENTENCES)
    samples.forget_samples(prefix)
    verify(str(prefix))
    for position, form, numbers in changes:
        samples.change(prefix, ".idx", position, struct.pack(form, *numbers))
    assert str(prefix) in str(refusal(lambda: verify(str(prefix))))


def test_verify_reads_every_shard_and_without_sidecar_every_id(tmp_path: Path) -> None:
    prefix = tmp_path / "p"
    samples.write_shards(prefix, SHARDS)
    samples.change(tmp_path / "p_00002", ".bin", 18, b"\x01\x00")
    assert "p_00002.bin" in str(refusal(lambda: IndexedDataset(str(prefix))))
    samples.forget_samples(prefix)
    assert IndexedDataset(str(prefix)).num_documents == 6
    assert "p_00002.bin" in str(refusal(lambda: verify(str(prefix))))
    os.truncate(f"{prefix}_00002.bin", 18)
    assert "p_00002.bin" in str(refusal(lambda: verify(str(prefix))))
    other = tmp_path / "q"
    samples.write_data(other, DOCUMENTS, vocab_size=70_000)
    other.with_suffix(".json").unlink()
    samples.change(other, ".bin", 0, struct.pack("<i", -3))
    assert "id -3" in str(refusal(lambda: verify(str(other))))


@pytest.mark.parametrize(
    ("before", "after"), [(SHARDS, SHARDS[2:]), (SHARDS[:1], SHARDS[:2]), (SHARDS, SHARDS[:2])]
)
def test_a_move_can_be_cut_off_anywhere(tmp_path: Path, before: Shards, after: Shards) -> None:
    """Until it is done no data set is there, or the old one; the same call finishes it. One shard
    alone has the name of the data set."""
    other = {"vocab.json": b"another"}
    for steps in itertools.count():
        folder = tmp_path / str(steps)
        folder.mkdir()
        prefix = samples.write_shards(folder / "p", before, TOKENIZER)
        staged, description = samples.stage_shards(folder, after)
        with cut_off(steps, *FOLDER_CALLS) as lost:
            move_data_set(staged, prefix, description, other)
        if lost:
            try:
                assert IndexedDataset(prefix).num_documents == sum(map(len, before))
                assert tokenizer_of(prefix) == TOKENIZER
            except FileNotFoundError:
                assert steps
            move_data_set(staged, prefix, description, other)
        assert tokenizer_of(prefix) == other
        assert not list(folder.glob("*.partial"))
        assert verify(prefix).documents == sum(map(len, after))
        assert len(names(folder)) == (2 * len(after) + 1 if len(after) > 1 else 3)
        if not lost:
            break
    assert steps >= 7


def test_a_tokenizer_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    calls: list[str] = []

    def note(call: str, given: Sequence[Any]) -> None:
        is_flush = call == "os.fsync"
        file = Path(f"/proc/self/fd/{given[0]}").readlink() if is_flush else Path(given[1])
        calls.append(f"{'flush' * is_flush} {file.name}")

    with before_calls(note, "os.fsync", "pathlib.Path.replace"):
        samples.write_shards(tmp_path / "p", SHARDS, TOKENIZER)
    before = calls[: calls.index(" p.tokenizer")]
    assert {f"flush {name}" for name in (*TOKENIZER, "p.tokenizer.partial")} <= {*before}
    assert calls[-1] == f"flush {tmp_path.name}"  # the names of all


def test_a_damaged_tokenizer_of_an_equal_data_set_is_replaced(tmp_path: Path) -> None:
    prefix = samples.write_shards(tmp_path / "p", SHARDS, TOKENIZER)
    file = tmp_path / "p.tokenizer" / "vocab.json"
    file.write_bytes(b"damaged")
    (tmp_path / "p.tokenizer.partial").mkdir()  # of a run that was killed
    samples.write_shards(tmp_path / "p", SHARDS, TOKENIZER)
    assert tokenizer_of(prefix) == TOKENIZER
    assert not (tmp_path / "p.tokenizer.partial").exists()
