"""Sentences begin with their subject, and identifiers are the field's terms.

Docstrings, texts below fields and comments of every tracked .py file, and every .md file outside
code, are read as sentences. Messages, which are strings among others, and comments of other files
are left to their authors.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Former words of this project's own, and the field's. The table has only identifiers that are free
# of a second meaning: `held` or `beside` may be good names, too. If the code needs one in
# its ordinary sense, its entry is removed, and the commit says in which sense.
COINAGES = {
    "BESIDE": "HF_FILES",
    "BatchRows": "dropout_keys",
    "Beside": "Grid",
    "Deciding": "ClusterTask",
    "Entrance": "TensorParallelInput",
    "Funnel": "DocumentCounts",
    "Held": "Memory, or the thing",
    "Holder": "TiedParameterHolder",
    "Kept": "SavedOnHost, or the thing",
    "Kit": "LayerFactory",
    "LaidOut": "ShardedModule",
    "Peers": "control group",
    "Planned": "ParallelizedModule",
    "Taken": "ShardedParameters",
    "Trip": "LayerOffload",
    "add_product": "add_matmul",
    "blame": "status",
    "carry_out": "run_experiment",
    "core_rows": "attention_dropout_keys",
    "find_again": "on_all_ranks",
    "marker_of": "marker_path",
    "of_query": "kv_head_index",
    "passes_on": "return_input",
    "refuse_alike": "on_all_ranks",
    "section_of": "config_of",
    "take_up": "resume",
    "telling": "fingerprint",
    "text_rows": "dropout_keys",
    "told": "message, record, report",
}
RULE = (
    "a sentence begins with its subject; 'see' or 'as in', not 'as of'; coined names have others:"
)
START = r"(?:\A|[.!?][\"')\]*_`]*\s|\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s)\s*[\"'(\[*_]*"
FORBIDDEN = [
    re.compile(rf"{START}(?P<found>(?:Of|What|Who|Whoever)\b(?![^.!?]*\?).{{0,60}})"),
    # Questions are none; a title or a cell of a table may lack its mark ("What works together").
    re.compile(r"(?:^#+|\|)\s+[\[*_]*(?P<found>Of\b.{0,60})", re.MULTILINE),
    re.compile(r"(?P<found>\bas\s+of\b.{0,60})", re.IGNORECASE),
]
OF_THE_LIBRARY = {  # in megatron/ alone, where one word had eight meanings
    "place": "position, index, folder, host, location",
    "places": "token_order, ..",
}
COINED = re.compile(rf"\b(?:{'|'.join(COINAGES | OF_THE_LIBRARY)})\b")
Text = tuple[int, str]  # the line in which it begins


def texts_of_python(source: str) -> Iterator[Text]:
    """Strings that stand alone, and comments; lines of one comment are joined."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("#").strip()
            if line > last + 1 or token.line[:column].strip():
                yield first, "\n".join(lines)
                first, lines = line, []
            last = line
            lines.append(text)
    yield first, "\n".join(lines)


def texts_of_page(source: str) -> Iterator[Text]:
    """All of it but code and comments."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "", found[0])

    source = re.sub(r"^```.*?^```|<!--.*?-->", blank, source, flags=re.DOTALL | re.MULTILINE)
    yield 1, re.sub(r"(?<=\n\n)(?: {4}.*\n|\n)+", blank, source)


def offences(name: str, source: str) -> Iterator[str]:
    """FILE:LINE: WORDS of each offence."""
    is_python = name.endswith(".py")
    if not is_python or re.search(r"\b(?:Of|What|Who|Whoever|[Aa]s\s+(?:# )?of)\b", source):
        for line, text in (texts_of_python if is_python else texts_of_page)(source):
            for pattern in FORBIDDEN:
                for found in pattern.finditer(text):
                    number = line + text[: found.start("found")].count("\n")
                    yield f"{name}:{number}: {' '.join(found['found'].split())}"
    if is_python and COINED.search(source):
        names = COINAGES | (OF_THE_LIBRARY if name.startswith("megatron/") else {})
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME and token.string in names:
                coined = f"{token.string}, for {names[token.string]}"
                yield f"{name}:{token.start[0]}: {coined}"


PLANTED = [
    ("a.py", '"""Of each rank its samples."""\n', 1),
    ("a.py", 'def f():\n    """Sums. What is left is zero."""\n', 2),
    ("a.py", "x = 1  # Whoever reads it\n", 1),
    ("a.py", "x = 1\n# one line, and\n# a second. Who knows\n", 3),
    ("a.py", 'class A:\n    a: int\n    """Rows, as\n    of the layer."""\n', 3),
    ("a.py", "told = 1\n", 1),
    ("megatron/a.py", "place = 1\n", 1),
    ("a.md", "# Title\n\nA page.\n\n- **Of both** the first\n", 5),
    ("a.md", "It is fast.\nWhat it costs is little.\n", 2),
    ("a.md", "The names, as of the table.\n", 1),
    ("a.md", "# Title\n\n## Of both\n", 3),
]
INNOCENT = [
    ("a.py", 'text = "Of each rank"\nx.sum()  # whatever\nplace = 1\n'),
    ("a.py", '"""Sums of all. Offsets, and what is left."""\nsaid = "told"\n'),
    ("a.md", "It stops. What if a rank dies?\n"),
    ("a.md", "# What works together\n\n```\n# Of code\n```\n\n    Of indented code\n\n| What |\n"),
]


@pytest.mark.parametrize(("name", "source", "line"), PLANTED)
def test_an_offence_is_found(name: str, source: str, line: int) -> None:
    (found,) = offences(name, source)
    assert found.startswith(f"{name}:{line}: ")


@pytest.mark.parametrize(("name", "source"), INNOCENT)
def test_other_words_are_not(name: str, source: str) -> None:
    assert [*offences(name, source)] == []


@pytest.mark.parametrize("ending", [".py", ".md"])
def test_sentences_and_names(ending: str) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [each for each in listed.stdout.decode().split("\0") if each.endswith(ending)]
    files = {name: ROOT / name for name in names if (ROOT / name).is_file()}
    assert len(files) > 50
    found = [each for name, file in files.items() for each in offences(name, file.read_text())]
    assert not found, "\n".join([RULE, *found])
