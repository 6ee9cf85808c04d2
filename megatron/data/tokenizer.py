"""The tokenizers of --tokenizer-type: GPT-2's byte-pair encoding, BERT's WordPiece, and any that a
tokenizer.json describes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizer_base import (
    CLS,
    END_OF_DOCUMENT,
    MARKS,
    MASK,
    PAD,
    SEP,
    UNKNOWN,
    Tokenizer,
    read_given,
)
from megatron.data.tokenizer_json import HuggingFaceTokenizer

CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer one is [UNK]
# Largest share with capitals, of a lower-case vocabulary's tokens with letters: none in BERT's own,
# "<S>" and "<T>" in its Chinese one; 31 % in one of 30,000 trained on cased text.
CASED = 0.02


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level byte-pair encoding.

    Text that spells the end mark is encoded as the ordinary characters it is made of.
    """

    kind = "GPT2BPETokenizer"
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        """Raises ValueError or OSError, naming the flag, for a file that is not as it should be."""
        import tokenizers

        vocab_content = read_given("--vocab-file", vocab_file)
        vocabulary = _parse_vocabulary(vocab_content, f"--vocab-file {vocab_file}")
        missing = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if missing or END_OF_DOCUMENT not in vocabulary:
            raise ValueError(
                f"--vocab-file {vocab_file} lacks {END_OF_DOCUMENT} or some of the 256 bytes; "
                "GPT-2's own vocab.json, or one of tools/train_tokenizer.py, would work"
            )
        merge_content = read_given("--merge-file", merge_file)
        merges = _parse_merges(merge_content, f"--merge-file {merge_file}", vocabulary)
        self.files = dict(zip(self.names.values(), (vocab_content, merge_content), strict=True))
        self.vocab_size = len(vocabulary)
        self.eod = vocabulary[END_OF_DOCUMENT]
        # A hash of the content: the formatting of the files does not count.
        content = json.dumps([sorted(vocabulary, key=vocabulary.__getitem__), merges])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        self.library = bpe


def _parse_vocabulary(content: bytes, given: str) -> dict[str, int]:
    """{token: id}, the ids being 0, 1, 2, ... in some order; given: flag and file."""
    try:
        vocabulary: Any = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{given} is not JSON: {error}") from error
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
    if any(type(each) is not int for each in ids) or set(ids) != set(range(len(ids))):
        cure = "a vocab.json, or --tokenizer-type HuggingFaceTokenizer for a tokenizer.json,"
        raise ValueError(
            f"{given} is no JSON object of tokens with the ids 0, 1, 2, ...; {cure} would work"
        )
    return vocabulary


