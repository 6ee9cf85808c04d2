"""Tokenised documents on disk, in Megatron's memory-mapped format.

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

A sequence is a document, or in a data set for BERT a sentence of one. P.json, which other programs
neither write nor read, is a Description of the two.

A large data set is several such pairs, P_00000, P_00001 and so on, each of which is whole by
itself; P.json then lists them, and they are read as one.
"""

import hashlib
import operator
import os
import shutil
import struct
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.data.description import Description
from megatron.data.files import flush_directory, flush_to_disk, sha256, temporary, with_suffix

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
CODES = {dtype: code for code, dtype in DTYPES.items()}

CHUNK = 1 << 20  # entries of an array handled at a time, where arrays may not fit in memory


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 for vocabularies under 65,500 (Megatron's rule), else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


class _Sliced:
    """What is read by entry or by slice without a step."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        raise NotImplementedError

    def __getitem__(self, key: int | slice) -> Any:
        if not isinstance(key, slice):
            entry = range(len(self))[operator.index(key)]
            return self._read(entry, entry + 1)[0]
        start, stop, step = key.indices(len(self))
        assert step == 1
        return self._read(start, max(start, stop))


class Stored(_Sliced):
    """An array of one dimension that fills a file; what is asked for is read, in any thread.

    Not mapped: the first touch of a mapped page makes the kernel read up to a hundred times as much
    around it, in vain where samples lie in random order; the pages count as this process's memory;
    and a disk that fails ends the process by a signal where reading raises OSError.
    """

    def __init__(self, file: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._stream = file.open("rb", buffering=0)
        self.nbytes = os.fstat(self._stream.fileno()).st_size

    def __del__(self) -> None:
        if hasattr(self, "_stream"):  # else it did not open
            self._stream.close()

    def __len__(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def expect(self, start: int, stop: int) -> None:
        """Say that these entries are read next: a disk finds many together sooner than in turn."""
        if sys.platform == "linux":  # others read ahead as they like
            size = self.dtype.itemsize
            where = start * size, (stop - start) * size
            os.posix_fadvise(self._stream.fileno(), *where, os.POSIX_FADV_WILLNEED)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """The caller's own."""
        entries = np.empty(stop - start, self.dtype)
        left, offset = entries.view(np.uint8).data, start * self.dtype.itemsize
        while left:
            count = os.preadv(self._stream.fileno(), [left], offset)
            if not count:
                raise OSError(f"{self._stream.name} has become shorter since it was opened")
            left, offset = left[count:], offset + count
        return entries


class Joined(_Sliced):
    """Arrays of one dimension and one dtype, one after another; nothing is read beforehand."""

    def __init__(
        self, arrays: Sequence[NDArray[Any] | Stored], shifts: Sequence[int] | None = None
    ) -> None:
        """shifts: what is added to the entries of each array, if anything."""
        self._arrays = arrays
        self._shifts = shifts or [0] * len(arrays)
        self._starts = [0, *accumulate(map(len, arrays))]

    def __len__(self) -> int:
        return self._starts[-1]

    def expect(self, start: int, stop: int) -> None:
        """As Stored.expect, of arrays that are stored."""
        for number, entries in self._find(start, stop):
            array = self._arrays[number]
            assert isinstance(array, Stored)
            array.expect(entries.start, entries.stop)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        """A view if all lies in one array."""
        slices = []
        for number, entries in self._find(start, stop):
            found = self._arrays[number][entries.start : entries.stop]
            shift = self._shifts[number]
            slices.append(found + shift if shift else found)
        return slices[0] if len(slices) == 1 else np.concatenate(slices)

    def _find(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """(array, its entries) for each array in which some of these lie; one if there are none."""
        first = min(bisect_right(self._starts, start), len(self._arrays)) - 1
        for number in range(first, len(self._arrays)):
            offset, end = self._starts[number : number + 2]
            yield number, range(max(0, start - offset), max(0, min(stop, end) - offset))
            if stop <= end:
                break


Array = NDArray[Any] | Joined


def join(arrays: Sequence[NDArray[Any]], shifts: Sequence[int] | None = None) -> Array:
    """The arrays as one; an array that is alone as it is."""
    return arrays[0] if len(arrays) == 1 else Joined(arrays, shifts)


class IndexedShard:
    """A .bin and its .idx: opening it reads its header only.

    sizes: int32 [sequences], in tokens. pointers: int64 [sequences], in bytes. documents: int64
    [documents + 1], in sequences. These are memory-mapped, and read-only. tokens: uint16 or int32
    [all tokens], of which a slice is read when it is asked for.
    """

    def __init__(self, prefix: str) -> None:
        """Raises FileNotFoundError, or ValueError where the files are damaged or cut short."""
        self.prefix = prefix
        index, binary = _existing(prefix, ".idx"), _existing(prefix, ".bin")
        self.dtype, sequences, documents = _read_header(index)
        ends = list(accumulate([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents]))
        _check_length(index, ends[-1])
        # An array and not a memmap, whose every slice takes ten times as long.
        whole = np.asarray(np.memmap(index, np.uint8, "r"))
        self.sizes = whole[ends[0] : ends[1]].view("<i4")
        self.pointers = whole[ends[1] : ends[2]].view("<i8")
        self.documents = whole[ends[2] : ends[3]].view("<i8")
        if self.documents[0] != 0 or self.documents[-1] != sequences:
            raise ValueError(f"{index} is damaged: its documents do not cover its sequences")
        end = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        _check_length(binary, end)
        self.tokens = Stored(binary, self.dtype)

    def chunks(self, *, step: int = CHUNK, size: int = CHUNK) -> Iterator[NDArray[Any]]:
        """Up to `size` tokens from each multiple of `step` on: all of them, if not told otherwise.

        A chunk is overwritten by the next. Read, not mapped: mapping every page takes far longer.
        """
        buffer = np.empty(size, self.dtype)
        with with_suffix(self.prefix, ".bin").open("rb") as stream:
            for start in range(0, len(self.tokens), step):
                stream.seek(start * self.dtype.itemsize)
                yield buffer[: stream.readinto(buffer.data) // self.dtype.itemsize]


def _existing(prefix: str, suffix: str) -> Path:
    file = with_suffix(prefix, suffix)
    if file.is_file():
        return file
    whole = [f"{prefix}_text_{kind}" for kind in ("document", "sentence")]
    found = [each for each in whole if with_suffix(each, ".idx").is_file()]
    likely = " or ".join(found) or (
        "a prefix such as P_text_document, of P_text_document.bin and P_text_document.idx, or for "
        "BERT P_text_sentence"
    )
    raise FileNotFoundError(f"{file} is not there; {likely} would work")


def _read_header(index: Path) -> tuple[np.dtype[Any], int, int]:
    """(dtype of the tokens, sequences, entries of `documents`)."""
    with index.open("rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"{index} is no index of Megatron's memory-mapped format, or is cut short")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise ValueError(
            f"{index} has version {version} and token type {code}; only version {VERSION} with "
            "type 8 (uint16) or 4 (int32) is read here"
        )
    if not sequences or not documents:
        raise ValueError(f"{index} holds no document")
    return DTYPES[code], sequences, documents


def _check_length(file: Path, expected: int) -> None:
    length = file.stat().st_size
    if length != expected:
        kind = "cut short" if length < expected else "too long, or its index is damaged"
        raise ValueError(f"{file} is {kind}: {length} bytes, where its index says {expected}")


class IndexedDataset:
    """A data set on disk, of one shard or of several: opening it reads their headers only.

    sizes, pointers, documents and tokens are those of a shard, numbered through, so that it does
    not show where a shard ends.
    """

    def __init__(self, prefix: str) -> None:
        """Raises FileNotFoundError, or ValueError where files are damaged or do not agree."""
        self.prefix = prefix
        description = Description.read(prefix)
        listed = description.shards if description is not None else ()
        names = [shard.name for shard in listed] or [""]
        self.shards = tuple(IndexedShard(prefix + name) for name in names)
        self.dtype = self.shards[0].dtype
        if any(shard.dtype != self.dtype for shard in self.shards):
            raise ValueError(f"{prefix}.json lists shards of different token types")
        last = self.shards[-1]
        starts = [shard.documents[:-1] for shard in self.shards[:-1]] + [last.documents]
        sequences = [0, *accumulate(len(shard.sizes) for shard in self.shards)]
        sizes = [0, *accumulate(shard.tokens.nbytes for shard in self.shards)]
        self.sizes: Array = join([shard.sizes for shard in self.shards])
        self.pointers: Array = join([shard.pointers for shard in self.shards], sizes[:-1])
        self.documents: Array = join(starts, sequences[:-1])
        tokens = [shard.tokens for shard in self.shards]
        self.tokens: Stored | Joined = tokens[0] if len(tokens) == 1 else Joined(tokens)

    def token_range(self, documents: range) -> range:
        """The tokens of some consecutive documents, as offsets in `tokens`."""
        start, stop = (self._first_token(each) for each in (documents.start, documents.stop))
        if not 0 <= start <= stop <= len(self.tokens):
            raise ValueError(f"{self.prefix}.idx is damaged: its documents are not in order")
        return range(start, stop)

    def _first_token(self, document: int) -> int:
        sequence = int(self.documents[document])
        if sequence >= len(self.sizes):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.dtype.itemsize


class IndexedDatasetWriter:
    """Writes a data set as a stream, in bounded memory.

    A document is a sequence, or with `sentences` one or several. Until commit() all goes to
    temporary files beside the final ones; leaving the `with` block without it leaves nothing
    behind.
    """

    def __init__(self, prefix: str, dtype: DTypeLike, *, sentences: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        self.documents = 0
        self.sequences = 0
        self.tokens = 0
        self._sentences = sentences
        self._prefix = prefix
        # The last one holds the documents until the index is put together.
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
        """Append documents: all their tokens, and how many of them each sequence has, int32.

        sentences: how many sequences each document has, int32, of a data set of sentences.
        """
        assert tokens.dtype == self.dtype
        assert (sentences is not None) == self._sentences
        counts = np.ones_like(sizes) if sentences is None else sentences
        for parts, whole in ((sizes, len(tokens)), (counts, len(sizes))):
            assert parts.dtype == np.int32
            assert parts.sum(dtype=np.int64) == whole
            assert np.all(parts > 0)
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
        """Put the data set in place, over an older one if there is one; the index comes last.

        eod: the mark that every document added ends with, if it does. shuffled: whether the
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
            shuffled=shuffled,
        )
        # Without its index a data set is absent: at no moment do files of two of them mix.
        index.unlink(missing_ok=True)
        temporary(binary).replace(binary)
        description.write(self._prefix)
        temporary(index).replace(index)
        flush_directory(index.parent)
        return description

    def _finish_index(self) -> None:
        """Behind the sizes, which are written: the pointers, the documents; then the header."""
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
        code = CODES[self.dtype]
        self._index.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
