"""A tokenizer trained on JSON lines."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import ByteLevelBPETokenizer

from tests.tools.corpus.lines import write_jsonl
from tools.train_tokenizer import train_tokenizer

PROGRAM = Path(__file__).parents[2] / "tools" / "train_tokenizer.py"


def test_the_tokenizer_has_the_shape_of_gpt2s(tmp_path: Path) -> None:
    records = [{"id": name, "text": text} for name, text in sorted(topics.items())]
    train_tokenizer((write_jsonl(tmp_path / "in.jsonl", records),), 1000, tmp_path)
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


def test_a_folder_of_shards_gives_what_one_file_gives(tmp_path: Path) -> None:
    records = [{"text": f"{name} {text}"} for name, text in sorted(topics.items())[:20]]
    whole = write_jsonl(tmp_path / "whole.jsonl", records)
    write_jsonl(tmp_path / "shards" / "part-0.jsonl", records[:9])
    last = write_jsonl(tmp_path / "last.jsonl", records[9:])
    (tmp_path / "shards" / "part-1.jsonl.gz").write_bytes(gzip.compress(last.read_bytes()))
    train_tokenizer((whole,), 500, tmp_path / "a")
    train_tokenizer((tmp_path / "shards",), 500, tmp_path / "b")
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_bad_lines_are_counted_and_no_document_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "some words here"}\n{"body": 1}\n')
    train_tokenizer((source,), 260, tmp_path)
    assert "warning: 1 lines set aside, the first: " in capsys.readouterr().err
    source.write_text('{"body": 1}\n')
    with pytest.raises(ValueError, match=r'holds no document \(.*in.jsonl, byte 0: no "text"'):
        train_tokenizer((source,), 260, tmp_path)


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    words = ["--input", "none.jsonl", "--vocab-size", "300", "--output-dir", "out"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: --input none.jsonl: no such file or folder\n"
