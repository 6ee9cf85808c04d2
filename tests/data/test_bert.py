"""BERT's samples: what is in them, in what order, and what decides it.

Every token of the data sets here has an id of its own, so that a sample tells where it is from; ids
from CONTINUATIONS on go on with a word. What is masked, and how often, is tested at the end.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.bert import BertBatch, BertDataset, Masking, open_bert_splits
from megatron.data.sources import open_corpus, require_sequences
from tests.data.samples import write_data, write_index, write_sentences
from tests.refusals import field_of, refusal

PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4
VOCABULARY = 20_000
CONTINUATIONS = 15_000


class Marks:
    """What the samples need of a tokenizer; says of itself what write_sentences() says."""

    kind = "BertWordPieceLowerCase"
    vocab_size = VOCABULARY
    fingerprint = "f"
    pad, cls, sep, mask, eod = PAD, CLS, SEP, MASK, SEP
    is_continuation = np.arange(VOCABULARY) >= CONTINUATIONS


def documents(count: int, first: int = FIRST, sentences: int = 7) -> list[list[list[int]]]:
    """Of 2 to 8 sentences of 2 to 9 tokens, all different ids."""
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
) -> list[BertDataset | None]:
    settings = {"mask_prob": 0.15, "short_seq_prob": 0.1, "max_ngram_size": 3} | others
    corpus = open_corpus(data_path, Marks())
    splits = open_bert_splits(
        corpus, Marks(), split=split, seq_length=seq_length, seed=seed, **settings
    )
    return list(splits)


def segments(batch: BertBatch) -> Iterator[tuple[list[int], list[int]]]:
    """What stands in the two segments of each sample."""
    for labels, types, is_real in zip(batch.labels, batch.token_types, batch.is_real, strict=True):
        yield labels[(types == 0) & is_real][1:-1].tolist(), labels[types == 1][:-1].tolist()


def equal(first: BertBatch, second: BertBatch) -> bool:
    return all(np.array_equal(each, vars(second)[name]) for name, each in vars(first).items())


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "p", documents(60))


def test_a_sample_is_two_segments_between_marks_and_padding(prefix: str) -> None:
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


def test_what_is_predicted_is_hidden_and_nothing_else(prefix: str) -> None:
    batch = opened(prefix)[0].batch(range(300))
    is_chosen, is_mark = batch.loss_mask == 1, batch.labels < FIRST
    assert set(np.unique(batch.loss_mask)) == {0, 1}
    assert not (is_chosen & is_mark).any()
    assert np.array_equal(batch.tokens[~is_chosen], batch.labels[~is_chosen])
    assert is_chosen.any(axis=1).all()
    found = batch.tokens[is_chosen]
    assert (found == MASK).mean() == pytest.approx(0.8, abs=0.05)
    assert ((found == MASK) | (found >= FIRST)).all()


def test_segments_are_neighbours_in_one_document_swapped_as_the_label_says(prefix: str) -> None:
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


def test_an_epoch_reads_every_sentence_and_the_next_has_other_cuts_and_masks(prefix: str) -> None:
    """Of the training split, all of which have two sentences; no document is cut by the length."""
    data = opened(prefix, short_seq_prob=0.0, seq_length=512)[0]
    everything = {token for each in documents(60)[:48] for sentence in each for token in sentence}
    size = data.samples_per_epoch
    epochs = [data.batch(range(epoch * size, (epoch + 1) * size)) for epoch in range(3)]
    for batch in epochs:
        assert {token for pair in segments(batch) for side in pair for token in side} == everything
    for first, second in pairwise(epochs):
        assert not np.array_equal(first.labels, second.labels)
        assert np.sum(first.loss_mask != second.loss_mask) > first.loss_mask.sum()


def test_the_sample_depends_on_seed_and_number_alone(prefix: str) -> None:
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


def test_cuts_and_masks_depend_on_seed_and_number(tmp_path: Path) -> None:
    """Of one block, which no order can change."""
    single = write(tmp_path / "p", documents(7)[6:])
    rows = set()
    for seed in range(4):
        batch = opened(single, split="1,0,0", seq_length=64, seed=seed)[0].batch(range(10))
        rows |= {row.tobytes() for row in np.concatenate([batch.tokens, batch.labels], axis=1)}
    assert len(rows) == 40


def test_a_blend_takes_from_each_its_share(tmp_path: Path) -> None:
    first = write(tmp_path / "a", documents(40))
    second = write(tmp_path / "b", documents(30, first=CONTINUATIONS))
    training, _, test = opened("0.3", first, "0.7", second, split="8,2,0")
    assert test is None
    batch = training.batch(range(100))
    assert (batch.labels[:, 1] >= CONTINUATIONS).sum() == 70
    again = training.batch([*range(50, 100), *range(50)])
    assert np.array_equal(again.tokens, np.roll(batch.tokens, 50, axis=0))


def test_data_that_is_no_pairs_of_sentences_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "gpt2", [[5, 6, 7, 8]] * 9, eod=None)
    gpt2 = open_corpus([str(tmp_path / "gpt2")], None)
    require_sequences(gpt2, sentences=False)
    pairs = open_corpus([write(tmp_path / "pairs", documents(9))], None)
    lines = write(tmp_path / "lines", [[[5, 6, 7]]] * 9)
    marked = write(tmp_path / "marked", documents(60))
    sidecar = tmp_path / "marked.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"eod": 2}))
    for call, name, cure in (
        (lambda: require_sequences(gpt2, sentences=True), "gpt2", "--split-sentences"),
        (lambda: require_sequences(pairs, sentences=False), "pairs", "--split-sentences"),
        (lambda: opened(lines), "lines", "--split-sentences"),
        (lambda: opened(marked), "marked", "--split-sentences"),
    ):
        error = refusal(call)
        assert field_of(error) == "--data-path"
        assert all(each in str(error) for each in (name, cure)), error


@pytest.mark.parametrize(
    ("name", "bad", "works"),
    [
        ("seq_length", 4, 5),
        ("mask_prob", 0.7, 0.15),
        ("mask_prob", 0.0, 0.5),
        ("split", "1,999,0", "1,0,0"),
    ],
)
def test_wrong_settings_are_refused(prefix: str, name: str, bad: object, works: object) -> None:
    error = refusal(lambda: opened(prefix, **{name: bad}))
    assert field_of(error) == f"--{name.replace('_', '-')}"
    opened(prefix, **{name: works})


def test_the_shortest_sequence_has_room_for_a_pair(prefix: str) -> None:
    batch = opened(prefix, seq_length=5)[0].batch(range(50))
    assert batch.is_real.all()
    assert batch.token_types.tolist() == [[0, 0, 0, 1, 1]] * 50


def test_an_id_outside_the_vocabulary_is_found_when_it_is_read(prefix: str) -> None:
    training = opened(prefix, split="1,0,0")[0]
    with Path(f"{prefix}.bin").open("r+b") as stream:
        stream.write(np.full(40, VOCABULARY, "<u2").tobytes())
    error = refusal(lambda: training.batch(range(training.samples_per_epoch)))
    assert all(each in str(error) for each in (prefix, "id 20000"))


def test_an_index_selects_and_reorders_documents_of_sentences(tmp_path: Path) -> None:
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


def test_where_sentences_end_is_part_of_a_data_set_s_identity(tmp_path: Path) -> None:
    """The same tokens, cut otherwise, are other samples; of whole documents only tokens count."""
    ids = list(range(FIRST, FIRST + 12))
    one, other = [[ids[:6], ids[6:]]] * 9, [[ids[:4], ids[4:]]] * 9
    identities = [
        open_corpus([write(tmp_path / name, content)], None).identity["data"]
        for name, content in (("one", one), ("again", one), ("other", other))
    ]
    assert identities[0] == identities[1] != identities[2]
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()


CONTINUES = np.arange(1000) >= 500  # of the vocabulary of these masks


def masking(mask_prob: float = 0.15, max_ngram_size: int = 3) -> Masking:
    return Masking(
        mask=MASK,
        ordinary=np.arange(FIRST, 1000),
        is_continuation=CONTINUES,
        mask_prob=mask_prob,
        max_ngram_size=max_ngram_size,
    )


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


@pytest.mark.parametrize("mean", [1.0, 1.3, 5.0])
@pytest.mark.parametrize("sizes", [(400, 2), (30, 20), (6, 9)])
def test_the_share_of_masked_tokens_is_mask_prob(sizes: Sequence[int], mean: float) -> None:
    """Within 3 standard deviations: a predicted word more or less in 10, with its pieces."""
    rng, counts = np.random.default_rng(1), np.zeros(2)
    rounds = 30_000 // sum(sizes)
    for _ in range(rounds):
        segments = [text(size, mean, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        counts += [sum(int(each.sum()) for each in chosen), sum(map(len, segments))]
    words = 0.15 * sum(sizes) * rounds
    pieces = 1 + (mean - 1) / mean  # (E[x^2] / E[x]^2) of a geometric number, at most
    assert counts[0] / counts[1] == pytest.approx(0.15, rel=3 * np.sqrt(2 * pieces / words))


@pytest.mark.parametrize("size", [16, 250])
@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_n_grams_of_n_words_are_as_often_as_1_by_n(longest: int, size: int) -> None:
    rng, lengths = np.random.default_rng(2), []
    for _ in range(20_000 // size):
        segments = [text(size, 1.3, rng), text(size, 1.3, rng)]
        chosen = masking(max_ngram_size=longest).choose(segments, rng)
        for ids, where in zip(segments, chosen, strict=True):
            lengths += runs(where[starts(ids)])
    weights = 1 / np.arange(1, longest + 1)
    expected = np.concatenate([[0], weights / weights.sum()])
    found = np.bincount(lengths) / len(lengths)
    assert found == pytest.approx(expected, abs=3 * np.sqrt(0.25 / len(lengths)))


def test_words_are_predicted_whole() -> None:
    rng = np.random.default_rng(3)
    for size in range(1, 80):
        segments = [text(size, 2.5, rng)[size % 3 :], text(20, 2.5, rng)]
        segments = [each for each in segments if len(each)]
        for ids, chosen in zip(segments, masking().choose(segments, rng), strict=True):
            of_words = np.split(chosen, np.flatnonzero(starts(ids))[1:])
            assert all(word.all() or not word.any() for word in of_words)


def test_every_word_away_from_the_ends_of_a_segment_is_as_likely() -> None:
    """0.15 each within 4 standard deviations; by the ends less, as n-grams stay inside."""
    rng, words = np.random.default_rng(4), np.zeros(60)
    ids, count = np.full(60, 4), 10_000
    for _ in range(count):
        words += masking().choose([ids], rng)[0]
    inner = words[4:-4] / count
    assert np.all(abs(inner - inner.mean()) < 4 * np.sqrt(0.15 * 0.85 / count))
    assert inner.mean() == pytest.approx(0.153, abs=0.002)
    assert words.mean() / count == pytest.approx(0.15, abs=0.001)


def test_the_count_of_a_sample_varies_little() -> None:
    """Of 400 words 60 are predicted: k is 36 or 37, and lengths are as their shares say but for 1.

    Drawn one by one, 36 lengths alone would vary by 4.6 words.
    """
    rng, ids = np.random.default_rng(5), np.full(400, 4)
    counts = [int(masking().choose([ids], rng)[0].sum()) for _ in range(500)]
    assert np.mean(counts) == pytest.approx(60, abs=0.2)
    assert np.std(counts) < 1.3


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 2), (3, 4)])
def test_at_least_one_n_gram_however_short_the_sample(sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        segments = [text(size, 1.5, rng) for size in sizes]
        chosen = masking().choose(segments, rng)
        words = [each[starts(ids)] for ids, each in zip(segments, chosen, strict=True)]
        assert sum(len(runs(each)) for each in words) == 1
        assert [each.shape for each in chosen] == [ids.shape for ids in segments]


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_the_highest_mask_prob_has_room(longest: int) -> None:
    """N-grams that do not touch can cover half of the words; long ones leave a little over."""
    rng, share = np.random.default_rng(7), []
    for _ in range(300):
        segments = [text(100, 1.0, rng), text(150, 1.0, rng)]
        share += [each.mean() for each in masking(0.5, longest).choose(segments, rng)]
    assert np.mean(share) == pytest.approx(0.5, rel=0.03)


def test_what_hides_a_token_is_drawn_80_10_10() -> None:
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
