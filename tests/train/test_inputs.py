"""From the settings of a run to its data, and prefetching: a step ahead for each worker, errors in
their step."""

import threading
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.data.batch import TextBatch
from megatron.data.tokenizer import build_tokenizer
from megatron.train.inputs import (
    Inputs,
    mock_inputs,
    open_bert_inputs,
    open_gpt2_inputs,
    prefetch,
    random_pairs,
    random_text,
)
from megatron.train.pretrain import require_one_run
from tests.data.samples import write_data_of_tokenizer, write_sentences, write_wordpiece
from tests.dist import PATIENCE, on_ranks
from tests.programs import SHAPE
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

BERT = "BertWordPieceLowerCase"


def open_kind(kind: str, folder: Path, *more: str) -> Inputs:
    """Inputs of 20 documents, each of other tokens."""
    words = [*SHAPE.split(), "--train-iters=1", "--seq-length=16", "--data-path", f"{folder}/p"]
    ids = np.arange(6)
    if kind == "gpt2":
        if not (folder / "p.idx").exists():
            write_data_of_tokenizer(folder / "p", [[*(10 * n + ids), 260] for n in range(20)])
        return open_gpt2_inputs(parse(PretrainGPT2Config, [*words, *more], {}))
    vocabulary = write_wordpiece(folder)
    if not (folder / "p.idx").exists():
        tokenizer = build_tokenizer(BERT, vocabulary, None)
        size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
        documents = [[10 + n + ids, 30 + n + ids] for n in range(20)]
        write_sentences(folder / "p", documents, fingerprint=fingerprint, vocab_size=size)
    words += ["--vocab-file", vocabulary]
    return open_bert_inputs(parse(PretrainBertConfig, [*words, *more], {}))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_no_shuffle_takes_the_order_of_the_file(tmp_path: Path, kind: str) -> None:
    """Told by the highest id of each sample, which rises from document to document."""
    for order in ("--shuffle", "--no-shuffle"):
        train = open_kind(kind, tmp_path, order, "--split=1,0,0").train
        numbers = range(train.samples_per_epoch)
        labels = train.batch(numbers).labels
        if kind == "bert":  # without the numbers for which a document is drawn
            labels = labels[[not each.is_spare for each in cast(Any, train).samples(numbers)]]
        highest = np.where(labels == 260, 0, labels).max(axis=1).tolist()
        assert len(highest) > 7
        assert (highest == sorted(highest)) == (order == "--no-shuffle")


@pytest.mark.parametrize("has_made_it", [True, False])
def test_a_checkpoints_tokenizer_is_that_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_made_it: bool
) -> None:
    tokenizer = write_data_of_tokenizer(tmp_path / "p", [[1, 2, 3, 260]] * 20, beside=False)
    if not has_made_it:
        tokenizer.fingerprint = "another"
    monkeypatch.setattr("megatron.train.inputs.saved_tokenizer", lambda load: tokenizer)
    found = open_kind("gpt2", tmp_path, "--split=1,0,0").tokenizer
    assert found is (tokenizer if has_made_it else None)


@pytest.mark.parametrize(
    ("kind", "samples"), [(PretrainGPT2Config, random_text), (PretrainBertConfig, random_pairs)]
)
def test_mock_data_are_validated_on_other_samples(kind: type[PretrainConfig], samples: Any) -> None:
    words = [*SHAPE.split(), "--train-iters=1", "--mock-data", "--vocab-size=64"]
    inputs = mock_inputs(parse(kind, words, {}), samples)
    train, validation = (each.batch([0, 1]).tokens for each in (inputs.train, inputs.validation))
    assert train.shape == validation.shape
    assert not (train == validation).all(axis=1).any()


RANKS = [  # (flags of two ranks, the flag that is refused)
    (("", ""), None),
    (("--lr 1e-3", "--lr 2e-3"), "--lr"),
    (("", "--train-iters 2"), "--train-iters"),
    (("--num-layers 2", "--num-layers 3"), "--num-layers"),
    (("--log-interval 2", "--log-interval 3"), "--log-interval"),
    (("", "--save x --save-interval 3"), "--save-interval"),
    (("--save x", "--save y"), None),
]


