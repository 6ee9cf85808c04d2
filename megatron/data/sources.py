"""The data sets that --data-path names, checked against the tokenizer and the model.

Needs no torch and reads little, so that a program can refuse bad input before it starts.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron.data.description import Description
from megatron.data.files import tokenizer_folder
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import Tokenizer, file_flags, read_tokenizer
from megatron.data.verify import check_counts, check_highest_id, check_sequences

# Of a data set without sidecar some 64 chunks of 2^16 ids are looked at beforehand: 8 to 16 MB, and
# few enough seeks for a slow disk.
GLANCES = 64
GLANCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Source:
    weight: Fraction
    data: IndexedDataset
    description: Description | None
    """None for a data set without sidecar: one that Megatron's own tools wrote."""

    @property
    def content(self) -> str:
        """What is in the data set; where the index says where sentences end, that too."""
        known = self.description
        if known is None:
            return f"{len(self.data.tokens) * self.data.dtype.itemsize} bytes"
        index = f", index {known.idx_sha256}" if known.sentences is not None else ""
        return f"SHA-256 {known.bin_sha256}{index}"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data sets of a run, of one tokenizer."""

    sources: tuple[Source, ...]
    vocab_size: int
    """True vocabulary of the model: padding comes on top."""
    eod: int | None
    """The mark that documents end with; None where it is not in the data, or not known."""
    fingerprint: str
    """Of the tokenizer; empty where neither tokenizer nor sidecar tells."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run has to find again, for JSON; where the files are does not count."""
        total = sum(source.weight for source in self.sources)
        return {
            "vocab_size": self.vocab_size,
            "tokenizer": self.fingerprint,
            "data": [f"{source.weight / total} of {source.content}" for source in self.sources],
        }


