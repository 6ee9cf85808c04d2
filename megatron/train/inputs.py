"""The data that a run reads, opened and checked against its tokenizer; needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.data import DataConfig
from megatron.config.pretrain import PretrainConfig
from megatron.data.gpt2 import GPT2Dataset, open_splits
from megatron.data.sources import Corpus, find_tokenizer, open_corpus
from megatron.data.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data sets, and what of them is trained and validated on."""

    corpus: Corpus
    tokenizer: Tokenizer | None
    """That made the data sets; None where neither flags nor a folder beside them hold it."""
    train: GPT2Dataset
    validation: GPT2Dataset | None

    @property
    def attached(self) -> Mapping[str, bytes]:
        """The tokenizer's files, for every checkpoint."""
        return {} if self.tokenizer is None else self.tokenizer.files


def open_inputs(config: PretrainConfig) -> Inputs:
    """Raises ValueError or OSError, naming the flag, for data that is damaged or does not fit.

    Warns where checkpoints will be saved that hold no tokenizer.
    """
    data = config.data
    given = _given_tokenizer(data)
    corpus = open_corpus(data.data_path, given, config.model.vocab_size)
    tokenizer = given or _found_tokenizer(corpus, data.tokenizer_type)
    if tokenizer is None and config.checkpoint.save is not None:
        warnings.warn(
            "checkpoints will hold no tokenizer, as no data set of --data-path has one beside it; "
            "with --vocab-file and --merge-file they would",
            stacklevel=2,
        )
    train_data, validation_data, _ = open_splits(
        corpus,
        split=data.split,
        seq_length=data.seq_length,
        seed=config.training.seed,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    if train_data is None:
        raise ValueError(
            f"--split {data.split} keeps nothing for training; --split 29,1,0 would work"
        )
    return Inputs(corpus=corpus, tokenizer=tokenizer, train=train_data, validation=validation_data)


def _given_tokenizer(data: DataConfig) -> Tokenizer | None:
    if not (data.vocab_file or data.merge_file):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def _found_tokenizer(corpus: Corpus, kind: str) -> Tokenizer | None:
    found = find_tokenizer(corpus)
    if found is not None and found.kind != kind:
        raise ValueError(
            f"--tokenizer-type {kind} did not make the data of --data-path; "
            f"--tokenizer-type {found.kind} would work"
        )
    return found
