"""Held-out documents and their yardsticks, the n-gram models."""

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from megatron.config.checkpoint import TrainedConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from tasks import ngram
from tasks.heldout import Settings, cloze_windows, prepare, read_texts, training_tokens
from tasks.protocol import Scores, Window
from tests.data.samples import write_data, write_texts, write_tokenizer, write_tokenizer_json
from tests.refusals import field_of, refusal
from tests.tools.convert.models import write_sentencepiece


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))


TEXT = 'One two three (the end).\n\nToo short\n\nNo word ends this 12\n\nHe said "go there now!"'


def cloze(
    texts: list[str], tokenizer: Tokenizer, length: int = 100, most: int = 500
) -> list[Window]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.heldout.CLOZE_WORDS", 4)
        patch.setattr("tasks.heldout.CLOZE_PASSAGES", most)
        return [*cloze_windows(texts, tokenizer, [tokenizer.eod], length)]


def test_cloze(tokenizer: Tokenizer) -> None:
    """It asks for the last word of long paragraphs, spread evenly where some are left out."""
    first, second = cloze([TEXT], tokenizer)
    assert tokenizer.decode(first.labels[first.first :]) == " end"
    assert tokenizer.decode(first.inputs[1:]) + "d" == "One two three (the end"
    assert tokenizer.decode(second.labels[second.first :]) == " now"
    (short, _) = cloze([TEXT], tokenizer, 8)
    assert (len(short.inputs), short.labels) == (8, first.labels[-8:])
    words = ["zero", "one", "two", "three", "four", "five", "six"]
    some = cloze([f"a b c {word}" for word in words], tokenizer, most=4)
    found = [tokenizer.decode(window.labels[window.first :]) for window in some]
    assert found == [" zero", " one", " three", " five"]


def test_cloze_of_other_tokenizers(tmp_path: Path) -> None:
    file = Path(write_tokenizer_json(tmp_path / "json")) / "tokenizer.json"
    other = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    (window, _) = cloze([TEXT], other)
    assert other.decode(window.labels[window.first :]) == " end"
    write_sentencepiece(tmp_path / "json", 317)
    llama = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    (window, _) = cloze([TEXT], llama)
    assert [*window.inputs[1:], window.labels[-1]] == llama.encode("One two three (the end")
    assert window.labels[window.first :] == [llama.token_id(each) for each in "\u2581end"]
    letters = {letter: number for number, letter in enumerate(["a", "b", " ", " b", "a b"])}
    spanning = Library(BPE(letters, [(" ", "b"), ("a", " b")]))
    spanning.add_special_tokens(["</s>", "<s>"])
    spanning.save(str(file))
    other = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    refusal(lambda: cloze(["b a a b"], other), "--tokenizer-type GPT2BPETokenizer")


