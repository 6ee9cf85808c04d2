"""The data that a run reads, opened and checked against its tokenizer; needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
)
from megatron.config.training import BertDataConfig, DataConfig, GPT2DataConfig
from megatron.data.batch import Samples
from megatron.data.bert import RandomPairs, open_bert_splits
from megatron.data.documents import Documents, open_documents
from megatron.data.gpt2 import RandomText, open_splits
from megatron.data.indexed import IndexedDataset
from megatron.data.map_style import open_named
from megatron.data.padded import open_padded_splits
from megatron.data.sources import (
    Corpus,
    Source,
    find_tokenizer,
    open_corpus,
    open_document_corpus,
    require_sequences,
)
from megatron.data.tokenizer import BertTokenizer, Tokenizer, build_tokenizer, file_flags
from megatron.errors import UsageError
from megatron.train.trained import saved_tokenizer

NO_CHECKPOINT = CheckpointConfig()
GPT2_VOCABULARY = 50_257  # if the config leaves it to the tokenizer and there is none


@runtime_checkable
class Blended(Protocol):
    """Samples whose epochs may differ in size, such as those of a blend."""

    @property
    def samples_in(self) -> Callable[[int], int]: ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data sets, and their samples for training and validation."""

    corpus: Corpus[Any]
    tokenizer: Tokenizer | None
    """The one that made the data sets; None if neither flags nor a folder beside them give it."""
    train: Samples
    validation: Samples | None

    def samples_in(self, epochs: int) -> int:
        """Training samples in this many epochs; in a blend, until its first data set has been read
        this often."""
        if isinstance(self.train, Blended):
            return self.train.samples_in(epochs)
        return epochs * self.train.samples_per_epoch


def open_gpt2_inputs(config: PretrainGPT2Config) -> Inputs:
    """Raises ValueError or OSError, naming the flag, if the data is damaged or does not fit.

    Warns if checkpoints will be saved without a tokenizer.
    """
    size = config.model.vocab_size
    return open_text(config.data, config.training.seed, size, load=config.checkpoint)


