"""English prose from this Python installation."""

import json
import sysconfig
from pathlib import Path

import pytest

from tests.tools.corpus.lines import read_jsonl
from tools.corpus.harvest import Settings, read_module, read_prose_file, run


def test_harvest_is_english_bounded_and_the_same_twice(tmp_path: Path) -> None:
    for name, workers in (("a", 1), ("b", 2)):
        more = {"json": tmp_path / "report.json", "workers": workers}
        run(Settings(output=tmp_path / name, max_bytes=600_000, **more))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    documents = read_jsonl(tmp_path / "a")
    size = sum(len(document["text"].encode()) for document in documents)
    assert size - len(documents[-1]["text"].encode()) < 600_000 <= size < 900_000
    assert len({document["id"] for document in documents}) == len(documents)
    assert all(set(document) == {"text", "source", "id"} for document in documents)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["output"]["bytes"] == size
    assert report["settings"] == {"max_bytes": 600_000}


def test_an_unreadable_file_is_counted_and_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    packages = tmp_path / "purelib"
    packages.mkdir()
    (packages / "bad.md").symlink_to("/proc/self/mem")  # root too gets an error
    (packages / "good.md").write_text("This file can be read like any other.")
    run(Settings(output=tmp_path / "out.jsonl", json=tmp_path / "report.json", workers=1))
    documents = read_jsonl(tmp_path / "out.jsonl")
    assert documents[-1]["id"] == "purelib/good.md"
    report = json.loads((tmp_path / "report.json").read_text())
    count = {"documents": 1, "bytes": 0}
    assert report["dropped"] == {"unreadable file": {**count, "sources": {"prose files": count}}}
    assert report["input"]["documents"] == len(documents) + 1


def test_modules_become_one_document_of_prose() -> None:
    source = b'''"""A module that shows how it is done.

    >>> 1 + 1
    2
    """
class A:
    """Four words are enough."""
    def f(self):
        """Return the number of things there are."""
        return "no docstring is this, though it reads like one"
'''
    assert read_module("pack/mod.py", source) == (
        "pack.mod\n\nA module that shows how it is done.\n\n"
        "A\n\nFour words are enough.\n\n"
        "A.f\n\nReturn the number of things there are."
    )
    assert read_module("broken.py", b"def f(:") == ""


def test_the_readme_of_a_package_comes_without_its_headers() -> None:
    metadata = b"Name: x\nVersion: 1\n\nThis package does what it says on the tin.\n"
    text = read_prose_file("x.dist-info/METADATA", metadata)
    assert text == "This package does what it says on the tin."
