"""Real English text that every machine with Python has.

    python tools/corpus.py harvest --output raw.jsonl
    python tools/corpus.py harvest --output raw.jsonl --max-bytes 1000000 --json counts.json

`pydoc` topics, READMEs, licences and other prose files of the installed packages, and the
docstrings of the standard library and of the packages: one document per file.  Sources are
parsed, never imported.  Paragraphs that are code, doctests or tables are left out.
"""

import ast
import contextlib
import email
import multiprocessing
import os
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from megatron.config.checks import at_least
from megatron.data.files import atomic_writer
from tools.corpus.engine import write_json
from tools.corpus.files import DocumentCounts, Record, documents, dump_record, keyed_hash
from tools.corpus.settings import program, progress, say
from tools.report import numbers

PROSE_FILE = re.compile(
    r"(README|LICEN[CS]E|COPYING|NOTICE|AUTHORS|NEWS|HISTORY|CHANGE|THIRD).*|METADATA"
    r"|.+\.(md|rst|txt)",
    re.IGNORECASE,
)
NOT_PROSE_FILE = re.compile(
    r"(SOURCES|RECORD|top_level|entry_points|requirements.*)\.txt|.*\.py[cdio]?"
)
SKIPPED_FOLDERS = {"test", "tests", "testing", "__pycache__", "site-packages", "dist-packages"}
SKIPPED_FOLDERS |= {"typeshed", "lib2to3"}
LARGEST_FILE = 2_000_000  # bytes; beyond this a "source" is a generated table

Source = tuple[str, Path, Path]  # kind of document, root of its names, file


@dataclass(frozen=True, kw_only=True)
class Settings:
    output: Path
    """The file of JSON lines to write."""

    json: Path | None = None
    """File for the counts, in the form of a step's manifest."""

    max_bytes: int = 8_000_000
    """Stop at this many bytes of text; pydoc topics and prose files come first, then modules in
    the order of a keyed hash of their names, so that a cut is a fair sample."""

    workers: int = len(os.sched_getaffinity(0))
    """Processes that parse sources; they do not change what is written."""

    def __post_init__(self) -> None:
        at_least(self, max_bytes=1, workers=1)


def run(settings: Settings) -> None:
    """Collect English prose from this Python installation."""
    accounting, written = DocumentCounts(), 0
    with (
        atomic_writer(settings.output) as file,
        progress("harvest", settings.max_bytes, 0) as bar,
        contextlib.closing(read_documents(settings.workers, accounting)) as found,
    ):
        for record in found:
            accounting.enter(record)
            accounting.keep(record)
            file.write(dump_record(record) + b"\n")
            size = len(record["text"].encode())
            written += size
            bar.update(size)
            if written >= settings.max_bytes:
                break
    accounting.check("harvest")
    say(
        f"harvest: {documents(accounting.output)} documents, {numbers.size(written)}, in "
        f"{settings.output}"
    )
    if settings.json is not None:
        facts = {"step": "harvest", "settings": {"max_bytes": settings.max_bytes}}
        write_json(settings.json, facts | accounting.to_json())


def read_documents(workers: int, accounting: DocumentCounts) -> Iterator[Record]:
    """Every document with prose in it: pydoc topics, prose files, then modules in hashed order.

    Files that cannot be read are counted in the accounting.
    """
    for name, text in sorted(topics.items()):
        if topic := prose(text):
            yield {"text": topic, "source": "pydoc topics", "id": f"pydoc/{name}"}
    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    files = [(root, path) for root in (library, packages) for path in walk(root)]
    texts = [
        ("prose files", root, path)
        for root, path in files
        if PROSE_FILE.fullmatch(path.name) and not NOT_PROSE_FILE.fullmatch(path.name)
    ]
    modules = [("modules", root, path) for root, path in files if path.suffix == ".py"]
    modules.sort(key=lambda source: keyed_hash("harvest", name_of(*source[1:])))
    with multiprocessing.Pool(workers) as pool:
        sources = texts + modules
        for source, record in zip(
            sources, pool.imap(read_document, sources, chunksize=16), strict=True
        ):
            if record is None:
                unreadable = {"text": "", "source": source[0]}
                accounting.enter(unreadable)
                accounting.drop(unreadable, "unreadable file")
            elif record["text"]:
                yield record


def walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for name in sorted(files):
            yield Path(folder, name)


def name_of(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def read_document(source: Source) -> Record | None:
    """The prose of one file, an empty text where there is none; None if it cannot be read."""
    kind, root, path = source
    read = read_module if kind == "modules" else read_prose_file
    try:
        small = path.is_file() and path.stat().st_size <= LARGEST_FILE
        content = path.read_bytes() if small else b""
    except OSError:
        return None
    name = name_of(root, path)
    return {"text": read(name, content), "source": kind, "id": f"{root.name}/{name}"}


def read_prose_file(name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace")
    if name.endswith("/METADATA"):  # headers as in an e-mail, then the project's README
        text = str(email.message_from_string(text).get_payload())
    return prose(text)


def read_module(name: str, content: bytes) -> str:
    """The docstrings of one module, each under the name of what it describes."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in others' sources
            module = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return ""  # a template, or written for another Python
    parts = [(name.removesuffix(".py").replace("/", "."), ast.get_docstring(module) or "")]
    parts += described(module, "")
    sections = [f"{title}\n\n{text}" for title, raw in parts if (text := prose(raw))]
    return "\n\n".join(sections)


def described(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of every class and function under `node`, in file order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            if docstring := ast.get_docstring(child):
                yield name, docstring
            yield from described(child, f"{name}.")


def prose(text: str) -> str:
    """The paragraphs of `text` that read as English, dedented, one blank line between them."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text.replace("\r\n", "\n")))
    return "\n\n".join(p.strip("\n") for p in paragraphs if is_prose(p))


CODE = re.compile(r"^\s*(>>>|\.\. |```|#!|import |from \S+ import|[-=~+|*]{3,}\s*$)", re.MULTILINE)


def is_prose(paragraph: str) -> bool:
    """Whether it is mostly letters, in words, and no code, directive, doctest or ruled table."""
    dense = "".join(paragraph.split())
    letters = sum(map(str.isalpha, dense))
    words = re.findall(r"(?<!\S)[A-Za-z][a-z']*(?=[\s.,;:!?)]|$)", paragraph)
    return (
        len(words) >= 4
        and letters >= 0.8 * len(dense)
        and len(words) >= 0.6 * len(paragraph.split())
        and not CODE.search(paragraph)
    )


if __name__ == "__main__":
    program("tools.corpus.harvest")
