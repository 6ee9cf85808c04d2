"""Checks of a data set on disk: against itself, against its sidecar, against a vocabulary."""

import hashlib
from dataclasses import dataclass

import numpy as np

from megatron.data.description import Description
from megatron.data.files import sha256, with_suffix
from megatron.data.indexed import CHUNK, IndexedDataset


@dataclass(frozen=True, kw_only=True)
class Report:
    """What verify() found in a sound data set."""

    documents: int
    sequences: int
    tokens: int
    highest_id: int
    described: bool
    """Whether a sidecar was there to compare counts, checksums and vocabulary with."""


def verify(prefix: str) -> Report:
    """Read the whole data set and check all that can be; the structure, which is quick, first.

    Raises ValueError, naming file and fault, where it is cut short, reordered or overflowing, has
    ids outside its vocabulary, or differs from its sidecar; FileNotFoundError where it is not.
    """
    data = IndexedDataset(prefix)
    _check_sequences(data)
    _check_documents(data)
    description = Description.read(prefix)
    if description is not None:
        check_counts(data, description)
        _check_sum(prefix, ".idx", sha256(with_suffix(prefix, ".idx")), description.idx_sha256)
    highest, checksum = _read_tokens(data, with_checksum=description is not None)
    if description is not None:
        check_highest_id(data, highest, description.vocab_size)
        _check_sum(prefix, ".bin", checksum, description.bin_sha256)
    return Report(
        documents=len(data.documents) - 1,
        sequences=len(data.sizes),
        tokens=len(data.tokens),
        highest_id=highest,
        described=description is not None,
    )


def check_counts(data: IndexedDataset, description: Description) -> None:
    """ValueError where the data set and its sidecar differ in documents or tokens."""
    found = {"documents": len(data.documents) - 1, "tokens": len(data.tokens)}
    for name, count in found.items():
        expected = getattr(description, name)
        if count != expected:
            raise ValueError(
                f"{data.prefix} holds {count} {name}, but {data.prefix}.json says {expected}: the "
                "files do not belong together; tools/preprocess_data.py makes them anew"
            )


def check_highest_id(data: IndexedDataset, highest: int, vocab_size: int) -> None:
    """ValueError where the highest id found is outside the vocabulary."""
    if highest >= vocab_size:
        raise ValueError(
            f"{data.prefix}.bin holds the id {highest}, outside a vocabulary of {vocab_size}: it "
            "was made with another tokenizer, or is damaged; the --vocab-file and --merge-file "
            "that it was made with would work"
        )


def _check_sequences(data: IndexedDataset) -> None:
    """That each sequence starts where the one before it ends."""
    expected = 0
    for start in range(0, len(data.sizes), CHUNK):
        sizes, pointers = (each[start : start + CHUNK] for each in (data.sizes, data.pointers))
        if sizes.min() < 0 or pointers.min() < 0:
            raise ValueError(f"{data.prefix}.idx is damaged: a size or pointer overflowed below 0")
        ends = expected + np.cumsum(sizes, dtype=np.int64) * data.dtype.itemsize
        wrong = np.flatnonzero(pointers != np.concatenate([[expected], ends[:-1]]))
        if len(wrong):
            raise ValueError(
                f"{data.prefix}.idx is damaged: sequence {start + wrong[0]} does not start where "
                "the one before it ends; sequences are reordered or sizes wrong"
            )
        expected = int(ends[-1])


def _check_documents(data: IndexedDataset) -> None:
    for start in range(0, len(data.documents), CHUNK):
        if np.any(np.diff(data.documents[start : start + CHUNK + 1]) < 0):
            raise ValueError(f"{data.prefix}.idx is damaged: its documents are not in order")


def _read_tokens(data: IndexedDataset, *, with_checksum: bool) -> tuple[int, str]:
    """(highest id, SHA-256 of P.bin, or of nothing)."""
    lowest, highest, checksum = 0, 0, hashlib.sha256()
    for chunk in data.chunks():
        lowest, highest = min(lowest, int(chunk.min())), max(highest, int(chunk.max()))
        if with_checksum:
            checksum.update(chunk.data)
    if lowest < 0:
        raise ValueError(f"{data.prefix}.bin is damaged: it holds the negative id {lowest}")
    return highest, checksum.hexdigest()


def _check_sum(prefix: str, suffix: str, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"{prefix}{suffix} has changed: its SHA-256 is {found}, but {prefix}.json says "
            f"{expected}; tools/preprocess_data.py makes it anew"
        )
