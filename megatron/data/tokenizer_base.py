"""The parts that all tokenizers have in common."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = "<|endoftext|>"
PAD, UNKNOWN, CLS, SEP, MASK = MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

EncodedTexts = tuple[NDArray[np.uint32], NDArray[np.int32]]
"""(the ids of all texts one after another, how many of them each text has)"""


class Tokenizer:
    """Converts text to ids and back, with a tokenizers.Tokenizer.

    It knows no special tokens: text that spells a mark is ordinary text.
    """

    kind: str
    """Its value of --tokenizer-type."""
    names: ClassVar[Mapping[str, str]]
    """Name of each file in a tokenizer's folder: {parameter: name}."""
    vocab_size: int
    """Number of ids, the end mark's included; every id is below it."""
    eod: int
    """Id of the mark that ends a document; no text is encoded as it."""
    bos_id: int | None = None
    """Id of the mark that begins a document, for other programs: here no text starts with it. None
    if the tokenizer names none."""
    pad_id: int | None = None
    """Id of the mark that pads a sample; None if the tokenizer has none."""
    more_ends: tuple[int, ...] = ()
    """Other ids that end a generated text, by the files beside the model's weights."""
    fingerprint: str
    """SHA-256, in hex, of all that decides the ids: if equal, so are the ids of every text."""
    files: Mapping[str, bytes]
    """{name: content} of the files it was made of, from which read_tokenizer makes it again."""
    library: Any
    """A tokenizers.Tokenizer."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Every id that ends a generated text, eod first."""
        return (self.eod, *self.more_ends)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_arrays(self, texts: Sequence[str]) -> EncodedTexts:
        return encode_arrays(self.library, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with marks spelt out."""
        return str(self.library.decode(list(ids), skip_special_tokens=False))

    def decode_after(self, ids: Sequence[int]) -> str:
        """The text of ids that follow other ids. Decoded alone, they would lack the blank that many
        tokenizers remove from the start of a text."""
        before = self.encode("a")
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def token_id(self, text: str) -> int:
        """The id of the token spelt `text`; ValueError, naming similar ones, if there is none.

        A byte-level token is spelt in the characters that stand for its bytes.
        """
        found: int | None = self.library.token_to_id(text)
        if found is None:
            near = difflib.get_close_matches(text, self.library.get_vocab(), cutoff=0.5)
            raise ValueError(
                f"the vocabulary has no token {text!r}"
                + (f"; {' or '.join(map(repr, near))} would work" if near else "")
            )
        return found


def encode_arrays(library: Any, texts: Sequence[str]) -> EncodedTexts:
    """library: a tokenizers.Tokenizer."""
    encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
    ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
    sizes = np.array([len(each) for each in ids], np.int32)
    return np.concatenate(ids or [np.empty(0, np.uint32)]), sizes


def read_given(flag: str, file: str | None) -> bytes:
    """Content of the flag's file; ValueError without one, FileNotFoundError if it is missing."""
    if file is None:
        raise ValueError(f"{flag} is missing: it names a file of the tokenizer")
    if Path(file).is_dir():
        kind = "--tokenizer-type HuggingFaceTokenizer"
        raise ValueError(f"{flag} {file} is a folder; a file, or with {kind} this one, would work")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file")
    return Path(file).read_bytes()
