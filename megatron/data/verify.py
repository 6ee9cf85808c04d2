"""Checks of a data set on disk: against itself, against its sidecar, against a vocabulary."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.description import Description, ShardFacts
from megatron.data.files import sha256, with_suffix
from megatron.data.indexed import CHUNK, IndexedDataset, IndexedShard


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
    data, description = IndexedDataset(prefix), Description.read(prefix)
    for shard in data.shards:
        _check_index(shard, sentences=description is not None and description.sentences is not None)
    highest = 0
    if description is None:
        for shard in data.shards:
            highest = max(highest, _read_tokens(shard, hashed=False)[0])
    else:
        check_counts(data, description)
        for shard, listed in zip(data.shards, _listed(description), strict=True):
            found = sha256(with_suffix(shard.prefix, ".idx"))
            _check_sum(f"{shard.prefix}.idx", found, listed.idx_sha256, prefix)
            of_shard, found = _read_tokens(shard, hashed=True)
            check_highest_id(shard.prefix, of_shard, description.vocab_size)
            _check_sum(f"{shard.prefix}.bin", found, listed.bin_sha256, prefix)
            highest = max(highest, of_shard)
    return Report(
        documents=len(data.documents) - 1,
        sequences=len(data.sizes),
        tokens=len(data.tokens),
        highest_id=highest,
        described=description is not None,
    )


def check_counts(data: IndexedDataset, description: Description) -> None:
    """ValueError where the data set, or a shard, and its sidecar differ in what they hold."""
    for shard, listed in zip(data.shards, _listed(description), strict=True):
        found = {"documents": len(shard.documents) - 1, "tokens": len(shard.tokens)}
        if listed.sentences is not None:
            found["sentences"] = len(shard.sizes)
        for name, count in found.items():
            expected = getattr(listed, name)
            if count != expected:
                raise ValueError(
                    f"{shard.prefix} holds {count} {name}, but {data.prefix}.json says {expected}: "
                    "the files do not belong together; tools/preprocess_data.py makes them anew"
                )


def check_sequences(
    data: IndexedDataset, description: Description | None, *, sentences: bool
) -> None:
    """ValueError where its sequences are not sentences, as BERT reads them, or not documents."""
    if has_sentences(data, description) == sentences:
        return
    kinds = ("whole documents", "without"), ("sentences", "with")
    (ours, _), (theirs, how) = kinds[not sentences], kinds[sentences]
    raise ValueError(
        f"{data.prefix} holds {ours}, where {theirs} are read; one that "
        f"tools/preprocess_data.py wrote {how} --split-sentences would work"
    )


def has_sentences(data: IndexedDataset, description: Description | None) -> bool:
    """Whether its sequences are sentences.

    Without a sidecar, those of a data set of more sequences than documents are.
    """
    if description is not None:
        return description.sentences is not None
    return len(data.sizes) > len(data.documents) - 1


def check_highest_id(prefix: str, highest: int, vocab_size: int) -> None:
    """ValueError where the highest id found is outside the vocabulary."""
    if highest >= vocab_size:
        raise ValueError(
            f"{prefix} holds the id {highest}, outside a vocabulary of {vocab_size}: it "
            "was made with another tokenizer, or is damaged; the --vocab-file, "
            "and --merge-file if it has one, that it was made with would work"
        )


def _check_index(shard: IndexedShard, *, sentences: bool) -> None:
    """That each sequence starts where the one before it ends, and documents are in order.

    sentences: that each document has a sentence, too, and each sentence a token.
    """
    file, expected = f"{shard.prefix}.idx is damaged", 0
    for start in range(0, len(shard.sizes), CHUNK):
        sizes, pointers = (each[start : start + CHUNK] for each in (shard.sizes, shard.pointers))
        if sizes.min() < 0 or pointers.min() < 0:
            raise ValueError(f"{file}: a size or pointer overflowed below 0")
        ends = expected + np.cumsum(sizes, dtype=np.int64) * shard.dtype.itemsize
        wrong = np.flatnonzero(pointers != np.concatenate([[expected], ends[:-1]]))
        if len(wrong):
            raise ValueError(
                f"{file}: sequence {start + wrong[0]} does not start where the one before it ends; "
                "sequences are reordered or sizes wrong"
            )
        if sentences and not sizes.all():
            raise ValueError(f"{file}: it has a sentence without a token")
        expected = int(ends[-1])
    for start in range(0, len(shard.documents), CHUNK):
        counts = np.diff(shard.documents[start : start + CHUNK + 1])
        if np.any(counts < 0):
            raise ValueError(f"{file}: its documents are not in order")
        if sentences and not counts.all():
            raise ValueError(f"{file}: it has a document without a sentence")


def _read_tokens(shard: IndexedShard, *, hashed: bool) -> tuple[int, str]:
    """(highest id, SHA-256 of the .bin, or of nothing)."""
    highest, checksum = 0, hashlib.sha256()
    for chunk in shard.chunks():
        if (lowest := int(chunk.min())) < 0:
            raise ValueError(f"{shard.prefix}.bin is damaged: it holds the negative id {lowest}")
        highest = max(highest, int(chunk.max()))
        if hashed:
            checksum.update(chunk.data)
    return highest, checksum.hexdigest()


def _listed(description: Description) -> Sequence[Description | ShardFacts]:
    """What the sidecar says of each shard."""
    return description.shards or [description]


def _check_sum(file: str, found: str, expected: str, prefix: str) -> None:
    if found != expected:
        raise ValueError(
            f"{file} has changed: its SHA-256 is {found}, but {prefix}.json says {expected}; "
            "tools/preprocess_data.py makes it anew"
        )
