"""LAMBADA: the figures of a plain loop over transformers, of both files."""

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.checkpoint import TrainedConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer, read_tokenizer
from tasks.lambada import Lambada, Settings, prepare, spells
from tasks.protocol import Scores
from tests.data.samples import write_dropping_tokenizer, write_tokenizer, write_tokenizer_json
from tests.tasks.peer import COUNT, Peer, passages
from tests.tasks.program import figures_of, without_words
from tests.tools.corpus.lines import write_jsonl


def task_of(file: Path, tokenizer: Tokenizer, positions: int = 64, **data: Any) -> Lambada:
    """data: what the model's settings say of its data."""
    settings = Settings(trained=TrainedConfig(load=""), valid_data=file)
    config = {"model": {"max_position_embeddings": positions}, "data": data}
    return prepare(settings, {"config": config}, tokenizer)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    texts = ["in the inn, the thing", "the thing in"]
    return write_jsonl(tmp_path / "two.jsonl", [{"text": text} for text in texts])


@torch.no_grad()
def reference(peer: Peer, texts: list[str]) -> dict[str, float]:
    """One passage at a time."""
    strict = last = greedy = nll = 0.0
    for text in texts:
        context, word = text.rsplit(" ", 1)
        ids = peer.encode(context)
        target = peer.encode(context + " " + word)[len(ids) :]
        given = peer.log_probabilities([*ids, *target])[len(ids) - 1 : -1]
        right = given.argmax(-1) == torch.tensor(target)
        nll -= sum(row[label].item() for row, label in zip(given, target, strict=True))
        strict += right.all().item()
        last += right[-1].item()
        whole = peer.model.generate(
            torch.tensor([ids]), max_new_tokens=16, do_sample=False, pad_token_id=0
        )[0, len(ids) :].tolist()
        written = peer.tokenizer.decode(whole).split("<|endoftext|>")[0]
        first = written[1:].split()[0] if written[:1] == " " and written[1:2].strip() else ""
        rest = first.removeprefix(word)
        greedy += first.startswith(word) and not any(each.isalnum() for each in rest)
    count = len(texts)
    return {
        "strict_accuracy": strict / count,
        "last_token_accuracy": last / count,
        "greedy_accuracy": greedy / count,
        "last_word_perplexity": exp(nll / count),
    }


def test_figures_of_a_plain_loop(peer: Peer, test_data: Path, tmp_path: Path) -> None:
    texts = passages(test_data)
    file = write_jsonl(tmp_path / "test.jsonl", [{"text": text} for text in texts])
    figures = figures_of("LAMBADA", 1, "--valid-data", str(file), "--load", str(peer.checkpoint))
    expected = reference(peer, texts)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert 0 < figures["greedy_accuracy"] < figures["strict_accuracy"] < 1
    assert figures["strict_accuracy"] <= figures["last_token_accuracy"] < 1
    assert figures["num_examples"] == COUNT
    assert figures["num_bytes"] == sum(len(text.encode()) for text in texts)
    assert figures["truncated_contexts"] == figures["truncated_prompts"] == 0
    assert len(without_words(figures)) == 14


def test_tokenizer_json(tmp_path: Path, file: Path, tokenizer: Tokenizer) -> None:
    """Blanks belong to words there, too; the begin token is read once."""
    other = build_tokenizer("HuggingFaceTokenizer", write_tokenizer_json(tmp_path / "t"), None)
    ours, theirs = task_of(file, other), task_of(file, tokenizer)
    begun = task_of(file, other, begin_token="[BOT]")
    begin = other.token_id("[BOT]")
    for number in range(len(ours)):
        assert ours[number].first == theirs[number].first
        assert np.array_equal(ours[number].labels, theirs[number].labels + 3)
        assert list(begun[number].inputs) == [begin, *ours[number].inputs]
        assert begun.prompts.tokens[number][0] == begin
        scored = begun[number].labels[begun[number].first :]
        assert np.array_equal(scored, ours[number].labels[ours[number].first :])


def test_tokenizer_that_drops_the_first_blank(tmp_path: Path, file: Path) -> None:
    folder = write_dropping_tokenizer(tmp_path / "d")
    dropping = build_tokenizer("HuggingFaceTokenizer", folder, None)
    task = task_of(file, dropping)
    own = [window.labels[window.first :].tolist() for window in map(task.__getitem__, range(2))]
    assert [dropping.decode(ids) for ids in own] == ["thing", "in"]
    assert [task.passages[number].target for number in range(2)] == [" thing", " in"]
    one = np.ones(2, np.int64)
    figures = task.score(Scores(-1.0 * one, one, one, one > 0), [own[0], [*own[1], own[0][1]]])
    assert figures["greedy_accuracy"] == 0.5, "'int' is not 'in'"
    next_word = dropping.encode("thing in")
    assert [task.ends_word(next_word[:end]) for end in (1, 6, 7)] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "count"),
    [("lambada_development_plain_text.txt", 4869), ("lambada_test_first500.jsonl", 500)],
)
def test_whole_releases(test_data: Path, name: str, count: int) -> None:
    tokenizer = read_tokenizer("GPT2BPETokenizer", test_data / "gpt2")
    task = task_of(test_data / "lambada" / name, tokenizer, 1024)
    assert len(task) == count
    for number in (0, count - 1):
        window = task[number]
        text = tokenizer.decode([*window.inputs, window.labels[-1]])
        assert text == task.passages[number].text
        assert text.endswith(tokenizer.decode([*window.labels[window.first :]]))


def test_spells() -> None:
    for text in (" Helen", " Helen and", " Helen.\n", ' Helen," she'):
        assert spells(text, " Helen"), text
    for text in (" Helen's", " Helena", " Helen2 x", "Helen", "  Helen", "\nHelen", " Hel", ""):
        assert not spells(text, " Helen"), text


def test_word_boundary_and_long_passages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "plain.txt"
    file.write_text("in the inn the end\n" + "a b " * 20 + "thin\n", encoding="utf-8")
    task = task_of(file, tokenizer, 24)
    done = [task.ends_word(tokenizer.encode(text)) for text in (" ", " in", " in ", "in", " i\n")]
    assert done == [False, False, True, True, True]
    short, long = task[0], task[1]
    assert tokenizer.decode(short.labels[short.first :]) == " end"
    assert tokenizer.decode([short.inputs[0], *short.labels]) == "in the inn the end"
    assert tokenizer.decode(long.labels[long.first :]) == " thin"
    assert len(long.inputs) == 24
    assert [len(each) for each in task.prompts.tokens] == [6, 8]
    assert task.prompts.most == 16
    exact, one = task_of(file, tokenizer, len(short.inputs)), np.ones(2, np.int64)
    figures = exact.score(Scores(-1.0 * one, one, one, one > 0), [[], []])
    assert figures["truncated_contexts"] == 1  # the last token is no input


def test_words_count_whole(file: Path, tokenizer: Tokenizer) -> None:
    task = task_of(file, tokenizer)
    counts = np.array([len(each.labels) - each.first for each in (task[0], task[1])])
    assert counts.tolist() == [len(tokenizer.encode(each)) for each in (" thing", " in")]
    scores = Scores(-1.0 * counts, counts, counts - [1, 0], np.array([True, True]))
    figures = task.score(scores, [[], []])
    assert (figures["strict_accuracy"], figures["last_token_accuracy"]) == (0.5, 1.0)
    assert figures["target_token_perplexity"] == pytest.approx(exp(1))
    assert figures["last_word_perplexity"] == pytest.approx(exp(counts.sum() / 2))
