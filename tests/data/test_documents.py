"""JSON lines as documents: found once, identified by content, bad lines left out."""

import errno
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import megatron.data.documents as module
from megatron.data import cache
from megatron.data.documents import Documents, open_documents
from megatron.errors import UsageError
from tests.data.samples import write_data
from tests.dist import PATIENCE
from tests.files import failing
from tests.refusals import refusal

LINES = ['{"text": "one", "n": 1}', "", '{"text": "zwölf\\n"}', '{"text": "drei", "body": "3"}']


def write(file: Path, lines: Sequence[str], end: str = "\n") -> str:
    file.write_bytes("".join(f"{line}{end}" for line in lines).encode())
    return str(file)


def texts(documents: Documents) -> list[str]:
    return [documents.text(number) for number in range(documents.num_documents)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_texts_and_places(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / "a.jsonl", LINES, end)
    documents = open_documents(path)
    assert texts(documents) == ["one", "zwölf\n", "drei"]
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert documents.content == f"SHA-256 {digest}, key text"
    assert [documents.location(n) for n in range(3)] == [f"{path}, line {n}" for n in (1, 3, 4)]
    with ThreadPoolExecutor(4) as threads:
        numbers = [n % 3 for n in range(300)]
        found = list(threads.map(documents.text, numbers))
    assert found == [texts(documents)[n] for n in numbers]


def test_bad_lines(tmp_path: Path) -> None:
    bad = [*LINES, '{"text": "cut', '{"body": "x"}', '{"text": ""}', "[1]", '{"text": "four"}']
    path = write(tmp_path / "a.jsonl", bad)
    for _ in range(2):  # read, and as kept
        with pytest.warns(UserWarning, match="line 5: ") as caught:
            documents = open_documents(path)
        assert len(caught) == 1
        assert texts(documents) == ["one", "zwölf\n", "drei", "four"]
    assert documents.location(3) == f"{path}, line 9"


def test_lines_are_found_once(tmp_path: Path) -> None:
    """Shown by a change that keeps size and time of the file, which no user makes."""
    path = write(tmp_path / "a.jsonl", LINES)
    first, before, content = open_documents(path), Path(path).stat(), Path(path).read_bytes()
    Path(path).write_bytes(content.replace(b"one", b"two"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_documents(path).content == first.content
    for _ in range(2):  # of another key; what is kept is of the last one
        with pytest.warns(UserWarning, match="line 1: "):
            other = open_documents(path, key="body")
        assert (texts(other), other.content != first.content) == (["3"], True)
        assert texts(open_documents(path)) == ["two", "zwölf\n", "drei"]
    before = [*Path("/proc/self/fd").iterdir()]
    assert [open_documents(path).num_documents for _ in range(9)] == [3] * 9
    assert len([*Path("/proc/self/fd").iterdir()]) <= len(before), "files stay open"
    first = open_documents(path)
    Path(path).write_text('{"text": "other, but as long as"}')
    os.utime(path, ns=(1, 1))
    other = open_documents(path)
    assert texts(other) == ["other, but as long as"]
    assert other.content != first.content


def test_damaged_scan(tmp_path: Path) -> None:
    path, kept = write(tmp_path / "a.jsonl", LINES), tmp_path / ".a.jsonl.scan"
    first, whole = open_documents(path), kept.read_bytes()
    places = (*range(0, len(whole), 9), len(whole) - 1)
    flipped = (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in places)
    for damaged in (b"", b"PK", whole[:200], *flipped):
        kept.write_bytes(damaged)
        again = open_documents(path)
        assert (texts(again), again.content) == (texts(first), first.content)
        assert kept.read_bytes() == whole


FULL = OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("os.fsync", FULL),
        ("pathlib.Path.replace", FULL),
        ("filelock.FileLock.acquire", PermissionError()),
        ("filelock.FileLock.acquire", NotImplementedError()),
    ],
)
def test_scan_that_cannot_be_kept_or_locked(tmp_path: Path, call: str, error: Exception) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    with failing(call, error):
        assert texts(open_documents(path)) == ["one", "zwölf\n", "drei"]
    assert error is not FULL or list(tmp_path.iterdir()) == [Path(path)]


def test_one_of_two_that_find_no_cache_makes_it(tmp_path: Path) -> None:
    both, made = Barrier(2, timeout=PATIENCE), list[int]()

    def run(number: int) -> int:
        looks = iter([both.wait])

        def find() -> int:
            found = made[:1]
            next(looks, int)()
            if not found:
                raise OSError
            return found[0]

        def make() -> int:
            made.append(number)
            return number

        return cache.find_or_make(tmp_path / "cache", find, make)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(2))] == 2 * made


def test_change_under_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    documents = open_documents(path)
    write(tmp_path / "a.jsonl", ["", "", *LINES])
    refusal(lambda: documents.text(2), path, field="--data-path")


@pytest.mark.parametrize("moment", ["opened", "scanned"])
@pytest.mark.parametrize("change", ["appended", "replaced"])
def test_change_while_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, change: str
) -> None:
    """A replacement has the size and the time of the file."""
    monkeypatch.chdir(tmp_path)
    file, other = Path("a.jsonl"), tmp_path / "other.jsonl"
    write(file, LINES)

    def make_change() -> None:
        if change == "appended":
            write(file, [*LINES, *LINES])
        else:
            write(other, LINES[::-1])
            os.utime(other, ns=(0, file.stat().st_mtime_ns))
            other.replace(file)

    scan, scan_once = module._scan, module.scan_once

    def changed_after(path: str, key: str) -> cache.Entries:
        yield from scan(path, key)
        make_change()

    def changed_before(*arguments: Any) -> dict[str, Any]:
        make_change()
        return scan_once(*arguments)

    if moment == "scanned":
        monkeypatch.setattr(module, "_scan", changed_after)
    else:
        monkeypatch.setattr(module, "scan_once", changed_before)
    error = str(refusal(lambda: open_documents("a.jsonl")))
    assert error == "--data-path a.jsonl changes while it is read; a finished file works"
    monkeypatch.undo()
    open_documents(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("name", "content", "named"), [
    ("a.jsonl", "", ""), ("a.jsonl", "\n  \n", ""), ("a.jsonl", "x\n{}\n", "line 1"),
    ("a.jsonl", '{"body": "x"}', "--json-key"),
    ("a.json", '[{"text": "x"}, {"text": "y"}]', "--dataset-name"),
    ("a.json", '[\n{"text": "x"},\n{"text": "y"}\n]\n', "--dataset-name"),
    ("a.jsonl.gz", "{}", "/a.jsonl works"), ("a.json.zst", "{}", "/a.json works"),
    ("a.txt", "{}", "--dataset-name"), ("a.csv", "a", ".jsonl"),
    ("absent.jsonl", None, "absent"), ("packed", None, "--pad"),
])  # fmt: skip
def test_refusals(tmp_path: Path, name: str, content: str | None, named: str) -> None:
    write_data(tmp_path / "packed", [[1, 2, 0]])
    if content is not None:
        (tmp_path / name).write_text(content)
    opened = partial(open_documents, str(tmp_path / name))
    refusal(opened, named, field="--data-path", kind=UsageError)
