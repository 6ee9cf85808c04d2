"""The data that a run reads, opened and checked against its tokenizer; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.pretrain import PretrainConfig
from megatron.data.gpt2 import GPT2Dataset, open_splits
from megatron.data.sources import Corpus, open_corpus
from megatron.data.tokenizer import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data sets, and what of them is trained and validated on."""

    corpus: Corpus
    train: GPT2Dataset
    validation: GPT2Dataset | None


def open_inputs(config: PretrainConfig) -> Inputs:
    """Raises ValueError or OSError, naming the flag, for data that is damaged or does not fit."""
    data = config.data
    tokenizer = None
    if data.vocab_file or data.merge_file:
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    corpus = open_corpus(data.data_path, tokenizer, config.model.vocab_size)
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
    return Inputs(corpus=corpus, train=train_data, validation=validation_data)
