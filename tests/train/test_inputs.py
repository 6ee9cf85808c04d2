"""From the settings of a run to its data: what reaches them, and what of mock data is what."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.data.tokenizer import build_tokenizer
from megatron.train.inputs import (
    Inputs,
    mock_inputs,
    open_bert_inputs,
    open_gpt2_inputs,
    random_pairs,
    random_text,
)
from tests.data.samples import write_data_of_tokenizer, write_sentences, write_wordpiece
from tests.programs import SHAPE

BERT = "BertWordPieceLowerCase"


def open_kind(kind: str, folder: Path, *more: str) -> Inputs:
    """Of 20 documents, each of other tokens."""
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


@pytest.mark.parametrize(
    ("kind", "samples"), [(PretrainGPT2Config, random_text), (PretrainBertConfig, random_pairs)]
)
def test_mock_data_are_validated_on_other_samples(kind: type[PretrainConfig], samples: Any) -> None:
    words = [*SHAPE.split(), "--train-iters=1", "--mock-data", "--vocab-size=64"]
    inputs = mock_inputs(parse(kind, words, {}), samples)
    train, validation = (each.batch([0, 1]).tokens for each in (inputs.train, inputs.validation))
    assert train.shape == validation.shape
    assert not (train == validation).all(axis=1).any()
