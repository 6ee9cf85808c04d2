"""Samples of one document each, padded on the right: a pure function of (seed, sample number).

A sample is [begin] ids [end] and padding up to s + 1 tokens; longer documents are cut. Padding is
not in the loss and is not counted as read. In a causal model no token attends to its right, so
attention needs no mask.

    tokens      [BOT] a     b     [EOT] [PAD]
    labels      a     b     [EOT] [PAD] [PAD]
    loss_mask   1     1     1     0     0
    is_real     True  True  True  True  False

b: samples of a batch; s: tokens of a sample (--seq-length).
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megatron.data.cache import Cache, Entries, find_or_make, write
from megatron.data.documents import Documents, JsonLines
from megatron.data.files import NO_SPACE, DataError, disk_space
from megatron.data.gpt2 import GPT2Batch
from megatron.data.indexed import token_dtype
from megatron.data.order import Series, open_series
from megatron.data.sources import Corpus
from megatron.data.tokenizer import VOCABULARY, Tokenizer
from megatron.errors import UsageError

CHUNK = 256  # documents that are tokenised together
FORMAT = "3"  # of a cache of tokens; files of another format have other names and are not read

Encode = Callable[[Sequence[int]], list[list[int]]]
"""Maps numbers of documents to the ids of each; safe in any thread."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Makes samples of one size from texts."""

    tokenizer: Tokenizer
    begin: tuple[int, ...]
    """Ids before the text."""
    end: tuple[int, ...]
    """Ids after the text."""
    seq_length: int

    def mark(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text with its marks, of any length."""
        return [*self.begin, *ids, *self.end]

    def batch(self, texts: Sequence[Sequence[int]]) -> GPT2Batch:
        """texts: the ids of each text."""
        encoded, size = [self.mark(ids) for ids in texts], self.seq_length + 1
        pad = self.tokenizer.pad_id
        window = np.full((len(texts), size), self.tokenizer.eod if pad is None else pad, np.int64)
        for row, ids in zip(window, encoded, strict=True):
            row[: len(ids)] = ids[:size]
        lengths = np.array([[len(ids)] for ids in encoded])
        is_real = np.arange(size) < lengths
        return GPT2Batch(
            tokens=window[:, :-1],
            labels=window[:, 1:],
            loss_mask=is_real[:, 1:].astype(np.float32),
            positions=np.tile(np.arange(self.seq_length), (len(texts), 1)),
            is_real=is_real[:, :-1],
            is_cut=lengths[:, 0] > size,
        )


@dataclass(frozen=True)
class DocumentRange:
    """The documents of one data set in one split."""

    encode: Encode
    documents: range

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.documents)


@dataclass(kw_only=True, eq=False)
class PaddedDataset(Series[DocumentRange]):
    padding: Padding

    def batch(self, numbers: Sequence[int]) -> GPT2Batch:
        """Safe in any thread. Raises ValueError past the end of a split that is not endless, and if
        a file has changed."""
        texts: list[list[int]] = [[]] * len(numbers)
        for split, rows, samples in self.locate(numbers):
            encoded = split.encode([split.documents[sample] for sample in samples.tolist()])
            for row, ids in zip(rows.tolist(), encoded, strict=True):
                texts[row] = ids
        return self.padding.batch(texts)


def open_padded_splits(
    corpus: Corpus[Documents],
    tokenizer: Tokenizer,
    *,
    split: str,
    seq_length: int,
    seed: int,
    shuffle: bool = True,
    begin_token: str | None = None,
    end_token: str | None = None,
    refuse_too_long: bool = False,
    cache_tokens: bool = False,
) -> tuple[PaddedDataset | None, PaddedDataset | None, PaddedDataset | None]:
    """(training, validation, test), None for a weight of 0; --split cuts each data set of a blend.

    begin_token, end_token: tokens of the vocabulary, as they are spelt; end_token is by default the
    tokenizer's end mark. refuse_too_long: tokenises all documents. cache_tokens: reads ids from a
    file beside the JSON lines, which is made if it does not exist; else a document is tokenised
    whenever it is read. Raises UsageError for a split without documents, for
    tokens that the vocabulary lacks, with refuse_too_long for documents of more than seq_length + 1
    tokens, and with cache_tokens for documents that are not a file of JSON lines.
    """
    padding = Padding(
        tokenizer=tokenizer,
        begin=() if begin_token is None else (_find("--begin-token", begin_token, tokenizer),),
        end=(tokenizer.eod if end_token is None else _find("--end-token", end_token, tokenizer),),
        seq_length=seq_length,
    )
    data = [source.data for source in corpus.sources]
    make_encoder = _read_cached if cache_tokens else _encode_on_demand
    encoders = {id(each): make_encoder(each, tokenizer) for each in data}
    if refuse_too_long:
        room, count, longest = seq_length + 1, 0, 0
        for documents in data:
            for number, ids in _encode_all(documents, encoders[id(documents)]):
                length = len(padding.mark(ids))
                count += length > room
                if length > longest:
                    longest, where = length, (documents, number)
        if count:
            documents, number = where
            allowed = f"cut, or given with {{}} {longest - 1}: {count} documents have more than "
            allowed += f"{room} tokens, and {{}} has {longest}"
            others = "--seq-length", documents.location(number)
            raise UsageError("--too-long", "refuse", allowed, *others, works="cut")

    def cut(data: Documents, documents: range, name: str) -> DocumentRange:
        return DocumentRange(encoders[id(data)], documents)

    make = partial(PaddedDataset, padding=padding)
    return open_series(corpus, split, seed, cut, make, shuffle=shuffle)


def _find(flag: str, token: str, tokenizer: Tokenizer) -> int:
    try:
        return tokenizer.token_id(token)
    except ValueError as error:
        raise UsageError(flag, token, "a token of {} ({})", VOCABULARY, str(error)) from error


def _encode_all(documents: Documents, encode: Encode) -> Iterator[tuple[int, list[int]]]:
    """(number, ids) of every document."""
    for start in range(0, documents.num_documents, CHUNK):
        numbers = range(start, min(start + CHUNK, documents.num_documents))
        yield from zip(numbers, encode(numbers), strict=True)


def _encode_on_demand(documents: Documents, tokenizer: Tokenizer) -> Encode:
    return lambda numbers: tokenizer.encode_batch([documents.text(number) for number in numbers])


def _read_cached(documents: Documents, tokenizer: Tokenizer) -> Encode:
    """Token ids of a file of JSON lines, cached beside it: tokenised once, read by every later run.

    The name of the cache, `.FILE.HASH.tokens`, has a hash of the file's content, the key of its
    texts and the tokenizer. So a changed file, or another tokenizer, has its own cache, and none is
    stale. Ids are without begin and end marks and are not cut: one cache serves every --seq-length.

    Raises UsageError if the documents are not a file of JSON lines, and
    DataError if the cache is damaged. Warns if no cache can be written to the folder, and then
    tokenises on demand.
    """
    if not isinstance(documents, JsonLines):
        allowed = f"left out where {documents.name} is no file of JSON lines"
        raise UsageError("--cache-tokens", None, allowed, works=("--no-cache-tokens",))
    encode = _encode_on_demand(documents, tokenizer)
    facts = "\n".join((FORMAT, documents.content, tokenizer.kind, tokenizer.fingerprint))
    name = hashlib.sha256(facts.encode()).hexdigest()[:16]
    source, dtype = Path(documents.name).resolve(), token_dtype(tokenizer.vocab_size)
    file = source.with_name(f".{source.name}.{name}.tokens")

    def tokenise() -> Entries:
        """ids: of all documents, one after another. bounds: int64 [documents + 1], where in ids
        each document starts, and the end."""
        bounds = np.zeros(documents.num_documents + 1, np.int64)
        for number, ids in _encode_all(documents, encode):
            bounds[number + 1] = bounds[number] + len(ids)
            yield "ids", np.asarray(ids, dtype)
        yield "bounds", bounds

    find = partial(Cache, file, facts, f"--cache-tokens: {file}")

    def make() -> Cache:
        write(file, facts, tokenise())
        return find()

    try:
        cache = find() if file.is_file() else find_or_make(file, find, make)
    except OSError as error:
        space = error.errno in NO_SPACE and f"; {disk_space(file, documents.num_bytes)}"
        warnings.warn(
            f"--cache-tokens: {file.parent} takes no cache ({error.strerror}{space or ''}): "
            "documents are tokenised when they are read",
            stacklevel=3,
        )
        return encode
    bounds, (_, _, num_ids, _) = cache.read("bounds"), cache.arrays["ids"]
    ends = [len(bounds) - 1, *bounds[:1], *bounds[-1:]]
    if ends != [documents.num_documents, 0, num_ids] or (bounds[1:] < bounds[:-1]).any():
        raise DataError(cache.damage)

    def read(numbers: Sequence[int]) -> list[list[int]]:
        ranges = [bounds[number : number + 2].tolist() for number in numbers]
        return [cache.read("ids", start, stop).tolist() for start, stop in ranges]

    return read