def open_text(
    data: GPT2DataConfig, seed: int, vocab_size: int | None, *, load: CheckpointConfig
) -> Inputs:
    """vocab_size: of the model, None for the tokenizer's. load: see saved_tokenizer."""
    if data.pad:
        return _open_padded(data, seed, vocab_size, load)
    corpus, tokenizer = _open_corpus(data, vocab_size, load, sentences=False)
    if tokenizer is None and load.save is not None:
        warnings.warn(
            "checkpoints will hold no tokenizer, as no data set of --data-path has one beside it; "
            f"with {file_flags(data.tokenizer_type)} they would",
            stacklevel=2,
        )
    splits = open_splits(
        corpus,
        split=data.split,
        seq_length=data.seq_length,
        seed=seed,
        shuffle=data.shuffle,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    return _inputs(data, corpus, tokenizer, splits)


def _open_padded(
    data: GPT2DataConfig, seed: int, vocab_size: int | None, load: CheckpointConfig
) -> Inputs:
    tokenizer = _given(data) or saved_tokenizer(load)
    if tokenizer is None:  # raises, naming the missing flags
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    _require_kind(data, tokenizer)
    paths, key = data.data_path, data.json_key
    split, config = data.dataset_split, data.dataset_config
    read: Callable[[str], Documents]
    read = partial(open_documents, key=key, split=split, config=config)
    if data.dataset_name is not None:
        paths = (data.dataset_name,)
        read = partial(open_named, column=key, split=split, config=config)
    corpus = open_document_corpus(paths, tokenizer, vocab_size, read)
    splits = open_padded_splits(
        corpus,
        tokenizer,
        split=data.split,
        seq_length=data.seq_length,
        seed=seed,
        shuffle=data.shuffle,
        begin_token=data.begin_token,
        end_token=data.end_token,
        refuse_too_long=data.too_long == "refuse",
        cache_tokens=data.cache_tokens,
    )
    return _inputs(data, corpus, tokenizer, splits)


def open_bert_inputs(config: PretrainBertConfig) -> Inputs:
    """Like open_gpt2_inputs; needs the tokenizer, whose special tokens are in every sample."""
    data, vocab_size = config.data, config.model.vocab_size
    return open_bert_data(data, config.training.seed, vocab_size, config.checkpoint)[1]


def open_bert_data(
    data: BertDataConfig,
    seed: int,
    vocab_size: int | None = None,
    load: CheckpointConfig = NO_CHECKPOINT,
) -> tuple[BertTokenizer, Inputs]:
    corpus, tokenizer = _open_corpus(data, vocab_size, load, sentences=True)
    if not isinstance(tokenizer, BertTokenizer):
        found = "one of another kind" if tokenizer is not None else "none"
        raise UsageError(
            "--vocab-file",
            data.vocab_file,
            "the vocab.txt of the WordPiece tokenizer that made --data-path, whose marks BERT "
            f"needs; {found} is beside the data",
            works=("--vocab-file", "vocab.txt"),
        )
    splits = open_bert_splits(
        corpus,
        tokenizer,
        split=data.split,
        seq_length=data.seq_length,
        seed=seed,
        mask_prob=data.mask_prob,
        short_seq_prob=data.short_seq_prob,
        max_ngram_size=data.max_ngram_size,
        shuffle=data.shuffle,
    )
    return tokenizer, _inputs(data, corpus, tokenizer, splits)


def _open_corpus(
    data: DataConfig, vocab_size: int | None, load: CheckpointConfig, *, sentences: bool
) -> tuple[Corpus[IndexedDataset], Tokenizer | None]:
    """The data sets and their tokenizer: that of the flags, or else the one found beside the data
    sets, or else that of --load if it made them.

    sentences: whether the data has to be split into sentences.
    """
    given, saved = _given(data), cache(partial(saved_tokenizer, load))
    corpus = open_corpus(data.data_path, given, vocab_size, saved)
    # Before the tokenizer's kind: this message names the program that reads this data set.
    require_sequences(corpus, sentences=sentences)
    tokenizer = given or find_tokenizer(corpus)
    if tokenizer is None and (own := saved()) is not None and own.fingerprint == corpus.fingerprint:
        tokenizer = own
    if tokenizer is not None:
        _require_kind(data, tokenizer)
    return corpus, tokenizer


def _given(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of the flags; None without them."""
    if not (data.vocab_file or data.merge_file):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def _require_kind(data: DataConfig, tokenizer: Tokenizer) -> None:
    if (kind := data.tokenizer_type) != tokenizer.kind:
        allowed = f"that of the tokenizer of the data, {tokenizer.kind}"
        works = ("--tokenizer-type", tokenizer.kind)
        raise UsageError("--tokenizer-type", kind, allowed, works=works)


def _inputs(
    data: DataConfig,
    corpus: Corpus[Any],
    tokenizer: Tokenizer | None,
    splits: tuple[Samples | None, ...],
) -> Inputs:
    """splits: for training, validation and test."""
    train, validation, _ = splits
    if train is None:
        allowed = "such that a document is left for training"
        raise UsageError("--split", data.split, allowed, works=("--split", "29,1,0"))
    return Inputs(corpus=corpus, tokenizer=tokenizer, train=train, validation=validation)


@dataclass(frozen=True)
class Mock:
    """Stands in for a data set with --mock-data."""

    num_documents: int = 0
    content: str = "mock data"


def mock_inputs(config: PretrainConfig, samples: Callable[[PretrainConfig], Samples]) -> Inputs:
    """Random samples for training, and others for validation; samples: see `ModelKind`."""
    source = Source(weight=Fraction(1), data=Mock())
    corpus = Corpus(sources=(source,), vocab_size=vocabulary_of(config), eod=None, fingerprint="")
    other = replace(config, training=replace(config.training, seed=config.training.seed + 1))
    return Inputs(corpus=corpus, tokenizer=None, train=samples(config), validation=samples(other))


def vocabulary_of(config: PretrainConfig) -> int:
    """Vocabulary size of a run without data: the config's, or else GPT-2's."""
    return getattr(config.model, "vocab_size", None) or GPT2_VOCABULARY


def random_text(config: PretrainConfig) -> Samples:
    return RandomText(
        vocabulary=vocabulary_of(config),
        length=config.data.seq_length,
        seed=config.training.seed,
    )


def random_pairs(config: PretrainBertConfig) -> Samples:
    """config: of any kind of model that reads a BertDataConfig."""
    return RandomPairs(
        vocabulary=vocabulary_of(config),
        length=config.data.seq_length,
        seed=config.training.seed,
        mask_prob=config.data.mask_prob,
    )
