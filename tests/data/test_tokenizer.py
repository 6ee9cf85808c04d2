"""The tokenizers: ids by hand, what marks and casing do, and files that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokenizer import (
    GPT2BPETokenizer,
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from megatron.data.wordpiece import (
    MARKS,
    BertTokenizer,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    count_casing,
)
from tests.data.samples import write_tokenizer, write_wordpiece

BPE, LOWER, CASED = "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"
TEXTS = [
    "the thing in the inn, then the end.",
    "  two  blanks\n\n\ttabs and <|endoftext|> spelled out; it's we'll 1234567",
    "Ünïcödé, 漢字, emoji 👩‍👩‍👧 and a nul \x00 byte",
    "",
]


@pytest.fixture
def bpe(tmp_path: Path) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path))


@pytest.fixture
def wordpiece(tmp_path: Path) -> BertWordPieceLowerCase:
    return BertWordPieceLowerCase(write_wordpiece(tmp_path, "thing", "inn", "ea", "sep"))


def test_merges_by_hand(bpe: GPT2BPETokenizer, tmp_path: Path) -> None:
    ids = json.loads((tmp_path / "vocab.json").read_text())
    tokens = ["the", "Ġ", "th", "in", "g"]
    assert bpe.encode("the thing") == [ids[token] for token in tokens]
    assert bpe.encode("in the") == [ids["in"], ids["Ġthe"]]
    assert (bpe.vocab_size, bpe.eod) == (261, 260)
    batch = bpe.encode_batch(TEXTS)
    assert batch == [bpe.encode(text) for text in TEXTS]
    assert [bpe.decode(each) for each in batch] == TEXTS
    assert not any(bpe.eod in each for each in batch)
    assert bpe.decode([bpe.eod]) == "<|endoftext|>"


def test_pieces_by_hand(wordpiece: BertWordPieceLowerCase, tmp_path: Path) -> None:
    tokens = (tmp_path / "vocab.txt").read_text().splitlines()
    ids = {token: number for number, token in enumerate(tokens)}
    expected = ["the", "thing", "##s", ",", "in", "##q", "e", "##l", "##a", "##n", "ea", "[UNK]"]
    assert wordpiece.encode("The things, INQ élan Éa 漢") == [ids[each] for each in expected]
    found = wordpiece.encode("[SEP] [sep]")  # text, not a mark
    assert [tokens[number] for number in found] == ["[", "sep", "]"] * 2
    assert wordpiece.vocab_size == len(tokens)
    marks = (wordpiece.pad, wordpiece.unknown, wordpiece.cls, wordpiece.sep, wordpiece.mask)
    assert marks == tuple(map(ids.__getitem__, MARKS))
    assert wordpiece.eod == wordpiece.sep
    assert wordpiece.is_continuation.tolist() == [token.startswith("##") for token in tokens]
    assert wordpiece.decode([ids["thing"], ids["##s"], ids["in"]]) == "things in"
    _, sizes = wordpiece.encode_arrays(["the", "\u200b \x00", "", "in"])
    assert sizes.tolist() == [1, 0, 0, 1]
    text = "  E\u0301a\x00 THINGS\t漢the"
    _, spans = wordpiece.offsets(text)
    pieces = [text[start:end] for start, end in spans]
    assert pieces == ["E\u0301a", "THING", "S", "漢", "the"]


def test_the_fingerprint_is_of_the_content_not_of_its_form(tmp_path: Path) -> None:
    vocab_file, merge_file = map(Path, write_tokenizer(tmp_path))

    def fingerprint() -> str:
        return GPT2BPETokenizer(str(vocab_file), str(merge_file)).fingerprint

    first = fingerprint()
    vocabulary = json.loads(vocab_file.read_text())
    vocab_file.write_text(json.dumps(dict(reversed(vocabulary.items())), indent=1))
    merge_file.write_bytes(merge_file.read_bytes().replace(b"\n", b"\r\n"))
    assert fingerprint() == first
    merge_file.write_bytes(merge_file.read_bytes().replace(b"i n\r\n", b""))
    assert fingerprint() != first
    file, content = tmp_path / "vocab.txt", "\n".join([*MARKS, "1", "漢", ""]).encode()
    file.write_bytes(content)
    lower = BertWordPieceLowerCase(str(file)).fingerprint
    assert BertWordPieceCase(str(file)).fingerprint != lower
    file.write_bytes(content.replace(b"\n", b"\r\n"))
    again = BertWordPieceLowerCase(str(file))
    assert (again.fingerprint, again.vocab_size) == (lower, 7)


def test_from_its_files_it_is_made_again_under_their_usual_names(
    bpe: GPT2BPETokenizer, wordpiece: BertTokenizer, tmp_path: Path
) -> None:
    expected = {BPE: ("vocab.json", "merges.txt"), LOWER: ("vocab.txt",)}
    tokenizers: tuple[Tokenizer, ...] = (bpe, wordpiece)
    for tokenizer in tokenizers:
        assert tuple(tokenizer.files) == file_names(tokenizer.kind) == expected[tokenizer.kind]
        folder = tmp_path / tokenizer.kind
        folder.mkdir()
        for name, content in tokenizer.files.items():
            assert content == (tmp_path / name).read_bytes()
            (folder / name).write_bytes(content)
        again = read_tokenizer(tokenizer.kind, folder)
        assert (again.fingerprint, again.files) == (tokenizer.fingerprint, tokenizer.files)
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        (folder / name).unlink()
        flags = file_flags(tokenizer.kind)
        with pytest.raises(ValueError, match=f"{folder} .*{name}: no such file; {flags} would"):
            read_tokenizer(tokenizer.kind, folder)


@pytest.mark.parametrize(
    ("kind", "vocab_file", "merge_file", "message"),
    [
        (BPE, "vocab.json", None, "--merge-file is missing"),
        (BPE, "nowhere", "merges.txt", "--vocab-file nowhere: no such file"),
        (LOWER, None, None, "--vocab-file is missing"),
        (LOWER, "vocab.json", None, "--vocab-file .* is JSON"),
        (CASED, "vocab.txt", "merges.txt", "--merge-file .* is no part of .*--vocab-file only"),
        ("T5", "vocab.json", "merges.txt", "--tokenizer-type T5 is unknown; known: GPT2BPE"),
    ],
)
def test_files_that_are_no_part_or_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    vocab_file: str | None,
    merge_file: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    write_wordpiece(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_tokenizer(kind, vocab_file, merge_file)


MARKED = "\n".join(MARKS)


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        (BPE, "vocab.json", b"{", "--vocab-file .* is not JSON"),
        (BPE, "vocab.json", b"[]", "--vocab-file .* one JSON object"),
        (BPE, "vocab.json", b'{"a": 1}', "--vocab-file .* one JSON object"),
        (BPE, "vocab.json", b'{"a": [1]}', "--vocab-file .* one JSON object"),
        (BPE, "vocab.json", b'{"a": false}', "--vocab-file .* one JSON object"),
        (BPE, "vocab.json", b'{"a": 0}', "--vocab-file .* lacks <.endoftext.>"),
        (BPE, "merges.txt", b"#version: 0.2\nq q\n", "--merge-file .*, line 2: 'q q'"),
        (BPE, "merges.txt", b"q\n", "--merge-file .*, line 1"),
        (BPE, "merges.txt", b"\xff\xfe", "--merge-file .* is not UTF-8"),
        (LOWER, "vocab.txt", b"the\nin\n", r"2 lines and lacks \[PAD\] \[UNK\] \[CLS\] \[SEP\] "),
        (LOWER, "vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"lacks \[MASK\]: "),
        (LOWER, "vocab.txt", b'{"[PAD]": 0}', "is JSON, and lacks "),
        (LOWER, "vocab.txt", f"{MARKED}\nthe\nin\nthe\n".encode(), "line 8: 'the' .* line 6"),
        (LOWER, "vocab.txt", f"{MARKED}\n\nthe\n".encode(), "line 6: empty"),
        (LOWER, "vocab.txt", b"\xff\xfe", "is not UTF-8"),
        (LOWER, "vocab.txt", b"", "lacks"),
        (LOWER, "vocab.txt", f"{MARKED}\nThe\nin\na\n".encode(), f"1 of 3 .* {CASED} would work"),
        (CASED, "vocab.txt", f"{MARKED}\nthe\nin\na\n".encode(), f"0 of 3 .* {LOWER} would work"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, kind: str, file: str, content: bytes, message: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    names = [str(tmp_path / name) for name in file_names(kind)]
    with pytest.raises(ValueError, match=message):
        build_tokenizer(kind, names[0], names[1] if len(names) > 1 else None)


def test_a_few_odd_tokens_make_no_cased_vocabulary(tmp_path: Path) -> None:
    """As <S> and <T> in the Chinese vocabulary."""
    words = [f"w{number}" for number in range(200)]
    vocab_file = write_wordpiece(tmp_path, "<S>", "<T>", *words)
    assert BertWordPieceLowerCase(vocab_file).vocab_size > 200


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("The cat", (1, 1)),
        ("the Cat", (1, 1)),
        ("the cat", (1, 0)),
        ("\u043a\u043e\u0442 3", (1, 0)),  # Russian
        ("ThE 漢字かなカナ", (1, 1)),
        ("the 漢", (1, 0)),
        ("the 漢字かなカナ", (0, 0)),  # mostly letters that are never capitals
        ("საქართველო", (0, 0)),  # Georgian, whose capitals begin no word
        ("1 + 1 = 2", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_texts_count_whose_letters_could_be_capitals(text: str, counts: tuple[int, int]) -> None:
    assert count_casing([text]) == counts
    assert np.array_equal(count_casing([text, "", text]), 2 * np.array(counts))
