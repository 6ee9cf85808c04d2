"""Blocks of sentences: each sentence in exactly one, found without a table."""

import struct
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron.data.description import join_descriptions, place
from megatron.data.indexed import IndexedDataset
from megatron.data.pairs import Blocks
from tests.data.samples import write_sentences

Sizes = Sequence[Sequence[int]]  # tokens of each sentence of each document


def random_sizes(seed: int, documents: int, sentences: int, tokens: int) -> list[list[int]]:
    """Of up to that many sentences a document, and tokens a sentence."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, sentences + 1, documents)
    return [rng.integers(1, tokens + 1, count).tolist() for count in counts]


CASES: dict[str, Sizes] = {
    "usual": random_sizes(1, 200, 12, 9),
    "tiny documents": random_sizes(2, 300, 3, 2),
    "long documents": random_sizes(3, 5, 900, 5),
    "one sentence mostly": [[5]] * 40 + [[3, 4]] + [[30]] * 40,
    "huge sentences": [[1, 1000, 1], [1000, 1000, 1, 1, 1], [1, 1, 1, 1, 3000], [9000], [2, 2]],
    "huge sentence and many tiny ones": [[500, *[1] * 400], [*[1] * 400, 500], [1] * 999],
    "lengths of the room": [[10, 10], [20, 20, 20], [19, 1], [40], [20, 20], [7, 13, 20]],
    "one document": [[4, 5, 6, 7, 8, 9]],
}


def write(prefix: Path, sizes: Sizes) -> IndexedDataset:
    write_sentences(prefix, [[[1] * size for size in document] for document in sizes])
    return IndexedDataset(str(prefix))


def bounds(sizes: Sizes) -> list[list[int]]:
    """Of each document, where its sentences start, and its end."""
    start, found = 0, []
    for document in sizes:
        found.append((start + np.cumsum([0, *document])).tolist())
        start = found[-1][-1]
    return found


@pytest.mark.parametrize("length", [2, 7, 20, 509])
@pytest.mark.parametrize("case", CASES)
def test_every_sentence_is_in_exactly_one_block(tmp_path: Path, case: str, length: int) -> None:
    sizes = CASES[case]
    blocks = Blocks(write(tmp_path / "p", sizes), range(len(sizes)), length)
    found = [blocks.block(number) for number in range(len(blocks))]
    real = [block.tolist() for block in found if block is not None]
    sentences = [pair for block in real for pair in pairwise(block)]
    documents = [document for document in bounds(sizes) if len(document) > 2]
    assert sentences == [pair for document in documents for pair in pairwise(document)]
    assert all(len(block) > 2 for block in real)
    wholes = [set(document) for document in documents]
    assert all(any(whole.issuperset(block) for whole in wholes) for block in real)
    assert len(blocks) == len(sizes) + -(-sum(map(sum, sizes)) // length)


@pytest.mark.parametrize("cut", [range(3), range(3, 11), range(11, 200), range(199, 200)])
def test_a_split_has_the_blocks_of_its_documents(tmp_path: Path, cut: range) -> None:
    sizes = CASES["usual"]
    blocks = Blocks(write(tmp_path / "p", sizes), cut, 20)
    found = [blocks.block(number) for number in range(len(blocks))]
    sentences = [pair for block in found if block is not None for pair in pairwise(block.tolist())]
    expected = [bounds(sizes)[document] for document in cut]
    assert sentences == [pair for each in expected if len(each) > 2 for pair in pairwise(each)]


def test_shards_have_the_blocks_of_the_whole(tmp_path: Path) -> None:
    sizes = CASES["usual"]
    parts, staged = [], tmp_path / "staged"
    staged.mkdir()
    for number, part in enumerate((sizes[:1], sizes[1:90], sizes[90:])):
        documents = [[[1] * size for size in document] for document in part]
        parts.append(write_sentences(staged / str(number), documents))
    prefixes = [str(staged / str(number)) for number in range(3)]
    place(prefixes, str(tmp_path / "p"), join_descriptions(parts), {})
    whole = Blocks(write(tmp_path / "whole", sizes), range(len(sizes)), 20)
    sharded = Blocks(IndexedDataset(str(tmp_path / "p")), range(len(sizes)), 20)
    assert len(sharded.data.shards) == 3
    assert len(sharded) == len(whole)
    for number in range(len(whole)):
        assert np.array_equal(sharded.block(number), whole.block(number))


def test_blocks_of_a_document_are_about_as_long(tmp_path: Path) -> None:
    """Sentences of 1 to 9 tokens: a cut is at most half of one away from its equal share."""
    sizes = [np.random.default_rng(1).integers(1, 10, 1000).tolist()]
    blocks = Blocks(write(tmp_path / "p", sizes), range(1), 100)
    found = [blocks.block(number) for number in range(len(blocks))]
    starts = [int(block[0]) for block in found if block is not None]
    parts = -(-sum(sizes[0]) // 100)
    assert len(starts) == parts
    assert starts == pytest.approx([part * sum(sizes[0]) / parts for part in range(parts)], abs=5)


def test_a_sentence_without_tokens_is_none(tmp_path: Path) -> None:
    """Other writers may leave some: they are no sentence of a pair."""
    sizes, starts = [3, 0, 0, 2, 0, 4], [0, 3, 3, 3, 5, 5]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 6, 4)
    index += struct.pack("<6i6q4q", *sizes, *(2 * start for start in starts), 0, 2, 5, 6)
    (tmp_path / "p.idx").write_bytes(index)
    np.arange(9, dtype="<u2").tofile(tmp_path / "p.bin")
    blocks = Blocks(IndexedDataset(str(tmp_path / "p")), range(3), 509)
    assert [blocks.block(number) for number in range(len(blocks))] == [None] * len(blocks)
    with pytest.raises(ValueError, match="of 3 documents of the training split .* none has two"):
        blocks.check("training")


def test_past_2_to_the_31_tokens(tmp_path: Path) -> None:
    """The last document of a sparse data set above 4 GiB."""
    sizes = [2**30, 2**30, 5, 6]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 3)
    index += struct.pack("<4i4q3q", *sizes, *(2 * start for start in starts[:-1]), 0, 2, 4)
    (tmp_path / "p.idx").write_bytes(index)
    with (tmp_path / "p.bin").open("wb") as stream:
        stream.truncate(2 * starts[-1])
    blocks = Blocks(IndexedDataset(str(tmp_path / "p")), range(2), 509)
    assert blocks.block(len(blocks) - 1).tolist() == starts[2:]
    assert blocks.block(0).tolist() == starts[:3]


def test_in_place_of_a_spare_number_every_block_is_as_likely(tmp_path: Path) -> None:
    """Within 5 standard deviations of 5,000 draws."""
    sizes = CASES["usual"]
    blocks = Blocks(write(tmp_path / "p", sizes), range(len(sizes)), 20)
    spare = next(n for n in range(len(blocks)) if blocks.block(n) is None)
    real = [block for n in range(len(blocks)) if (block := blocks.block(n)) is not None]
    rng = np.random.default_rng(1)
    drawn = [blocks.draw(spare, rng) for _ in range(5_000)]
    assert all(is_spare for _, is_spare in drawn)
    counts = Counter(int(block[0]) for block, _ in drawn)
    assert set(counts) == {int(block[0]) for block in real}
    mean = 5_000 / len(real)
    assert max(abs(count - mean) for count in counts.values()) < 5 * np.sqrt(mean)


def test_a_number_of_a_block_is_that_block(tmp_path: Path) -> None:
    blocks = Blocks(write(tmp_path / "p", CASES["usual"]), range(200), 20)
    for number in range(len(blocks)):
        if (block := blocks.block(number)) is not None:
            found, is_spare = blocks.draw(number, np.random.default_rng(1))
            assert np.array_equal(found, block)
            assert not is_spare


def test_a_pair_is_found_where_hardly_any_is(tmp_path: Path) -> None:
    sizes = [*[[3]] * 255, [4, 5], *[[3]] * 5000]
    blocks = Blocks(write(tmp_path / "p", sizes), range(len(sizes)), 509)
    for seed in range(3):
        block, is_spare = blocks.draw(0, np.random.default_rng(seed))
        assert is_spare
        assert block.tolist() == [765, 769, 774]


def test_one_sentence_documents_are_counted_refused_and_warned_of(tmp_path: Path) -> None:
    sizes = [*[[3]] * 6, *[[4, 5]] * 4]
    data = write(tmp_path / "p", sizes)
    everything = Blocks(data, range(10), 20)
    assert everything.one_sentence(100) == (6, 10)
    assert everything.one_sentence(5) == (3, 5)
    with pytest.warns(UserWarning, match="of 10 documents of the test split .* 6 have one"):
        everything.check("test")
    Blocks(data, range(2, 10), 20).check("training")
    message = "--data-path: of 6 documents of the validation split of .*p none.*--split-sentences"
    with pytest.raises(ValueError, match=message):
        Blocks(data, range(6), 20).check("validation")
