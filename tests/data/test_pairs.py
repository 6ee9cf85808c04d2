"""Blocks of sentences, found without a table, and the two segments that are drawn of one."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from megatron.data.bert import Blocks, Pair, draw_pair, lengths_kept
from megatron.data.indexed import IndexedDataset
from tests.data.samples import write_index, write_sentences
from tests.refusals import field_of, refusal

Sizes = Sequence[Sequence[int]]  # tokens of each sentence of each document


def random_sizes(seed: int, documents: int, sentences: int, tokens: int) -> list[list[int]]:
    """Of up to that many sentences a document, and tokens a sentence."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, sentences + 1, documents)
    return [rng.integers(1, tokens + 1, count).tolist() for count in counts]


USUAL = random_sizes(1, 200, 12, 9)
CASES: dict[str, Sizes] = {
    "usual": USUAL,
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


def all_of(blocks: Blocks) -> list[list[int]]:
    """Every block, in order, without the spare numbers."""
    found = (blocks.block(number) for number in range(len(blocks)))
    return [block.tolist() for block in found if block is not None]


@pytest.mark.parametrize("length", [2, 7, 20, 509])
@pytest.mark.parametrize("case", CASES)
def test_every_sentence_is_in_exactly_one_block(tmp_path: Path, case: str, length: int) -> None:
    sizes = CASES[case]
    blocks = Blocks(write(tmp_path / "p", sizes), range(len(sizes)), length)
    real = all_of(blocks)
    documents = [document for document in bounds(sizes) if len(document) > 2]
    assert [pair for block in real for pair in pairwise(block)] == [
        pair for document in documents for pair in pairwise(document)
    ]
    assert all(len(block) > 2 for block in real)
    wholes = [set(document) for document in documents]
    assert all(any(whole.issuperset(block) for whole in wholes) for block in real)
    assert len(blocks) == len(sizes) + -(-sum(map(sum, sizes)) // length)


@pytest.mark.parametrize("cut", [range(3), range(3, 11), range(11, 200), range(199, 200)])
def test_a_split_has_the_blocks_of_its_documents(tmp_path: Path, cut: range) -> None:
    found = all_of(Blocks(write(tmp_path / "p", USUAL), cut, 20))
    expected = [bounds(USUAL)[document] for document in cut]
    assert [pair for block in found for pair in pairwise(block)] == [
        pair for each in expected if len(each) > 2 for pair in pairwise(each)
    ]


def test_blocks_of_a_document_are_about_as_long(tmp_path: Path) -> None:
    """Sentences of 1 to 9 tokens: a cut is at most half of one away from its equal share."""
    sizes = [np.random.default_rng(1).integers(1, 10, 1000).tolist()]
    starts = [block[0] for block in all_of(Blocks(write(tmp_path / "p", sizes), range(1), 100))]
    parts = -(-sum(sizes[0]) // 100)
    assert len(starts) == parts
    assert starts == pytest.approx([part * sum(sizes[0]) / parts for part in range(parts)], abs=5)


def test_a_sentence_without_tokens_is_none(tmp_path: Path) -> None:
    """Other writers may leave some: they are no sentence of a pair."""
    write_index(tmp_path / "p", [3, 0, 0, 2, 0, 4], [0, 2, 5, 6])
    np.arange(9, dtype="<u2").tofile(tmp_path / "p.bin")
    blocks = Blocks(IndexedDataset(str(tmp_path / "p")), range(3), 509)
    assert all_of(blocks) == []
    assert field_of(refusal(lambda: blocks.check("training"))) == "--data-path"


def test_past_2_to_the_31_tokens(tmp_path: Path) -> None:
    """The last document of a sparse data set above 4 GiB."""
    sizes = [2**30, 2**30, 5, 6]
    starts = np.cumsum([0, *sizes]).tolist()
    write_index(tmp_path / "p", sizes, [0, 2, 4])
    with (tmp_path / "p.bin").open("wb") as stream:
        stream.truncate(2 * starts[-1])
    blocks = Blocks(IndexedDataset(str(tmp_path / "p")), range(2), 509)
    assert blocks.block(len(blocks) - 1).tolist() == starts[2:]
    assert blocks.block(0).tolist() == starts[:3]


def test_a_number_is_its_block_or_if_spare_any_with_the_same_probability(tmp_path: Path) -> None:
    """Within 5 standard deviations of 5,000 draws."""
    blocks = Blocks(write(tmp_path / "p", USUAL), range(len(USUAL)), 20)
    spares, rng = [], np.random.default_rng(1)
    for number in range(len(blocks)):
        if (block := blocks.block(number)) is None:
            spares.append(number)
        else:
            found, is_spare = blocks.draw(number, rng)
            assert np.array_equal(found, block)
            assert not is_spare
    drawn = [blocks.draw(spares[0], rng) for _ in range(5_000)]
    assert all(is_spare for _, is_spare in drawn)
    counts = Counter(int(block[0]) for block, _ in drawn)
    real = all_of(blocks)
    assert set(counts) == {block[0] for block in real}
    mean = 5_000 / len(real)
    assert max(abs(count - mean) for count in counts.values()) < 5 * np.sqrt(mean)


def test_a_pair_is_found_where_hardly_any_is(tmp_path: Path) -> None:
    sizes = [*[[3]] * 255, [4, 5], *[[3]] * 5000]
    blocks = Blocks(write(tmp_path / "p", sizes), range(len(sizes)), 509)
    block, is_spare = blocks.draw(0, np.random.default_rng(0))
    assert (block.tolist(), is_spare) == ([765, 769, 774], True)


def test_one_sentence_documents_are_counted_refused_and_warned_of(tmp_path: Path) -> None:
    data = write(tmp_path / "p", [*[[3]] * 6, *[[4, 5]] * 4])
    everything = Blocks(data, range(10), 20)
    assert everything.one_sentence(100) == (6, 10)
    assert everything.one_sentence(5) == (3, 5)
    with pytest.warns(UserWarning, match="of 10 .* 6"):
        everything.check("test")
    Blocks(data, range(2, 10), 20).check("training")
    error = refusal(lambda: Blocks(data, range(6), 20).check("validation"))
    assert (field_of(error), "--split-sentences" in str(error)) == ("--data-path", True)


def pairs(block: list[int], length: int, short: float, count: int) -> list[Pair]:
    rng = np.random.default_rng(1)
    return [draw_pair(np.array(block), length, short, rng) for _ in range(count)]


def test_the_cut_is_any_start_of_a_sentence_and_half_of_the_pairs_are_swapped() -> None:
    """4,000 pairs; each share within 4 standard deviations."""
    found = Counter()
    for pair in pairs([100, 103, 108, 110], 20, 0.0, 4000):
        assert (pair.truncated, pair.is_short) == (0, False)
        found[pair.first, pair.second, pair.is_swapped] += 1
    cuts = [range(100, 103), range(103, 110)], [range(100, 108), range(108, 110)]
    expected = {(*cut, False) for cut in cuts} | {(*cut[::-1], True) for cut in cuts}
    assert set(found) == expected
    assert all(abs(count - 1000) < 110 for count in found.values())


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [((10, 4), (6, 4)), ((4, 10), (4, 6)), ((9, 9), (5, 5)), ((100, 6), (5, 5)), ((5, 6), (5, 5)),
     ((1, 10**5), (1, 9)), ((3, 7), (3, 7))],
)  # fmt: skip
def test_the_longer_segment_is_shortened(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    ends = [1000, 1000 + lengths[0], 1000 + sum(lengths)]
    for pair in pairs(ends, 10, 0.0, 50):
        sides = [pair.first, pair.second][:: -1 if pair.is_swapped else 1]
        assert tuple(map(len, sides)) == kept
        assert ends[0] <= sides[0].start < sides[0].stop <= ends[1]
        assert ends[1] <= sides[1].start < sides[1].stop <= ends[2]
        assert pair.truncated == sum(lengths) - sum(kept)


def test_shortening_is_that_of_a_loop_over_tokens() -> None:
    """As the original BERT: the longer of the two, the second of equals, until both fit."""
    for room, a, b in product((0, 1, 6, 7), range(12), range(12)):
        first, second = a, b
        while first + second > room:
            if first > second:
                first -= 1
            else:
                second -= 1
        assert lengths_kept(a, b, room) == (first, second), (a, b, room)


def test_tokens_are_lost_at_the_front_and_at_the_end_alike() -> None:
    """60 of 100 tokens, each by a coin: 30 at the front, within 4 standard deviations."""
    fronts = [
        min(each.first.start, each.second.start) for each in pairs([0, 100, 140], 80, 0.0, 1000)
    ]
    assert np.mean(fronts) == pytest.approx(30, abs=4 * np.sqrt(15 / 1000))
    assert np.std(fronts) == pytest.approx(np.sqrt(15), rel=0.1)


def test_short_samples_are_runs_of_sentences_within_a_target() -> None:
    """Sentences of 2 tokens: a target of t takes t // 2 of them, but two at least."""
    bounds = list(range(0, 101, 2))
    found = pairs(bounds, 100, 1.0, 5000)
    assert all(each.is_short and not each.truncated for each in found)
    lengths = [len(each.first) + len(each.second) for each in found]
    expected = [max(4, t // 2 * 2) for t in range(2, 101)]
    assert np.mean(lengths) == pytest.approx(np.mean(expected), abs=4 * 29 / np.sqrt(5000))
    assert (min(lengths), max(lengths)) == (4, 100)
    starts = Counter(min(each.first.start, each.second.start) for each in found)
    assert {0, 96} <= set(starts) <= set(bounds[:-2])
    share = np.mean([each.is_short for each in pairs(bounds, 100, 0.1, 5000)])
    assert share == pytest.approx(0.1, abs=0.017)
