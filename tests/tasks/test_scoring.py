"""Windows score every token once; neither scores nor a task's figures depend on batch or layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from megatron.config.checkpoint import TrainedConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.evaluate import batch_of
from tasks.heldout import Settings, cloze_windows, prepare, read_texts, training_tokens
from tasks.protocol import Scores, Sliding, Task, Window
from tasks.score import score_windows
from tests.data.samples import write_data, write_tokenizer, write_tokenizer_json
from tests.dist import Pool
from tests.refusals import field_of, refusal
from tests.tasks.passages import passages, some_articles
from tests.tasks.peer import Peer
from tests.tasks.program import figures_of, without_words
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, tiny_model
from tests.tools.convert.models import write_sentencepiece


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 8), (16, 1), (4, 3)])
@pytest.mark.parametrize("reach_back", [False, True])
def test_windows_score_every_token_but_the_first_once(
    count: int, length: int, stride: int, reach_back: bool
) -> None:
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


def test_scores_depend_on_neither_batch_size_nor_layout(gloo: Pool) -> None:
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
    for world, tensor_size in ((2, 2), (2, 1), (4, 4), (4, 2), (4, "4:2d"), (8, "8:3d")):
        for scores in gloo.run(world, scored, tensor_size, 4):
            assert_equal(scores, expected)


def all_figures(rows: list[list[str]], tensor_size: int | str, micro_batch_size: int) -> list[Any]:
    """The figures of each task on the first rank."""
    more = ["--micro-batch-size", str(micro_batch_size)]
    return [figures_of(task, tensor_size, *words, *more) for task, *words in rows]


def test_every_task_gives_the_same_figures_at_every_layout_and_batch_size(
    peer: Peer, test_data: Path, tmp_path: Path, gloo: Pool
) -> None:
    load, texts, both = ["--load", str(peer.checkpoint)], passages(test_data), "--per-document"
    wiki, lambada, heldout = (tmp_path / name for name in ("wiki", "lambada", "heldout.jsonl"))
    wiki.write_text(some_articles(test_data), encoding="utf-8")
    lambada.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    text = "\n\n".join(texts[:6])
    heldout.write_text(json.dumps({"text": text}) + "\n")
    train = [[*peer.encode(text), peer.tokenizer.eos_token_id] for _ in range(4)]
    write_data(tmp_path / "train", train, vocab_size=50_257)
    (tmp_path / "train.json").unlink()  # of another tokenizer, it says
    own = ["--train-data", str(tmp_path / "train"), "--cloze-words", "5"]
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
    for world, tensor_size in ((4, 2), (2, 1), (4, "4:2d")):
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


def test_a_model_that_has_diverged_has_no_figures(gloo: Pool) -> None:
    assert "--dtype" in (error := diverged(1))
    assert gloo.run(2, diverged, 1) == gloo.run(2, diverged, 2) == [error] * 2


def test_a_perplexity_too_large_to_write_is_infinite() -> None:
    ones = np.ones(2, np.int64)
    scores = Scores(np.array([-3.0, -1.0]), ones, ones, ones.astype(bool))
    assert scores.perplexity(2) == pytest.approx(np.exp(2))
    assert scores[1:].perplexity(1) == pytest.approx(np.exp(1))
    assert scores.perplexity(1e-3) == float("inf")


def test_cloze_asks_for_the_last_word_of_long_paragraphs(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))
    write_data(tmp_path / "train", [[1, 0]])
    texts = tmp_path / "heldout.jsonl"
    texts.write_text("{}")
    settings = Settings(
        trained=TrainedConfig(load=""),
        input=(texts,),
        train_data=str(tmp_path / "train"),
        cloze_words=4,
    )
    text = (
        'One two three (the end).\n\nToo short\n\nNo word ends this 12\n\nHe said "go there now!"'
    )
    first, second = cloze_windows([text], tokenizer, [tokenizer.eod], 100, settings)
    assert tokenizer.decode(first.labels[first.first :]) == " end"
    assert tokenizer.decode(first.inputs[1:]) + "d" == "One two three (the end"
    assert tokenizer.decode(second.labels[second.first :]) == " now"

    (short, _) = cloze_windows([text], tokenizer, [tokenizer.eod], 8, settings)
    assert (len(short.inputs), short.labels) == (8, first.labels[-8:])

    words = ["zero", "one", "two", "three", "four", "five", "six"]
    texts_of_one = [f"a b c {word}" for word in words]
    some = cloze_windows(
        texts_of_one, tokenizer, [tokenizer.eod], 100, replace(settings, cloze_passages=4)
    )
    found = [tokenizer.decode(window.labels[window.first :]) for window in some]
    assert found == [" zero", " one", " three", " five"], "spread evenly, where some are left out"

    file = Path(write_tokenizer_json(tmp_path / "json")) / "tokenizer.json"
    other = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    (window, _) = cloze_windows([text], other, [other.eod], 100, settings)
    assert other.decode(window.labels[window.first :]) == " end"
    write_sentencepiece(tmp_path / "json", 317)
    llama = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    (window, _) = cloze_windows([text], llama, [llama.eod], 100, settings)
    assert [*window.inputs[1:], window.labels[-1]] == llama.encode("One two three (the end")
    assert window.labels[window.first :] == [llama.token_id(each) for each in "\u2581end"]
    letters = {letter: number for number, letter in enumerate(["a", "b", " ", " b", "a b"])}
    spanning = Tokenizer(BPE(letters, [(" ", "b"), ("a", " b")]))
    spanning.add_special_tokens(["</s>", "<s>"])
    spanning.save(str(file))
    other = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    error = refusal(lambda: [*cloze_windows(["b a a b"], other, [other.eod], 100, settings)])
    assert "--tokenizer-type GPT2BPETokenizer" in str(error)


def test_a_line_without_text_is_named_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text('{"text": "good"}\n{"txt": "bad"}\n{"text": "too"}\n')
    with pytest.warns(UserWarning, match="heldout.jsonl, byte 17"):
        assert read_texts([file], "text") == (["good", "too"], 1)
    (tmp_path / "more.txt").write_text("all\nof it")
    with pytest.warns(UserWarning, match="heldout.jsonl, byte 17"):
        assert read_texts([tmp_path], "text") == (["good", "too", "all\nof it"], 1)
    with pytest.warns(UserWarning, match="heldout.jsonl"):
        assert field_of(refusal(lambda: read_texts([file], "body"))) == "--input"


def test_training_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "train", [[1, 2, 0], [3, 0], [4, 0]])
    manifest = {"tokenizer": "f", "config": {"data": {"split": "2,1,0"}}}
    assert training_tokens(str(tmp_path / "train"), manifest).tolist() == [1, 2, 0, 3, 0]
    other = manifest | {"tokenizer": "g"}
    error = refusal(lambda: training_tokens(str(tmp_path / "train"), other))
    assert field_of(error) == "--train-data"


def minus_one_each(task: Task) -> Scores:
    """Scores of which every scored token has the log-probability -1."""
    counts = np.array([len(each.labels) - each.first for each in task.windows])
    return Scores(-1.0 * counts, counts, 0 * counts, counts < 0)


def test_heldout_documents_stand_between_two_marks_and_one_sum_is_divided(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))
    end, texts = tokenizer.eod, ["in  the inn", "One two three\n four"]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps({'text': x})}\n" for x in texts))
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
    figures = task.score(minus_one_each(task), [])
    tokens, words, size = sum(map(len, train)), 3 + 4, len("\n".join(texts))
    assert (figures["tokens"], figures["words"], figures["bytes"]) == (tokens, words, size)
    assert figures["token_perplexity"] == pytest.approx(np.e)
    assert figures["word_perplexity"] == pytest.approx(np.exp(tokens / words))
    assert figures["bits_per_byte"] == pytest.approx(tokens / np.log(2) / size)
