"""The data sets that --data-path names, checked against the tokenizer and the model.

Needs no torch and reads little, so that a program can refuse bad input before it starts.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from megatron.data.documents import Documents, names_documents, open_documents
from megatron.data.files import tokenizer_folder
from megatron.data.indexed import IndexedDataset, check_highest_id
from megatron.data.tokenizer import Tokenizer, file_flags, read_tokenizer
from megatron.errors import UsageError

PATH = "--data-path"

# Some 64 chunks of 2^16 ids of a data set without sidecar are checked beforehand: 8 to 16 MB, and
# few enough seeks for a slow disk.
SAMPLED_CHUNKS = 64
SAMPLED_CHUNK = 1 << 16


class DataSet(Protocol):
    """A data set of a blend: an IndexedDataset of tokens, or Documents."""

    @property
    def num_documents(self) -> int: ...

    @property
    def content(self) -> str:
        """Identity of the content, which a resumed run must find again."""
        ...


Data = TypeVar("Data", bound=DataSet)


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Data]):
    weight: Fraction
    data: Data


@dataclass(frozen=True, kw_only=True)
class Corpus(Generic[Data]):
    """The data sets of a run, with one tokenizer."""

    sources: tuple[Source[Data], ...]
    vocab_size: int
    """Rows of the model's word embedding, at least the tokenizer's number of ids; padding for the
    layout is added to it."""
    eod: int | None
    """The id that documents end with; None if it is not in the data, or not known."""
    fingerprint: str
    """Fingerprint of the tokenizer; empty if neither tokenizer nor sidecar gives it."""

    @property
    def identity(self) -> dict[str, Any]:
        """Facts that a resumed run must find again, for JSON; paths of files do not count."""
        total = sum(source.weight for source in self.sources)
        data = [f"{source.weight / total} of {source.data.content}" for source in self.sources]
        return {"vocab_size": self.vocab_size, "tokenizer": self.fingerprint, "data": data}


def open_corpus(
    data_path: Sequence[str],
    tokenizer: Tokenizer | None,
    vocab_size: int | None = None,
    undescribed: Callable[[], Tokenizer | None] = lambda: None,
) -> Corpus[IndexedDataset]:
    """Open the data sets of --data-path: one prefix, or weights and prefixes in turn.

    tokenizer: None if no tokenizer file was given; the facts are then in the sidecars, and
    `undescribed` finds a tokenizer for data without them.
    vocab_size: that of --vocab-size, at least the tokenizer's number of ids, which is the default.
    Raises UsageError, naming both values, if they contradict each other. Warns of data
    sets that were not shuffled, and of those without sidecar; some 2^22 ids of the latter, spread
    over the data, are checked.
    """
    sources = []
    for weight, prefix in _parse(data_path):
        if Path(prefix).is_dir() and (pairs := sorted(Path(prefix).glob("*.idx"))):
            names = [str(pair.with_suffix("")) for pair in pairs[:4]]
            allowed = f"a prefix in this folder: {' or '.join(names)}"
            raise UsageError(PATH, prefix, allowed, works=names[0] if len(pairs) == 1 else ())
        if names_documents(prefix):
            allowed = "the prefix of a .bin and .idx pair, which tools/preprocess_data.py makes of "
            raise UsageError(PATH, prefix, f"{allowed}text; {{}} reads text, for GPT-2", "--pad")
        try:
            sources.append(Source(weight=weight, data=IndexedDataset(prefix)))
        except (ValueError, OSError) as error:
            raise UsageError(PATH, prefix, f"a pair that can be read ({error})") from error
    if tokenizer is None and not any(source.data.description for source in sources):
        tokenizer = undescribed()
    # {source of the facts: (kind, vocabulary, fingerprint) of the tokenizer}
    tokenizers: dict[str, tuple[str, int, str]] = {}
    if tokenizer is not None:
        facts = tokenizer.kind, tokenizer.vocab_size, tokenizer.fingerprint
        tokenizers["--vocab-file"] = facts
    ends: set[int | None] = set()
    unshuffled, undescribed_data = [], []
    for data in (source.data for source in sources):
        if (about := data.description) is None:
            ends.add(None if tokenizer is None else tokenizer.eod)
            undescribed_data.append(data)
            continue
        facts = about.tokenizer_type, about.vocab_size, about.tokenizer_fingerprint
        tokenizers[f"{data.prefix}.json"] = facts
        ends.add(about.eod)
        # Neighbours share a sample only of whole documents: one of sentences has one document.
        if not about.shuffled and about.sentences is None:
            unshuffled.append(data.prefix)
    size, fingerprint = _agreed_tokenizer(tokenizers, vocab_size)
    for data in undescribed_data:
        text = f"{data.prefix}.json is not there: only ids are checked, not tokenizer and order"
        warnings.warn(text, stacklevel=2)
        step = max(SAMPLED_CHUNK, data.num_tokens // SAMPLED_CHUNKS)
        for start in range(0, data.num_tokens, step):
            ids = data.read(start, min(start + SAMPLED_CHUNK, data.num_tokens))
            check_highest_id(data.prefix, int(ids.max()), size)
    if unshuffled:
        warnings.warn(
            f"{', '.join(unshuffled)}: documents are not known to be shuffled, and neighbours "
            "share samples; python tools/corpus.py split shuffles them",
            stacklevel=2,
        )
    eod = ends.pop() if len(ends) == 1 else None
    return Corpus(sources=tuple(sources), vocab_size=size, eod=eod, fingerprint=fingerprint)


def open_document_corpus(
    data_path: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    read: Callable[[str], Documents] = open_documents,
) -> Corpus[Documents]:
    """Open the documents of --data-path, which are still text: one path, or weights and paths in
    turn.

    vocab_size: that of --vocab-size, at least the tokenizer's number of ids, which is the default.
    read: opens one path. Raises UsageError for what does not fit.
    """
    sources = [Source(weight=weight, data=read(path)) for weight, path in _parse(data_path)]
    facts = tokenizer.kind, tokenizer.vocab_size, tokenizer.fingerprint
    size, fingerprint = _agreed_tokenizer({"--vocab-file": facts}, vocab_size)
    return Corpus(
        sources=tuple(sources), vocab_size=size, eod=tokenizer.eod, fingerprint=fingerprint
    )


def _parse(data_path: Sequence[str]) -> list[tuple[Fraction, str]]:
    """[(weight, prefix or file)]"""
    if not data_path:
        allowed = "given: the prefix of a .bin and .idx pair, or documents, such as a file of JSON "
        raise UsageError(PATH, None, f"{allowed}lines, which {{}} reads", "--pad")
    if len(data_path) == 1:
        return [(Fraction(1), data_path[0])]
    try:
        weights = [Fraction(word) for word in data_path[::2]]
    except (ValueError, ZeroDivisionError):
        weights = []
    if len(data_path) % 2 or not weights or min(weights) <= 0:
        allowed = "a single path, or a positive weight before each, such as 0.3 first 0.7 second"
        raise UsageError(PATH, " ".join(data_path), allowed)
    return list(zip(weights, data_path[1::2], strict=True))


def _agreed_tokenizer(
    tokenizers: Mapping[str, tuple[str, int, str]], vocab_size: int | None
) -> tuple[int, str]:
    """(vocabulary, fingerprint) that all sources agree on and --vocab-size allows; else
    UsageError."""
    if not tokenizers:
        if vocab_size is None:
            allowed = "given: no data set of {} has a .json with the size"
            raise UsageError("--vocab-size", None, allowed, PATH)
        return vocab_size, ""
    names = ("kind", "vocabulary", "fingerprint")
    (first, expected), *others = tokenizers.items()
    for other, facts in others:
        for name, ours, theirs in zip(names, expected, facts, strict=True):
            if ours != theirs:
                allowed = "of one tokenizer, that which the data was made with: those of {} and {} "
                allowed += f"differ in their {name}, {ours} and {theirs}"
                raise UsageError(PATH, None, allowed, first, other)
    _, size, fingerprint = expected
    if vocab_size is not None and vocab_size < size:
        allowed = f"at least the {size} ids of the tokenizer; a model of {{}} with {vocab_size} "
        allowed += "needs a tokenizer of at most as many"
        raise UsageError("--vocab-size", vocab_size, allowed, "--load")
    return vocab_size or size, fingerprint


def require_sequences(corpus: Corpus[IndexedDataset], *, sentences: bool) -> None:
    """UsageError unless all data sets hold sentences, as BERT reads them; if False, documents."""
    for source in corpus.sources:
        if source.data.has_sentences != sentences:
            content, how = ("whole documents", "with") if sentences else ("sentences", "without")
            allowed = f"one that tools/preprocess_data.py wrote {how} --split-sentences: this data "
            raise UsageError(PATH, source.data.prefix, f"{allowed}set holds {content}")


def find_tokenizer(corpus: Corpus[IndexedDataset]) -> Tokenizer | None:
    """The corpus's tokenizer, from the folder beside the first data set that has one; else None.

    Raises ValueError, naming the folder, if its tokenizer did not make the data set, or is damaged.
    """
    for source in corpus.sources:
        folder, description = tokenizer_folder(source.data.prefix), source.data.description
        if description is None or not folder.is_dir():
            continue
        tokenizer = read_tokenizer(description.tokenizer_type, folder)
        if tokenizer.fingerprint != description.tokenizer_fingerprint:
            cure = f"the right {file_flags(tokenizer.kind)}, or no such folder, would work"
            raise ValueError(f"{folder} holds another tokenizer than that of the data set; {cure}")
        return tokenizer
    return None