def _parse_merges(
    content: bytes, given: str, vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    try:
        # Any line end, as when a file is read as text.
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is not UTF-8 text: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(
                f"{given}, line {number}: {line!r} merges no tokens of --vocab-file; files that "
                "belong together would work"
            )
        merges.append((left, right))
    return merges


class BertTokenizer(Tokenizer):
    """BERT's WordPiece.

    Text that spells a mark such as [SEP] is encoded as the ordinary characters it is made of. Text
    without any character of a word, such as "\\u200b", becomes no token.
    """

    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.txt"}
    is_lower_case: ClassVar[bool]
    """Whether text is lower-cased, and its accents removed, before it is encoded."""

    def __init__(self, vocab_file: str | None) -> None:
        """Raises ValueError or OSError, naming the flag, for a file that is not as it should be."""
        content, given = read_given("--vocab-file", vocab_file), f"--vocab-file {vocab_file}"
        tokens = _parse_tokens(content, given)
        _check_casing(tokens, self.is_lower_case, given)
        self.library = build_wordpiece(tokens, is_lower_case=self.is_lower_case)
        self.files = {self.names["vocab_file"]: content}
        self.vocab_size = len(tokens)
        numbers = map(tokens.index, (PAD, UNKNOWN, CLS, SEP, MASK))
        self.pad, self.unknown, self.cls, self.sep, self.mask = numbers
        self.eod, self.pad_id = self.sep, self.pad
        self.fingerprint = hashlib.sha256(json.dumps([self.kind, tokens]).encode()).hexdigest()
        self.is_continuation: NDArray[np.bool_] = np.array(
            [token.startswith(CONTINUATION) for token in tokens]
        )
        """[vocabulary]: whether a piece continues the word of the piece before it."""

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, start and end of each in the text, in characters)."""
        encoding = self.library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets


class BertWordPieceLowerCase(BertTokenizer):
    kind = "BertWordPieceLowerCase"
    is_lower_case = True


class BertWordPieceCase(BertTokenizer):
    kind = "BertWordPieceCase"
    is_lower_case = False


def build_wordpiece(tokens: Sequence[str], *, is_lower_case: bool) -> Any:
    """A tokenizers.Tokenizer, as transformers makes it; ids are indices of `tokens`."""
    import tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD
        )
    )
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=is_lower_case)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece(prefix=CONTINUATION)
    return library


def _parse_tokens(content: bytes, given: str) -> list[str]:
    """Tokens, one per line, with ids 0, 1, 2, ...; given: flag and file."""
    try:
        lines = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is not UTF-8 text; BERT's own vocab.txt would work") from error
    if missing := [mark for mark in MARKS if mark not in lines]:
        raise ValueError(
            f"{given} lacks the lines {' '.join(missing)} of a WordPiece's vocabulary; a vocab.txt "
            "of BERT or of tools/train_tokenizer.py would work"
        )
    first: dict[str, int] = {}
    for number, token in enumerate(lines, start=1):
        if not token:
            raise ValueError(f"{given}, line {number}: empty; every line should hold a token")
        if first.setdefault(token, number) != number:
            raise ValueError(f"{given}, line {number}: {token!r} is in line {first[token]}, too")
    return lines


def _check_casing(tokens: Sequence[str], is_lower_case: bool, given: str) -> None:
    """ValueError if the vocabulary was made for text of the other casing."""
    cased = [token for token in tokens if token not in MARKS and token.lower() != token.upper()]
    upper = [token for token in cased if token != token.lower()]
    if not cased or (len(upper) <= CASED * len(cased)) == is_lower_case:
        return
    other, kind = (
        (BertWordPieceCase, "without") if is_lower_case else (BertWordPieceLowerCase, "with")
    )
    raise ValueError(
        f"{given}: {len(upper)} of {len(cased)} tokens with letters have capitals; a vocabulary "
        f"{kind} capitals, or --tokenizer-type {other.kind} where data is made, would work"
    )


Maker = type[GPT2BPETokenizer] | type[BertTokenizer] | type[HuggingFaceTokenizer]
TOKENIZERS: dict[str, Maker] = {
    maker.kind: maker
    for maker in (
        GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, HuggingFaceTokenizer
    )
}  # fmt: skip


def build_tokenizer(kind: str, vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The tokenizer of this kind; ValueError or OSError, naming the flag, if it cannot be built."""
    maker = _maker(kind)
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    for parameter, file in given.items():
        if file is not None and parameter not in maker.names:
            raise ValueError(
                f"{_flag(parameter)} {file} is not for --tokenizer-type {kind}; {file_flags(kind)} "
                "alone would work"
            )
    return maker(**{parameter: given[parameter] for parameter in maker.names})


def file_names(kind: str) -> tuple[str, ...]:
    """Names of such a tokenizer's files in a folder; ValueError for an unknown kind."""
    return tuple(_maker(kind).names.values())


def file_flags(kind: str) -> str:
    """The flags that name these files, for messages: "--vocab-file and --merge-file"."""
    return " and ".join(map(_flag, _maker(kind).names))


def read_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """The tokenizer of this kind whose files are in the folder, as Tokenizer.files names them.

    Raises ValueError, naming the folder and the file, if one is missing or damaged.
    """
    maker = _maker(kind)
    files: dict[str, str | None] = {
        parameter: str(folder / name) for parameter, name in maker.names.items()
    }
    try:
        return maker(**files)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}; {file_flags(kind)} would work"
        ) from error


def _maker(kind: str) -> Maker:
    if kind not in TOKENIZERS:
        raise ValueError(f"--tokenizer-type {kind} is unknown; known: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind]


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