def test_lines_without_text(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text('{"text": "good"}\n{"txt": "bad"}\n{"text": "too"}\n')
    with pytest.warns(UserWarning, match="heldout.jsonl, byte 17"):
        assert read_texts([file], "text") == (["good", "too"], 1)
    (tmp_path / "more.txt").write_text("all\nof it")
    with pytest.warns(UserWarning, match="heldout.jsonl, byte 17"):
        assert read_texts([tmp_path], "text") == (["good", "too", "all\nof it"], 1)
    with pytest.warns(UserWarning, match="heldout.jsonl"):
        assert field_of(refusal(lambda: read_texts([file], "body"))) == "--input"


def test_training_data_of_another_tokenizer(tmp_path: Path) -> None:
    write_data(tmp_path / "train", [[1, 2, 0], [3, 0], [4, 0]])
    manifest = {"tokenizer": "f", "config": {"data": {"split": "2,1,0"}}}
    assert training_tokens(str(tmp_path / "train"), manifest).tolist() == [1, 2, 0, 3, 0]
    other = manifest | {"tokenizer": "g"}
    refusal(lambda: training_tokens(str(tmp_path / "train"), other), field="--train-data")


def test_documents_between_marks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end, texts = tokenizer.eod, ["in  the inn", "One two three\n four"]
    write_texts(tmp_path / "texts.jsonl", texts)
    train = [[*tokenizer.encode(text), end] for text in texts]
    write_data(tmp_path / "train", train, vocab_size=tokenizer.vocab_size)
    files = {"input": (tmp_path / "texts.jsonl",), "train_data": str(tmp_path / "train")}
    settings = Settings(trained=TrainedConfig(load=""), **files)
    manifest = {"tokenizer": "f", "config": {"data": {"seq_length": 8, "split": "1,0,0"}}}
    task = prepare(settings, manifest, tokenizer)
    windows = iter(task.windows)
    for ids in train:
        first = next(windows)
        assert [*first.inputs, first.labels[-1]] == [end, *ids][: len(first.inputs) + 1]
        found = [*first.labels[first.first :]]
        while len(found) < len(ids):
            window = next(windows)
            assert window.first >= 4, "half a window stands before what is scored"
            found += [*window.labels[window.first :]]
        assert found == ids
    counts = np.array([len(each.labels) - each.first for each in task.windows])  # -1 for each
    figures = task.score(Scores(-1.0 * counts, counts, 0 * counts, counts < 0), [])
    tokens, words, size = sum(map(len, train)), 3 + 4, len("\n".join(texts))
    assert (figures["tokens"], figures["words"], figures["bytes"]) == (tokens, words, size)
    assert figures["token_perplexity"] == pytest.approx(np.e)
    assert figures["word_perplexity"] == pytest.approx(np.exp(tokens / words))
    assert figures["bits_per_byte"] == pytest.approx(tokens / np.log(2) / size)


# N-gram models


def test_discounts() -> None:
    counts = np.repeat([0, 1, 2, 3, 4, 9], [7, 50, 20, 12, 8, 3])
    y = 50 / (50 + 2 * 20)
    expected = [0, 1 - 2 * y * 20 / 50, 2 - 3 * y * 12 / 20, 3 - 4 * y * 8 / 12]
    assert ngram.discounts(counts) == pytest.approx(expected)


def test_bigram_by_hand() -> None:
    """Documents "1 2", "1 2", "1 1" over the ids 0 (end), 1, 2, 3; fallback discounts."""
    train = np.array([1, 2, 0, 1, 2, 0, 1, 1, 0])
    assert (ngram.discounts(np.array([3, 2, 2, 1, 1])) == ngram.FALLBACK_DISCOUNTS).all()
    # bigrams: 0>1 three times, 1>2 and 2>0 twice, 1>1 and 1>0 once
    # contexts of 0: {2, 1}, of 1: {0, 1}, of 2: {1}; discounts 1, 1, 0.5 of 5 are spread over 4
    lower = np.array([1, 1, 0.5, 0]) / 5 + 2.5 / 5 / 4
    model = ngram.Bigram(train, 4)
    assert model.lower == pytest.approx(lower)

    def p(previous: int, word: int) -> float:
        return float(model.probability(np.array([previous]), np.array([word]))[0])

    wide, every = ngram.Bigram(300 * train.astype(np.uint16), 1000), np.arange(1000)
    for previous in (0, 300, 600, 7):
        assert wide.probability(np.full(1000, previous), every).sum() == pytest.approx(1)
    assert p(0, 1) == pytest.approx((3 - 1.5) / 3 + 1.5 / 3 * lower[1])
    assert p(1, 2) == pytest.approx((2 - 1) / 4 + (1 + 0.5 + 0.5) / 4 * lower[2])
    assert p(1, 3) == pytest.approx((1 + 0.5 + 0.5) / 4 * lower[3])
    assert p(3, 2) == pytest.approx(lower[2])
    heldout = np.array([1, 2, 0, 3, 0])  # predicted from 0, 1, 2, 0, 3
    steps = [p(0, 1), p(1, 2), p(2, 0), p(0, 3), p(3, 0)]
    expected = math.exp(-sum(map(math.log, steps)) / 5)
    assert ngram.bigram_perplexity(train, heldout, 4) == pytest.approx(expected)


def test_streams_that_do_not_fit() -> None:
    outside, endless, empty = np.array([3, 0]), np.array([0, 1]), np.array([], np.int64)
    refusal(lambda: ngram.unigram_perplexity(outside, np.array([1, 0]), 3))
    refusal(lambda: ngram.bigram_perplexity(endless[::-1], endless, 3), "--no-append-eod")
    refusal(lambda: ngram.unigram_perplexity(np.array([1, 0]), empty, 3))
