"""Reading the .bin/.idx format: its bytes, shards read as one, damage, and offsets past 2^31."""

import itertools
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt2 import open_splits
from megatron.data.indexed import Description, IndexedDataset, token_dtype
from megatron.data.sources import open_corpus
from tasks.heldout import training_tokens
from tests.data.samples import (
    PlainTokenizer,
    change,
    forget_samples,
    write_data,
    write_index,
    write_sentences,
    write_shards,
    write_sparse,
)
from tests.refusals import field_of, refusal
from tools.corpus.tokenize.writer import IndexedDatasetWriter, verify

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0]]
SENTENCES = [[[5, 6], [7]], [[8, 9, 10]], [[11], [12]]]
SHARDS = [[[5, 6, 7, 0], [8, 0]], [[9, 10, 0]], [[11, 0], [12, 13, 14, 15, 16, 0], [17, 0]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_data(tmp_path / "p", DOCUMENTS)
    return tmp_path / "p"


@pytest.fixture
def sharded(tmp_path: Path) -> str:
    return write_shards(tmp_path / "p", SHARDS)


def whole(prefix: Path | str) -> list[int]:
    data = IndexedDataset(str(prefix))
    return data.read(0, data.num_tokens).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "code", "letter"), [(100, 8, "H"), (65_499, 8, "H"), (65_500, 4, "i")]
)
def test_bytes_of_the_format(tmp_path: Path, vocab_size: int, code: int, letter: str) -> None:
    write_data(tmp_path / "p", DOCUMENTS, vocab_size=vocab_size)
    size = struct.calcsize(letter)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    index += struct.pack("<3i", 4, 2, 6)
    index += struct.pack("<3q", 0, 4 * size, 6 * size)
    index += struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "p.idx").read_bytes() == index
    assert (tmp_path / "p.bin").read_bytes() == struct.pack(f"<12{letter}", *chain(*DOCUMENTS))
    data = IndexedDataset(str(tmp_path / "p"))
    ranges = [data.token_range(range(number, number + 1)) for number in range(3)]
    assert [data.read(each.start, each.stop).tolist() for each in ranges] == DOCUMENTS
    assert data.token_range(range(1, 3)) == range(4, 12)


