"""BERT's samples: blocks of sentences, the two segments drawn of one, what is masked.

Every token of the data sets of `documents` has an id of its own, so that a sample tells where it is
from; ids from CONTINUATIONS on go on with a word.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data import bert
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import open_corpus, require_sequences
from tests.data.samples import write_data, write_index, write_sentences
from tests.refusals import field_of, refusal

PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4
VOCABULARY = 20_000
CONTINUATIONS = 15_000


class Marks:
    """The parts of a tokenizer that samples need; describes itself as write_sentences() does."""

    kind = "BertWordPieceLowerCase"
    vocab_size = VOCABULARY
    fingerprint = "f"
    pad, cls, sep, mask, eod = PAD, CLS, SEP, MASK, SEP
    is_continuation = np.arange(VOCABULARY) >= CONTINUATIONS


def documents(count: int, first: int = FIRST, sentences: int = 7) -> list[list[list[int]]]:
    """Documents of 2 to 8 sentences of 2 to 9 tokens, all different ids."""
    ids = iter(range(first, VOCABULARY))
    return [
        [[next(ids) for _ in range(2 + (i + 3 * j) % 8)] for j in range(2 + i % sentences)]
        for i in range(count)
    ]


def write(prefix: Path, content: Sequence[Sequence[Sequence[int]]]) -> str:
    write_sentences(prefix, content, vocab_size=VOCABULARY)
    return str(prefix)


def opened(
    *data_path: str, split: str = "8,1,1", seq_length: int = 40, seed: int = 1, **others: Any
) -> list[bert.BertDataset | None]:
    settings = {"mask_prob": 0.15, "short_seq_prob": 0.1, "max_ngram_size": 3} | others
    corpus = open_corpus(data_path, Marks())
    splits = bert.open_bert_splits(
        corpus, Marks(), split=split, seq_length=seq_length, seed=seed, **settings
    )
    return list(splits)


def segments(batch: bert.BertBatch) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens in the two segments of each sample."""
    for labels, types, is_real in zip(batch.labels, batch.token_types, batch.is_real, strict=True):
        yield labels[(types == 0) & is_real][1:-1].tolist(), labels[types == 1][:-1].tolist()


def equal(first: bert.BertBatch, second: bert.BertBatch) -> bool:
    return all(np.array_equal(each, vars(second)[name]) for name, each in vars(first).items())


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "p", documents(60))


def test_sample(prefix: str) -> None:
    batch = opened(prefix)[0].batch(range(200))
    assert batch.tokens.shape == batch.loss_mask.shape == (200, 40)
    integers = (batch.tokens, batch.token_types, batch.labels, batch.is_swapped)
    assert {each.dtype for each in integers} == {np.dtype(np.int64)}
    assert (batch.is_real.dtype, batch.loss_mask.dtype) == (np.bool_, np.float32)
    for row, (first, second) in enumerate(segments(batch)):
        real = len(first) + len(second) + 3
        padding = [PAD] * (40 - real)
        whole = [CLS, *first, SEP, *second, SEP, *padding]
        assert batch.labels[row].tolist() == whole
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * len(padding)
        assert batch.token_types[row].tolist() == types
        assert batch.is_real[row].tolist() == [True] * real + [False] * len(padding)
        assert min(*first, *second) >= FIRST
    assert batch.num_tokens == int(batch.is_real.sum()) < batch.tokens.size


def test_loss_mask(prefix: str) -> None:
    batch = opened(prefix)[0].batch(range(300))
    is_chosen, is_mark = batch.loss_mask == 1, batch.labels < FIRST
    assert set(np.unique(batch.loss_mask)) == {0, 1}
    assert not (is_chosen & is_mark).any()
    assert np.array_equal(batch.tokens[~is_chosen], batch.labels[~is_chosen])
    assert is_chosen.any(axis=1).all()
    found = batch.tokens[is_chosen]
    assert (found == MASK).mean() == pytest.approx(0.8, abs=0.05)
    assert ((found == MASK) | (found >= FIRST)).all()
    assert {PAD, CLS, SEP, MASK}.isdisjoint(opened(prefix)[0].masking.ordinary.tolist())


