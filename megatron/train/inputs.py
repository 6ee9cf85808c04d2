"""The data that a run reads, opened and checked against its tokenizer, and then this rank's samples
of it, read ahead. Importing this needs no torch."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parts import PARTS
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
    PretrainTextConfig,
    PretrainViTConfig,
)
from megatron.config.training import BertDataConfig, GPT2DataConfig, TextDataConfig
from megatron.data.batch import Batch, Samples, micro_batch_numbers
from megatron.data.bert import RandomPairs, open_bert_splits
from megatron.data.documents import Documents, open_documents
from megatron.data.gpt2 import RandomText, open_splits
from megatron.data.images import RandomImages, open_images
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
from megatron.models.registry import ModelKind
from megatron.train.trained import saved_tokenizer

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh

NO_CHECKPOINT = CheckpointConfig()
CIFAR10_CLASSES = 10
GPT2_VOCABULARY = 50_257  # if the config leaves it to the tokenizer and there is none


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data sets, and their samples for training and validation."""

    corpus: Corpus[Any]
    tokenizer: Tokenizer | None
    """The one that made the data sets; None if neither flags nor a folder beside them give it."""
    train: Samples
    validation: Samples | None
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model that the data give, by field; those of the flags go before."""

    @classmethod
    def of_samples(
        cls, train: Samples, vocab_size: int, *, content: str, validation: Samples | None = None
    ) -> Inputs:
        """Inputs whose samples come from no corpus. content: names the data set; a run resumes on
        the one whose name it had."""
        source = Source[Any](weight=Fraction(1), data=SimpleNamespace(content=content))
        corpus = Corpus(sources=(source,), vocab_size=vocab_size, eod=None, fingerprint="")
        return cls(corpus=corpus, tokenizer=None, train=train, validation=validation)

    def samples_in(self, epochs: int) -> int:
        """Training samples in this many epochs; in a blend, until its first data set has been read
        this often."""
        if (samples_in := getattr(self.train, "samples_in", None)) is not None:  # of a blend
            return samples_in(epochs)
        return epochs * self.train.samples_per_epoch


def open_inputs(config: PretrainConfig, kind: ModelKind) -> Inputs:
    """The data that a run reads. Raises ValueError or OSError, naming the flag, if it is damaged or
    does not fit."""
    if config.data.mock_data:
        return mock_inputs(config, resolve_name(kind.samples))
    if config.data.dataset is not None:
        return PARTS["dataset"].find(config.data.dataset)(config=config)
    return resolve_name(str(kind.inputs))(config)


def open_gpt2_inputs(config: PretrainGPT2Config) -> Inputs:
    """Raises as open_inputs does. Warns if checkpoints will be saved without a tokenizer."""
    size = config.model.vocab_size
    return open_text(config.data, config.training.seed, size, load=config.checkpoint)


def open_text(
    data: GPT2DataConfig, seed: int, vocab_size: int | None, *, load: CheckpointConfig
) -> Inputs:
    """vocab_size: of the model, None for the tokenizer's. load: see saved_tokenizer."""
    if data.pad:
        flags = data.tokenizer_type, data.vocab_file, data.merge_file
        # Without either tokenizer the last call raises, naming the missing flags.
        of_documents = _of_flags(data) or saved_tokenizer(load) or build_tokenizer(*flags)
        _require_kind(data, of_documents)
        paths, key = data.data_path, data.json_key
        split, config = data.dataset_split, data.dataset_config
        read: Callable[[str], Documents]
        read = partial(open_documents, key=key, split=split, config=config)
        if data.dataset_name is not None:
            paths = (data.dataset_name,)
            read = partial(open_named, column=key, split=split, config=config)
        documents = open_document_corpus(paths, of_documents, vocab_size, read)
        padded = open_padded_splits(
            documents,
            of_documents,
            split=data.split,
            seq_length=data.seq_length,
            seed=seed,
            shuffle=data.shuffle,
            begin_token=data.begin_token,
            end_token=data.end_token,
            refuse_too_long=data.too_long == "refuse",
            cache_tokens=data.cache_tokens,
        )
        return _inputs(data, documents, of_documents, padded)
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
        other = "one of another kind" if tokenizer is not None else "none"
        allowed = "the vocab.txt of the WordPiece tokenizer that made {}, whose marks BERT needs; "
        allowed += f"{other} is beside the data"
        works = "vocab.txt"
        raise UsageError("--vocab-file", data.vocab_file, allowed, "--data-path", works=works)
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


def open_image_inputs(config: PretrainViTConfig) -> Inputs:
    """Raises as open_inputs does. The first start packs the images."""
    data, model, seed = config.data, config.model, config.training.seed
    if not data.data_path:
        raise UsageError("--data-path", None, "given, or else {}", "--mock-data", works="cifar10")
    beside = None if data.cache_dir is None else Path(data.cache_dir)
    packed = open_images(
        Path(data.data_path[0]), model.image_size, beside=beside, workers=data.num_workers
    )
    classes = len(packed.classes)
    if (given := model.num_classes) is not None and given < classes:
        allowed = f"at least {classes}, the classes of {{}}"
        raise UsageError("--num-classes", given, allowed, "--data-path", works=classes)
    names = tuple(packed.classes)
    if model.class_names and model.class_names != names:  # each column of the head is of one class
        value, others = " ".join(model.class_names), ("--data-path", " ".join(names))
        works = ("--class-names", *names)
        raise UsageError("--class-names", value, "those of {}: {}", *others, works=works)
    changes = {"shuffle": data.shuffle, "crop_padding": data.crop_padding, "flip": data.flip}
    train = packed.series("training", seed, **changes)
    validation = packed.series("validation", seed)  # shuffled, so that a part of it has all classes
    inputs = Inputs.of_samples(
        train, given or classes, content=packed.content, validation=validation
    )
    mean, std = model.image_mean or packed.mean, model.image_std or packed.std
    given_by_data = {"image_mean": mean, "image_std": std, "class_names": names}
    return replace(inputs, model=given_by_data)


