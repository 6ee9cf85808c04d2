"""-h: help that fits on a screen, with two examples. --help-all: everything.

tyro writes the whole help, with a table for each group of flags. -h cuts a long help to the names
of its flags.
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
_TABLE = re.compile(r"^ (.+)\n -+\n((?: .+\n|\n(?= {3}))*)\n?", re.MULTILINE)
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


def shown(whole: str, commands: Sequence[str], *, is_short: bool) -> str:
    """The help, with examples. whole: tyro's, as for a file."""
    # Plain letters, as a terminal may lack others.
    text = re.sub(r" +$", "", whole.replace("\N{BULLET}", "-"), flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    text = re.sub(r"^(?! |usage:).{81,}$", lambda line: _wrapped(line[0]), text, flags=re.MULTILINE)
    if is_long := is_short and text.count("\n") > MOST_LINES:
        start = next(_TABLE.finditer(text)).start()
        usage, _, about = text[:start].strip().partition("\n\n")
        first, *others = about.split("\n\n")
        kept = [first, *(each for each in others if each.startswith("--"))]
        text = "\n\n".join((usage, *map(_wrapped, kept), _TABLE.sub(_names, text[start:])))
    words = " ".join(text.split())
    text = with_examples(text, [each for each in commands if " ".join(each.split()) not in words])
    return text + f"\n{ALL} explains every flag.\n" * is_long


def with_examples(text: str, commands: Sequence[str]) -> str:
    if not commands:
        return text
    return f"{text}\nExamples:\n\n{textwrap.indent(chr(10).join(commands), '    ')}\n"


def _names(table: re.Match[str]) -> str:
    """A table as the first names of its flags, the required ones first; one without flags as it is.

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
    return _wrapped(f"{title}: {line}", "    ") + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False)
