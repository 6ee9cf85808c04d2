"""Tokenised documents on disk, in Megatron's memory-mapped format, as preprocessing writes them.

P.bin holds the tokens of all sequences, one after another. P.idx holds, little-endian and without
padding:

    magic       9 bytes            MMIDIDX, two zero bytes
    version     uint64             1
    dtype       uint8              8: tokens are uint16; 4: int32
    sequences   uint64             n
    documents   uint64             d + 1
    sizes       int32 [n]          tokens of each sequence
    pointers    int64 [n]          byte of P.bin at which each sequence starts
    documents   int64 [d + 1]      sequence at which each document starts, and n

A sequence is a document; in a data set for BERT, it is a sentence of a document. P.json, a
Description of both files, is neither written nor read by other programs.

The pointers decide what is read: an index may select, repeat or reorder sequences of P.bin. Tokens
are numbered in the order of the index, and all code outside IndexedShard uses these numbers.

A large data set is several such pairs, P_00000, P_00001 and so on, each complete by itself; P.json
then lists them, and they are read as one data set.
"""

import hashlib
import json
import os
import struct
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import (
    SAMPLE,
    DataError,
    read_whole,
    sampled_sha256,
    with_suffix,
    write_atomically,
)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}

CHUNK = 1 << 16  # sequences whose pointers are checked together
OPTIONAL_COUNTS = ("sentences", "one_sentence", "unknown_tokens")  # fields of a Description


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 for vocabularies under 65,500 (Megatron's rule), else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """One of several pairs that are read as one data set."""

    name: str
    """Part after the data set's prefix in the names of its .bin and .idx."""
    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    bin_sample_sha256: str | None = None
    idx_sample_sha256: str | None = None
    sentences: int | None = None
    one_sentence: int | None = None
    unknown_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """The sidecar P.json: how the data set was made, and its contents."""

    tokenizer_type: str
    tokenizer_fingerprint: str
    vocab_size: int
    eod: int | None
    """The id that every document ends with; None where none was appended."""
    documents: int
    tokens: int
    bin_sha256: str
    """With several shards: SHA-256 of their checksums, one per line; so is idx_sha256."""
    idx_sha256: str
    bin_sample_sha256: str | None = None
    """See sampled_sha256(); compared at every opening. None in an older file."""
    idx_sample_sha256: str | None = None
    shards: tuple[ShardFacts, ...] = ()
    """In order; empty if the data set is one pair with its own name."""
    shuffled: bool | None = None
    """Whether the documents are in random order; None if that is not known."""
    sentences: int | None = None
    """Number of sentences, each one sequence, as BERT reads them; None if a sequence is a whole
    document, as GPT-2 reads it."""
    one_sentence: int | None = None
    """Documents of one sentence, which BERT skips; None if not split, or not counted."""
    unknown_tokens: int | None = None
    """Tokens that are [UNK]; None if the tokenizer has none, or they were not counted."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """From the result of asdict() or the content of a file; TypeError for anything else."""
        shards = tuple(ShardFacts(**each) for each in content.get("shards", ()))
        return cls(**{**content, "shards": shards})

    @classmethod
    def read(cls, prefix: str) -> Self | None:
        """Description of the data set, None if it has none; ValueError for a damaged one."""
        file = with_suffix(prefix, ".json")
        if not file.exists():
            return None
        try:
            description = cls.from_json(json.loads(file.read_bytes()))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{file} should be a JSON object of {names}: {error}") from error
        totals = sum_shards(description.shards) if description.shards else {}
        if any(getattr(description, name) != total for name, total in totals.items()):
            raise ValueError(f"{file} is damaged: its shards do not add up to its totals")
        return description

    def write(self, prefix: str) -> None:
        content = json.dumps(asdict(self), indent=2).encode() + b"\n"
        write_atomically(with_suffix(prefix, ".json"), content)

    @property
    def pairs(self) -> Mapping[str, "Description | ShardFacts"]:
        """{name after the prefix: facts} of each .bin and .idx, in order."""
        return {shard.name: shard for shard in self.shards} or {"": self}


def sum_shards(shards: Sequence[ShardFacts]) -> dict[str, Any]:
    """The counts and checksums of a Description with these shards."""
    totals: dict[str, Any] = {}
    for name in ("documents", "tokens", *OPTIONAL_COUNTS):
        counts = [count for shard in shards if (count := getattr(shard, name)) is not None]
        totals[name] = sum(counts) if counts else None
    for name in ("bin_sha256", "idx_sha256", "bin_sample_sha256", "idx_sample_sha256"):
        sums = [getattr(shard, name) for shard in shards]
        totals[name] = None if None in sums else _digest(sums)
    return totals


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class IndexedShard:
    """A .bin and its .idx.

    sizes: int32 [sequences], in tokens. pointers: int64 [sequences], in bytes. documents: int64
    [documents + 1], in sequences. All three are memory-mapped and read-only. samples:
    sampled_sha256() of the .bin and of the .idx.

    The sequences form runs, each contiguous in the .bin: a single run if nothing was selected or
    reordered.
    """

    def __init__(self, prefix: str, *, in_order: bool = False) -> None:
        """in_order: the pointers are known to form one run, and are not checked.

        Raises FileNotFoundError, or ValueError if the files are damaged or cut short.
        """
        self.prefix = prefix
        index, binary = _existing(prefix, ".idx"), _existing(prefix, ".bin")
        with index.open("rb") as stream:
            header = stream.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(
                f"{index} is no index of Megatron's memory-mapped format, or is cut short"
            )
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION or code not in DTYPES:
            works = f"version {VERSION} with type 8 (uint16) or 4 (int32) would work"
            raise ValueError(f"{index} has version {version} and token type {code}; {works}")
        if not sequences or not documents:
            raise ValueError(f"{index} holds no document")
        self.dtype = DTYPES[code]
        ends = list(accumulate([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents]))
        _check_length(index, ends[-1])
        # A plain array: each slice of a memmap takes ten times as long.
        whole = np.asarray(np.memmap(index, np.uint8, "r"))
        self.sizes = whole[ends[0] : ends[1]].view("<i4")
        self.pointers = whole[ends[1] : ends[2]].view("<i8")
        self.documents = whole[ends[2] : ends[3]].view("<i8")
        if self.documents[0] != 0 or self.documents[-1] != sequences:
            raise ValueError(f"{index} is damaged: its documents do not cover its sequences")
        firsts = np.zeros(1, np.int64) if in_order else self.find_runs()
        lasts = np.append(firsts[1:], sequences) - 1
        size = self.dtype.itemsize
        starts = self.pointers[firsts] // size
        stops = self.pointers[lasts] // size + self.sizes[lasts]
        tokens = np.concatenate([[0], np.cumsum(stops - starts)])
        # Each run's first sequence, first token, and shift from its position in the .bin to that
        # token. A memoryview's elements are ints, and are read faster than an array's.
        self._sequences, self.run_tokens = firsts.data, tokens[:-1]
        self.run_shifts = self.run_tokens - starts
        self.num_tokens = int(tokens[-1])
        self.samples = sampled_sha256(binary), sampled_sha256(index)
        self.descriptor = os.open(binary, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def find_runs(self) -> NDArray[np.int64]:
        """First sequence of each run: int64 [runs]; ValueError if a sequence is not in the .bin."""
        binary, size = with_suffix(self.prefix, ".bin"), self.dtype.itemsize
        length, firsts = binary.stat().st_size, [np.zeros(1, np.int64)]
        for start in range(0, len(self.sizes), CHUNK):
            sizes, pointers = (each[start : start + CHUNK] for each in (self.sizes, self.pointers))
            ends = pointers + np.multiply(sizes, size, dtype=np.int64)
            inside = (pointers >= 0) & (ends >= 0) & (ends <= length)
            if not (is_right := inside & (pointers % size == 0) & (sizes >= 0)).all():
                where = int(is_right.argmin())
                raise ValueError(
                    f"{binary} is cut short, or its index is damaged: sequence {start + where} has "
                    f"{sizes[where]} tokens from byte {pointers[where]} on, and the file {length} "
                    f"bytes, {size} a token"
                )
            after = self.pointers[start + 1 : start + CHUNK + 1]
            firsts.append(start + 1 + np.flatnonzero(after != ends[: len(after)]))
        return np.concatenate(firsts)

    def first_token(self, sequence: int) -> int:
        """Offset of the sequence's first token; num_tokens for the end of the last sequence."""
        if sequence >= len(self.sizes):
            return self.num_tokens
        run = bisect_right(self._sequences, sequence) - 1
        return int(self.pointers[sequence]) // self.dtype.itemsize + int(self.run_shifts[run])


def _existing(prefix: str, suffix: str) -> Path:
    file = with_suffix(prefix, suffix)
    if file.is_file():
        return file
    longer = [f"{prefix}_text_{kind}" for kind in ("document", "sentence")]
    existing = [each for each in longer if with_suffix(each, ".idx").is_file()]
    works = " or ".join(existing) or "P_text_document, for P_text_document.bin and its .idx,"
    raise FileNotFoundError(f"{file} is not there; {works} would work")


def _check_length(file: Path, expected: int) -> None:
    length = file.stat().st_size
    if length != expected:
        kind = "cut short" if length < expected else "too long"
        raise ValueError(
            f"{file} is {kind}, or belongs to other files: {length} bytes, not {expected}"
        )


class IndexedDataset:
    """A data set of one shard or of several.

    Documents, sequences and tokens are numbered across all shards. Opening reads headers, the
    sidecar and a sample of each file; without a sidecar, or if it has no sample of the index,
    opening reads all sizes and pointers, too.
    """

    def __init__(self, prefix: str) -> None:
        """FileNotFoundError, or ValueError if files are damaged or do not belong together."""
        self.prefix = prefix
        self.description = Description.read(prefix)
        """None for a data set without sidecar, as Megatron's own tools write it."""
        pairs = self.description.pairs if self.description is not None else {"": None}
        self.shards = tuple(
            IndexedShard(
                prefix + name, in_order=facts is not None and facts.idx_sample_sha256 is not None
            )
            for name, facts in pairs.items()
        )
        self.dtype = self.shards[0].dtype
        for shard, facts in zip(self.shards, pairs.values(), strict=True):
            if facts is None:
                continue
            _check_length(with_suffix(shard.prefix, ".bin"), facts.tokens * self.dtype.itemsize)
            expected = facts.bin_sample_sha256, facts.idx_sample_sha256
            for suffix, sample, was in zip((".bin", ".idx"), shard.samples, expected, strict=True):
                if was is not None:
                    file = f"{shard.prefix}{suffix}"
                    check_sum(file, sample, was, "the SHA-256 of a sample of it")
        documents = (len(shard.documents) - 1 for shard in self.shards)
        self._first_documents = [0, *accumulate(documents)]  # of each shard, and the end
        self.first_tokens = [0, *accumulate(shard.num_tokens for shard in self.shards)]
        """Those of the shards, and the end."""
        self.num_documents = self._first_documents[-1]
        self.num_sequences = sum(len(shard.sizes) for shard in self.shards)
        self.num_tokens = self.first_tokens[-1]
        own = [*zip(self.shards, self.first_tokens, strict=False)]  # as in a shard, of all runs
        runs = [shard.run_tokens + first for shard, first in own]
        self._run_tokens = np.concatenate([*runs, [self.num_tokens]]).data
        self._run_shifts = np.concatenate([shard.run_shifts + first for shard, first in own]).data

    @property
    def content(self) -> str:
        """Identity of the content: the SHA-256 of the .bin in the sidecar, and of the index if that
        says where sentences end; then a digest of the samples of all files, which are read anew."""
        if self.description is None:
            sidecar = f"{self.num_tokens * self.dtype.itemsize} bytes"
        else:
            has_index = self.description.sentences is not None
            index = f", index {self.description.idx_sha256}" if has_index else ""
            sidecar = f"SHA-256 {self.description.bin_sha256}{index}"
        samples = [sample for shard in self.shards for sample in shard.samples]
        return f"{sidecar}{SAMPLE}{_digest(samples)}"

    @property
    def has_sentences(self) -> bool:
        """Whether sequences are sentences; without a sidecar, whether a document has several."""
        if self.description is not None:
            return self.description.sentences is not None
        return self.num_sequences > self.num_documents

    def token_range(self, documents: range) -> range:
        """The tokens of these consecutive documents."""
        start, stop = self.first_token(documents.start), self.first_token(documents.stop)
        if start > stop:
            raise DataError(f"{self.prefix}.idx is damaged: its documents are not in order")
        return range(start, stop)

    def first_token(self, document: int) -> int:
        """Offset of the document's first token; num_tokens for document num_documents."""
        shard, first_token, number = self._find_document(document)
        start = shard.first_token(int(shard.documents[number]))
        if not 0 <= start <= shard.num_tokens:
            raise DataError(f"{shard.prefix}.idx is damaged: its documents are not in order")
        return first_token + start

    def sequence_sizes(self, document: int) -> NDArray[np.int32]:
        """Tokens of each sequence of the document: int32 [sequences], a read-only view."""
        shard, _, number = self._find_document(document)
        first, last = shard.documents[number : number + 2].tolist()
        return shard.sizes[first:last]

    def _find_document(self, document: int) -> tuple[IndexedShard, int, int]:
        """(the document's shard, the shard's first token, the document's number in the shard)."""
        number = min(bisect_right(self._first_documents, document), len(self.shards)) - 1
        first = self._first_documents[number]
        return self.shards[number], self.first_tokens[number], document - first

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[IndexedShard, int, int]]:
        """(shard, first byte and number of bytes in its .bin) for each part of tokens [start,
        stop)."""
        size = self.dtype.itemsize
        while start < stop:
            shard = self.shards[bisect_right(self.first_tokens, start) - 1]
            run = bisect_right(self._run_tokens, start) - 1
            end = min(stop, self._run_tokens[run + 1])
            yield shard, (start - self._run_shifts[run]) * size, (end - start) * size
            start = end

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), uint16 or int32, in a new array; safe in any thread.

        Raises DataError, naming the file, if it has become shorter.

        Not mapped: the first touch of a mapped page makes the kernel read up to a hundred times as
        much, in vain for samples in random order; the pages count as memory of this process; and a
        failing disk ends the process by a signal, where reading raises OSError.
        """
        tokens = np.empty(stop - start, self.dtype)
        left = tokens.view(np.uint8).data
        for shard, offset, length in self._pieces(start, stop):
            read_whole(shard.descriptor, left[:length], offset, f"{shard.prefix}.bin")
            left = left[length:]
        return tokens

    def will_read(self, start: int, stop: int) -> None:
        """Announces a read: a disk serves many reads together faster than in turn."""
        if sys.platform == "linux":
            for shard, offset, length in self._pieces(start, stop):
                os.posix_fadvise(shard.descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def check_sum(file: str, actual: str, expected: str, what: str = "its SHA-256") -> None:
    """Raises ValueError if a file is not what its sidecar says."""
    if actual != expected:
        raise ValueError(
            f"{file} has changed: {what} is {actual}, and was {expected}; tools/preprocess_data.py "
            "makes it anew, and without the .json it is read as it is"
        )


def check_highest_id(prefix: str, highest: int, vocab_size: int) -> None:
    """Raises DataError if the highest id found is outside the vocabulary."""
    if highest >= vocab_size:
        raise DataError(
            f"{prefix} holds the id {highest}, outside a vocabulary of {vocab_size}; the "
            "--vocab-file and --merge-file that it was made with would work, if it is not damaged"
        )
