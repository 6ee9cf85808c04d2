"""GPT-2's tokenizer: its ids, its round trip, and files that do not fit."""

import json
from pathlib import Path

import pytest

from megatron.data.tokenizer import (
    GPT2BPETokenizer,
    build_tokenizer,
    file_names,
    read_tokenizer,
)
from tests.data.samples import write_tokenizer

TEXTS = [
    "the thing in the inn, then the end.",
    "  two  blanks\n\n\ttabs and <|endoftext|> spelled out; it's we'll 1234567",
    "Ünïcödé, 漢字, emoji 👩‍👩‍👧 and a nul \x00 byte",
    "",
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path))


def test_merges_by_hand(tokenizer: GPT2BPETokenizer, tmp_path: Path) -> None:
    ids = json.loads((tmp_path / "vocab.json").read_text())
    tokens = ["the", "Ġ", "th", "in", "g"]
    assert tokenizer.encode("the thing") == [ids[token] for token in tokens]
    assert tokenizer.encode("in the") == [ids["in"], ids["Ġthe"]]
    assert (tokenizer.vocab_size, tokenizer.eod) == (261, 260)


def test_round_trip(tokenizer: GPT2BPETokenizer) -> None:
    batch = tokenizer.encode_batch(TEXTS)
    assert batch == [tokenizer.encode(text) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in batch] == TEXTS


def test_the_end_mark_spelled_out_is_text(tokenizer: GPT2BPETokenizer) -> None:
    ids = tokenizer.encode("a<|endoftext|><|endoftext|>")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|><|endoftext|>"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    files = write_tokenizer(tmp_path)
    first = GPT2BPETokenizer(*files).fingerprint
    vocabulary = json.loads(Path(files[0]).read_text())
    Path(files[0]).write_text(json.dumps(dict(reversed(vocabulary.items())), indent=1))
    assert GPT2BPETokenizer(*files).fingerprint == first
    merges = Path(files[1]).read_text(encoding="utf-8")
    Path(files[1]).write_text(merges.replace("i n\n", ""), encoding="utf-8")
    assert GPT2BPETokenizer(*files).fingerprint != first


def test_the_same_ids_as_transformers(test_data: Path) -> None:
    """On a megabyte of real text, and on text that spells the end mark."""
    from transformers import GPT2TokenizerFast

    vocab_file, merge_file = (test_data / "gpt2" / name for name in ("vocab.json", "merges.txt"))
    ours = GPT2BPETokenizer(str(vocab_file), str(merge_file))
    assert (ours.vocab_size, ours.eod) == (50_257, 50_256)
    merges = [tuple(line.split()) for line in merge_file.read_text("utf-8").splitlines()[1:]]
    theirs = GPT2TokenizerFast(vocab=json.loads(vocab_file.read_text("utf-8")), merges=merges)
    text = (test_data / "wikitext103" / "wiki.valid.tokens").read_text("utf-8")
    pieces = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    pieces += TEXTS
    expected = theirs(pieces, split_special_tokens=True)["input_ids"]
    assert len(theirs) == 50_257
    assert ours.encode_batch(pieces) == expected
    assert [ours.decode(ids) for ids in expected] == pieces


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.json", "{", "--vocab-file .* is not JSON"),
        ("vocab.json", "[]", "--vocab-file .* one JSON object"),
        ("vocab.json", '{"a": 1}', "--vocab-file .* one JSON object"),
        ("vocab.json", '{"a": [1]}', "--vocab-file .* one JSON object"),
        ("vocab.json", '{"a": false}', "--vocab-file .* one JSON object"),
        ("vocab.json", '{"a": 0}', "--vocab-file .* lacks <|endoftext|>"),
        ("merges.txt", "#version: 0.2\nq q\n", "--merge-file .*, line 2: 'q q' does not merge"),
        ("merges.txt", "q\n", "--merge-file .*, line 1"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, file: str, content: str, message: str) -> None:
    files = write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        GPT2BPETokenizer(*files)


def test_merges_that_are_not_text(tmp_path: Path) -> None:
    files = write_tokenizer(tmp_path)
    Path(files[1]).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="--merge-file .*merges.txt is not UTF-8"):
        GPT2BPETokenizer(*files)


def test_files_that_are_missing(tmp_path: Path) -> None:
    vocab_file, merge_file = write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="--merge-file is missing"):
        build_tokenizer("GPT2BPETokenizer", vocab_file, None)
    with pytest.raises(FileNotFoundError, match="--vocab-file nowhere: no such file"):
        build_tokenizer("GPT2BPETokenizer", "nowhere", merge_file)
    with pytest.raises(ValueError, match="--tokenizer-type T5 is unknown; known: GPT2BPE"):
        build_tokenizer("T5", vocab_file, merge_file)


def test_from_its_files_it_is_made_again_under_their_usual_names(tmp_path: Path) -> None:
    files = write_tokenizer(tmp_path)
    odd = [str(Path(file).rename(tmp_path / f"my-{Path(file).name}")) for file in files]
    tokenizer = GPT2BPETokenizer(*odd)
    assert tuple(tokenizer.files) == file_names(tokenizer.kind) == ("vocab.json", "merges.txt")
    (tmp_path / "again").mkdir()
    for name, content in tokenizer.files.items():
        assert content == (tmp_path / f"my-{name}").read_bytes()
        (tmp_path / "again" / name).write_bytes(content)
    again = read_tokenizer(tokenizer.kind, tmp_path / "again")
    assert (again.fingerprint, again.files) == (tokenizer.fingerprint, tokenizer.files)
    assert [again.encode(text) for text in TEXTS] == tokenizer.encode_batch(TEXTS)


def test_a_folder_that_holds_no_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    message = f"the tokenizer in {tmp_path} .*merges.txt: no such file; --vocab-file and --merge"
    with pytest.raises(ValueError, match=message):
        read_tokenizer("GPT2BPETokenizer", tmp_path)
    with pytest.raises(ValueError, match="--tokenizer-type T5 is unknown; known: GPT2BPE"):
        read_tokenizer("T5", tmp_path)


def test_merges_with_the_line_ends_of_windows(tmp_path: Path, tokenizer: GPT2BPETokenizer) -> None:
    merges = tmp_path / "merges.txt"
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    other = GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(merges))
    assert other.fingerprint == tokenizer.fingerprint