def test_sentences(tmp_path: Path) -> None:
    """The bytes that Megatron writes with --split-sentences, added one by one or together."""
    description = write_sentences(tmp_path / "p", SENTENCES)
    assert (description.documents, description.sentences, description.tokens) == (3, 5, 8)
    assert Description.read(str(tmp_path / "p")) == description
    with IndexedDatasetWriter(str(tmp_path / "q"), token_dtype(100), sentences=True) as writer:
        sizes, counts = np.array([2, 1, 3, 1, 1], np.int32), np.array([2, 1, 2], np.int32)
        writer.add(np.arange(5, 13, dtype=np.uint16), sizes, counts)
        writer.commit(tokenizer_type="t", tokenizer_fingerprint="f", vocab_size=100, eod=None)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 4)
    index += struct.pack("<5i5q4q", 2, 1, 3, 1, 1, 0, 4, 6, 12, 14, 0, 2, 3, 5)
    for name in "pq":
        assert (tmp_path / f"{name}.idx").read_bytes() == index
        assert (tmp_path / f"{name}.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    write_data(tmp_path / "d", DOCUMENTS)
    for described in (True, False):
        for name, is_split in (("p", True), ("d", False)):
            data = IndexedDataset(str(tmp_path / name))
            assert (data.description is not None, data.has_sentences) == (described, is_split)
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
    assert IndexedDataset(str(tmp_path / "p")).token_range(range(1, 3)) == range(3, 8)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_and_overlong_files(prefix: Path, suffix: str) -> None:
    length = Path(f"{prefix}{suffix}").stat().st_size
    for new in (length - 2, length + 2):
        os.truncate(f"{prefix}{suffix}", new)
        assert field_of(refusal(lambda: IndexedDataset(str(prefix)))) == f"{prefix}{suffix}"


def test_tokens_are_not_mapped(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end, though the system returns more than 2 GiB in several reads."""
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:3]], offset)
    )
    data = IndexedDataset(str(prefix))
    some = data.read(3, 6)
    assert (some.tolist(), data.read(5, 5).tolist()) == ([0, 8, 0], [])
    some[:] = 1  # the caller's own
    assert data.read(3, 12).tolist() == [*chain(*DOCUMENTS)][3:]
    maps = Path("/proc/self/maps").read_text()
    assert f"{prefix}.idx" in maps
    assert f"{prefix}.bin" not in maps
    os.truncate(f"{prefix}.bin", 10)  # under a run
    assert data.read(0, 5).tolist() == [5, 6, 7, 0, 8]
    assert "p.bin" in str(refusal(lambda: data.read(4, 6)))


@pytest.mark.parametrize(
    "chosen", [(0, 2, 4, 6, 7), (7, 2, 2, 3, 0), (0, 1, 2), (5, None, 6, 7, None)], ids=str
)
def test_index_selects_documents(tmp_path: Path, chosen: tuple[int | None, ...]) -> None:
    """Eight documents of 40 tokens, 1 to 320; None: an empty one, which may point anywhere."""
    prefix, number = str(tmp_path / "p"), len(chosen)
    np.arange(1, 321, dtype="<u2").tofile(f"{prefix}.bin")
    sizes = [0 if each is None else 40 for each in chosen]
    pointers = [638 if each is None else 80 * each for each in chosen]
    write_index(tmp_path / "p", sizes, range(number + 1), pointers)
    documents = [[] if n is None else [40 * n + i for i in range(1, 41)] for n in chosen]
    tokens = [*chain(*documents)]

    data = IndexedDataset(prefix)
    assert (data.num_documents, data.num_tokens) == (number, len(tokens))
    for start, stop in itertools.combinations_with_replacement(range(0, len(tokens) + 1, 13), 2):
        assert data.read(start, stop).tolist() == tokens[start:stop]
    for start, stop in itertools.combinations_with_replacement(range(number + 1), 2):
        found = data.token_range(range(start, stop))
        assert data.read(found.start, found.stop).tolist() == [*chain(*documents[start:stop])]
    report = verify(prefix)
    counts = report.documents, report.tokens, report.highest_id
    assert counts == (number, len(tokens), max(tokens))
    manifest = {"tokenizer": "", "config": {"data": {"split": f"3,{number - 3},0"}}}
    assert training_tokens(prefix, manifest).tolist() == [*chain(*documents[:3])]

    ones = [1] * 37  # of another data set
    write_data(tmp_path / "q", [ones], vocab_size=400)
    with pytest.warns(UserWarning, match=r"p\.json"):
        corpus = open_corpus(["1", prefix, "1", str(tmp_path / "q")], PlainTokenizer("test", 400))
    training, _, _ = open_splits(corpus, split="1,0,0", seq_length=9, seed=1, shuffle=False)
    batch = training.batch(range(8))
    samples = [tokens[9 * k : 9 * k + 10] for k in range(4)]
    found = np.column_stack([batch.tokens, batch.labels[:, -1]]).tolist()
    assert [each for each in found if each != ones[:10]] == samples


def test_identity_has_the_index(tmp_path: Path) -> None:
    """Also one of as many tokens; a sidecar without samples does not hide it, nor its order."""
    documents = [[1, 2, 0], [3, 4, 0], [5, 6, 0]]
    write_data(tmp_path / "p", documents)
    forget_samples(tmp_path / "p")
    identities = []
    for order in ((0, 1, 2), (1, 0, 2)):
        write_index(tmp_path / "p", [3] * 3, range(4), [6 * number for number in order])
        assert whole(tmp_path / "p") == [*chain(*(documents[number] for number in order))]
        identities.append(open_corpus([str(tmp_path / "p")], PlainTokenizer()).identity)
    assert identities[0] != identities[1]
    assert "p.idx" in str(refusal(lambda: verify(str(tmp_path / "p"))))


@pytest.mark.parametrize(
    ("part", "content"),
    [("pointers", 18), ("pointers", 3), ("pointers", -2), ("pointers", 2**63 - 2), ("sizes", -1)],
)
def test_index_that_points_outside(tmp_path: Path, part: str, content: int) -> None:
    """12 tokens, of which the last document has 6."""
    write_data(tmp_path / "p", DOCUMENTS)
    (tmp_path / "p.json").unlink()
    form, place = ("<q", 34 + 12 + 16) if part == "pointers" else ("<i", 34 + 8)
    change(tmp_path / "p", ".idx", place, struct.pack(form, content))
    assert "sequence 2" in str(refusal(lambda: verify(str(tmp_path / "p"))))
    fits = 12 if part == "pointers" else 1
    change(tmp_path / "p", ".idx", place, struct.pack(form, fits))
    assert verify(str(tmp_path / "p")).documents == 3


def test_threads(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 60_000, 20_000).astype(np.uint16)
    write_data(tmp_path / "p", [numbers], vocab_size=60_000)
    data = IndexedDataset(str(tmp_path / "p"))
    starts = list(range(0, 19_000, 97))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: data.read(start, start + 1000), starts))
    for start, tokens in zip(starts, found, strict=True):
        assert np.array_equal(tokens, numbers[start : start + 1000])


def test_shards(sharded: str, tmp_path: Path) -> None:
    write_data(tmp_path / "single", [*chain(*SHARDS)])
    ours, single = IndexedDataset(sharded), IndexedDataset(str(tmp_path / "single"))
    assert (len(ours.shards), len(single.shards)) == (3, 1)
    for name in ("num_documents", "num_sequences", "num_tokens"):
        assert getattr(ours, name) == getattr(single, name)
    for document in range(6):
        assert np.array_equal(ours.sequence_sizes(document), single.sequence_sizes(document))
    for start, stop in itertools.combinations_with_replacement(range(7), 2):
        assert ours.token_range(range(start, stop)) == single.token_range(range(start, stop))
    for start, stop in itertools.combinations_with_replacement(range(20), 2):
        assert ours.read(start, stop).tolist() == single.read(start, stop).tolist()
    assert whole(f"{sharded}_00001") == [9, 10, 0]  # each shard is a data set by itself
    forget_samples(Path(sharded))
    before = IndexedDataset(sharded).content
    change(Path(f"{sharded}_00001"), ".bin", 0, b"\x08\0")
    assert IndexedDataset(sharded).content != before


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    def check(*fragments: str) -> None:
        refusal(lambda: IndexedDataset(str(tmp_path / "p")), *fragments)

    def swap(*names: str) -> None:
        contents = [(tmp_path / name).read_bytes() for name in names]
        for name, content in zip(names, contents[::-1], strict=True):
            (tmp_path / name).write_bytes(content)

    write_data(tmp_path / "p", DOCUMENTS)
    write_data(tmp_path / "q", [[1] * 6, [1] * 6])
    swap("p.json", "q.json")
    check("p.")
    write_sentences(tmp_path / "p", SENTENCES)
    write_sentences(tmp_path / "q", [[[5, 6, 7]], [[8, 9, 10]], [[11], [12]]])
    swap("p.json", "q.json")
    check("p.")
    for before, after in (('"documents": 6', '"documents": 7'), ('"_00001"', '"_00001", "a": 1')):
        write_shards(tmp_path / "p", SHARDS)
        sidecar = tmp_path / "p.json"
        assert before in sidecar.read_text()
        sidecar.write_text(sidecar.read_text().replace(before, after))
        check("p.json")
    write_shards(tmp_path / "p", SHARDS)
    swap("p_00000.bin", "p_00001.bin")
    swap("p_00000.idx", "p_00001.idx")
    check("p_00000")
    (tmp_path / "p_00002.bin").unlink()
    check("p_00002.bin")


def test_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    """A sparse data set above 4 GiB."""
    last = [3, 1, 4, 1, 5]
    prefix, first = tmp_path / "p", write_sparse(tmp_path / "p", last)
    data = IndexedDataset(str(prefix))
    found = data.token_range(range(2, 3))
    assert found == range(first, first + 5)
    assert data.read(found.start, found.stop).tolist() == last
