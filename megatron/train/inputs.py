"""The data that a run reads, opened and checked against its tokenizer; needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.data import DataConfig
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.data.batch import Samples
from megatron.data.bert import open_bert_splits
from megatron.data.gpt2 import open_splits
from megatron.data.sources import Corpus, find_tokenizer, open_corpus
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.data.wordpiece import BertTokenizer


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data sets, and what of them is trained and validated on."""

    corpus: Corpus
    tokenizer: Tokenizer | None
    """That made the data sets; None where neither flags nor a folder beside them hold it."""
    train: Samples
    validation: Samples | None

    @property
    def attached(self) -> Mapping[str, bytes]:
        """The tokenizer's files, for every checkpoint."""
        return {} if self.tokenizer is None else self.tokenizer.files


def open_gpt2_inputs(config: PretrainGPT2Config) -> Inputs:
    """Raises ValueError or OSError, naming the flag, for data that is damaged or does not fit.

    Warns where checkpoints will be saved that hold no tokenizer.
    """
    corpus, tokenizer = _open_corpus(config)
    if tokenizer is None and config.checkpoint.save is not None:
        warnings.warn(
            "checkpoints will hold no tokenizer, as no data set of --data-path has one beside it; "
            "with --vocab-file and --merge-file they would",
            stacklevel=2,
        )
    splits = open_splits(
        corpus,
        split=config.data.split,
        seq_length=config.data.seq_length,
        seed=config.training.seed,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    return _inputs(config, corpus, tokenizer, splits)


def open_bert_inputs(config: PretrainBertConfig) -> Inputs:
    """As open_gpt2_inputs; the tokenizer has to be known, since its marks go into every sample."""
    corpus, tokenizer = _open_corpus(config)
    if not isinstance(tokenizer, BertTokenizer):
        raise ValueError(
            "BERT needs the marks of a WordPiece tokenizer, and no data set of --data-path has one "
            "beside it; --vocab-file vocab.txt, of the tokenizer that made the data, would work"
        )
    splits = open_bert_splits(
        corpus,
        tokenizer,
        split=config.data.split,
        seq_length=config.data.seq_length,
        seed=config.training.seed,
        mask_prob=config.data.mask_prob,
        short_seq_prob=config.data.short_seq_prob,
        max_ngram_size=config.data.max_ngram_size,
    )
    return _inputs(config, corpus, tokenizer, splits)


def _open_corpus(config: PretrainConfig) -> tuple[Corpus, Tokenizer | None]:
    given = _given_tokenizer(config.data)
    corpus = open_corpus(config.data.data_path, given, config.model.vocab_size)
    return corpus, given or _found_tokenizer(corpus, config.data.tokenizer_type)


def _inputs(
    config: PretrainConfig,
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    splits: tuple[Samples | None, ...],
) -> Inputs:
    """splits: for training, validation and test."""
    train, validation, _ = splits
    if train is None:
        raise ValueError(
            f"--split {config.data.split} keeps nothing for training; --split 29,1,0 would work"
        )
    return Inputs(corpus=corpus, tokenizer=tokenizer, train=train, validation=validation)


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
