"""Encoders of preprocessing: the `tokenizers` library, which is the reference, and faster ones.

gigatoken encodes a byte-level BPE a hundred times faster, but no WordPiece; for this "words" asks
the reference once for each word.  A faster encoder is used if it supports the vocabulary and gives
the reference's ids on the probes, texts that encoders often get wrong.

gigatoken 0.10 has a newer Unicode than tokenizers 0.23: it treats 4,657 characters as letters that
the reference does not, and thus splits a contraction such as 's after one of them differently.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.tokenizer import EncodedTexts, Tokenizer, build_tokenizer, encode_arrays
from megatron.errors import UsageError
from megatron.libraries import MissingLibrary, load

CHOICES = ("auto", "gigatoken", "words", "tokenizers")
CACHED = 1 << 22  # characters of cached words; with their ids some 100 MB
PROBES = (
    "",
    "the thing, in the inn; then The END.",
    "it's we'll they've I'd you're I'm IT'S 's'S ' s \u017f '\u017f can''t",
    "<|endoftext|>a<|endoftext|><|endoftext|> <|endoftext",
    " ",
    "a  b   c    \td \t\t e",
    "\n\n\n a\n \n  b \n\n",
    "lone \r and \r\n and \r\r\n\n\r",
    "tail of blanks   \n  ",
    "\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000x\u3000\u3000y",
    "in\x0bthe\x0cin\x1cthe\x1fin\x85the\u2028in\u3000the\xa0in",
    "\u180e\u200b\ufeff\u2060 zero width",
    "0 00 1234567 3.14 1e-5 \u0661\u0662 \u00b2\u00bd\u2167\u3007\u9fa5",
    "e\u0301 a\u0308\u0323 \u0301 \u0e01\u0e33 \u0915\u094d\u0937\u093f \u1100\u1161\u11a8",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f600",
    "\x00 \x00\x00a\x01\x7f\x80\x9f",
    "\ue000\uf8ff \U000f0000\U0010fffd \ufffe\uffff\ufffd \U0010ffff",
    "\u01c5\u1e9e\u0130\u0131\u00df \u03a3\u03c2 \u02b0\u00aa\u00ba",
    "\u6f22\u5b57\u304b\u306a \ud55c\uae00 \u0627\u0644\u0639 \u05e2\u05d1 \u0440\u0443\u0441",
    "_a_b __c__ a_1 #!? ... ---!!! (a)[b]{c} $1 \u20ac2 \u201cq\u201d \u2014 \u2026",
    " " * 300 + "a" + "\n" * 300 + "b" + "\t" * 100,
    "a" * 500 + "0" * 500 + "-" * 500 + "\u00e9" * 200,
    "thethethe inin  thein" * 40,
    "https://example.org/a_b?c=1&d=%20#e <p class='x'>&amp;</p> C:\\dir\\file.txt",
)


class Encoder:
    """Encodes texts to ids in the calling process: by the `tokenizers` library, the reference."""

    name = "tokenizers"
    """One of CHOICES."""

    def __init__(self, library: Any, reason: str = "") -> None:
        """library: a tokenizers.Tokenizer.  reason: why no faster encoder is used, if known."""
        self._library = library
        self.description = f"tokenizers {version('tokenizers')}{f' ({reason})' if reason else ''}"

    def arrays(self, texts: Sequence[str]) -> EncodedTexts:
        return encode_arrays(self._library, texts)


class Gigatoken(Encoder):
    """The gigatoken library, on the calling thread only."""

    name = "gigatoken"

    def __init__(self, library: Any) -> None:
        """Raises MissingLibrary without gigatoken, RuntimeError for an unsupported vocabulary."""
        self._bpe = load("gigatoken").Tokenizer.from_json(library.to_str())
        self.description = f"gigatoken {version('gigatoken')}"

    def arrays(self, texts: Sequence[str]) -> EncodedTexts:
        rows = self._bpe.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(rows.offsets.data)
        ids = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        return ids, np.diff(offsets).astype(np.int32)


class Words(Encoder):
    """The `tokenizers` library, called once for each distinct stretch of text between two spaces.

    For BERT's WordPiece, which splits text at every space and does not look beyond one.
    """

    name = "words"

    def __init__(self, library: Any, limit: int = CACHED) -> None:
        """limit: characters of words that are cached. Raises ValueError for a library that may look
        beyond a space."""
        kinds = type(library.model).__name__, type(library.pre_tokenizer).__name__
        if kinds != ("WordPiece", "BertPreTokenizer"):
            raise ValueError(f"it is for a WordPiece, and this is a {kinds[0]}")
        self.description = f"tokenizers {version('tokenizers')}, once for each word"
        self._library = library
        self._cache: dict[str, bytes] = {}  # {word: its ids, as uint32}
        self._cached, self._limit = 0, limit  # characters

    def arrays(self, texts: Sequence[str]) -> EncodedTexts:
        if self._cached > self._limit:
            self._cache, self._cached = {}, 0
        words = [text.split(" ") for text in texts]
        new = list({word for each in words for word in each if word not in self._cache})
        for word, found in zip(new, self._library.encode_batch_fast(new), strict=True):
            self._cache[word] = np.array(found.ids, np.uint32).tobytes()
        self._cached += sum(map(len, new))
        ids = [b"".join(map(self._cache.__getitem__, each)) for each in words]
        sizes = np.fromiter(map(len, ids), np.int32, len(ids)) // np.int32(4)
        return np.frombuffer(b"".join(ids), np.uint32), sizes


FASTER: tuple[type[Gigatoken | Words], ...] = (Gigatoken, Words)


def build_encoder(choice: str, library: Any) -> Encoder:
    """The encoder of this name, or with "auto" the fastest whose ids are the reference's.

    library: a tokenizers.Tokenizer.  Raises UsageError for an impossible choice.
    """
    if choice not in CHOICES:
        raise UsageError("--encoder", choice, f"one of {', '.join(CHOICES)}")
    makers = [maker for maker in FASTER if choice in ("auto", maker.name)]
    # Only a HuggingFaceTokenizer sets this. Its other settings may not show in the probes.
    if library.encode_special_tokens and makers:
        if choice != "auto":
            raise UsageError("--encoder", choice, "auto or tokenizers for a tokenizer.json")
        makers = []
    faults = []
    for maker in makers:
        try:
            fast = maker(library)
            fault = find_difference(fast, Encoder(library))
        except (MissingLibrary, ValueError, RuntimeError) as error:
            fault = f"{maker.name} cannot be used: {str(error).partition(chr(10))[0]}"
        if fault is None:
            return fast
        faults.append(fault)
    if choice not in ("auto", Encoder.name):
        allowed = f"one that gives the tokenizer's ids; {faults[0]}"
        raise UsageError("--encoder", choice, allowed, works=("--encoder", "tokenizers"))
    return Encoder(library, "; ".join(faults))


def find_difference(encoder: Encoder, reference: Encoder) -> str | None:
    """A message with the first probe whose ids differ from the reference's, or None."""
    found, expected = encoder.arrays(PROBES), reference.arrays(PROBES)
    ids, known = (np.split(ids, np.cumsum(sizes)[:-1]) for ids, sizes in (found, expected))
    for text, ours, theirs in zip(PROBES, ids, known, strict=True):
        if not np.array_equal(ours, theirs):
            return f"{encoder.name} gives other ids than {reference.name} for {text[:40]!r}"
    return None


@cache
def load_tokenizer(kind: str, vocab_file: Path | None, merge_file: Path | None) -> Tokenizer:
    # There are --workers processes; the tokenizers library would use all cores in each of them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files = [str(file) if file else None for file in (vocab_file, merge_file)]
    return build_tokenizer(kind, *files)


@cache
def load_encoder(
    kind: str, vocab_file: Path | None, merge_file: Path | None, choice: str = "auto"
) -> Encoder:
    """The encoder; built once per process, even if `choice` names the one that "auto" selects."""
    if choice != "auto":
        chosen = load_encoder(kind, vocab_file, merge_file)
        if chosen.name == choice:
            return chosen
    return build_encoder(choice, load_tokenizer(kind, vocab_file, merge_file).library)
