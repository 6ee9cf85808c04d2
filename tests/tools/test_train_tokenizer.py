"""A tokenizer trained on JSON lines."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, read_tokenizer
from megatron.data.tokenizer_base import MARKS
from tests.tools.corpus.lines import write_jsonl
from tools.train_tokenizer import SAMPLE, SAMPLE_CHARACTERS, sampled, train_tokenizer

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


def test_a_folder_of_lines_and_texts(tmp_path: Path) -> None:
    folder = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "aa ab"}]).parent
    (folder / "b.txt").write_text("zyx\n" * 9)
    train_tokenizer((folder,), 280, tmp_path)
    assert {"aa", "zyx"} <= json.loads((tmp_path / "vocab.json").read_text()).keys()


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


@pytest.mark.parametrize("kind", [BertWordPieceLowerCase.kind, BertWordPieceCase.kind])
def test_a_wordpiece_begins_with_its_marks(tmp_path: Path, kind: str) -> None:
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
        text.lower() if kind == BertWordPieceLowerCase.kind else text
    )


def test_the_same_text_gives_the_same_wordpiece(tmp_path: Path) -> None:
    """In processes with other hashes: the library's own order changes from run to run."""
    records = [{"text": text} for _, text in sorted(topics.items())[:30]]
    write_jsonl(tmp_path / "in.jsonl", [*records, {"body": 1}])
    words = ["--input", "in.jsonl", "--vocab-size", "500", "--tokenizer-type"]
    for name in "abc":
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words, "BertWordPieceLowerCase", "--output-dir", name],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("warning: 1 lines set aside") == 1
    contents = {(tmp_path / name / "vocab.txt").read_bytes() for name in "abc"}
    assert len(contents) == 1


def test_the_sample_that_unknown_tokens_are_counted_in_is_spread_evenly() -> None:
    texts = [f"{number} " * 1000 for number in range(2345)]
    sample: list[str] = []
    assert list(sampled(texts, sample)) == texts
    assert sample == [text[:SAMPLE_CHARACTERS] for text in texts[:: 2345 // SAMPLE]]


def test_letters_that_no_vocabulary_would_hold_are_told_with_another_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = "".join(chr(0x4E00 + number) for number in range(1500))
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": letters}])
    train_tokenizer((source,), 9000, tmp_path, BertWordPieceLowerCase.kind)
    said = capsys.readouterr().err
    assert "33.3% of the tokens" in said
    assert "a ready vocabulary of this script (of letters no more than 1000 are learned)" in said


def test_it_says_what_it_replaces_and_no_empty_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": "some words here"}])
    words = ["--input", "in.jsonl", "--output-dir", "out", "--tokenizer-type"]
    for kind, size, replaced in (
        ("BertWordPieceLowerCase", "120", []),
        ("BertWordPieceLowerCase", "120", []),
        ("GPT2BPETokenizer", "257", []),
        ("GPT2BPETokenizer", "258", ["replaced vocab.json and merges.txt in out"]),
        ("BertWordPieceLowerCase", "100", []),
    ):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words, kind, "--vocab-size", size],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        *before, last = done.stderr.splitlines()
        assert before == replaced
        assert " ids in out" in last
        assert done.stdout == ""


def test_rare_letters_are_unknown_to_a_wordpiece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = "".join(chr(0x4E00 + number) for number in range(500))
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": f"words {letters} words"}] * 2)
    train_tokenizer((source,), 100, tmp_path, BertWordPieceLowerCase.kind)
    said = capsys.readouterr().err
    assert "warning: 98.2% of the tokens of a sample of --input are [UNK]; a larger --voc" in said
    tokenizer = read_tokenizer(BertWordPieceLowerCase.kind, tmp_path)
    assert tokenizer.vocab_size < 100
    assert tokenizer.encode(letters[-1]) == [1]
    assert 1 not in tokenizer.encode("words")


def test_a_wordpiece_that_cannot_be(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "all in lower case"}])
    with pytest.raises(ValueError, match="--vocab-size 99: .*100"):
        train_tokenizer((source,), 99, tmp_path, "BertWordPieceCase")
    with pytest.raises(ValueError, match="--tokenizer-type T5.*GPT2BPE.*Case"):
        train_tokenizer((source,), 100, tmp_path, "T5")
    with pytest.raises(ValueError, match="--tokenizer-type BertWordPieceLowerCase"):
        train_tokenizer((source,), 100, tmp_path, "BertWordPieceCase")


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
    assert done.stderr.startswith("error: --input none.jsonl")
    assert done.stderr.count("\n") == 1
