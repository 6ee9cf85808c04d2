"""A document a sample: what is read, scored and counted, in what order, and what is refused."""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.data.cache import write as write_cache
from megatron.data.gpt2 import Boundaries, GPT2Batch
from megatron.data.padded import PaddedDataset, open_padded_splits
from megatron.data.sources import open_document_corpus
from megatron.data.tokenizer import BertWordPieceLowerCase, GPT2BPETokenizer, Tokenizer
from tests.data.samples import write_texts, write_tokenizer, write_wordpiece
from tests.refusals import field_of, refusal

END = 260  # of write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def open_training(
    paths: list[str], tokenizer: Tokenizer, *, split: str = "1,0,0", **settings: Any
) -> PaddedDataset:
    corpus = open_document_corpus(paths, tokenizer)
    given = {"seq_length": 4, "seed": 5, "shuffle": False} | settings
    training, _, _ = open_padded_splits(corpus, tokenizer, split=split, **given)
    return training


def documents(batch: GPT2Batch, tokenizer: Tokenizer) -> list[str]:
    """The text of each sample between its first token and its last."""
    return [
        tokenizer.decode(row[is_real][:-1].tolist())
        for row, is_real in zip(batch.tokens, batch.is_real, strict=True)
    ]


@pytest.mark.parametrize("has_pad", [False, True])
def test_sample_by_hand(tmp_path: Path, tokenizer: Tokenizer, has_pad: bool) -> None:
    if has_pad:
        tokenizer = BertWordPieceLowerCase(write_wordpiece(tmp_path))
    path = write_texts(tmp_path / "a.jsonl", ["a", "abc", "abcd", "abcde"])
    more = [f"##{each}" if has_pad else each for each in "bcde"]  # pieces of a word
    a, b, c, d, e = map(tokenizer.token_id, ["a", *more])
    end = tokenizer.eod
    pad = tokenizer.token_id("[PAD]") if has_pad else end
    batch = open_training([path], tokenizer).batch(range(4))
    assert batch.tokens.tolist() == [[a, end, pad, pad], [a, b, c, end], [a, b, c, d], [a, b, c, d]]
    real = [row[: int(n)] for row, n in zip(batch.labels.tolist(), (1, 3, 4, 4), strict=True)]
    assert real == [[end], [b, c, end], [b, c, d, end], [b, c, d, e]]
    assert batch.loss_mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1] * 4, [1] * 4]
    assert batch.loss_mask.dtype == np.float32
    assert batch.num_tokens == 2 + 4 + 4 + 4, "padding is not counted"
    assert (batch.is_cut.tolist(), batch.num_cut) == ([False, False, False, True], 1)
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 4

    begin = tokenizer.token_id("x")
    marked = open_training([path], tokenizer, begin_token="x", end_token="y").batch([0, 1])
    last = tokenizer.token_id("y")
    assert marked.tokens[:, :3].tolist() == [[begin, a, last], [begin, a, b]]
    assert marked.labels[1].tolist() == [a, b, c, last]


def test_documents_of_one_token(tmp_path: Path) -> None:
    tokenizer = BertWordPieceLowerCase(write_wordpiece(tmp_path))  # which drops what cannot be seen
    path = write_texts(tmp_path / "a.jsonl", ["a", "\x7f", "\u200b"])
    assert open_training([path], tokenizer).batch(range(3)).num_empty == 2
    assert open_training([path], tokenizer, begin_token="x").batch(range(3)).num_empty == 0
    assert Boundaries(eod=0).batch(np.zeros((2, 5), np.int32)).num_empty is None


def test_seed_and_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [f"d{number}" for number in range(20)]
    path = write_texts(tmp_path / "a.jsonl", texts)
    data = open_training([path], tokenizer, seq_length=8, shuffle=True)
    assert data.samples_per_epoch == 20
    first, second = (documents(data.batch(range(s, s + 20)), tokenizer) for s in (0, 20))
    assert sorted(first) == sorted(second) == sorted(texts)
    assert first != second != texts
    assert documents(data.batch([7, 33, 2]), tokenizer) == [first[7], second[13], first[2]]
    other = open_training([path], tokenizer, seq_length=8, shuffle=True, seed=6)
    assert documents(other.batch(range(20)), tokenizer) != first
    plain = open_training([path], tokenizer, seq_length=8)
    assert documents(plain.batch(range(40)), tokenizer) == texts * 2


def test_blends_and_splits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = write_texts(tmp_path / "a.jsonl", [f"a{number}" for number in range(10)])
    two = write_texts(tmp_path / "b.jsonl", [f"b{number}" for number in range(10)])
    paths = ["0.25", one, "0.75", two]
    corpus = open_document_corpus(paths, tokenizer)
    assert [each[:14] for each in corpus.identity["data"]] == ["1/4 of SHA-256", "3/4 of SHA-256"]
    assert corpus.identity["tokenizer"] == tokenizer.fingerprint
    training, validation, test = open_padded_splits(
        corpus, tokenizer, split="8,2,0", seq_length=8, seed=1, shuffle=False
    )
    assert test is None
    found = documents(training.batch(range(8)), tokenizer)
    assert sorted(found) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4", "b5"]
    assert {each[1] for each in documents(validation.batch([0, 1]), tokenizer)} <= {"8", "9"}
    assert "--eval-iters" in str(refusal(lambda: validation.batch([9])))


