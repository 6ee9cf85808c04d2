"""The data that a run reads, opened and checked against its tokenizer; needs no torch."""

from __future__ import annotations

from megatron.config.pretrain import PretrainConfig
from megatron.data.gpt2 import GPT2Dataset, open_splits
from megatron.data.sources import Corpus, open_corpus
from megatron.data.tokenizer import build_tokenizer


def open_inputs(config: PretrainConfig) -> tuple[Corpus, GPT2Dataset, GPT2Dataset | None]:
    """(data sets, training split, validation split or None).

    Raises ValueError or OSError, naming the flag, where a data set is damaged or does not fit.
    """
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
    return corpus, train_data, validation_data
