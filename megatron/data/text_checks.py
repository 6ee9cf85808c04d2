"""Checks whether texts fit a WordPiece's vocabulary: their casing, and their share of [UNK].

The checks return a warning, if any; worse cases raise ValueError.
"""

import math
from collections.abc import Iterable
from operator import ne
from typing import NamedTuple

from megatron.data.tokenizer import UNKNOWN, BertTokenizer

# Shares of [UNK] among the tokens of a text. English has next to none with BERT's own vocabulary
# (RACE: 0 of 15 million; QQP: 34 of 250,157); Chinese sentences have 60 %, Korean 16 %, Hindi 7 %.
# Russian and Arabic, whose letters are in the vocabulary, have none either.
WARN_UNKNOWN = 0.01
MAX_UNKNOWN = 0.05  # unless --max-unknown says another share
# Shares of texts with capitals: all of RACE's articles, 99.96 % of QQP's questions, 90 % of MNLI's
# sentences, a fifth of which are phone calls written in lower case; none of lower-cased data.
WARN_CAPITALS = 0.5
LEAST_CAPITALS = 0.01
ENOUGH_TEXTS = 20  # fewer tell nothing about their casing


class Casing(NamedTuple):
    texts: int
    """Texts that show a casing."""
    with_capitals: int
    """Those of them that have a capital letter."""


def count_casing(texts: Iterable[str]) -> Casing:
    """A text shows a casing if it has a capital, or letters that could be capitals."""
    with_capitals = without = 0
    for text in texts:
        if text != text.lower():
            with_capitals += 1
        elif text.isascii():  # takes a hundredth of the time
            without += text != text.upper()
        # Most letters have a capital form: not so in Chinese that names a web address, nor in
        # Georgian, whose capitals begin no word, so that title() leaves its letters as they are.
        elif 2 * sum(map(ne, map(str.title, text), text)) > sum(map(str.isalpha, text)):
            without += 1
    return Casing(with_capitals + without, with_capitals)


def judge_casing(
    name: str, casing: Casing, tokenizer: BertTokenizer, *, allow: bool, works: str
) -> str | None:
    """A warning if text for a vocabulary with capitals has few of them, else None.

    Raises ValueError if it has next to none, unless `allow`: --allow-lower-case. A vocabulary
    without capitals takes any text. name: name of the texts; works: settings that take lower case.
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
    """A warning if more than WARN_UNKNOWN of the tokens are [UNK], else None.

    Raises ValueError if more than `most`, --max-unknown, are. name: name of the texts; works:
    settings that would take them.
    """
    share = count / max(1, tokens)
    message = f"{name}: {count} of {tokens} tokens ({share:.1%}) are {UNKNOWN}; {works}"
    if share > most:
        allowed = f"--max-unknown {math.ceil(100 * share) / 100:.2f}"
        raise ValueError(f"{message}, or {allowed}, would work")
    return f"{message} would work" if share > WARN_UNKNOWN else None
