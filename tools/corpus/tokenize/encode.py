"""Work of the workers of tools/preprocess_data.py: units of JSON lines to tokens, these to shards.

A unit is encoded into three files: its tokens, the size of each sequence (a document, or a sentence
of one) and the number of sequences of each document. A shard is the concatenation of the units of
some range of the input.  Thus all workers are busy whether there is one shard or many, and the
output does not depend on the number of workers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import token_dtype
from megatron.data.json_lines import no_text_reason, parse_json
from megatron.libraries import Library
from tools.corpus.engine import keep_rejected
from tools.corpus.files import DocumentCounts, Unit, grouped, read_documents, scratch_writer
from tools.corpus.tokenize.settings import Settings
from tools.corpus.tokenize.writer import IndexedDatasetWriter

BATCH_DOCUMENTS, BATCH_BYTES = 500, 1 << 22  # encoded in one call, at most
JOINED_TOKENS = 1 << 23  # held in memory at a time while a shard is joined
PARTS = (".tokens", ".sizes", ".documents")  # files that a unit is encoded into
NO_TOKEN = "without a token"
LINES_LOOKED_AT = 100  # lines without text per unit whose keys are counted
SAMPLE_UNITS, SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 32, 256, 4000  # limits of a sample of the input


LANGUAGE = "en"  # of sentencex; docs/results/sentences.md gives reasons
# Characters of a line that are split into sentences in one call. For lines with non-ASCII letters
# the library's time grows with the square of the length.
LONGEST = 5_000

sentencex = Library("sentencex")


def group_units(units: Sequence[Unit], shard_bytes: int) -> list[list[Unit]]:
    """The units of each shard: equal shares of the input, of at most about shard_bytes."""
    sizes = [unit.stop - unit.start for unit in units]
    total = sum(sizes)
    shards = -(-total // shard_bytes)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64).tolist()
    numbered = zip((start * shards // total for start in starts), units, strict=True)
    return [[unit for _, unit in group] for _, group in groupby(numbered, key=lambda pair: pair[0])]


class Encoded(NamedTuple):
    ids: NDArray[np.uint32]
    """Token ids of all documents, concatenated."""
    sizes: NDArray[np.int32]
    """Number of ids of each sequence, 1 or more."""
    sequences: NDArray[np.int32]
    """Number of sequences of each document, 0 if it has no token."""
    empty: int
    """Number of sentences without a token, which are left out."""


def encode_unit(unit: Unit, settings: Settings) -> dict[str, Any]:
    """Write the unit's tokens, and the sizes of its sequences; returns its counts, for JSON."""
    accounting, empty, other_keys = DocumentCounts(), 0, Counter[str]()
    dtype, no_text = token_dtype(settings.vocab_size), no_text_reason(settings.json_key)

    def count_keys(line: bytes, reason: str) -> None:
        """Count the characters of text under each other key of the first lines without text."""
        if len(accounting.rejected) <= LINES_LOOKED_AT and reason == no_text:
            other = parse_json(line)
            items = other.items() if isinstance(other, dict) else ()
            other_keys.update({k: len(v) if isinstance(v, str) else 0 for k, v in items})

    with ExitStack() as stack:
        tokens, sizes, sequences = (
            stack.enter_context(scratch_writer(settings.part(unit.name, suffix)))
            for suffix in PARTS
        )
        documents = read_documents(unit, accounting, settings.json_key, count_keys)
        for batch in grouped(documents, lambda each: len(each.line), BATCH_BYTES, BATCH_DOCUMENTS):
            encoded = encode([document.text for document in batch], settings)
            tokens.write(encoded.ids.astype(dtype))
            sizes.write(encoded.sizes)
            sequences.write(encoded.sequences[encoded.sequences > 0])
            empty += encoded.empty
            for document, count in zip(batch, encoded.sequences, strict=True):
                if count:
                    accounting.keep(document.record)
                else:
                    accounting.drop(document.record, NO_TOKEN)
    keep_rejected(settings, unit, accounting, shown=0)
    return {
        "accounting": accounting.to_json(),
        "empty_sentences": empty,
        "lines_without_key": sum(bad["reason"] == no_text for bad in accounting.rejected),
        "other_keys": other_keys,
    }