def test_segments_are_neighbours(prefix: str) -> None:
    starts = {sentence[0] for document in documents(60) for sentence in document}
    wholes = [[token for sentence in each for token in sentence] for each in documents(60)]
    batch = opened(prefix, seq_length=512)[0].batch(range(400))
    for pair, is_swapped in zip(segments(batch), batch.is_swapped, strict=True):
        before, after = pair[::-1] if is_swapped else pair
        assert {before[0], after[0]} <= starts
        (whole,) = [each for each in wholes if each[0] <= before[0] <= each[-1]]
        begin = whole.index(before[0])
        assert whole[begin : begin + len(before) + len(after)] == before + after
    assert batch.is_swapped.mean() == pytest.approx(0.5, abs=0.1)


def test_epochs(prefix: str) -> None:
    """All documents of the training split have two sentences; the length cuts none of them."""
    data = opened(prefix, short_seq_prob=0.0, seq_length=512)[0]
    everything = {token for each in documents(60)[:48] for sentence in each for token in sentence}
    size = data.samples_per_epoch
    epochs = [data.batch(range(epoch * size, (epoch + 1) * size)) for epoch in range(3)]
    for batch in epochs:
        assert {token for pair in segments(batch) for side in pair for token in side} == everything
    for first, second in pairwise(epochs):
        assert not np.array_equal(first.labels, second.labels)
        assert np.sum(first.loss_mask != second.loss_mask) > first.loss_mask.sum()


def test_seed_and_number(prefix: str) -> None:
    straight = opened(prefix)[0].batch(range(50))
    assert equal(opened(prefix)[0].batch(range(50)), straight)
    order = np.random.default_rng(0).permutation(50).tolist()
    shuffled = opened(prefix)[0].batch(order)
    assert np.array_equal(shuffled.tokens, straight.tokens[order])
    assert np.array_equal(shuffled.loss_mask, straight.loss_mask[order])
    single = opened(prefix)[0].batch([7])
    assert np.array_equal(single.tokens, straight.tokens[7:8])
    assert not equal(opened(prefix, seed=2)[0].batch(range(50)), straight)
    assert not equal(opened(prefix, seed=2**64 - 1)[0].batch(range(50)), straight)


def test_seed_and_number_of_one_block(tmp_path: Path) -> None:
    """A data set of one block, which no order can change."""
    single = write(tmp_path / "p", documents(7)[6:])
    rows = set()
    for seed in range(4):
        batch = opened(single, split="1,0,0", seq_length=64, seed=seed)[0].batch(range(10))
        rows |= {row.tobytes() for row in np.concatenate([batch.tokens, batch.labels], axis=1)}
    assert len(rows) == 40


def test_blend(tmp_path: Path) -> None:
    first = write(tmp_path / "a", documents(40))
    second = write(tmp_path / "b", documents(30, first=CONTINUATIONS))
    training, _, test = opened("0.3", first, "0.7", second, split="8,2,0")
    assert test is None
    batch = training.batch(range(100))
    assert (batch.labels[:, 1] >= CONTINUATIONS).sum() == 70
    again = training.batch([*range(50, 100), *range(50)])
    assert np.array_equal(again.tokens, np.roll(batch.tokens, 50, axis=0))


def test_data_without_pairs_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "gpt2", [[5, 6, 7, 8]] * 9, eod=None)
    gpt2 = open_corpus([str(tmp_path / "gpt2")], None)
    require_sequences(gpt2, sentences=False)
    pairs = open_corpus([write(tmp_path / "pairs", documents(9))], None)
    lines = write(tmp_path / "lines", [[[5, 6, 7]]] * 9)
    for call, name, cure in (
        (lambda: require_sequences(gpt2, sentences=True), "gpt2", "--split-sentences"),
        (lambda: require_sequences(pairs, sentences=False), "pairs", "--split-sentences"),
        (lambda: opened(lines), "lines", "--split-sentences"),
    ):
        refusal(call, name, cure, field="--data-path")


