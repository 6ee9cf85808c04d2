"""Splits text into sentences by the rules of sentencex; docs/results/sentences.md gives reasons."""

from collections.abc import Iterator
from importlib.metadata import version

from megatron.libraries import Library, load

sentencex = Library("sentencex")

LANGUAGE = "en"
# Characters of a line that are split in one call. For lines with non-ASCII letters the library's
# time grows with the square of the length.
LONGEST = 5_000


def splitter() -> str:
    """The library's name and version. Raises MissingLibrary."""
    load("sentencex", "--no-split-sentences")
    return f"sentencex {version('sentencex')}"


def split_sentences(text: str) -> list[str]:
    """The sentences in order; each character other than white space is in exactly one of them.

    A line end ends a sentence, so lines should not be wrapped.  A text of only white space has no
    sentences.  A sentence of more than LONGEST characters is split, at a blank if it has any.
    """
    return [sentence for line in text.splitlines() for sentence in _split_line(line)]


def _split_line(line: str) -> Iterator[str]:
    """The sentences of a line, without surrounding white space."""
    start = 0
    while start < len(line):
        window = line[start : start + LONGEST]
        pieces = sentencex.segment(LANGUAGE, window)
        if "".join(pieces) != window:  # not known to happen, but no text may be lost
            pieces = [window]
        if start + len(window) < len(line):  # the last piece may continue after the window
            pieces = pieces[:-1] or [_whole_words(window)]
        length = sum(map(len, pieces))
        yield from filter(None, map(str.strip, pieces))
        start += length


def _whole_words(window: str) -> str:
    """The window up to its last white space, so that no word is split; all of it if it has none."""
    for end in range(len(window), 0, -1):
        if window[end - 1].isspace():
            return window[:end]
    return window
