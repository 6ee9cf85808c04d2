"""Files of documents: finding them, and reading them in bounded memory.

A file is JSON lines, one record a line, or a text file (*.txt), which is one document.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import itertools
import json
import lzma
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from megatron.errors import UsageError
from megatron.libraries import Library

if TYPE_CHECKING:
    import orjson
    from backports import zstd
else:
    orjson = Library("orjson")
    zstd = Library("backports.zstd", "files that end in .gz")

Record = dict[str, Any]
LONGEST_LINE = 32 << 20  # bytes; a longer line, or text file, is set aside and not held in memory
LINES, TEXT = (".jsonl", ".json"), ".txt"
NAMED = 5  # files that a warning names
MANIFEST = "manifest.json"
WORK = ".work"
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": lambda raw: zstd.ZstdFile(raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)
NOT_SHARDS = {MANIFEST, "run.json", "rejected.jsonl", "duplicates.jsonl"}
DEEPEST = 200  # levels of lists and objects; orjson writes 254, and reads more


class Damage(str):
    """A fault of a whole file, which is cut short or damaged; counted apart from bad lines."""

    __slots__ = ()


class Line(NamedTuple):
    offset: int
    """Byte of the (decompressed) file at which the line starts."""
    content: bytes
    """Without its line end; only the beginning if there is a fault."""
    fault: str | None
    """Why the line cannot be read as it stands."""


def damage() -> tuple[type[Exception], ...]:
    """Errors of a damaged compressed file; zstd's own only once it is imported."""
    module = sys.modules.get("backports.zstd")
    return DAMAGE if module is None else (*DAMAGE, module.ZstdError)


def find_shards(paths: Sequence[Path], endings: Sequence[str] = (*LINES, TEXT)) -> list[Path]:
    """The files among `paths` and the shards in the folders among them, in order.

    endings: endings of the names of shards in a folder, before .gz or .zst. Warns of other files in
    a folder, because they are not read. Raises ValueError, naming --input, if there is nothing to
    read, and for the output of a step that has not finished.
    """
    shards: list[Path] = []
    names = tuple(ending + more for ending in endings for more in ("", *OPENERS))
    readable = f"named *{', *'.join(endings)}, with or without {', '.join(OPENERS)}"
    for path in paths:
        if path.is_file():
            shards.append(path)
            continue
        if not path.is_dir():
            raise UsageError("--input", path, "a file or a folder that is there, and no pipe")
        if (path / WORK).exists() and not (path / MANIFEST).exists():
            text = f"--input {path} is the output of an unfinished step; its command again "
            raise ValueError(f"{text}finishes it")
        known = (each for each in sorted(path.iterdir()) if each.name not in NOT_SHARDS)
        content = [each for each in known if not each.name.startswith(".")]
        in_folder = {each for each in content if each.is_file() and each.name.endswith(names)}
        if not in_folder:
            message = f"--input {path} holds no file {readable}"
            for below in filter(Path.is_dir, sorted(path.iterdir())):
                if any(each.name.endswith(names) for each in below.iterdir()):
                    raise ValueError(f"{message}; {below} does, and --input {below} would work")
            raise ValueError(message)
        shards += sorted(in_folder)
        others = [f"{each.name}{'/' * each.is_dir()}" for each in content if each not in in_folder]
        works = f"files {readable}, are read"
        if any(each.endswith("/") for each in others):
            works += "; folders inside it are read if named after --input, too"
        warn_not_read(f"--input {path}", others, works)
    if not shards:
        raise ValueError("--input is to be followed by files of documents, or folders of them")
    return shards


def warn_not_read(where: str, names: Iterable[str], works: str) -> None:
    """Warns of files that `where` holds and that are not read, if any; names the first of them."""
    names = iter(names)
    named = list(itertools.islice(names, NAMED))
    more = sum(1 for _ in names)
    if named:
        _warn(f"{where}: not read: {', '.join(named)}{f' and {more} more' * bool(more)}; {works}")


@functools.cache
def _warn(message: str) -> None:
    """Warns once per process, which may look for its input several times."""
    warnings.warn(message, stacklevel=4)


@contextlib.contextmanager
def open_shard(path: Path | str) -> Iterator[IO[bytes]]:
    """A binary stream of the file's content, decompressed if its name says so."""
    path = Path(path)
    with path.open("rb") as raw:
        yield OPENERS.get(path.suffix, lambda plain: plain)(raw)


