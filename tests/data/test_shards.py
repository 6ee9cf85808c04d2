"""A data set of several shards: read as one, put in place whole, checked shard by shard."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.data.description import Description, join_descriptions, place
from megatron.data.gpt2 import open_splits
from megatron.data.indexed import IndexedDataset, Joined, join
from megatron.data.sources import open_corpus
from megatron.data.verify import verify
from tests.data.samples import PlainTokenizer, write_data, write_sentences

SHARDS = [[[5, 6, 7, 0], [8, 0]], [[9, 10, 0]], [[11, 0], [12, 13, 14, 15, 16, 0], [17, 0]]]
DOCUMENTS = [document for shard in SHARDS for document in shard]
TOKENIZER = {"vocab.json": b"vocabulary", "merges.txt": b"merges"}


def stage(folder: Path, shards: list[list[list[int]]]) -> tuple[list[str], Description]:
    folder.mkdir(exist_ok=True)
    prefixes = [str(folder / str(number)) for number in range(len(shards))]
    parts = [
        write_data(Path(prefix), shard) for prefix, shard in zip(prefixes, shards, strict=True)
    ]
    return prefixes, join_descriptions(parts)


def write_shards(prefix: Path, shards: list[list[list[int]]] = SHARDS) -> str:
    staged, description = stage(prefix.parent / "staged", shards)
    place(staged, str(prefix), description, TOKENIZER)
    return str(prefix)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.is_file()}


def tokenizer_of(prefix: str) -> dict[str, bytes]:
    folder = Path(f"{prefix}.tokenizer")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def sharded(tmp_path: Path) -> str:
    return write_shards(tmp_path / "p")


@pytest.fixture
def single(tmp_path: Path) -> str:
    write_data(tmp_path / "single", DOCUMENTS)
    return str(tmp_path / "single")


def test_shards_read_as_one_data_set(sharded: str, single: str) -> None:
    ours, whole = IndexedDataset(sharded), IndexedDataset(single)
    assert (len(ours.shards), len(whole.shards)) == (3, 1)
    for name in ("sizes", "pointers", "documents", "tokens"):
        found, expected = getattr(ours, name), getattr(whole, name)
        assert len(found) == len(expected)
        assert found[:].tolist() == expected[:].tolist()
        assert found.__class__ is Joined
        assert [found[i] for i in range(-2, 2)] == [expected[i] for i in range(-2, 2)]
    for start, stop in itertools.combinations_with_replacement(range(len(DOCUMENTS) + 1), 2):
        assert ours.token_range(range(start, stop)) == whole.token_range(range(start, stop))
    for start, stop in itertools.combinations_with_replacement(range(len(whole.tokens) + 1), 2):
        assert ours.tokens[start:stop].tolist() == whole.tokens[start:stop].tolist()


def test_a_slice_within_a_shard_is_no_copy() -> None:
    arrays = [np.arange(4), np.arange(0), np.arange(4, 9)]
    joined = join(arrays)
    assert np.shares_memory(joined[5:8], arrays[2])
    assert np.shares_memory(joined[0:4], arrays[0])
    assert joined[2:6].tolist() == [2, 3, 4, 5]
    assert (joined[4], joined[-1], joined[9:20].tolist()) == (4, 8, [])
    with pytest.raises(IndexError):
        joined[9]


def test_samples_cross_the_borders_of_shards(sharded: str, single: str) -> None:
    batches = []
    for prefix in (sharded, single):
        corpus = open_corpus([prefix], PlainTokenizer())
        training, _, _ = open_splits(corpus, split="1,0,0", seq_length=3, seed=1)
        assert training is not None
        batches.append(training.batch(range(training.samples_per_epoch)))
    assert batches[0].tokens.tolist() == batches[1].tokens.tolist()
    assert batches[0].labels.tolist() == batches[1].labels.tolist()


def test_a_batch_is_asked_of_the_disk_before_any_of_it_is_read(
    sharded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int, int]] = []
    preadv = os.preadv

    def read(file: int, parts: list[memoryview], start: int) -> int:
        calls.append(("read", file, start, len(parts[0])))
        return preadv(file, parts, start)

    def ask(file: int, start: int, size: int, advice: int) -> None:
        calls.append(("ask", file, start, size))

    training, _, _ = open_splits(
        open_corpus([sharded], PlainTokenizer()), split="1,0,0", seq_length=3, seed=1
    )
    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "posix_fadvise", ask)
    training.batch(range(training.samples_per_epoch))
    asked, done = ([each[1:] for each in calls if each[0] == kind] for kind in ("ask", "read"))
    assert len({file for file, *_ in done}) == 3
    assert sorted(asked) == sorted(done)
    assert [each[0] for each in calls] == ["ask"] * len(asked) + ["read"] * len(done)


def test_each_shard_is_whole_by_itself(sharded: str) -> None:
    data = IndexedDataset(f"{sharded}_00001")
    assert data.tokens[:].tolist() == [9, 10, 0]
    assert not verify(f"{sharded}_00001").described


def test_a_shard_that_is_alone_keeps_the_name_of_the_data_set(tmp_path: Path) -> None:
    write_shards(tmp_path / "p", SHARDS[:1])
    assert names(tmp_path) == {"p.bin", "p.idx", "p.json"}
    assert verify(str(tmp_path / "p")).documents == 2


def test_verify_reads_every_shard(sharded: str) -> None:
    report = verify(sharded)
    assert (report.documents, report.tokens, report.highest_id) == (6, 19, 17)
    binary = Path(f"{sharded}_00002.bin")
    binary.write_bytes(binary.read_bytes()[:-2] + b"\x01\x00")
    with pytest.raises(ValueError, match="p_00002.bin has changed: .*p.json says"):
        verify(sharded)
    binary.write_bytes(binary.read_bytes()[:-2])
    with pytest.raises(ValueError, match="p_00002.bin is cut short"):
        verify(sharded)
    binary.unlink()
    with pytest.raises(FileNotFoundError, match="p_00002.bin is not there"):
        IndexedDataset(sharded)


def test_shards_in_another_order_are_found(sharded: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        first, second = (tmp_path / f"p_0000{number}{suffix}" for number in (0, 1))
        content = first.read_bytes()
        second.replace(first)
        second.write_bytes(content)
    with pytest.raises(ValueError, match="p_00000 holds 1 documents, but .*p.json says 2"):
        open_corpus([sharded], PlainTokenizer())


def test_sentences_of_shards(tmp_path: Path) -> None:
    """Their documents are numbered through, as their sentences are."""
    documents = [[[1, 2], [3]], [[4]], [[5], [6], [7, 8]]]
    (tmp_path / "staged").mkdir()
    staged = [str(tmp_path / "staged" / name) for name in "ab"]
    parts = [
        write_sentences(Path(staged[0]), documents[:2]),
        write_sentences(Path(staged[1]), documents[2:]),
    ]
    description = join_descriptions(parts)
    assert (description.sentences, description.documents) == (6, 3)
    assert [shard.sentences for shard in description.shards] == [3, 3]
    place(staged, str(tmp_path / "p"), description, TOKENIZER)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.sizes[:].tolist() == [2, 1, 1, 1, 1, 2]
    assert data.documents[:].tolist() == [0, 2, 3, 6]
    assert verify(str(tmp_path / "p")).sequences == 6
    content = json.loads((tmp_path / "p.json").read_text())
    content["shards"][0]["sentences"] = 2
    (tmp_path / "p.json").write_text(json.dumps({**content, "sentences": 5}))
    with pytest.raises(ValueError, match="p_00000 holds 3 sentences, but .*p.json says 2"):
        verify(str(tmp_path / "p"))


def test_a_sidecar_that_does_not_add_up(sharded: str) -> None:
    content = json.loads(Path(f"{sharded}.json").read_text())
    del content["shards"][1]
    Path(f"{sharded}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="what it says of its shards does not add up"):
        IndexedDataset(sharded)


def test_the_identity_is_of_all_shards(tmp_path: Path, sharded: str) -> None:
    other = write_shards(tmp_path / "q", [*SHARDS[:2], [[1, 0]]])
    first, second = (
        open_corpus([prefix], PlainTokenizer()).identity for prefix in (sharded, other)
    )
    assert first["data"] != second["data"]


@pytest.mark.parametrize("before", [SHARDS, SHARDS[:1], SHARDS[1:]])
@pytest.mark.parametrize("after", [SHARDS, SHARDS[:1], SHARDS[:2]])
def test_an_older_data_set_is_replaced_whole(
    tmp_path: Path, before: list[list[list[int]]], after: list[list[list[int]]]
) -> None:
    prefix = write_shards(tmp_path / "p", before)
    write_shards(tmp_path / "p", after)
    documents = [document for shard in after for document in shard]
    assert verify(prefix).documents == len(documents)
    pairs = len(after) if len(after) > 1 else 1
    assert len(names(tmp_path)) == 2 * pairs + 1


@pytest.mark.parametrize("before", [SHARDS, SHARDS[:1]])
@pytest.mark.parametrize("after", [SHARDS[:2], SHARDS[2:]])
def test_placing_can_be_cut_off_anywhere(
    tmp_path: Path,
    before: list[list[list[int]]],
    after: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it is done no data set is there, or the old one; the same call finishes it."""
    calls = 0
    real = {"replace": Path.replace, "unlink": Path.unlink, "mkdir": Path.mkdir}
    other = {"vocab.json": b"another"}

    def cut_off(name: str, after_calls: int) -> None:
        def step(self: Path, *arguments: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls > after_calls:
                raise KeyboardInterrupt
            return real[name](self, *arguments, **more)  # type: ignore[operator]

        monkeypatch.setattr(Path, name, step)

    for steps in itertools.count():
        folder = tmp_path / str(steps)
        folder.mkdir()
        prefix = write_shards(folder / "p", before)
        staged, description = stage(folder / "staged", after)
        calls = 0
        for name in real:
            cut_off(name, steps)
        try:
            place(staged, prefix, description, other)
        except KeyboardInterrupt:
            finished = False
        else:
            finished = True
        monkeypatch.undo()
        if not finished:
            try:
                assert len(IndexedDataset(prefix).documents) - 1 == sum(map(len, before))
                assert tokenizer_of(prefix) == TOKENIZER
            except FileNotFoundError:
                assert steps
            place(staged, prefix, description, other)
        assert tokenizer_of(prefix) == other
        assert not list(folder.glob("*.partial"))
        assert verify(prefix).documents == sum(map(len, after))
        assert len(names(folder)) == (2 * len(after) + 1 if len(after) > 1 else 3)
        if finished:
            assert steps >= 7
            return


def test_the_tokenizer_of_an_equal_data_set_is_left_or_replaced(tmp_path: Path) -> None:
    prefix = write_shards(tmp_path / "p")
    file = tmp_path / "p.tokenizer" / "vocab.json"
    stamp = file.stat().st_ino
    write_shards(tmp_path / "p")
    assert file.stat().st_ino == stamp
    file.write_bytes(b"damaged")
    (tmp_path / "p.tokenizer.partial").mkdir()  # of a run that was killed
    write_shards(tmp_path / "p")
    assert tokenizer_of(prefix) == TOKENIZER
    assert not (tmp_path / "p.tokenizer.partial").exists()