def random_images(config: PretrainViTConfig) -> Samples:
    return RandomImages(vocabulary_of(config), config.model.image_size, config.training.seed)


def _open_corpus(
    data: TextDataConfig, vocab_size: int | None, load: CheckpointConfig, *, sentences: bool
) -> tuple[Corpus[IndexedDataset], Tokenizer | None]:
    """The data sets and their tokenizer: that of the flags, or else the one found beside the data
    sets, or else that of --load if it made them.

    sentences: whether the data has to be split into sentences.
    """
    file_flags(data.tokenizer_type)  # refuses an unknown kind, even if no tokenizer is built
    of_flags, saved = _of_flags(data), cache(partial(saved_tokenizer, load))
    corpus = open_corpus(data.data_path, of_flags, vocab_size, saved)
    # Before the tokenizer's kind: this message names the program that reads this data set.
    require_sequences(corpus, sentences=sentences)
    tokenizer = of_flags or find_tokenizer(corpus)
    if tokenizer is None:
        of_checkpoint = saved()
        if of_checkpoint is not None and of_checkpoint.fingerprint == corpus.fingerprint:
            tokenizer = of_checkpoint
    if tokenizer is not None:
        _require_kind(data, tokenizer)
    return corpus, tokenizer


def _of_flags(data: TextDataConfig) -> Tokenizer | None:
    """The tokenizer of the flags; None without them."""
    if not (data.vocab_file or data.merge_file):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)


def _require_kind(data: TextDataConfig, tokenizer: Tokenizer) -> None:
    if (kind := data.tokenizer_type) != tokenizer.kind:
        allowed = f"that of the tokenizer of the data, {tokenizer.kind}"
        raise UsageError("--tokenizer-type", kind, allowed, works=tokenizer.kind)


def _inputs(
    data: TextDataConfig,
    corpus: Corpus[Any],
    tokenizer: Tokenizer | None,
    splits: tuple[Samples | None, ...],
) -> Inputs:
    """splits: for training, validation and test."""
    train, validation, _ = splits
    if train is None:
        allowed = "such that a document is left for training"
        raise UsageError("--split", data.split, allowed, works="1,0,0")
    return Inputs(corpus=corpus, tokenizer=tokenizer, train=train, validation=validation)


def mock_inputs(config: PretrainConfig, samples: Callable[[PretrainConfig], Samples]) -> Inputs:
    """Random samples for training, and others for validation; samples: see `ModelKind`."""
    other = replace(config, training=replace(config.training, seed=config.training.seed + 1))
    size, validation = vocabulary_of(config), samples(other)
    return Inputs.of_samples(samples(config), size, content="mock data", validation=validation)


def vocabulary_of(config: PretrainConfig) -> int:
    """Vocabulary size of a run without data: the config's, or else GPT-2's; for a classifier of
    images its classes, or else those of CIFAR-10."""
    if hasattr(config.model, "num_classes"):
        return config.model.num_classes or CIFAR10_CLASSES
    return getattr(config.model, "vocab_size", None) or GPT2_VOCABULARY


def random_text(config: PretrainTextConfig) -> Samples:
    return RandomText(
        vocabulary=vocabulary_of(config), length=config.data.seq_length, seed=config.training.seed
    )


def random_pairs(config: PretrainBertConfig) -> Samples:
    """config: of any kind of model that reads a BertDataConfig."""
    return RandomPairs(
        vocabulary=vocabulary_of(config),
        length=config.data.seq_length,
        seed=config.training.seed,
        mask_prob=config.data.mask_prob,
    )


def shard(lengths: Sequence[int], size: int, mesh: Mesh, name: str) -> Iterator[list[int]]:
    """Yields the text numbers of each batch of this rank, with a progress bar called `name`. Ranks
    of one model get the same numbers, since they compute together.

    lengths: of the texts, in tokens. The longest come first: texts of equal length need little
    padding, and a batch that does not fit in memory fails at once. size: texts per batch.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    local = batches[mesh.copies.rank :: mesh.copies.size]
    is_shown = mesh.is_first and sys.stderr.isatty()  # it would fill a log file
    with tqdm(total=sum(map(len, local)), desc=name, disable=not is_shown) as bar:
        for numbers in local:
            yield numbers
            bar.update(len(numbers))


def prefetch(
    data: Samples,
    starts: range,
    *,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    num_workers: int = 1,
    sampler: Callable[[int], int] | None = None,
) -> Generator[list[Batch]]:
    """Yields this rank's micro-batches of each step, made while earlier steps are computed.

    starts: the first sample of each step; its stride is the global batch size. num_workers: threads
    that read ahead, each for one of the next steps. sampler: gives the number of the sample that is
    read in place of each. An error of the data set is raised in its step.
    The threads end with the iterator, so close an iterator that is left early.
    """

    def read(start: int) -> list[Batch]:
        numbers = micro_batch_numbers(
            start,
            global_batch_size=starts.step,
            micro_batch_size=micro_batch_size,
            data_rank=data_rank,
            data_size=data_size,
        )
        return [
            data.batch(each if sampler is None else [*map(sampler, each)]).numbered(np.array(each))
            for each in numbers
        ]

    ahead = deque[Future[list[Batch]]]()
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="prefetch")
    try:
        for start in starts:
            ahead.append(threads.submit(read, start))
            if len(ahead) > num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
