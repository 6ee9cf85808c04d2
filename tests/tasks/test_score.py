"""Windows score every token once; neither scores nor a task's figures depend on batch or layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.train import evaluate
from megatron.train.evaluate import batch_of
from tasks.protocol import Scores, Sliding, Window
from tasks.score import score_windows
from tests.data.samples import write_data, write_texts
from tests.dist import Pool
from tests.refusals import refusal
from tests.tasks.peer import Peer, passages, some_articles
from tests.tasks.program import figures_of, without_words
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, tiny_model


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 8), (16, 1), (4, 3)])
@pytest.mark.parametrize("reach_back", [False, True])
def test_sliding_windows(count: int, length: int, stride: int, reach_back: bool) -> None:
    tokens = list(range(count))
    windows = Sliding(tokens, length, stride, reach_back)
    assert [label for each in windows for label in each.labels[each.first :]] == tokens[1:]
    array = np.arange(count)
    assert all(np.shares_memory(each.inputs, array) for each in Sliding(array, length, stride))
    for number, window in enumerate(windows):
        assert len(window.inputs) == len(window.labels) <= length
        assert [each + 1 for each in window.inputs] == window.labels
        assert 0 <= window.first < len(window.labels)
        if number:  # as much before the scored tokens as the length leaves room for
            assert window.first >= length - stride
        if number and reach_back:
            assert len(window.inputs) == length
        if not reach_back:
            assert window.inputs[0] == number * stride


def windows_of_text() -> list[Window]:
    random = np.random.default_rng(0)
    texts = [random.integers(VOCABULARY, size=size) for size in (5, 17, 33, 60)]
    likely = np.array([random.integers(VOCABULARY)])
    windows = [window for text in texts for window in Sliding(text, SEQUENCE, 6)]
    return [*windows, easy_window(likely)]


def easy_window(tokens: Any) -> Window:
    """One whose last label alone is what the tiny model thinks most probable."""
    model = tiny_model(mesh_of_ranks(1))
    with torch.no_grad():
        for _ in range(3):
            ids = torch.from_numpy(tokens)[None]
            logits = model.eval()(batch_of(ids))[-1, :VOCABULARY]
            tokens = np.append(tokens, logits.argmax() if len(tokens) == 3 else 0)
    return Window(tokens[:-1], tokens[1:], 0)


def scored(tensor_size: int | str, micro_batch_size: int) -> Scores:
    mesh = mesh_of_ranks(tensor_size)
    model = tiny_model(mesh)
    return score_windows(model.eval(), mesh, windows_of_text(), micro_batch_size, "test")


def assert_equal(scores: Scores, expected: Scores) -> None:
    assert scores.log_probability == pytest.approx(expected.log_probability, rel=1e-12)
    for name in ("tokens", "hits", "last_hit", "all_hit"):
        one, other = getattr(scores, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist(), name


def test_scores_at_any_layout(gloo: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(mesh_of_ranks(1))
    rows = []
    for window in windows_of_text():  # one at a time, without padding, by torch's own functions
        inputs = torch.from_numpy(window.inputs)[None]
        with torch.no_grad():
            logits = model.eval()(batch_of(inputs))[window.first :, :VOCABULARY]
        labels = torch.from_numpy(window.labels[window.first :])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        hits = logits.argmax(dim=1) == labels
        rows.append((-loss, len(labels), hits.sum().item(), hits[-1].item()))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    expected = Scores(*columns)
    assert expected.tokens.sum() == 4 + 16 + 32 + 59 + 3
    assert (expected.hits[-1] < 3, expected.last_hit[-1]) == (True, True)
    for size in (1, 3, 100):
        assert_equal(scored(1, size), expected)
    for world, tensor_size in ((4, 2), (4, "4:2d"), (4, "tensor=2,context=2:p2p")):
        for scores in gloo.run(world, scored, tensor_size, 4):
            assert_equal(scores, expected)
    monkeypatch.setattr(evaluate, "SCORED_AT_ONCE", 7)
    assert_equal(scored(1, 3), expected)


def all_figures(rows: list[list[str]], tensor_size: int | str, micro_batch_size: int) -> list[Any]:
    """The figures of each task on the first rank."""
    more = ["--micro-batch-size", str(micro_batch_size)]
    return [figures_of(task, tensor_size, *words, *more) for task, *words in rows]


def test_figures_at_any_layout(peer: Peer, test_data: Path, tmp_path: Path, gloo: Pool) -> None:
    load, texts, both = ["--load", str(peer.checkpoint)], passages(test_data)[:9], "--per-document"
    wiki, lambada, heldout = (tmp_path / name for name in ("wiki", "lambada", "heldout.jsonl"))
    wiki.write_text(some_articles(test_data, 2), encoding="utf-8")
    write_texts(lambada, texts)
    text = "\n\n".join(texts[:6])
    write_texts(heldout, [text])
    train = [[*peer.encode(text), peer.tokenizer.eos_token_id] for _ in range(4)]
    write_data(tmp_path / "train", train, vocab_size=50_257)
    (tmp_path / "train.json").unlink()  # of another tokenizer, it says
    own = ["--train-data", str(tmp_path / "train")]
    rows = [
        ["WIKITEXT103", *load, "--valid-data", str(wiki), "--overlapping-eval", "96", both],
        ["LAMBADA", *load, "--valid-data", str(lambada)],
        ["HELDOUT", *load, "--input", str(heldout), *own],
    ]
    alone = all_figures(rows, 1, 8)
    expected = [
        {key: pytest.approx(x, rel=1e-6) if isinstance(x, float) else x for key, x in each.items()}
        for each in alone
    ]
    assert all_figures(rows, 1, 3) == expected
    for world, tensor_size in ((4, 2), (2, "context=2:p2p")):
        first, *others = gloo.run(world, all_figures, rows, tensor_size, 8)
        assert first == expected, (world, tensor_size)
        assert others == [[{}] * len(rows)] * (world - 1)

    figures = alone[2]
    assert len(without_words(figures)) == 13
    assert figures["tokens"] == len(peer.encode(text)) + 1
    assert figures["cloze_passages"] > 3
    assert figures["unigram_perplexity"] < figures["token_perplexity"]


def diverged(tensor_size: int) -> str:
    """The error of a model that has."""
    mesh = mesh_of_ranks(tensor_size)
    model = tiny_model(mesh)
    torch.nn.init.constant_(model.final_norm.bias, float("nan"))
    return str(refusal(lambda: score_windows(model.eval(), mesh, windows_of_text(), 4, "test")))


def test_diverged_model(gloo: Pool) -> None:
    assert "--dtype" in (error := diverged(1))
    assert gloo.run(2, diverged, 1) == gloo.run(2, diverged, 2) == [error] * 2


def test_perplexity() -> None:
    ones = np.ones(2, np.int64)
    scores = Scores(np.array([-3.0, -1.0]), ones, ones, ones.astype(bool))
    assert scores.perplexity(2) == pytest.approx(np.exp(2))
    assert scores[1:].perplexity(1) == pytest.approx(np.exp(1))
    assert scores.perplexity(1e-3) == float("inf")