def encode(texts: Sequence[str], settings: Settings) -> Encoded:
    """The tokens of documents, with sentences and end marks according to the settings."""
    is_split = settings.split_sentences
    parts = [split_sentences(text) if is_split else [text] for text in texts]
    encoder = settings.load_encoder(settings.encoder_name)
    ids, sizes = encoder.arrays(list(chain.from_iterable(parts)))
    document = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    assert len(sizes) == len(document)
    real = sizes > 0
    sequences = np.bincount(document[real], minlength=len(parts)).astype(np.int32)
    empty = len(sizes) - int(real.sum()) if is_split else 0
    sizes = sizes[real]
    if settings.eod is not None:
        ids, sizes = np.insert(ids, np.cumsum(sizes), settings.eod), sizes + np.int32(1)
    return Encoded(ids, sizes, sequences, empty)


def sample_texts(units: Sequence[Unit], key: str) -> list[str]:
    """The beginnings of documents from all over the input.  key: key of the text in a line."""
    some = units[:: -(-len(units) // SAMPLE_UNITS)]
    return [
        document.text[:SAMPLE_CHARACTERS]
        for unit in some
        for document in islice(
            read_documents(unit, DocumentCounts(), key), SAMPLE_DOCUMENTS // len(some)
        )
    ]


def join_shard(number: int, units: tuple[str, ...], settings: Settings) -> dict[str, Any] | None:
    """Join the parts of the units; returns the shard's Description, None if it has no document."""
    staged = settings.staged(number)
    Path(staged).parent.mkdir(parents=True, exist_ok=True)
    dtype, is_split = token_dtype(settings.vocab_size), settings.split_sentences
    single = unknown = 0
    with IndexedDatasetWriter(staged, dtype, sentences=is_split) as writer:
        for unit in units:
            for tokens, sizes, sequences in _read_part(settings, unit, writer.dtype):
                writer.add(tokens, sizes, sequences if is_split else None)
                single += int((sequences == 1).sum())
                if settings.unknown is not None:
                    unknown += int((tokens == settings.unknown).sum())
        if not writer.documents:
            return None
        description = writer.commit(
            tokenizer_type=settings.tokenizer_type,
            tokenizer_fingerprint=settings.fingerprint,
            vocab_size=settings.vocab_size,
            eod=settings.eod,
            shuffled=settings.shuffled,
        )
    complete = replace(
        description,
        one_sentence=single if is_split else None,
        unknown_tokens=unknown if settings.unknown is not None else None,
    )
    return asdict(complete)


def _read_part(
    settings: Settings, unit: str, dtype: np.dtype[Any]
) -> Iterator[tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]]:
    """(tokens, sizes, sequences) of a unit's parts, some documents at a time."""
    binary, *counts = (settings.part(unit, suffix) for suffix in PARTS)
    sizes, sequences = (np.fromfile(file, np.int32) for file in counts)
    if not len(sequences):
        return
    tokens = np.memmap(binary, dtype, "r")
    # Start of each document and end of the last one, counted in sequences and in tokens.
    starts = np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[starts]
    cuts = np.searchsorted(offsets[1:], np.arange(0, offsets[-1], JOINED_TOKENS), side="right")
    for first, last in pairwise(np.unique([*cuts, len(sequences)]).tolist()):
        yield (
            tokens[offsets[first] : offsets[last]],
            sizes[starts[first] : starts[last]],
            sequences[first:last],
        )


def split_sentences(text: str) -> list[str]:
    """The sentences in order; each character other than white space is in exactly one of them.

    A line end ends a sentence, so lines should not be wrapped.  A text of only white space has no
    sentences.  A sentence of more than LONGEST characters is split, at a blank if it has any.
    """
    return [sentence for line in text.splitlines() for sentence in _split_line(line)]


def _split_line(line: str) -> Iterator[str]:
    """The sentences of a line, without surrounding white space."""
    start = 0
    while start < len(line):
        window = line[start : start + LONGEST]
        pieces = sentencex.segment(LANGUAGE, window)
        if "".join(pieces) != window:  # not known to happen, but no text may be lost
            pieces = [window]
        if start + len(window) < len(line):  # the last piece may continue after the window
            words = re.match(r".*\s", window)  # up to the last white space: no word is split
            pieces = pieces[:-1] or [words[0] if words else window]
        length = sum(map(len, pieces))
        yield from filter(None, map(str.strip, pieces))
        start += length
