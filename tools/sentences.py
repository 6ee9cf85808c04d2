"""Text to sentences, by the rules of sentencex; docs/results/sentences.md says why these."""

from collections.abc import Iterator
from importlib.metadata import version

from sentencex import segment

SPLITTER = f"sentencex {version('sentencex')}"
LANGUAGE = "en"
# Characters of a line that are looked at together: the time that the library takes grows with the
# square of a line's length where it has other letters than ASCII's.
LONGEST = 5_000


def split_sentences(text: str) -> list[str]:
    """The sentences in order: each character that is no white space is in exactly one of them.

    A line end ends a sentence, so that lines should not be wrapped.  A text of white space alone
    has none.  A sentence of more than LONGEST characters is cut.
    """
    return [sentence for line in text.splitlines() for sentence in _split_line(line)]


def _split_line(line: str) -> Iterator[str]:
    """Without the white space around them."""
    start = 0
    while start < len(line):
        window = line[start : start + LONGEST]
        pieces = segment(LANGUAGE, window)
        if "".join(pieces) != window:  # not known to happen, and no text may be lost by it
            pieces = [window]
        if start + len(window) < len(line) and len(pieces) > 1:
            pieces.pop()  # which may go on
        length = sum(map(len, pieces))
        yield from filter(None, map(str.strip, pieces))
        start += length
