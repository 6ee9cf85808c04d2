"""Token ids of a file of JSON lines, kept beside it: tokenised once, read by every later run.

The name of the cache, `.FILE.HASH.tokens`, has a hash of the file's content, the key of its texts
and the tokenizer. So a changed file, or another tokenizer, has its own cache, and none is stale.
Ids are without begin and end marks and are not cut: one cache serves every --seq-length.

    ids     uint16 or int32    of all documents, one after another
    ends    int64 [documents]  where in ids each document ends
"""

import errno
import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.data.documents import Documents, JsonLines
from megatron.data.files import DataError, alone, disk_space, flush_to_disk, temporary
from megatron.data.indexed import token_dtype
from megatron.data.tokenizer_base import Tokenizer

CHUNK = 256  # documents that are tokenised together
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Encode = Callable[[Sequence[int]], list[list[int]]]
"""Maps numbers of documents to the ids of each; safe in any thread."""


def encoder(documents: Documents, tokenizer: Tokenizer, *, cached: bool) -> Encode:
    """Tokenises on demand, or with `cached` reads the cache beside the data, which is made first if
    it does not exist.

    Raises ValueError, naming --cache-tokens, if the documents are not a file of JSON lines. Warns
    if no cache can be written to the folder, and then tokenises on demand.
    """

    def on_demand(numbers: Sequence[int]) -> list[list[int]]:
        return tokenizer.encode_batch([documents.text(number) for number in numbers])

    if not cached:
        return on_demand
    if not isinstance(documents, JsonLines):
        raise ValueError(
            f"--cache-tokens: {documents.name} is no file of JSON lines; --no-cache-tokens works"
        )
    facts = "\n".join((documents.content, tokenizer.kind, tokenizer.fingerprint))
    name = hashlib.sha256(facts.encode()).hexdigest()[:16]
    source, dtype = Path(documents.name).resolve(), token_dtype(tokenizer.vocab_size)
    file = source.with_name(f".{source.name}.{name}.tokens")
    try:
        with alone(file):  # one process of a host tokenises; the others wait for its cache
            if not file.is_file():
                _write(file, on_demand, documents.num_documents, dtype)
    except OSError as error:
        space = error.errno in NO_SPACE and f"; {disk_space(file, documents.num_bytes)}"
        warnings.warn(
            f"--cache-tokens: {file.parent} takes no cache ({error.strerror}{space or ''}): "
            "documents are tokenised when they are read",
            stacklevel=3,
        )
        return on_demand
    return TokenCache(file, documents.num_documents, dtype).encode


def _write(file: Path, encode: Encode, documents: int, dtype: np.dtype[Any]) -> None:
    """Writes the cache in bounded memory; the file is in place whole, or not at all."""
    staged, ends = temporary(file), np.empty(documents, np.int64)
    end = 0
    try:
        with staged.open("wb") as stream:
            for start in range(0, documents, CHUNK):
                numbers = range(start, min(start + CHUNK, documents))
                for number, ids in zip(numbers, encode(numbers), strict=True):
                    stream.write(np.asarray(ids, dtype).tobytes())
                    ends[number] = end = end + len(ids)
            stream.write(ends.tobytes())
            flush_to_disk(stream)
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)


class TokenCache:
    """A whole cache, open for reading."""

    def __init__(self, file: Path, documents: int, dtype: np.dtype[Any]) -> None:
        """Raises DataError, naming the file, if it is damaged."""
        self._file, self._dtype = file, dtype
        self._stream: BinaryIO = file.open("rb", buffering=0)
        weakref.finalize(self, self._stream.close)
        size, tail = os.fstat(self._stream.fileno()).st_size, 8 * documents
        found = os.pread(self._stream.fileno(), tail, size - tail) if size >= tail else b""
        starts = np.concatenate([[0], np.frombuffer(found, np.int64)]) * dtype.itemsize
        if int(starts[-1]) + tail != size or (np.diff(starts) < 0).any():
            raise DataError(f"--cache-tokens: {file} is damaged; without this file it is made anew")
        self._starts = starts

    def encode(self, numbers: Sequence[int]) -> list[list[int]]:
        """The ids of each of these documents."""
        found = list[list[int]]()
        for number in numbers:
            start, stop = self._starts[number : number + 2].tolist()
            content = os.pread(self._stream.fileno(), stop - start, start)
            if len(content) != stop - start:
                raise DataError(f"--cache-tokens: {self._file} was cut while it was read")
            found.append(np.frombuffer(content, self._dtype).tolist())
        return found
