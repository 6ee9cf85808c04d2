"""Samples: what they cover, in what order, and what document boundaries do to them."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt2 import Boundaries, GPT2Dataset, open_splits
from megatron.data.order import Blend
from megatron.data.sources import open_corpus
from tests.data.samples import PlainTokenizer, write_data
from tests.refusals import refusal


def documents(count: int, first: int = 1) -> list[list[int]]:
    """Documents of 3 to 9 tokens and their end mark 0; the numbers tell which token is where."""
    return [[1 + (first + i * 7 + j) % 97 for j in range(3 + i % 7)] + [0] for i in range(count)]


def opened(
    prefix: Path, *, split: str = "8,1,1", seq_length: int = 5, seed: int = 1, shuffle: bool = True
) -> list[GPT2Dataset | None]:
    corpus = open_corpus([str(prefix)], PlainTokenizer())
    return list(open_splits(corpus, split=split, seq_length=seq_length, seed=seed, shuffle=shuffle))


def windows(data: GPT2Dataset, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens of each sample and the one after them."""
    batch = data.batch(numbers)
    return [(*row, label[-1]) for row, label in zip(batch.tokens, batch.labels, strict=True)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_data(tmp_path / "p", documents(40))
    return tmp_path / "p"


def test_epoch(prefix: Path) -> None:
    splits = [documents(40)[0:32], documents(40)[32:36], documents(40)[36:40]]
    for data, part in zip(opened(prefix), splits, strict=True):
        tokens = list(chain(*part))
        expected = [tuple(tokens[k : k + 6]) for k in range(0, len(tokens) - 5, 5)]
        assert data.samples_per_epoch == len(expected)
        found = windows(data, range(data.samples_per_epoch))
        assert sorted(found) == sorted(expected)
        assert found != expected
        batch = data.batch([0])
        assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == np.int64


def test_epochs_differ_in_order(prefix: Path) -> None:
    """The order depends on the seed alone; evaluation stops at the end of its split."""
    training, validation, _ = opened(prefix)
    size = training.samples_per_epoch
    epochs = [windows(training, range(size * epoch, size * (epoch + 1))) for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert windows(training, range(size - 2, size + 2)) == epochs[0][-2:] + epochs[1][:2]
    assert windows(opened(prefix)[0], range(size)) == epochs[0]
    assert windows(opened(prefix, seed=2)[0], range(size)) != epochs[0]
    size = validation.samples_per_epoch
    validation.batch([size - 1])
    assert "--eval-iters" in str(refusal(lambda: validation.batch([0, size])))


def test_split_of_one_sample(tmp_path: Path) -> None:
    write_data(tmp_path / "p", [[1, 2, 3, 4, 5, 6]])
    data = opened(tmp_path / "p", split="1,0,0")[0]
    assert windows(data, [0, 1, 2]) == [(1, 2, 3, 4, 5, 6)] * 3
    error = refusal(lambda: opened(tmp_path / "p", split="1,0,0", seq_length=6))
    assert str(error).startswith("--seq-length 6: must be below the 6 tokens")


def test_blend(tmp_path: Path) -> None:
    write_data(tmp_path / "a", documents(40))
    write_data(tmp_path / "b", documents(30, first=50))
    corpus = open_corpus(["0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b")], PlainTokenizer())
    training, _, test = open_splits(corpus, split="8,2,0", seq_length=5, seed=1)
    assert test is None
    own = [windows(opened(tmp_path / name, split="8,2,0")[0], range(70)) for name in "ab"]
    sources, local = Blend([Fraction(3), Fraction(7)]).locate(np.arange(100))
    expected = [own[source][number] for source, number in zip(sources, local, strict=True)]
    assert windows(training, range(100)) == expected


WINDOW = np.array([[5, 0, 6, 7, 0, 0, 8], [0, 9, 9, 9, 9, 0, 0]])  # the end mark is 0


def test_boundaries_by_hand() -> None:
    """A document ends with its mark; the token after it starts the next, at position 0."""
    batch = Boundaries(
        eod=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    ).batch(WINDOW)
    assert batch.tokens.tolist() == [[5, 0, 6, 7, 0, 0], [0, 9, 9, 9, 9, 0]]
    assert batch.labels.tolist() == [[0, 6, 7, 0, 0, 8], [9, 9, 9, 9, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]
    assert batch.document_starts.tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]
    assert batch.loss_mask.dtype == np.float32


def test_boundary_flags() -> None:
    plain = Boundaries(eod=None).batch(WINDOW)
    for flag in (None, "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        batch = Boundaries(eod=0, **({flag: True} if flag else {})).batch(WINDOW)
        assert (batch.positions.tolist() != plain.positions.tolist()) == (
            flag == "reset_position_ids"
        )
        assert (batch.document_starts is not None) == (flag == "reset_attention_mask")
        assert (batch.loss_mask.min() < 1) == (flag == "eod_mask_loss")
    assert plain.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert plain.document_starts is None
    assert plain.loss_mask.min() == 1


def test_boundaries_without_end_marks(tmp_path: Path) -> None:
    write_data(tmp_path / "p", documents(40), eod=None)
    corpus = open_corpus([str(tmp_path / "p")], PlainTokenizer())
    settings = {"split": "1,0,0", "seq_length": 5, "seed": 1}
    refusal(lambda: open_splits(corpus, **settings, eod_mask_loss=True), field="--eod-mask-loss")


def test_id_outside_the_vocabulary(prefix: Path) -> None:
    training = opened(prefix, split="1,0,0")[0]
    with Path(f"{prefix}.bin").open("r+b") as stream:
        stream.seek(20)
        stream.write(np.uint16(100).tobytes())
    refusal(lambda: training.batch(range(training.samples_per_epoch)), str(prefix), "id 100")