@on_ranks(2)
def test_ranks_with_other_settings_are_refused() -> None:
    mesh = mesh_of_ranks(2)
    for words, named in RANKS:
        given = f"{SHAPE} --mock-data --train-iters 1 --vocab-size 64 {words[mesh.tensor.rank]}"
        config = parse(PretrainGPT2Config, given.split(), {})
        compare = partial(require_one_run, config, mock_inputs(config, random_text), mesh)
        if named is None:
            compare()
        else:
            refusal(compare, field=named)


class Numbers:
    """Samples of one token, their number; tells of each batch that is made, and of the end."""

    samples_per_epoch = 10**9

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.made: list[list[int]] = []
        self.changed = threading.Condition()

    def batch(self, numbers: range) -> TextBatch:
        with self.changed:
            self.made.append(list(numbers))
            self.changed.notify_all()
        if self.broken in numbers:
            raise ValueError(f"sample {self.broken} is broken")
        return TextBatch(tokens=np.array(numbers)[:, None])

    def wait_for(self, made: list[list[int]]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: sorted(self.made) == made, timeout=PATIENCE)


def is_running() -> bool:
    return any(thread.name.startswith("prefetch") for thread in threading.enumerate())


def read(data: Numbers, starts: range, rank: int = 0, size: int = 1) -> list[list[list[int]]]:
    """The numbers of the samples, which each batch knows, too."""
    steps = list(prefetch(data, starts, micro_batch_size=2, data_rank=rank, data_size=size))
    assert all((batch.numbers == batch.tokens[:, 0]).all() for step in steps for batch in step)
    return [[batch.tokens[:, 0].tolist() for batch in step] for step in steps]


def prefetched(data: Numbers, stop: int, workers: int) -> Generator[list[TextBatch]]:
    """Steps of two samples, by one rank."""
    one = {"micro_batch_size": 2, "data_rank": 0, "data_size": 1}
    return prefetch(data, range(0, stop, 2), **one, num_workers=workers)


def test_steps_hold_the_micro_batches_of_this_rank() -> None:
    assert read(Numbers(), range(4, 12, 4)) == [[[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert read(Numbers(), range(4, 12, 4), rank=1, size=2) == [[[6, 7]], [[10, 11]]]
    assert read(Numbers(), range(4, 4, 4)) == []
    assert not is_running()


@pytest.mark.parametrize("workers", [1, 3])
def test_each_worker_makes_one_of_the_next_steps(workers: int) -> None:
    data = Numbers()
    with closing(prefetched(data, 100, workers)) as steps:
        assert data.made == []
        for step in range(2):
            assert next(steps)[0].tokens[:, 0].tolist() == [2 * step, 2 * step + 1]
            made = [[start, start + 1] for start in range(0, 2 * (step + workers) + 1, 2)]
            assert data.wait_for(made)
        assert is_running()
    assert not is_running()
    assert len(data.made) == workers + 2


def test_workers_read_in_parallel() -> None:
    """Each of the first steps is made only when all of them are being made."""
    together = threading.Barrier(3)

    class Slow(Numbers):
        def batch(self, numbers: range) -> TextBatch:
            if numbers[0] < 6:
                together.wait(timeout=PATIENCE)
            return super().batch(numbers)

    steps = prefetched(Slow(), 10, 3)
    assert [step[0].tokens[0, 0] for step in steps] == [0, 2, 4, 6, 8]
    assert not is_running()


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_of_the_data_set_is_raised_in_its_step(workers: int) -> None:
    steps = prefetched(Numbers(broken=5), 100, workers)
    assert [next(steps)[0].tokens[0, 0] for _ in range(2)] == [0, 2]
    with pytest.raises(ValueError, match="5"):
        next(steps)
    assert not is_running()


def test_samples_after_the_last_step_are_not_read() -> None:
    assert len(read(Numbers(broken=4), range(0, 4, 2))) == 2
