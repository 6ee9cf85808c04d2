"""BERT's WordPiece: text is cut at blanks and punctuation, and each word into known pieces.

With checks of whether texts fit a vocabulary: their casing, and how much of them is [UNK]. They
return a warning, if any; what is worse raises ValueError.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import ne
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.base_tokenizer import Tokenizer, read_given

PAD, UNKNOWN, CLS, SEP, MASK = MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer one is [UNK]
# Of the tokens of a text. English has next to none with BERT's own vocabulary (RACE: 0 of 15
# million; QQP: 34 of 250,157), sentences of Chinese 60 %, of Korean 16 %, of Hindi 7 %. Russian or
# Arabic, whose letters it has, has none either.
TELL_UNKNOWN = 0.01
MAX_UNKNOWN = 0.05  # unless --max-unknown says another share
# Of the tokens with letters, the share with upper-case ones: none in BERT's own lower-case
# vocabulary, "<S>" and "<T>" in its Chinese one, 31 % in one of 30,000 trained on cased text.
CASED = 0.02
# Texts with capitals: of RACE's articles all, of QQP's questions 99.96 %, of MNLI's sentences, a
# fifth of which are telephone calls written down in lower case, 90 %; of lower-cased data none.
TELL_CAPITALS = 0.5
LEAST_CAPITALS = 0.01
ENOUGH_TEXTS = 20  # fewer tell nothing about their casing


class BertTokenizer(Tokenizer):
    """BERT's WordPiece.

    Text that spells a mark such as [SEP] is encoded as the ordinary characters it is made of, and
    text without any character of a word, such as "\\u200b", as no token at all.
    """

    names: ClassVar[Mapping[str, str]] = {"vocab_file": "vocab.txt"}
    is_lower_case: ClassVar[bool]
    """Whether text is put into lower case, and its accents taken away, before it is encoded."""

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
        self.eod = self.sep
        self.fingerprint = hashlib.sha256(json.dumps([self.kind, tokens]).encode()).hexdigest()
        self.is_continuation: NDArray[np.bool_] = np.array(
            [token.startswith(CONTINUATION) for token in tokens]
        )
        """[vocabulary]: whether a piece goes on with the word of the piece before it."""

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, where in the text each begins and ends, in characters)."""
        encoding = self.library.encode(text, add_special_tokens=False)
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


class Casing(NamedTuple):
    texts: int
    """Of which the casing can be told."""
    with_capitals: int
    """Of these, those that have a capital letter."""


def count_casing(texts: Iterable[str]) -> Casing:
    with_capitals = without = 0
    for text in texts:
        if text != text.lower():
            with_capitals += 1
        elif _could_have_capitals(text):
            without += 1
    return Casing(with_capitals + without, with_capitals)


def judge_casing(
    name: str, casing: Casing, tokenizer: BertTokenizer, *, allow: bool, cure: str
) -> str | None:
    """A warning where text for a vocabulary with capitals has few of them, else None.

    ValueError where it has next to none, unless `allow`: --allow-lower-case. A vocabulary without
    capitals takes any text. name: of the texts; cure: what else would take text in lower case.
    """
    if tokenizer.is_lower_case or casing.texts < ENOUGH_TEXTS:
        return None
    share = casing.with_capitals / casing.texts
    message = (
        f"{name}: {casing.with_capitals} of {casing.texts} texts ({share:.1%}) have a capital "
        f"letter, as {tokenizer.kind} needs"
    )
    if share < LEAST_CAPITALS and not allow:
        raise ValueError(f"{message}; {cure}, or --allow-lower-case, would work")
    return message if share < TELL_CAPITALS else None


def judge_unknown(
    name: str, count: int, tokens: int, most: float, *, why: str, cure: str
) -> str | None:
    """A warning where more than TELL_UNKNOWN of the tokens are [UNK], else None.

    ValueError where more than `most`, --max-unknown, are. name: of what the tokens are of.
    """
    share = count / max(1, tokens)
    message = f"{name}: {count} of {tokens} tokens ({share:.1%}) are {UNKNOWN}, {why}"
    if share > most:
        allowed = f"--max-unknown {math.ceil(100 * share) / 100:.2f}"
        raise ValueError(f"{message}; {cure}, or {allowed}, would work")
    return f"{message}; {cure} would work" if share > TELL_UNKNOWN else None


def _parse_tokens(content: bytes, given: str) -> list[str]:
    """A token a line, their ids 0, 1, 2, ...; given: flag and file."""
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
    """ValueError where the vocabulary was made for text of the other kind."""
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


def _could_have_capitals(text: str) -> bool:
    """Whether most letters of a text without capitals could be some.

    Not those of Chinese that names an address of the web, nor of Georgian, whose capitals begin no
    word, so that title() leaves its letters as they are.
    """
    if text.isascii():  # takes a hundredth of the time
        return text != text.upper()
    return 2 * sum(map(ne, map(str.title, text), text)) > sum(map(str.isalpha, text))
