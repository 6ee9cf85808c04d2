"""BERT's WordPiece: text is cut at blanks and punctuation, and each word into known pieces."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.data.library import LibraryTokenizer, read_given

PAD, UNKNOWN, CLS, SEP, MASK = MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer one is [UNK]
# Of the tokens of a text. English has next to none with BERT's own vocabulary (RACE: 0 of 15
# million; QQP: 34 of 250,157), sentences of Chinese 60 %, of Korean 16 %, of Hindi 7 %. Russian or
# Arabic, whose letters it has, has none either.
TELL_UNKNOWN = 0.01
# Of the tokens with letters, the share with upper-case ones: none in BERT's own lower-case
# vocabulary, "<S>" and "<T>" in its Chinese one, 31 % in one of 30,000 trained on cased text.
CASED = 0.02


class BertTokenizer(LibraryTokenizer):
    """BERT's WordPiece.

    Text that spells a mark such as [SEP] is encoded as the ordinary characters it is made of, and
    text without any character of a word, such as "\\u200b", as no token at all.
    """

    kind: str
    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.txt"}
    """What each file is called in a folder of a tokenizer."""
    is_lower_case: ClassVar[bool]
    """Whether text is put into lower case, and its accents taken away, before it is encoded."""

    def __init__(self, vocab_file: str | None, encoder: str = "auto") -> None:
        """Raises ValueError or OSError, naming the flag, for a file that is not as it should be.

        encoder: which library encodes; see encoders.py.
        """
        content, given = read_given("--vocab-file", vocab_file), f"--vocab-file {vocab_file}"
        tokens = _parse_tokens(content, given)
        _check_casing(tokens, self.is_lower_case, given)
        super().__init__(build_wordpiece(tokens, is_lower_case=self.is_lower_case), encoder)
        self.files: Mapping[str, bytes] = {self.names["vocab_file"]: content}
        self.vocab_size = len(tokens)
        numbers = map(tokens.index, (PAD, UNKNOWN, CLS, SEP, MASK))
        self.pad, self.unknown, self.cls, self.sep, self.mask = numbers
        self.eod = self.sep
        self.fingerprint = hashlib.sha256(json.dumps([self.kind, tokens]).encode()).hexdigest()
        self.is_continuation: NDArray[np.bool_] = np.array(
            [token.startswith(CONTINUATION) for token in tokens]
        )
        """[vocabulary]: whether a piece goes on with the word of the piece before it."""

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, where in the text each begins and ends, in characters)."""
        encoding = self._library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets


class BertWordPieceLowerCase(BertTokenizer):
    kind = "BertWordPieceLowerCase"
    is_lower_case = True


class BertWordPieceCase(BertTokenizer):
    kind = "BertWordPieceCase"
    is_lower_case = False


def build_wordpiece(tokens: Sequence[str], *, is_lower_case: bool) -> Any:
    """A tokenizers.Tokenizer, as transformers makes it; ids are places in `tokens`."""
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
    """A token a line, their ids 0, 1, 2, ...; given: flag and file."""
    try:
        lines = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is not UTF-8 text; BERT's own vocab.txt would work") from error
    if missing := [mark for mark in MARKS if mark not in lines]:
        is_json = content.lstrip()[:1] == b"{"
        raise ValueError(
            f"{given} {'is JSON, and' if is_json else f'has {len(lines)} lines and'} lacks "
            f"{' '.join(missing)}: it is no vocabulary of a WordPiece; a vocab.txt with a token "
            "a line would work, BERT's own or one of tools/train_tokenizer.py"
        )
    first: dict[str, int] = {}
    for number, token in enumerate(lines, start=1):
        if not token:
            raise ValueError(f"{given}, line {number}: empty; every line should hold a token")
        if first.setdefault(token, number) != number:
            raise ValueError(
                f"{given}, line {number}: {token!r} stands in line {first[token]} too, so that it "
                "has two ids; every token should stand once"
            )
    return lines


def _check_casing(tokens: Sequence[str], is_lower_case: bool, given: str) -> None:
    """ValueError where the vocabulary was made for text of the other kind."""
    cased = [token for token in tokens if token not in MARKS and token.lower() != token.upper()]
    upper = [token for token in cased if token != token.lower()]
    if not cased or (len(upper) <= CASED * len(cased)) == is_lower_case:
        return
    other = BertWordPieceCase if is_lower_case else BertWordPieceLowerCase
    lost = "which lower-case text never needs" if is_lower_case else "so that capitals are [UNK]"
    kind = "without capitals" if is_lower_case else "with capitals"
    raise ValueError(
        f"{given}: {len(upper)} of {len(cased)} tokens with letters hold upper-case ones, {lost}; "
        f"--tokenizer-type {other.kind} would work where data is made, and a vocabulary {kind} "
        "elsewhere"
    )