@pytest.mark.parametrize("epochs", [1, 3, 10])
def test_epochs_of_a_blend(tmp_path: Path, tokenizer: Tokenizer, epochs: int) -> None:
    one = write_texts(tmp_path / "a.jsonl", [f"a{number}" for number in range(10)])
    two = write_texts(tmp_path / "b.jsonl", [f"b{number}" for number in range(5)])
    data = open_training(["1", one, "9", two], tokenizer)
    samples = data.samples_in(epochs)
    found = [text[0] for text in documents(data.batch(range(samples + 1)), tokenizer)]
    assert (found[:-1].count("b"), found[-1]) == (5 * epochs, "b")


def test_refusals(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for settings, named in (
        ({"begin_token": "[BOT]"}, ["--begin-token"]),
        ({"end_token": "[EOT]"}, ["--end-token"]),
        ({"split": "1,99,0"}, ["--split"]),
        ({"refuse_too_long": True}, ["b.jsonl, line 2", "12", "--seq-length 11"]),
    ):
        one = write_texts(tmp_path / "a.jsonl", ["x", "abcdef"])
        paths = ["1", one, "1", write_texts(tmp_path / "b.jsonl", ["x", "abcdefghijk"])]
        refusal(partial(open_training, paths, tokenizer, **settings), *named)
        if "refuse_too_long" in settings:
            data = open_training(paths, tokenizer, **settings, seq_length=11)
            assert data.batch(range(4)).num_cut == 0


def test_packed_and_padded_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one = write_texts(tmp_path / "a.jsonl", ["x"])
    error = refusal(lambda: open_document_corpus(["1", one, "1", "packed"], tokenizer))
    assert (field_of(error), "--pad" in str(error)) == ("--data-path", True)
    assert "--vocab-size" in str(refusal(lambda: open_document_corpus([one], tokenizer, 7)))


class Counting(GPT2BPETokenizer):
    """Counts the texts that it tokenises."""

    texts = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        Counting.texts += len(texts)
        return super().encode_batch(texts)


def test_cache(tmp_path: Path) -> None:
    counting = Counting(*write_tokenizer(tmp_path))
    texts = ["the thin", "a" * 9, "\u00fc", *(f"d{number}" for number in range(300))]
    path = write_texts(tmp_path / "web.jsonl", texts)
    plain = open_training([path], counting, shuffle=True).batch(range(400))

    def opened(tokenizer: Tokenizer = counting, **settings: Any) -> tuple[GPT2Batch, int, int]:
        """The samples, the number of tokenised texts, and the number of caches."""
        Counting.texts = 0
        found = open_training([path], tokenizer, shuffle=True, cache_tokens=True, **settings)
        batch = found.batch(range(400))
        return batch, Counting.texts, len(list(tmp_path.glob(".web.jsonl.*.tokens")))

    for tokenised in (len(texts), 0):
        batch, *counts = opened()
        for name in ("tokens", "labels", "loss_mask", "is_real", "is_cut"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(plain, name), name)
        assert counts == [tokenised, 1]
    longer, *counts = opened(seq_length=30, begin_token="x")
    assert counts == [0, 1], "ids are whole and without marks"
    assert batch.is_cut.any()
    assert not longer.is_cut.any()
    assert opened(BertWordPieceLowerCase(write_wordpiece(tmp_path)))[2] == 2
    write_texts(tmp_path / "web.jsonl", [text[::-1] for text in texts])
    assert opened()[1:] == (len(texts), 3), "a file that has changed is tokenised again"


def test_damaged_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Damage of every kind, at the start and during a run."""
    path = write_texts(tmp_path / "web.jsonl", ["a", "bc"])

    def opened() -> PaddedDataset:
        return open_training([path], tokenizer, cache_tokens=True)

    opened()
    (cache,) = tmp_path.glob(".*.tokens")
    content = cache.read_bytes()
    message = f"--cache-tokens: {cache} is damaged; without this file it is made anew"
    start = content.index(np.array([0, 1, 3]).tobytes())  # of the bounds, after the ids
    flipped = (
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (*range(0, 16, 3), *range(start, len(content), 3))
    )
    for damaged in (*(content[:length] for length in range(len(content))), *flipped):
        cache.write_bytes(damaged)
        assert str(refusal(opened)) == message
    key = json.loads(content[int.from_bytes(content[:8], "little") :])["key"]
    ids = np.zeros(3, np.uint16)
    for bounds in ([], [0, 3], [0, 1, 2], [1, 1, 3], [0, 4, 3], [0, 1, 2, 3]):
        write_cache(cache, key, [("ids", ids), ("bounds", np.array(bounds, np.int64))])
        assert str(refusal(opened)) == message, bounds
    cache.unlink()
    training = opened()
    assert cache.read_bytes() == content
    os.truncate(cache, 16)
    assert str(refusal(lambda: training.batch([1]))) == message


def test_cache_that_cannot_be_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_texts(tmp_path / f"{'w' * 240}.jsonl", ["a", "bc"])  # too long for more after it
    with pytest.warns(UserWarning, match="--cache-tokens"):
        batch = open_training([path], tokenizer, cache_tokens=True).batch([1])
    assert documents(batch, tokenizer) == ["bc"]


@pytest.mark.usefixtures("datasets_cache")
def test_cache_of_other_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pq.write_table(pa.table({"text": ["a", "bc"]}), tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    refusal(lambda: open_training([path], tokenizer, cache_tokens=True), field="--cache-tokens")
