"""Tokenizers behind one small interface: text to token ids and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.encoders import Encoder, build_encoder

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(Protocol):
    """What the project asks of a tokenizer."""

    kind: str
    """Name that --tokenizer-type knows it by."""
    vocab_size: int
    """Number of ids, the end mark's included; every id is below it."""
    eod: int
    """Id of the mark that ends a document; no text is encoded as it."""
    fingerprint: str
    """SHA-256, in hex, of the vocabulary and the merges: equal ids for every text."""
    files: Mapping[str, bytes]
    """{name: content} of the files it was made of, from which read_tokenizer makes it again."""

    @property
    def encoder(self) -> Encoder:
        """What encodes; ValueError where the one that was chosen cannot be had."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_arrays(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """(the ids of all texts one after another, how many of them each text has)."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class GPT2BPETokenizer:
    """GPT-2's byte-level byte-pair encoding.

    Text that spells the end mark is encoded as the ordinary characters it is made of.
    """

    kind = "GPT2BPETokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    """What each file is called in a folder of a tokenizer."""

    def __init__(
        self, vocab_file: str | None, merge_file: str | None, encoder: str = "auto"
    ) -> None:
        """Raises ValueError or OSError, naming the flag, for a file that is not as it should be.

        encoder: which library encodes; see encoders.py.
        """
        import tokenizers

        vocab_content = _read("--vocab-file", vocab_file)
        vocabulary = _parse_vocabulary(vocab_content, f"--vocab-file {vocab_file}")
        missing = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing or END_OF_DOCUMENT not in vocabulary:
            raise ValueError(
                f"--vocab-file {vocab_file} has {len(vocabulary)} tokens and lacks "
                f"{END_OF_DOCUMENT} or some of the 256 bytes, so it is no vocabulary of a GPT-2 "
                "tokenizer; take GPT-2's own vocab.json, or one that tools/train_tokenizer.py wrote"
            )
        merge_content = _read("--merge-file", merge_file)
        merges = _parse_merges(merge_content, f"--merge-file {merge_file}", vocabulary)
        self.files: Mapping[str, bytes] = {
            self.names["vocab_file"]: vocab_content,
            self.names["merge_file"]: merge_content,
        }
        self.vocab_size = len(vocabulary)
        self.eod = vocabulary[END_OF_DOCUMENT]
        self.fingerprint = _fingerprint(vocabulary, merges)
        self._bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        self._bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = tokenizers.decoders.ByteLevel()
        self._choice = encoder

    @cached_property
    def encoder(self) -> Encoder:
        """Made when it is first asked for: who decodes, or compares fingerprints, needs none."""
        return build_encoder(self._choice, self._bpe)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encoder.lists(texts)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        return self.encoder.arrays(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._bpe.decode(list(ids)))


TOKENIZERS: dict[str, type[GPT2BPETokenizer]] = {GPT2BPETokenizer.kind: GPT2BPETokenizer}


def build_tokenizer(
    kind: str, vocab_file: str | None, merge_file: str | None, encoder: str = "auto"
) -> Tokenizer:
    """The tokenizer of this kind; ValueError or OSError, naming the flag, where it cannot be."""
    return _maker(kind)(vocab_file, merge_file, encoder)


def file_names(kind: str) -> tuple[str, ...]:
    """What the files of a tokenizer of this kind are called in a folder, ValueError for none."""
    return tuple(_maker(kind).names.values())


def read_tokenizer(kind: str, folder: Path, encoder: str = "auto") -> Tokenizer:
    """The tokenizer of this kind whose files are in the folder, as Tokenizer.files names them.

    Raises ValueError, naming the folder and the file, where one is missing or damaged.
    """
    maker = _maker(kind)
    files = {parameter: str(folder / name) for parameter, name in maker.names.items()}
    try:
        return maker(**files, encoder=encoder)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}; --vocab-file and --merge-file "
            "would work in its place"
        ) from error


def _maker(kind: str) -> type[GPT2BPETokenizer]:
    if kind not in TOKENIZERS:
        raise ValueError(f"--tokenizer-type {kind} is unknown; known: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind]


def _read(flag: str, file: str | None) -> bytes:
    if file is None:
        raise ValueError(f"{flag} is missing: it names a file of the tokenizer")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file")
    return Path(file).read_bytes()


def _parse_vocabulary(content: bytes, given: str) -> dict[str, int]:
    """{token: id}, the ids being 0, 1, 2, ... in some order; given: flag and file."""
    try:
        vocabulary: Any = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{given} is not JSON: {error}") from error
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
    if any(type(each) is not int for each in ids) or set(ids) != set(range(len(ids))):
        raise ValueError(
            f"{given} should be one JSON object of tokens with the ids 0, 1, 2, ... "
            "without gaps, such as GPT-2's vocab.json"
        )
    return vocabulary


def _parse_merges(
    content: bytes, given: str, vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    try:
        # Any line end, as when a file is read as text.
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{given} is not UTF-8 text; a file such as GPT-2's merges.txt would work"
        ) from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(
                f"{given}, line {number}: {line!r} does not merge tokens of the "
                "vocabulary; --vocab-file and --merge-file should belong together"
            )
        merges.append((left, right))
    return merges


def _fingerprint(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
    """Of the content: how the files are formatted does not count."""
    content = [sorted(vocabulary, key=vocabulary.__getitem__), merges]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