def test_settings_are_refused(prefix: str) -> None:
    for name, bad, works in (
        ("seq_length", 4, 5),
        ("mask_prob", 0.7, 0.15),
        ("mask_prob", 0.0, 0.5),
        ("split", "1,999,0", "1,0,0"),
    ):
        refusal(partial(opened, prefix, **{name: bad}), field=f"--{name.replace('_', '-')}")
        opened(prefix, **{name: works})


def test_random_pairs_are_two_halves() -> None:
    random = bert.RandomPairs(vocabulary=9, length=6, seed=1, mask_prob=0.5)
    assert random.batch([0, 1]).token_types.tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_shortest_sequence(prefix: str) -> None:
    batch = opened(prefix, seq_length=5)[0].batch(range(50))
    assert batch.is_real.all()
    assert batch.token_types.tolist() == [[0, 0, 0, 1, 1]] * 50


def test_id_outside_the_vocabulary(prefix: str) -> None:
    training = opened(prefix, split="1,0,0")[0]
    with Path(f"{prefix}.bin").open("r+b") as stream:
        stream.write(np.full(40, VOCABULARY, "<u2").tobytes())
    refusal(lambda: training.batch(range(training.samples_per_epoch)), prefix, "id 20000")


def test_index_that_reorders_documents(tmp_path: Path) -> None:
    """Eight documents of 4 sentences of 10 tokens, all different ids."""
    first_ids = [FIRST + 40 * number for number in range(8)]
    np.arange(FIRST, FIRST + 320, dtype="<u2").tofile(tmp_path / "p.bin")
    chosen = (6, 0, 2, 7, 4, 2)
    pointers = [80 * number + 20 * sentence for number in chosen for sentence in range(4)]
    write_index(tmp_path / "p", [10] * len(pointers), range(0, len(pointers) + 1, 4), pointers)
    with pytest.warns(UserWarning, match="p.json"):
        training = opened(str(tmp_path / "p"), split="1,0,0", seq_length=43, short_seq_prob=0.0)[0]
    read = set()
    for one, other in segments(training.batch(range(training.samples_per_epoch))):
        document = [*min(one, other), *max(one, other)]
        assert document == [*range(document[0], document[0] + 40)]
        read.add(document[0])
    assert read == {first_ids[number] for number in chosen}


def test_identity_has_the_ends_of_sentences(tmp_path: Path) -> None:
    """The same tokens, cut otherwise, are other samples; of whole documents only tokens count."""
    ids = list(range(FIRST, FIRST + 12))
    one, other = [[ids[:6], ids[6:]]] * 9, [[ids[:4], ids[4:]]] * 9
    identities = [
        open_corpus([write(tmp_path / name, content)], None).identity["data"]
        for name, content in (("one", one), ("again", one), ("other", other))
    ]
    assert identities[0] == identities[1] != identities[2]
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()


# Blocks of sentences, found without a table, and pairs of segments


Sizes = Sequence[Sequence[int]]  # tokens of each sentence of each document


def random_sizes(seed: int, documents: int, sentences: int, tokens: int) -> list[list[int]]:
    """Documents of up to that many sentences each, and tokens a sentence."""
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


def blocks_of(folder: Path, sizes: Sizes, length: int, split: range | None = None) -> bert.Blocks:
    """The blocks of all documents, or of a split."""
    write_sentences(folder / "p", [[[1] * size for size in document] for document in sizes])
    documents = range(len(sizes)) if split is None else split
    return bert.Blocks(IndexedDataset(str(folder / "p")), documents, length)


def bounds(sizes: Sizes) -> list[list[int]]:
    """The starts of each document's sentences, and its end."""
    start, found = 0, []
    for document in sizes:
        found.append((start + np.cumsum([0, *document])).tolist())
        start = found[-1][-1]
    return found


def all_of(blocks: bert.Blocks) -> list[list[int]]:
    """Every block, in order, without the spare numbers."""
    found = (blocks.block(number) for number in range(len(blocks)))
    return [block.tolist() for block in found if block is not None]


