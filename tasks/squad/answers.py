"""Answers from the logits of a question's windows.

The likeliest span of all windows is the answer: the highest sum of its start's and its end's logit,
of at most --max-answer-length tokens. A token that several windows have may start a span only in
the one where the context around it is best, the way of BERT's authors. All such spans are looked
at, not those of each window's 20 best starts and ends alone. The answer is that part of
the passage as it is in the file, from character to character, so that nothing is put back together
from tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tasks.squad.windows import Windows

PER_TOKEN = 0.01  # what a longer window adds to the context of its tokens


@dataclass(frozen=True)
class Answers:
    texts: Sequence[str]  # of each question, none of them empty
    odds: NDArray[np.float64]  # [questions], see read_answers


def read_answers(windows: Windows, logits: Sequence[NDArray[np.floating]], longest: int) -> Answers:
    """logits: of each window, [its tokens, 2]; longest: tokens of an answer.

    The odds of no answer are the lowest sum of the two logits of [CLS] in any window, less that of
    the answer.
    """
    texts, odds = [], []
    for number, question in enumerate(windows.questions):
        own = range(*windows.firsts[number : number + 2].tolist())
        table, ahead = windows.table[own.start : own.stop, 1:3], windows.ahead(number)
        found = []
        for window, (begin, end), may_start in zip(own, table, best_contexts(table), strict=True):
            starts, ends = logits[window][ahead : ahead + end - begin].astype(np.float64).T
            sum_, first, last = best_span(np.where(may_start, starts, -np.inf), ends, longest)
            found.append((sum_, begin + first, begin + last))
        best, first, last = max(found, key=lambda each: each[0])
        null = min(float(logits[window][0].astype(np.float64).sum()) for window in own)
        passage = question.passage
        spans = windows.passages.spans_of(passage)
        texts.append(windows.squad.passages[passage][spans[first, 0] : spans[last, 1]])
        odds.append(null - best)
    return Answers(texts, np.array(odds))


def best_contexts(table: NDArray[np.integer]) -> list[NDArray[np.bool_]]:
    """Of each window (first and last + 1 token, [windows, 2]) which of its tokens have no better
    context in another one: as many tokens on the side where there are fewer."""
    begins, ends = table[:, :1], table[:, 1:]
    places = np.arange(ends.max())
    context = np.minimum(places - begins, ends - 1 - places) + PER_TOKEN * (ends - begins)
    inside = (places >= begins) & (places < ends)
    best = np.where(inside, context, -np.inf).argmax(axis=0)
    return [best[begin:end] == number for number, (begin, end) in enumerate(table)]


def best_span(
    starts: NDArray[np.float64], ends: NDArray[np.float64], longest: int
) -> tuple[float, int, int]:
    """(sum, first, last) of the span [first, last] of at most `longest` tokens whose logits have
    the highest sum; starts, ends: [n]."""
    padded = np.append(ends, np.full(longest - 1, -np.inf))
    sums = starts[:, None] + sliding_window_view(padded, longest)  # [n, tokens after the first]
    first, more = divmod(int(sums.argmax()), longest)
    return float(sums[first, more]), first, first + more
