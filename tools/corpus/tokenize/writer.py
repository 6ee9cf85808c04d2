"""Writes, joins, replaces and verifies the files of data sets, which megatron/data reads."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.data.files import (
    flush_path,
    flush_to_disk,
    sampled_sha256,
    sha256,
    tokenizer_folder,
    with_suffix,
)
from megatron.data.indexed import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    Description,
    IndexedDataset,
    IndexedShard,
    ShardFacts,
    check_highest_id,
    check_sum,
    sum_shards,
)

CHUNK = 1 << 20  # entries handled at a time in arrays that may not fit in memory


def temporary(file: Path) -> Path:
    """This process's temporary name in the file's folder, to write under and then rename."""
    return file.with_name(f"{file.name}.tmp{os.getpid()}")


def pack_header(dtype: np.dtype[Any], sequences: int, documents: int) -> bytes:
    """The header of an .idx file."""
    (code,) = (code for code, known in DTYPES.items() if known == dtype)
    return HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1)


class IndexedDatasetWriter:
    """Writes a .bin, its .idx and its .json incrementally, in bounded memory.

    A document is one sequence, or with `sentences` one or more. Until commit() everything is in
    temporary files beside the final ones; leaving the `with` block without it removes them.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, *, sentences: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        self.documents = 0
        self.sequences = 0
        self.tokens = 0
        self._sentences = sentences
        self._prefix = prefix
        # The last file holds the documents until the index is assembled.
        self._files = [with_suffix(prefix, suffix) for suffix in (".bin", ".idx", ".documents")]
        streams = [temporary(file).open("w+b") for file in self._files]
        self._binary, self._index, self._documents = streams
        self._sha256 = hashlib.sha256()
        self._index.write(bytes(HEADER.size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._binary, self._index, self._documents):
            stream.close()
        for file in self._files:
            temporary(file).unlink(missing_ok=True)

    def add(
        self,
        tokens: NDArray[Any],
        sizes: NDArray[np.int32],
        sentences: NDArray[np.int32] | None = None,
    ) -> None:
        """Append documents: all their tokens, and the number of tokens of each sequence, int32.

        sentences: number of sequences of each document, int32, for a data set of sentences.
        """
        assert tokens.dtype == self.dtype
        assert (sentences is not None) == self._sentences
        counts = np.ones_like(sizes) if sentences is None else sentences
        for lengths, total in ((sizes, len(tokens)), (counts, len(sizes))):
            assert lengths.dtype == np.int32
            assert lengths.sum(dtype=np.int64) == total
            assert np.all(lengths > 0)
        content = tokens.tobytes()
        self._binary.write(content)
        self._sha256.update(content)
        self._index.write(sizes.tobytes())
        starts = self.sequences + np.cumsum(counts, dtype="<i8") - counts
        self._documents.write(starts.tobytes())
        self.tokens += len(tokens)
        self.sequences += len(sizes)
        self.documents += len(counts)

    def commit(
        self,
        *,
        tokenizer_type: str,
        tokenizer_fingerprint: str,
        vocab_size: int,
        eod: int | None,
        shuffled: bool | None = None,
    ) -> Description:
        """Move the data set to its final place and replace any older one; the index is moved last.

        eod: the id that every added document ends with, if there is one. shuffled: whether the
        documents were added in random order.
        """
        assert self.documents > 0
        self._finish_index()
        binary, index, _ = self._files
        for stream in (self._binary, self._index):
            flush_to_disk(stream)
        description = Description(
            tokenizer_type=tokenizer_type,
            tokenizer_fingerprint=tokenizer_fingerprint,
            vocab_size=vocab_size,
            eod=eod,
            documents=self.documents,
            sentences=self.sequences if self._sentences else None,
            tokens=self.tokens,
            bin_sha256=self._sha256.hexdigest(),
            idx_sha256=sha256(temporary(index)),
            bin_sample_sha256=sampled_sha256(temporary(binary)),
            idx_sample_sha256=sampled_sha256(temporary(index)),
            shuffled=shuffled,
        )
        # Without its index a data set is absent, so files of two data sets never mix.
        index.unlink(missing_ok=True)
        temporary(binary).replace(binary)
        description.write(self._prefix)
        temporary(index).replace(index)
        flush_path(index.parent)
        return description

    def _finish_index(self) -> None:
        """Append pointers and documents after the sizes in the file, then write the header."""
        self._index.flush()
        index = temporary(self._files[1])
        sizes = np.memmap(index, "<i4", "r", offset=HEADER.size, shape=(self.sequences,))
        pointer = 0
        for start in range(0, self.sequences, CHUNK):
            in_bytes = sizes[start : start + CHUNK].astype("<i8") * self.dtype.itemsize
            pointers = pointer + np.cumsum(in_bytes) - in_bytes
            self._index.write(pointers.tobytes())
            pointer = int(pointers[-1] + in_bytes[-1])
        self._documents.seek(0)
        shutil.copyfileobj(self._documents, self._index, CHUNK)
        self._index.write(np.array(self.sequences, "<i8").tobytes())
        self._index.seek(0)
        self._index.write(pack_header(self.dtype, self.sequences, self.documents))


def join_descriptions(shards: Sequence[Description]) -> Description:
    """The description of a data set of these shards, in order; a single one is returned as is."""
    if len(shards) == 1:
        return shards[0]
    names = [field.name for field in fields(ShardFacts) if field.name != "name"]
    facts = tuple(
        ShardFacts(name=f"_{number:05}", **{name: getattr(shard, name) for name in names})
        for number, shard in enumerate(shards)
    )
    return replace(shards[0], **sum_shards(facts), shards=facts)


def move_data_set(
    staged: Sequence[str], prefix: str, description: Description, tokenizer: Mapping[str, bytes]
) -> None:
    """Move shards to `prefix`, and write its sidecar and the tokenizer's files.

    staged: prefixes of the shards, on the same file system. tokenizer: {name: content}. Files of
    two data sets never mix: the data set is absent until the last index is in place. After a crash
    the same call resumes: a shard that is no longer at its staged place has already been moved.
    """
    targets = [prefix + name for name in description.pairs]
    old = None
    with contextlib.suppress(ValueError):  # a damaged one is about to be replaced
        old = Description.read(prefix)
    if old != description:
        # Remove the older data set, except the .bin files that are about to be replaced. Its
        # sidecar is removed last, as it lists the shards.
        prefixes = {prefix, *(prefix + name for name in (old.pairs if old else ()))}
        for each in prefixes:
            with_suffix(each, ".idx").unlink(missing_ok=True)
        for each in prefixes.difference(targets):
            with_suffix(each, ".bin").unlink(missing_ok=True)
        with_suffix(prefix, ".json").unlink(missing_ok=True)
    _move(staged, targets, ".bin")
    _write_tokenizer(prefix, tokenizer)
    description.write(prefix)
    _move(staged, targets, ".idx")
    flush_path(with_suffix(prefix, ".json").parent)


def _move(sources: Sequence[str], targets: Sequence[str], suffix: str) -> None:
    for source, target in zip(sources, targets, strict=True):
        if (file := with_suffix(source, suffix)).exists():
            file.replace(with_suffix(target, suffix))


def _write_tokenizer(prefix: str, files: Mapping[str, bytes]) -> None:
    """Write all files or none; a folder that already has exactly these is left as it is."""
    folder = tokenizer_folder(prefix)
    staging = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)  # remains of a killed run
    if folder.is_dir() and files == {file.name: file.read_bytes() for file in folder.iterdir()}:
        return
    staging.mkdir()
    for name, content in files.items():
        with (staging / name).open("wb") as stream:
            stream.write(content)
            flush_to_disk(stream)
    flush_path(staging)
    if folder.exists():
        shutil.rmtree(folder)
    staging.replace(folder)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts that verify() found in an intact data set."""

    documents: int
    sequences: int
    tokens: int
    highest_id: int
    described: bool
    """Whether there is a sidecar; counts, checksums and vocabulary were then compared with it."""


def verify(prefix: str) -> Report:
    """Read the whole data set and check it; the structure is quick to check and comes first.

    Raises ValueError, naming file and fault, if it is truncated or too long, has ids outside its
    vocabulary, or differs from its sidecar; FileNotFoundError if it does not exist. Without a
    sidecar an index may select, repeat and reorder sequences; only the selected ones are read.
    """
    data = IndexedDataset(prefix)
    description = data.description
    pairs = description.pairs.values() if description is not None else [None]
    for shard in data.shards:
        described = description is not None
        _check_index(shard, in_order=described, sentences=described and data.has_sentences)
    highest = 0
    ranges = starmap(range, pairwise(data.first_tokens))
    for shard, facts, tokens in zip(data.shards, pairs, ranges, strict=True):
        if facts is not None:
            index = with_suffix(shard.prefix, ".idx")
            check_sum(str(index), sha256(index), facts.idx_sha256)
        highest_of_shard, checksum = _read_tokens(data, tokens, shard.prefix)
        highest = max(highest, highest_of_shard)
        if facts is not None and description is not None:
            check_highest_id(shard.prefix, highest_of_shard, description.vocab_size)
            check_sum(f"{shard.prefix}.bin", checksum, facts.bin_sha256)
    return Report(
        documents=data.num_documents,
        sequences=data.num_sequences,
        tokens=data.num_tokens,
        highest_id=highest,
        described=description is not None,
    )


def _check_index(shard: IndexedShard, *, in_order: bool, sentences: bool) -> None:
    """Check that each sequence lies inside the .bin, and documents are in order.

    in_order: also check that each sequence starts where the previous one ends. sentences: also
    check that each document has a sentence, and each sentence a token.
    """
    damaged, runs = f"{shard.prefix}.idx is damaged", shard.find_runs()
    if in_order and (len(runs) > 1 or shard.pointers[0]):
        where = 0 if shard.pointers[0] else runs[1]
        raise ValueError(f"{damaged}: sequence {where} does not start where the last one ends")
    for start in range(0, len(shard.sizes) if sentences else 0, CHUNK):
        if not shard.sizes[start : start + CHUNK].all():
            raise ValueError(f"{damaged}: it has a sentence without a token")
    for start in range(0, len(shard.documents), CHUNK):
        counts = np.diff(shard.documents[start : start + CHUNK + 1])
        if np.any(counts < 0):
            raise ValueError(f"{damaged}: its documents are not in order")
        if sentences and not counts.all():
            raise ValueError(f"{damaged}: it has a document without a sentence")


def _read_tokens(data: IndexedDataset, whole: range, prefix: str) -> tuple[int, str]:
    """(highest id, SHA-256) of the tokens of a shard with this prefix."""
    highest, checksum = 0, hashlib.sha256()
    for start in whole[::CHUNK]:
        tokens = data.read(start, min(start + CHUNK, whole.stop))
        if (lowest := int(tokens.min())) < 0:
            raise ValueError(f"{prefix}.bin is damaged: it holds the negative id {lowest}")
        highest = max(highest, int(tokens.max()))
        checksum.update(tokens.data)
    return highest, checksum.hexdigest()