def open_corpus(
    data_path: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> Corpus:
    """Open the data sets of --data-path: one prefix, or weights and prefixes in turn.

    tokenizer: None where no tokenizer file was given; the sidecars then say what is needed.
    vocab_size: what --vocab-size says, None where it was not given. Raises ValueError, naming the
    flag and both values, where they do not fit together. Data sets that were not shuffled get a
    warning. So does a data set without sidecar, of whose ids some 2^22, spread over it, are looked
    at.
    """
    sources = tuple(_open_source(weight, prefix) for weight, prefix in _parse(data_path))
    makers: dict[str, _Maker] = {}
    if tokenizer is not None:
        makers["--vocab-file"] = (tokenizer.kind, tokenizer.vocab_size, tokenizer.fingerprint)
    for source in sources:
        if (known := source.description) is not None:
            maker = known.tokenizer_type, known.vocab_size, known.tokenizer_fingerprint
            makers[f"{source.data.prefix}.json"] = maker
    size, fingerprint = _the_only(makers, vocab_size)
    for source in sources:
        if source.description is None:
            _glance(source.data, size)
    _warn_of_order(sources)
    own = tokenizer.eod if tokenizer is not None else None
    marks = {own if (known := source.description) is None else known.eod for source in sources}
    eod = marks.pop() if len(marks) == 1 else None
    return Corpus(sources=sources, vocab_size=size, eod=eod, fingerprint=fingerprint)


_Maker = tuple[str, int, str]  # kind, vocabulary and fingerprint of the tokenizer of some tokens


def _parse(data_path: Sequence[str]) -> list[tuple[Fraction, str]]:
    """[(weight, prefix)]"""
    if not data_path:
        raise ValueError("--data-path is missing: it takes the prefix of a .bin and .idx pair")
    if len(data_path) == 1:
        return [(Fraction(1), data_path[0])]
    try:
        weights = [Fraction(word) for word in data_path[::2]]
    except (ValueError, ZeroDivisionError):
        weights = []
    if len(data_path) % 2 or not weights or min(weights) <= 0:
        raise ValueError(
            f"--data-path {' '.join(data_path)} should be one prefix, or a positive weight before "
            "each prefix; --data-path 0.3 first 0.7 second would work"
        )
    return list(zip(weights, data_path[1::2], strict=True))


def _open_source(weight: Fraction, prefix: str) -> Source:
    try:
        data, description = IndexedDataset(prefix), Description.read(prefix)
        if description is not None:
            check_counts(data, description)
    except (ValueError, OSError) as error:
        raise ValueError(f"--data-path: {error}") from error
    return Source(weight=weight, data=data, description=description)


def _the_only(makers: Mapping[str, _Maker], vocab_size: int | None) -> tuple[int, str]:
    """(vocabulary, fingerprint) that all places and --vocab-size agree on; ValueError otherwise."""
    if not makers:
        if vocab_size is None:
            raise ValueError(
                "the size of the vocabulary is not known: no data set of --data-path has a .json "
                "beside it; the files of its tokenizer, or --vocab-size, would tell"
            )
        return vocab_size, ""
    first_place, first = next(iter(makers.items()))
    for place, maker in makers.items():
        for name, ours, theirs in zip(
            ("kind", "vocabulary", "fingerprint"), first, maker, strict=True
        ):
            if ours != theirs:
                raise ValueError(
                    f"--data-path: tokenizers differ in their {name}: {ours} by {first_place}, "
                    f"{theirs} by {place}; the files of the tokenizer that the data set was made "
                    "with would work"
                )
    _, size, fingerprint = first
    if vocab_size not in (None, size):
        raise ValueError(
            f"--vocab-size {vocab_size} is not the tokenizer's {size}; --vocab-size {size} would "
            "work, or none"
        )
    return size, fingerprint


def _glance(data: IndexedDataset, vocab_size: int) -> None:
    warnings.warn(
        f"{data.prefix}.json is not there, so only the ids of the data set are checked, not "
        "which tokenizer made them, nor whether its documents were shuffled",
        stacklevel=2,
    )
    step = max(GLANCE, len(data.tokens) // GLANCES)
    chunks = (chunk for shard in data.shards for chunk in shard.chunks(step=step, size=GLANCE))
    check_highest_id(data.prefix, max(int(chunk.max()) for chunk in chunks), vocab_size)


def _warn_of_order(sources: Sequence[Source]) -> None:
    """A sample packs neighbouring documents, so that their order matters; but one of sentences is
    of a single document."""
    unshuffled = [
        source.data.prefix
        for source in sources
        if (known := source.description) is not None
        and not known.shuffled
        and known.sentences is None
    ]
    if unshuffled:
        warnings.warn(
            f"{', '.join(unshuffled)}: documents are not known to be shuffled, and neighbours "
            "share samples; python -m tools.corpus.split shuffles them",
            stacklevel=2,
        )


def require_sequences(corpus: Corpus, *, sentences: bool) -> None:
    """ValueError where a data set is not of sentences, as BERT reads them, or not of documents."""
    for source in corpus.sources:
        try:
            check_sequences(source.data, source.description, sentences=sentences)
        except ValueError as error:
            raise ValueError(f"--data-path: {error}") from error


def find_tokenizer(corpus: Corpus) -> Tokenizer | None:
    """That of the corpus, from the folder beside the first data set that has one; None if none has.

    Raises ValueError, naming the folder, where what it holds did not make the data set, or is
    damaged.
    """
    for source in corpus.sources:
        folder, known = tokenizer_folder(source.data.prefix), source.description
        if known is None or not folder.is_dir():
            continue
        tokenizer = read_tokenizer(known.tokenizer_type, folder)
        found, expected = tokenizer.fingerprint, known.tokenizer_fingerprint
        if found != expected:
            raise ValueError(
                f"{folder} holds another tokenizer than the data set beside it was made with: "
                f"fingerprint {found[:12]}, not {expected[:12]}; {file_flags(tokenizer.kind)} with "
                "what it was made with would work, or no such folder"
            )
        return tokenizer
    return None
