"""What all tokenizers have in common."""

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
    bos_id: int | None = None
    """Id of the mark that begins a document, for others' programs: none is put before a text here.
    None where the tokenizer names none."""
    pad_id: int | None = None
    """Id of the mark that pads a sample; None where the tokenizer has none."""
    more_ends: tuple[int, ...] = ()
    """Other ids that end a text where a model writes one, by the files beside its weights."""
    fingerprint: str
    """SHA-256, in hex, of what decides the ids: equal ids for every text."""
    files: Mapping[str, bytes]
    """{name: content} of the files it was made of, from which read_tokenizer makes it again."""
    library: Any
    """A tokenizers.Tokenizer."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Every id that ends a text where a model writes one, eod first."""
        return (self.eod, *self.more_ends)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_arrays(self, texts: Sequence[str]) -> EncodedTexts:
        return encode_arrays(self.library, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, its marks spelt out."""
        return str(self.library.decode(list(ids), skip_special_tokens=False))

    def decode_after(self, ids: Sequence[int]) -> str:
        """The text of ids that follow a text. Decoded alone they would lack the blank that many
        tokenizers take off the start of a text."""
        before = self.encode("a")
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def token_id(self, text: str) -> int:
        """The id of the token that is spelt so; ValueError, naming near ones, where there is none.

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
    """The file that the flag names; ValueError without one, FileNotFoundError where it is not."""
    if file is None:
        raise ValueError(f"{flag} is missing: it names a file of the tokenizer")
    if Path(file).is_dir():
        kind = "--tokenizer-type HuggingFaceTokenizer"
        raise ValueError(f"{flag} {file} is a folder; a file, or with {kind} this one, would work")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file")
    return Path(file).read_bytes()