def read_lines(
    file: Path | str, start: int = 0, stop: int = sys.maxsize, *, longest: int = LONGEST_LINE
) -> Iterator[Line]:
    """The lines that are not blank, in bounded memory.

    start, stop: only the lines of a plain file that begin at bytes `start` to `stop` - 1. A line
    longer than `longest`, or content that cannot be decompressed, is one line with a fault.
    """
    compressed = Path(file).suffix in OPENERS
    with open_shard(file) as stream:
        offset = start
        if start:  # a line across the boundary belongs to the previous range
            stream.seek(start - 1)
            offset += _skip_line(stream, stop - start + 1) - 1
        try:
            while compressed or offset < stop:
                line = stream.readline(longest + 1)
                if not line:
                    return
                length, fault = len(line), None
                if length > longest and not line.endswith(b"\n"):
                    length += _skip_line(stream)
                    line, fault = line[:200], f"line of {length} bytes, over {longest}"
                if not offset and line.startswith(codecs.BOM_UTF8):
                    offset, line, length = 3, line[3:], length - 3
                if line and not line.isspace():
                    yield Line(offset, line.rstrip(b"\r\n"), fault)
                offset += length
        except damage() as error:
            if not compressed or getattr(error, "errno", None):  # the disk's, not the content's
                raise
            reason = f"damaged or cut short, the rest is lost ({error})"
            yield Line(offset, b"", Damage(reason))


def bare_name(file: Path | str) -> str:
    """The name without the ending of its compression."""
    name = Path(file).name
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in OPENERS else name


def is_text(file: Path | str) -> bool:
    """Whether the file is one document, not one per line."""
    return bare_name(file).endswith(TEXT)


def read_shard(
    file: Path | str, start: int = 0, stop: int = sys.maxsize, *, key: str = "text"
) -> Iterator[Line]:
    """Lines as in read_lines; a text file is one line, a record with its text under `key` and its
    name as "id"."""
    if not is_text(file):
        yield from read_lines(file, start, stop)
        return
    content, fault = b"", None
    try:
        with open_shard(file) as stream:
            content = stream.read(LONGEST_LINE + 1)
        if len(content) > LONGEST_LINE:
            fault = f"text file of over {LONGEST_LINE} bytes; several files, or lines, would work"
        else:
            record = {"id": bare_name(file), key: content.decode("utf-8-sig")}
            content = orjson.dumps(record)
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 ({error})"
    except damage() as error:
        if Path(file).suffix not in OPENERS or getattr(error, "errno", None):
            raise
        fault = Damage(f"damaged or cut short ({error})")
    yield Line(0, content[:200] if fault else content, fault)


def _skip_line(stream: IO[bytes], enough: int = sys.maxsize) -> int:
    """Reads to the end of the line, or until `enough` bytes are read; returns the bytes read."""
    skipped = 0
    while skipped < enough and (piece := stream.readline(1 << 20)):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def parse_line(line: Line, key: str = "text") -> Record:
    """The record of a line of read_lines. Raises ValueError with the reason if it has no text."""
    if line.fault:
        raise ValueError(line.fault)
    return parse_record(line.content, key)


def parse_record(line: bytes, key: str = "text") -> Record:
    """The record of one line. Raises ValueError with the reason if it has no text."""
    record = parse_json(line)
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(no_text_reason(key))
    if not text or text.isspace():
        raise ValueError(f'empty "{key}"')
    return record


def no_text_reason(key: str) -> str:
    return f'no "{key}" string'


def parse_json(line: bytes) -> Any:
    """Any JSON, with nothing rounded or changed. Raises ValueError with the reason otherwise."""
    try:
        value = orjson.loads(line)
        if not _has_large_number(value):  # orjson rounds integers past 64 bits
            return value
    except ValueError:  # json also accepts what JSON does not allow, such as NaN
        pass
    try:
        value = json.loads(line.decode())
    except RecursionError:  # the depth at which it happens depends on the caller
        raise ValueError(f"nested deeper than {DEEPEST}") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    _has_large_number(value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair") from None
    return value


def _has_large_number(value: Any, depth: int = 0) -> bool:
    """Whether a float is at least 2^63 in size; ValueError if nested too deep to be written."""
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST}")
    if isinstance(value, float):
        return abs(value) >= 2**63
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    large = [_has_large_number(each, depth + 1) for each in value]
    return any(large)
