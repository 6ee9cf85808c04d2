"""-h: help that fits on a screen, with two examples. --help-all: everything.

tyro writes the whole help, with a table for each group of flags. A long help keeps their names.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Sequence

ALL = "--help-all"
WORDS = frozenset({"-h", "--help", ALL})
MOST_LINES = 40  # of a help that is shown as it is
MOST_EXAMPLES = 2

_EXAMPLE = re.compile(r"^ *((?:python|torchrun) (?:.*\\\n)*.*)$", re.MULTILINE)
_TABLE = re.compile(r"^ (.+)\n -+\n((?: .+\n)*)\n?", re.MULTILINE)
_FLAG = re.compile(r"  (?:-\w, )?(--[a-z][\w-]*)")


def examples(*parts: object) -> list[str]:
    """The first commands in these docstrings or the docstrings of these parts' modules, and last in
    that of the program's file."""
    texts = [part if isinstance(part, str) else inspect.getmodule(part).__doc__ for part in parts]
    found: dict[str, None] = {}
    for text in [*texts, sys.modules["__main__"].__doc__]:
        for command in _EXAMPLE.findall(textwrap.dedent(text or "")):
            found[re.sub(r"\n +", "\n    ", re.sub(r" {2,}#.*", "", command))] = None
    return list(found)[:MOST_EXAMPLES]


def short(whole: str, commands: Sequence[str]) -> str:
    """The help on a screen. whole: tyro's, as for a file; commands: examples."""
    text = re.sub(r" +$", "", whole.replace("\N{BULLET}", "-"), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    if is_long := text.count("\n") > MOST_LINES:
        start = next(_TABLE.finditer(text)).start()
        usage, _, about = text[:start].strip().partition("\n\n")
        first, *others = about.split("\n\n")
        kept = [first, *(each for each in others if each.startswith("--"))]
        lines = "\n\n".join(textwrap.fill(each, 80, break_on_hyphens=False) for each in kept)
        text = f"{usage}\n\n{lines}\n\n{_TABLE.sub(_names, text[start:])}"
    text = with_examples(text, [each for each in commands if is_long or each not in text])
    return text + f"\n{ALL} explains every flag.\n" * is_long


def with_examples(text: str, commands: Sequence[str]) -> str:
    if not commands:
        return text
    return f"{text}\nExamples:\n\n{textwrap.indent(chr(10).join(commands), '    ')}\n"


def _names(table: re.Match[str]) -> str:
    """A table as the names of its flags, the required ones first; one without flags as it is.

    A long pair --name, --no-name has two rows.
    """
    title, rows = table[1].strip(), re.split(r"^(?=  -)", table[2], flags=re.MULTILINE)
    names = {each[1]: "(required)" in row for row in rows if (each := _FLAG.match(row))}
    if names.pop("--help", None) is not None and not names:
        return ""
    if not names:
        return table[0]
    names = {name: need for name, need in names.items() if "--" + name[5:] not in names}
    required = ", ".join(name for name, is_required in names.items() if is_required)
    others = ", ".join(name for name, is_required in names.items() if not is_required)
    line = "; ".join(each for each in (required and f"{required} (required)", others) if each)
    return (
        textwrap.fill(f"{title}: {line}", 80, subsequent_indent="    ", break_on_hyphens=False)
        + "\n"
    )
