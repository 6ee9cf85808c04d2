"""What all tokenizers share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

EncodedTexts = tuple[NDArray[np.uint32], NDArray[np.int32]]
"""(the ids of all texts one after another, how many of them each text has)"""


class Tokenizer:
    """Text to ids and back, with a tokenizers.Tokenizer.

    It knows no special tokens: text that spells a mark is ordinary text.
    """

    kind: str
    """Name that --tokenizer-type knows it by."""
    names: ClassVar[Mapping[str, str]]
    """What each file is called in a folder of a tokenizer: {parameter: name}."""
    vocab_size: int
    """Number of ids, the end mark's included; every id is below it."""
    eod: int
    """Id of the mark that ends a document; no text is encoded as it."""
    fingerprint: str
    """SHA-256, in hex, of the vocabulary and the merges: equal ids for every text."""
    files: Mapping[str, bytes]
    """{name: content} of the files it was made of, from which read_tokenizer makes it again."""
    library: Any
    """A tokenizers.Tokenizer."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts))]

    def encode_arrays(self, texts: Sequence[str]) -> EncodedTexts:
        return encode_arrays(self.library, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode(list(ids)))


def encode_arrays(library: Any, texts: Sequence[str]) -> EncodedTexts:
    """library: a tokenizers.Tokenizer."""
    encodings = library.encode_batch_fast(list(texts))
    ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
    sizes = np.array([len(each) for each in ids], np.int32)
    return np.concatenate(ids or [np.empty(0, np.uint32)]), sizes


def read_given(flag: str, file: str | None) -> bytes:
    """The file that the flag names; ValueError without one, FileNotFoundError if it is not there"""
    if file is None:
        raise ValueError(f"{flag} is missing: it names a file of the tokenizer")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file")
    return Path(file).read_bytes()