@pytest.mark.parametrize("length", [2, 7, 20, 509])
@pytest.mark.parametrize("case", CASES)
def test_every_sentence_is_in_one_block(tmp_path: Path, case: str, length: int) -> None:
    sizes = CASES[case]
    for split in (range(len(sizes)), range(len(sizes) // 3, len(sizes)), range(1)):
        blocks = blocks_of(tmp_path, sizes, length, split)
        real, own = all_of(blocks), sizes[split.start : split.stop]
        documents = [each for each in bounds(sizes)[split.start : split.stop] if len(each) > 2]
        assert [pair for block in real for pair in pairwise(block)] == [
            pair for document in documents for pair in pairwise(document)
        ]
        assert all(len(block) > 2 for block in real)
        wholes = [set(document) for document in documents]
        assert all(any(whole.issuperset(block) for whole in wholes) for block in real)
        assert len(blocks) == len(own) + -(-sum(map(sum, own)) // length)


def test_lengths_of_blocks(tmp_path: Path) -> None:
    """Sentences of 1 to 9 tokens: a cut is at most half of one away from its equal share."""
    sizes = [np.random.default_rng(1).integers(1, 10, 1000).tolist()]
    starts = [block[0] for block in all_of(blocks_of(tmp_path, sizes, 100))]
    parts = -(-sum(sizes[0]) // 100)
    assert len(starts) == parts
    assert starts == pytest.approx([part * sum(sizes[0]) / parts for part in range(parts)], abs=5)


def test_empty_sentences(tmp_path: Path) -> None:
    """Other writers may leave some: they are no sentence of a pair."""
    write_index(tmp_path / "p", [3, 0, 0, 2, 0, 4], [0, 2, 5, 6])
    np.arange(9, dtype="<u2").tofile(tmp_path / "p.bin")
    blocks = bert.Blocks(IndexedDataset(str(tmp_path / "p")), range(3), 509)
    assert all_of(blocks) == []
    assert field_of(refusal(lambda: blocks.check("training"))) == "--data-path"


def test_past_2_to_the_31_tokens(tmp_path: Path) -> None:
    """The last document of a sparse data set above 4 GiB."""
    sizes = [2**30, 2**30, 5, 6]
    starts = np.cumsum([0, *sizes]).tolist()
    write_index(tmp_path / "p", sizes, [0, 2, 4])
    with (tmp_path / "p.bin").open("wb") as stream:
        stream.truncate(2 * starts[-1])
    blocks = bert.Blocks(IndexedDataset(str(tmp_path / "p")), range(2), 509)
    assert blocks.block(len(blocks) - 1).tolist() == starts[2:]
    assert blocks.block(0).tolist() == starts[:3]


def test_spare_numbers(tmp_path: Path) -> None:
    """Within 5 standard deviations of 2,000 draws."""
    blocks = blocks_of(tmp_path, USUAL, 20)
    spares, rng = [], np.random.default_rng(1)
    for number in range(len(blocks)):
        if (block := blocks.block(number)) is None:
            spares.append(number)
        else:
            found, is_spare = blocks.draw(number, rng)
            assert np.array_equal(found, block)
            assert not is_spare
    drawn = [blocks.draw(spares[0], rng) for _ in range(2_000)]
    assert all(is_spare for _, is_spare in drawn)
    counts = Counter(int(block[0]) for block, _ in drawn)
    real = all_of(blocks)
    assert set(counts) == {block[0] for block in real}
    mean = 2_000 / len(real)
    assert max(abs(count - mean) for count in counts.values()) < 5 * np.sqrt(mean)


def test_hardly_any_pair(tmp_path: Path) -> None:
    sizes = [*[[3]] * 255, [4, 5], *[[3]] * 5000]
    blocks = blocks_of(tmp_path, sizes, 509)
    block, is_spare = blocks.draw(0, np.random.default_rng(0))
    assert (block.tolist(), is_spare) == ([765, 769, 774], True)


def test_one_sentence_documents(tmp_path: Path) -> None:
    sizes = [*[[3]] * 6, *[[4, 5]] * 4]
    everything = blocks_of(tmp_path, sizes, 20)
    assert everything.one_sentence(100) == (6, 10)
    assert everything.one_sentence(5) == (3, 5)
    with pytest.warns(UserWarning, match="of 10 .* 6"):
        everything.check("test")
    blocks_of(tmp_path, sizes, 20, range(2, 10)).check("training")
    error = refusal(lambda: blocks_of(tmp_path, sizes, 20, range(6)).check("validation"))
    assert (field_of(error), "--split-sentences" in str(error)) == ("--data-path", True)


def pairs(block: list[int], length: int, short: float, count: int) -> list[bert.Pair]:
    rng = np.random.default_rng(1)
    return [bert.draw_pair(np.array(block), length, short, rng) for _ in range(count)]


def test_cuts_and_swaps() -> None:
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
def test_longer_segment_is_shortened(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    ends = [1000, 1000 + lengths[0], 1000 + sum(lengths)]
    for pair in pairs(ends, 10, 0.0, 50):
        sides = [pair.first, pair.second][:: -1 if pair.is_swapped else 1]
        assert tuple(map(len, sides)) == kept
        assert ends[0] <= sides[0].start < sides[0].stop <= ends[1]
        assert ends[1] <= sides[1].start < sides[1].stop <= ends[2]
        assert pair.truncated == sum(lengths) - sum(kept)


def test_shortening_as_in_the_original() -> None:
    """As the original BERT: the longer of the two, the second of equals, until both fit."""
    for room, a, b in product((0, 1, 6, 7), range(12), range(12)):
        first, second = a, b
        while first + second > room:
            if first > second:
                first -= 1
            else:
                second -= 1
        assert bert.lengths_kept(a, b, room) == (first, second), (a, b, room)


def test_lost_at_front_and_end_alike() -> None:
    """60 of 100 tokens, each by a coin: 30 at the front, within 4 standard deviations."""
    fronts = [
        min(each.first.start, each.second.start) for each in pairs([0, 100, 140], 80, 0.0, 1000)
    ]
    assert np.mean(fronts) == pytest.approx(30, abs=4 * np.sqrt(15 / 1000))
    assert np.std(fronts) == pytest.approx(np.sqrt(15), rel=0.1)


def test_short_samples() -> None:
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
    # A target of 3 takes 3 sentences of a token, also from the first one on.
    fitting = [len(each.first) + len(each.second) for each in pairs([0, 1, 2, 3], 3, 1.0, 2000)]
    assert np.mean(fitting) == pytest.approx(2.5, abs=4 * 0.5 / np.sqrt(2000))
    share = np.mean([each.is_short for each in pairs(bounds, 100, 0.1, 5000)])
    assert share == pytest.approx(0.1, abs=0.017)


# Masks


CONTINUES = np.arange(1000) >= 500  # of the vocabulary of these masks


def masking(mask_prob: float = 0.15, max_ngram_size: int = 3) -> bert.Masking:
    ids = {"mask": MASK, "ordinary": np.arange(FIRST, 1000), "is_continuation": CONTINUES}
    return bert.Masking(**ids, mask_prob=mask_prob, max_ngram_size=max_ngram_size)


def text(words: int, mean: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Pieces of that many words, of 1 piece or more; mean: pieces of a word."""
    ends = np.cumsum(rng.geometric(1 / mean, words))
    ids = rng.integers(500, 1000, ends[-1])
    ids[np.concatenate([[0], ends[:-1]])] = rng.integers(4, 500, words)
    return ids


def starts(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where words begin: a segment begins with one, whatever it is cut from."""
    begins = ~CONTINUES[ids]
    begins[0] = True
    return begins


def runs(words: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of words that are to be predicted."""
    edges = np.flatnonzero(np.diff(words.astype(int), prepend=0, append=0))
    return (edges[1::2] - edges[::2]).tolist()


@pytest.mark.parametrize("mean", [1.3, 5.0])
@pytest.mark.parametrize("sizes", [(400, 2), (30, 20), (6, 9)])
def test_mask_prob(sizes: Sequence[int], mean: float) -> None:
    """Within 3 standard deviations: a predicted word more or less in 10, with its pieces."""
    rng, counts = np.random.default_rng(1), np.zeros(2)
    rounds = 10_000 // sum(sizes)
    for _ in range(rounds):
        segments = [text(size, mean, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        counts += [sum(int(each.sum()) for each in chosen), sum(map(len, segments))]
    words = 0.15 * sum(sizes) * rounds
    pieces = 1 + (mean - 1) / mean  # (E[x^2] / E[x]^2) of a geometric number, at most
    assert counts[0] / counts[1] == pytest.approx(0.15, rel=3 * np.sqrt(2 * pieces / words))


@pytest.mark.parametrize("size", [16, 250])
@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_lengths_of_n_grams(longest: int, size: int) -> None:
    rng, lengths = np.random.default_rng(2), []
    for _ in range(8_000 // size):
        segments = [text(size, 1.3, rng), text(size, 1.3, rng)]
        chosen = masking(max_ngram_size=longest).choose(segments, rng)
        for ids, where in zip(segments, chosen, strict=True):
            lengths += runs(where[starts(ids)])
    weights = 1 / np.arange(1, longest + 1)
    expected = np.concatenate([[0], weights / weights.sum()])
    found = np.bincount(lengths) / len(lengths)
    assert found == pytest.approx(expected, abs=3 * np.sqrt(0.25 / len(lengths)))


def test_whole_words() -> None:
    rng = np.random.default_rng(3)
    for size in range(1, 80):
        segments = [text(size, 2.5, rng)[size % 3 :], text(20, 2.5, rng)]
        segments = [each for each in segments if len(each)]
        for ids, chosen in zip(segments, masking().choose(segments, rng), strict=True):
            of_words = np.split(chosen, np.flatnonzero(starts(ids))[1:])
            assert all(word.all() or not word.any() for word in of_words)


def test_words_are_equally_likely() -> None:
    """0.15 each within 4 standard deviations; by the ends less, as n-grams stay inside."""
    rng, words = np.random.default_rng(4), np.zeros(60)
    ids, count = np.full(60, 4), 4_000
    for _ in range(count):
        words += masking().choose([ids], rng)[0]
    inner = words[4:-4] / count
    assert np.all(abs(inner - inner.mean()) < 4 * np.sqrt(0.15 * 0.85 / count))
    assert inner.mean() == pytest.approx(0.153, abs=0.003)
    assert words.mean() / count == pytest.approx(0.15, abs=0.0015)


def test_count_of_masked_words() -> None:
    """60 of 400 words are predicted: k is 36 or 37, and lengths are as their shares say but for 1.

    Drawn one by one, 36 lengths alone would vary by 4.6 words.
    """
    rng, ids = np.random.default_rng(5), np.full(400, 4)
    counts = [int(masking().choose([ids], rng)[0].sum()) for _ in range(500)]
    assert np.mean(counts) == pytest.approx(60, abs=0.2)
    assert np.std(counts) < 1.3


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 2), (3, 4)])
def test_at_least_one_n_gram(sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        segments = [text(size, 1.5, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        words = [each[starts(ids)] for ids, each in zip(segments, chosen, strict=True)]
        assert sum(len(runs(each)) for each in words) == 1
        assert [each.shape for each in chosen] == [ids.shape for ids in segments]


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_highest_mask_prob(longest: int) -> None:
    """N-grams that do not touch can cover half of the words; long ones leave a little over."""
    rng, share = np.random.default_rng(7), []
    for _ in range(300):
        segments = [text(100, 1.0, rng), text(150, 1.0, rng)]
        share += [each.mean() for each in masking(0.5, longest).choose(segments, rng)]
    assert np.mean(share) == pytest.approx(0.5, rel=0.03)


def test_mask_80_10_10() -> None:
    rng = np.random.default_rng(8)
    ids, chosen = rng.integers(4, 1000, 400_000), rng.random(400_000) < 0.5
    read = masking().replace(ids, chosen, rng)
    assert np.array_equal(read[~chosen], ids[~chosen])
    was, now = ids[chosen], read[chosen]
    shares = [(now == 3).mean(), ((now != 3) & (now != was)).mean(), (now == was).mean()]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.003)
    # Among 996 ids, each is as likely and none is special.
    drawn = np.bincount(now[(now != 3) & (now != was)], minlength=1000)
    assert not drawn[:FIRST].any()
    mean = drawn.sum() / (1000 - FIRST)
    assert np.all(abs(drawn[4:] - mean) < 5.5 * np.sqrt(mean))
