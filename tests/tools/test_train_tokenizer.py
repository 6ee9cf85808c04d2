"""A tokenizer trained on JSON lines."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.config.parse import parse_call
from megatron.data.tokenizer import MARKS, HuggingFaceTokenizer, read_tokenizer
from tests.refusals import by_last_flag, refusal, refused
from tests.tools.corpus.lines import write_jsonl
from tools.train_tokenizer import train_tokenizer

Capture = pytest.CaptureFixture[str]

LOWER_CASE, CASED = "BertWordPieceLowerCase", "BertWordPieceCase"
PROGRAM = Path(__file__).parents[2] / "tools" / "train_tokenizer.py"


def test_shape_of_gpt2(tmp_path: Path) -> None:
    records = [{"id": name, "text": text} for name, text in sorted(topics.items())]
    train_tokenizer((write_jsonl(tmp_path / "in.jsonl", records),), 1000, tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert sorted(vocabulary.values()) == list(range(1000))
    assert vocabulary["<|endoftext|>"] == 999
    assert len((tmp_path / "merges.txt").read_text().splitlines()) == 1 + 1000 - 257
    tokenizer = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    text = "Any bytes: schön, 漢字, \x00 and the words of the topics."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_small_corpus(tmp_path: Path, capsys: Capture) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "aa ab"}])
    train_tokenizer((source,), 5000, tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    assert vocabulary["<|endoftext|>"] == len(vocabulary) - 1 < 300
    assert "5000" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [LOWER_CASE, CASED])
def test_wordpiece(tmp_path: Path, kind: str) -> None:
    records = [{"text": text} for _, text in sorted(topics.items())]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    train_tokenizer((source,), 1000, tmp_path / "a", kind)
    tokens = (tmp_path / "a" / "vocab.txt").read_text("utf-8").splitlines()
    assert tuple(tokens[:5]) == MARKS
    assert len(set(tokens)) == len(tokens) == 1000
    assert {"the", "##ing", "a", "##a", "."} <= set(tokens)
    assert "##." not in tokens
    tokenizer = read_tokenizer(kind, tmp_path / "a")
    text = "The words of the topics, in order."
    assert tokenizer.decode(tokenizer.encode(text)) == (
        text.lower() if kind == LOWER_CASE else text
    )


@pytest.mark.parametrize("kind", [LOWER_CASE, HuggingFaceTokenizer.kind])
def test_same_tokenizer(tmp_path: Path, kind: str) -> None:
    """In processes with other hashes: the library's own order changes from run to run."""
    records = [{"text": text} for _, text in sorted(topics.items())[:30]]
    write_jsonl(tmp_path / "in.jsonl", [*records, {"body": 1}])
    words = ["--input", "in.jsonl", "--vocab-size", "500", "--tokenizer-type", kind]
    words += [] if "Bert" in kind else ["--special-tokens", "<pad>", "</s>"]
    for name in "abc":
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words, "--output", name],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("warning: 1 ") == 1
    one, *others = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "abc")
    assert others == [one] * 2
    config = json.loads(one.get("tokenizer_config.json", "{}"))
    marks = [config.get(f"{mark}_token") for mark in ("bos", "eos", "pad")]
    assert marks == ([None] * 3 if "Bert" in kind else [None, "</s>", "<pad>"])


@pytest.mark.parametrize(("count", "size", "words"), [(1500, 9000, ""), (500, 100, "words ")])
def test_unknown_letters(tmp_path: Path, count: int, size: int, words: str) -> None:
    letters = "".join(chr(0x4E00 + number) for number in range(count))
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"{words}{letters[::-1]} {words}"}] * 2)
    train_tokenizer((source,), size, tmp_path, LOWER_CASE)
    tokenizer = read_tokenizer(LOWER_CASE, tmp_path)
    assert tokenizer.encode(letters[-1]) == [1]
    assert 1 not in tokenizer.encode(words)


def test_replaced_files(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "some words here"}])
    out = tmp_path / "out"
    for kind, size in (
        (LOWER_CASE, 120),
        ("GPT2BPETokenizer", 257),
        ("GPT2BPETokenizer", 258),
        (LOWER_CASE, 100),
    ):
        train_tokenizer((source,), size, out, kind)
    assert len(json.loads((out / "vocab.json").read_text())) == 258
    assert len((out / "vocab.txt").read_text().splitlines()) <= 100


LAST = """
--vocab-size 256 | --tokenizer-type BertWordPieceCase --vocab-size 99
--vocab-size 100 --tokenizer-type T5 | --vocab-size 300 --input none.jsonl
--vocab-size 300 --output tools/corpus.py | --vocab-size 300 --output tools/corpus.py/below
"""


@pytest.mark.parametrize(("words", "field"), by_last_flag(LAST))
def test_refusals(tmp_path: Path, words: str, field: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "All of it in one line"}])
    given = ["--input", str(source)] if "--input" not in words else []
    given += ["--output", str(tmp_path / "out"), *words.split()]
    assert refused(lambda each: parse_call(train_tokenizer, each, {})(), given) == field


def test_case_of_a_text_in_lower_case(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "all in lower case"}])
    error = refusal(lambda: train_tokenizer((source,), 100, tmp_path, CASED))
    assert "--tokenizer-type BertWordPieceLowerCase" in str(error)


def test_shards(tmp_path: Path) -> None:
    records = [{"text": f"{name} {text}"} for name, text in sorted(topics.items())[:20]]
    whole = write_jsonl(tmp_path / "whole.jsonl", records)
    write_jsonl(tmp_path / "shards" / "part-0.jsonl", records[:9])
    last = write_jsonl(tmp_path / "last.jsonl", records[9:])
    (tmp_path / "shards" / "part-1.jsonl.gz").write_bytes(gzip.compress(last.read_bytes()))
    train_tokenizer((whole,), 500, tmp_path / "a")
    train_tokenizer((tmp_path / "shards",), 500, tmp_path / "b")
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_no_document(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"body": 1}])
    assert "in.jsonl, byte 0" in str(refusal(lambda: train_tokenizer((source,), 260, tmp_path)))
