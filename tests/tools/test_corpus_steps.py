"""Reading and writing jsonl, harvest, clean, split and the tokenizer's training."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ftfy
import pytest
from tokenizers import ByteLevelBPETokenizer

from tools.corpus.clean import clean, has_pieces, pieces, repair
from tools.corpus.harvest import harvest, read_module, read_prose_file
from tools.corpus.jsonl import Funnel, placed, read_records
from tools.corpus.split import split
from tools.train_tokenizer import train_tokenizer

GERMAN = "Das ist ein kurzer Text in deutscher Sprache, der hier nicht bleiben darf. " * 20


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def english() -> list[dict[str, Any]]:
    return [{"id": name, "text": text} for name, text in sorted(topics.items())]


def test_bad_lines_are_set_aside_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n\n{"text": 3}\nnot json\n'
        b'{"text": " "}\n{"text": "\xff"}\n{"text": "\\ud800"}\n'
    )
    funnel = Funnel("test")
    assert [record["text"] for record in read_records([path], funnel)] == ["good"]
    assert [bad["line"] for bad in funnel.bad_lines] == [3, 4, 5, 6, 7]
    assert {bad["file"] for bad in funnel.bad_lines} == {str(path)}
    assert funnel.dropped["bad line"].documents == 5


def test_input_without_a_document_names_its_first_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"body": "x"}\n')
    with pytest.raises(ValueError, match=r'in.jsonl:2: no "text"'):
        list(read_records([path], Funnel("test")))


def test_an_interrupted_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def interrupted() -> None:
        with placed(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_step_ends_with_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.corpus.split", "--input", str(tmp_path / "none")]
    command += ["--train", "a", "--heldout", "b", "--report", "c"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert str(tmp_path / "none") in ended.stderr


def test_harvest_is_english_bounded_and_the_same_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        harvest(tmp_path / name, tmp_path / "report.json", max_bytes=600_000, workers=1)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    documents = read_jsonl(tmp_path / "a")
    size = sum(len(document["text"].encode()) for document in documents)
    assert 600_000 <= size < 900_000
    assert len({document["id"] for document in documents}) == len(documents)
    assert json.loads((tmp_path / "report.json").read_text())["output"]["bytes"] == size
    assert all(set(document) == {"text", "source", "id"} for document in documents)


def test_an_unreadable_file_is_counted_and_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    packages = tmp_path / "purelib"
    packages.mkdir()
    (packages / "bad.md").symlink_to("/proc/self/mem")  # root too gets an error
    (packages / "good.md").write_text("This file can be read like any other.")
    harvest(tmp_path / "out.jsonl", tmp_path / "report.json", workers=1)
    kept = [document["id"] for document in read_jsonl(tmp_path / "out.jsonl")]
    assert kept[-1] == "purelib/good.md"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["dropped"] == {"unreadable file": {"documents": 1, "bytes": 0}}


def test_modules_become_one_document_of_prose() -> None:
    source = b'''"""A module that shows how it is done.

    >>> 1 + 1
    2
    """
class A:
    """The first class of this module, with words."""
    def f(self):
        """Return the number of things there are."""
        return "no docstring is this, though it reads like one"
'''
    assert read_module("pack/mod.py", source) == (
        "pack.mod\n\nA module that shows how it is done.\n\n"
        "A\n\nThe first class of this module, with words.\n\n"
        "A.f\n\nReturn the number of things there are."
    )
    assert read_module("broken.py", b"def f(:") == ""


def test_the_readme_of_a_package_comes_without_its_headers() -> None:
    metadata = b"Name: x\nVersion: 1\n\nThis package does what it says on the tin.\n"
    text = read_prose_file("x.dist-info/METADATA", metadata)
    assert text == "This package does what it says on the tin."


@pytest.mark.parametrize(
    "text",
    [
        "plain\ttext\nof two lines",
        "entity &amp; &#233; &lt;\nthen <b>markup &amp; more</b>\nand &amp; again",
        "schÃ¶n\u2028line\x85end\r\nof\rit \x00\x07 ﬁ “quoted” & alone",
        "",
        "\n\n",
        *list(topics.values())[:10],
    ],
)
def test_sparing_plain_lines_changes_nothing(text: str) -> None:
    assert repair(text) == ftfy.fix_text(text)


def test_clean_keeps_long_english_documents_and_their_fields(tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dogs and cats. " * 12
    records = [
        {"text": text + "schÃ¶n", "url": "here", "id": 7},
        {"text": "Too short to be kept, but English all the same.", "id": 8},
        {"text": GERMAN, "id": 9},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    clean((source,), tmp_path / "out.jsonl", tmp_path / "report.json", workers=1)
    assert read_jsonl(tmp_path / "out.jsonl") == [{"text": text + "schön", "url": "here", "id": 7}]
    report = json.loads((tmp_path / "report.json").read_text())
    reasons = {reason: count["documents"] for reason, count in report["dropped"].items()}
    assert reasons == {"under 128 pieces": 1, "not English": 1}
    assert report["input"]["documents"] == 3
    assert report["repaired_documents"] == 1


def test_clean_that_drops_everything_says_why(tmp_path: Path) -> None:
    records = [{"text": "Too short to be kept, but English all the same."}, {"text": GERMAN}]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    with pytest.raises(
        ValueError, match="all 2 documents were dropped: 1 under 128 pieces, 1 not English"
    ):
        clean((source,), tmp_path / "out.jsonl", tmp_path / "report.json", workers=1)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_shortest_document_has_exactly_that_many_pieces() -> None:
    text = "word" + " word" * 127
    assert len(pieces(text)) == 128
    assert has_pieces(text, 128)
    assert not has_pieces(text, 129)
    long_words = " ".join(["w" * 40] * 128)  # far longer than the prefix that is tried first
    assert has_pieces(long_words, 128)
    assert not has_pieces(long_words, 129)


def test_split_deals_every_document_once_whatever_the_order(tmp_path: Path) -> None:
    records = english()
    results = []
    for order in (records, records[::-1]):
        source = write_jsonl(tmp_path / "in.jsonl", order)
        train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
        split(source, train, heldout, tmp_path / "report.json", heldout_share=0.1)
        results.append((read_jsonl(train), read_jsonl(heldout)))
    assert results[0] == results[1]
    train_records, heldout_records = results[0]
    assert len(heldout_records) == round(0.1 * len(records))
    together = train_records + heldout_records
    assert sorted(together, key=lambda r: r["id"]) == records != together


def test_split_of_one_document_says_what_would_work(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", english()[:1])
    with pytest.raises(ValueError, match="at least 2"):
        split(source, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    write_jsonl(source, english()[:2])
    split(source, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert len(read_jsonl(tmp_path / "a")) == len(read_jsonl(tmp_path / "b")) == 1


def test_the_tokenizer_has_the_shape_of_gpt2s(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", english())
    train_tokenizer((source,), 1000, tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert sorted(vocabulary.values()) == list(range(1000))
    assert vocabulary["<|endoftext|>"] == 999
    assert len((tmp_path / "merges.txt").read_text().splitlines()) == 1 + 1000 - 257
    tokenizer = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    text = "Any bytes: schön, 漢字, \x00 and the words of the topics."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_small_corpus_gives_a_smaller_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "aa ab"}])
    train_tokenizer((source,), 5000, tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert vocabulary["<|endoftext|>"] == len(vocabulary) - 1 < 300
    assert "asked for 5000" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--vocab-size 256"):
        train_tokenizer((source,), 256, tmp_path)
