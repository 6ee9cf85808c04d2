"""Whether texts fit a WordPiece's vocabulary: their casing, and how much of them is [UNK].

The checks return a warning, if any; what is worse raises ValueError.
"""

import math
from collections.abc import Iterable
from operator import ne
from typing import NamedTuple

from megatron.data.tokenizer import BertTokenizer
from megatron.data.tokenizer_base import UNKNOWN

# Of the tokens of a text. English has next to none with BERT's own vocabulary (RACE: 0 of 15
# million; QQP: 34 of 250,157), sentences of Chinese 60 %, of Korean 16 %, of Hindi 7 %. Russian or
# Arabic, whose letters it has, has none either.
WARN_UNKNOWN = 0.01
MAX_UNKNOWN = 0.05  # unless --max-unknown says another share
# Texts with capitals: of RACE's articles all, of QQP's questions 99.96 %, of MNLI's sentences, a
# fifth of which are telephone calls written down in lower case, 90 %; of lower-cased data none.
WARN_CAPITALS = 0.5
LEAST_CAPITALS = 0.01
ENOUGH_TEXTS = 20  # fewer tell nothing about their casing


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
    name: str, casing: Casing, tokenizer: BertTokenizer, *, allow: bool, works: str
) -> str | None:
    """A warning where text for a vocabulary with capitals has few of them, else None.

    ValueError where it has next to none, unless `allow`: --allow-lower-case. A vocabulary without
    capitals takes any text. name: of the texts; works: what else would take text in lower case.
    """
    if tokenizer.is_lower_case or casing.texts < ENOUGH_TEXTS:
        return None
    share = casing.with_capitals / casing.texts
    message = (
        f"{name}: {casing.with_capitals} of {casing.texts} texts ({share:.1%}) have a capital "
        f"letter, as {tokenizer.kind} needs"
    )
    if share < LEAST_CAPITALS and not allow:
        raise ValueError(f"{message}; {works}, or --allow-lower-case, would work")
    return message if share < WARN_CAPITALS else None


def judge_unknown(name: str, count: int, tokens: int, most: float, works: str) -> str | None:
    """A warning where more than WARN_UNKNOWN of the tokens are [UNK], else None.

    ValueError where more than `most`, --max-unknown, are. name: of the tokens' texts; works: what
    else would take them.
    """
    share = count / max(1, tokens)
    message = f"{name}: {count} of {tokens} tokens ({share:.1%}) are {UNKNOWN}; {works}"
    if share > most:
        allowed = f"--max-unknown {math.ceil(100 * share) / 100:.2f}"
        raise ValueError(f"{message}, or {allowed}, would work")
    return f"{message} would work" if share > WARN_UNKNOWN else None


def _could_have_capitals(text: str) -> bool:
    """Whether most letters of a text without capitals could be some.

    Not those of Chinese that names an address of the web, nor of Georgian, whose capitals begin no
    word, so that title() leaves its letters as they are.
    """
    if text.isascii():  # takes a hundredth of the time
        return text != text.upper()
    return 2 * sum(map(ne, map(str.title, text), text)) > sum(map(str.isalpha, text))
