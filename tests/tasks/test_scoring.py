"""Windows score every token once, and totals depend on neither batch size nor layout."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import build_tokenizer
from tasks.common import Window, score_windows, sliding_windows
from tasks.heldout import Settings, cloze_windows, read_texts, training_tokens
from tests.data.samples import write_data, write_tokenizer
from tests.dist import Pool
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, tiny_model


@pytest.mark.parametrize("count", [2, 5, 16, 17, 18, 40])
@pytest.mark.parametrize(("length", "step"), [(16, 16), (16, 8), (16, 1), (4, 3)])
def test_windows_score_every_token_but_the_first_once(count: int, length: int, step: int) -> None:
    tokens = list(range(count))
    windows = list(sliding_windows(tokens, length, step))
    assert [label for each in windows for label in each.labels[each.first :]] == tokens[1:]
    for number, window in enumerate(windows):
        assert len(window.inputs) == len(window.labels) <= length
        assert [each + 1 for each in window.inputs] == window.labels
        if number:  # as much before the scored tokens as the length leaves room for
            assert window.first >= length - step


def windows_of_text() -> list[Window]:
    random = np.random.default_rng(0)
    texts = [random.integers(VOCABULARY, size=size).tolist() for size in (5, 17, 33, 60)]
    return [window for text in texts for window in sliding_windows(text, SEQUENCE, 6)]


def totals(tensor_size: int, micro_batch_size: int) -> dict[str, float]:
    mesh = mesh_of_ranks(tensor_size)
    model, _ = tiny_model(mesh)
    return asdict(score_windows(model.eval(), mesh, windows_of_text(), micro_batch_size, "test"))


def test_totals_depend_on_neither_batch_size_nor_layout(gloo: Pool) -> None:
    mesh = mesh_of_ranks(1)
    model, _ = tiny_model(mesh)
    log_probability, tokens, hits = 0.0, 0, 0
    for window in windows_of_text():  # one at a time, without padding, by torch's own functions
        inputs = torch.tensor([window.inputs])
        positions = torch.arange(len(window.inputs))[None]
        logits = model(inputs, positions)[window.first :, :VOCABULARY]
        labels = torch.tensor(window.labels[window.first :])
        log_probability -= torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        tokens += len(labels)
        hits += bool((logits.argmax(dim=1) == labels).all())
    expected = {
        "log_probability": pytest.approx(log_probability, rel=1e-12),
        "tokens": tokens,
        "windows": len(windows_of_text()),
        "hits": hits,
    }
    assert tokens == 4 + 16 + 32 + 59
    assert [totals(1, size) for size in (1, 3, 100)] == [expected] * 3
    for world, tensor_size in ((2, 2), (2, 1), (4, 4), (4, 2)):
        assert gloo.run(world, totals, tensor_size, 4) == [expected] * world


def test_cloze_asks_for_the_last_word_of_long_paragraphs(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))
    write_data(tmp_path / "train", [[1, 0]])
    texts = tmp_path / "heldout.jsonl"
    texts.write_text("{}")
    settings = Settings(
        trained=TrainedConfig(load="", vocab_file="", merge_file=""),
        input=str(texts),
        train_data=str(tmp_path / "train"),
        cloze_words=4,
    )
    text = (
        'One two three (the end).\n\nToo short\n\nNo word ends this 12\n\nHe said "go there now!"'
    )
    first, second = cloze_windows([text], tokenizer, 100, settings)
    assert tokenizer.decode(first.labels[first.first :]) == " end"
    assert tokenizer.decode(first.inputs[1:]) + "d" == "One two three (the end"
    assert tokenizer.decode(second.labels[second.first :]) == " now"

    (short, _) = cloze_windows([text], tokenizer, 8, settings)
    assert (len(short.inputs), short.labels) == (8, first.labels[-8:])


def test_a_line_without_text_is_named_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text('{"text": "good"}\n{"txt": "bad"}\n{"text": "too"}\n')
    with pytest.warns(UserWarning, match=r"heldout.jsonl, byte 17 left out"):
        assert read_texts([file], "text") == (["good", "too"], 1)
    with (
        pytest.warns(UserWarning, match=r"byte \d+ left out"),
        pytest.raises(ValueError, match=r"--input .* holds no documents"),
    ):
        read_texts([file], "body")


def test_training_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "train", [[1, 2, 0], [3, 0], [4, 0]])
    manifest = {"tokenizer": "f", "config": {"data": {"split": "2,1,0"}}}
    assert training_tokens(str(tmp_path / "train"), manifest).tolist() == [1, 2, 0, 3, 0]
    with pytest.raises(ValueError, match="--train-data .* tokenizer f, the model with g"):
        training_tokens(str(tmp_path / "train"), manifest | {"tokenizer": "g"})
