"""Repairs text: with ftfy where it could change something, and newlines where lines are wrapped.

`repair` is `ftfy.fix_text`, only faster: ftfy works line by line, and for most lines its source
tells the outcome.
"""

import itertools
import re
from functools import cache

from megatron.libraries import Library

ftfy, chardata, fixes = Library("ftfy"), Library("ftfy.chardata"), Library("ftfy.fixes")


# Finds lines that ftfy could change: they have a character that is not printable ASCII (tab,
# newline and form feed aside), or an HTML entity.  Every step of ftfy leaves other lines unchanged.
# The pattern starts with one class: re skips ahead to it three times as fast as to a choice of two.
@cache
def suspects() -> re.Pattern[str]:
    entity = chardata.HTML_ENTITY_RE.pattern.removeprefix("&")
    return re.compile(r"[^\t\n\f\x20-%'-~](?:(?<!&)|(?<=&)" + entity + ")")


# Lines in which ftfy only uncurls quotes.  Its other steps change none of these characters, none
# combines with a neighbour, and every sign of a wrong encoding has at least one character that is
# not here.
CURLY = "\u2018\u2019\u201c\u201d"
UNTOUCHED = "\xa0\xa9\xab\xad\xae\xb7\xbb\u200b\u2013\u2014\u2022\u2026\u2122"
EASY = re.compile(f"[\t\n\f\x20-~{CURLY}{UNTOUCHED}]*")

WIDTHS = range(40, 121)  # characters to which text may have been wrapped
FEWEST_LINES = 3  # needed to determine a width
SHARE_FULL = 0.8  # share of a text's lines that have to be full if it is wrapped


def repair(text: str) -> str:
    """`ftfy.fix_text(text)`: the same for every text, lone surrogates and NUL included."""
    markup = text.find("<")  # after the line of the first, ftfy leaves HTML entities alone
    parts: list[str] = []
    done = 0
    pattern = suspects()
    while suspect := pattern.search(text, done):
        start = text.rfind("\n", done, suspect.start()) + 1 or done
        end = text.find("\n", suspect.start()) + 1 or len(text)
        line = text[start:end]
        is_html = 0 <= markup < start
        if EASY.fullmatch(line) and (is_html or not chardata.HTML_ENTITY_RE.search(line)):
            line = fixes.uncurl_quotes(line)
        else:
            line = ftfy.fix_text(line, unescape_html=False if is_html else "auto")
        parts += text[done:start], line
        done = end
    return "".join([*parts, text[done:]]) if parts else text


def mend_newlines(text: str) -> str:
    """The text without superfluous newlines (section 4.1).

    In text that was wrapped to a width, a full line is joined with the next one, by a blank, or by
    nothing after a word's hyphen.  In all text, blanks at the ends of lines are removed, more than
    two newlines become two, and newlines at either end are removed.
    """
    lines = [line.rstrip() for line in text.split("\n")]
    width = wrap_width(lines)
    mended = lines[:1]
    for line, after in itertools.pairwise(lines):
        glue = "\n"
        if width and _same_paragraph(line, after) and _is_full(line, after, width):
            glue = "" if re.search(r"\w-\Z", line) else " "
        mended += glue, after
    return re.sub(r"\n{3,}", "\n\n", "".join(mended)).strip("\n")


def wrap_width(lines: list[str]) -> int | None:
    """The width to which the lines were wrapped, None if they were not.

    It is the length that one line in ten exceeds, last lines of paragraphs not counted.  The lines
    were wrapped if most of them are full: the next word would have exceeded the width.
    """
    inner = [pair for pair in itertools.pairwise(lines) if _same_paragraph(*pair)]
    if len(inner) < FEWEST_LINES:
        return None
    width = sorted(len(line) for line, _ in inner)[9 * len(inner) // 10]
    full = sum(_is_full(line, after, width) for line, after in inner)
    return width if width in WIDTHS and full >= SHARE_FULL * len(inner) else None


def _same_paragraph(line: str, after: str) -> bool:
    """Whether `after` continues the paragraph of `line`; blank and indented lines begin another."""
    return bool(line and after) and not after[0].isspace()


def _is_full(line: str, after: str, width: int) -> bool:
    return len(line) + 1 + len(after.split(None, 1)[0]) > width
