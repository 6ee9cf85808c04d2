"""Text to sentences, by the rules of sentencex; docs/results/sentences.md says why these."""

from collections.abc import Iterator
from importlib.metadata import version

from megatron.libraries import Library, load

sentencex = Library("sentencex")

LANGUAGE = "en"
# Characters of a line that are looked at together: the time that the library takes grows with the
# square of a line's length where it has other letters than ASCII's.
LONGEST = 5_000


def splitter() -> str:
    """The library and its version. Raises MissingLibrary."""
    load("sentencex", "--no-split-sentences")
    return f"sentencex {version('sentencex')}"


def split_sentences(text: str) -> list[str]:
    """The sentences in order: each character that is no white space is in exactly one of them.

    A line end ends a sentence, so that lines should not be wrapped.  A text of white space alone
    has none.  A sentence of more than LONGEST characters is cut, at a blank if it has any.
    """
    return [sentence for line in text.splitlines() for sentence in _split_line(line)]


def _split_line(line: str) -> Iterator[str]:
    """Without the white space around them."""
    start = 0
    while start < len(line):
        window = line[start : start + LONGEST]
        pieces = sentencex.segment(LANGUAGE, window)
        if "".join(pieces) != window:  # not known to happen, and no text may be lost by it
            pieces = [window]
        if start + len(window) < len(line):  # the last piece may go on
            pieces = pieces[:-1] or [_whole_words(window)]
        length = sum(map(len, pieces))
        yield from filter(None, map(str.strip, pieces))
        start += length


def _whole_words(window: str) -> str:
    """Up to its last white space, so that no word is cut; all of it where there is none."""
    for end in range(len(window), 0, -1):
        if window[end - 1].isspace():
            return window[:end]
    return window
