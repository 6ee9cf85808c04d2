"""The tokenizers: ids by hand, what marks and casing do, and files that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.text_checks import count_casing
from megatron.data.tokenizer import (
    MARKS,
    BertTokenizer,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
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
        with pytest.raises(ValueError, match=f"{folder} .*{name}.*{flags}"):
            read_tokenizer(tokenizer.kind, folder)


MARKED = "\n".join(MARKS)
REFUSED = [
    (BPE, {"merges.txt": None}, "--merge-file"),
    (BPE, {"vocab.json": None}, "--vocab-file"),
    (LOWER, {"vocab.txt": None}, "--vocab-file"),
    *[(BPE, {"vocab.json": content}, "--vocab-file .*vocab.json")
      for content in (b"{", b"[]", b'{"a": 1}', b'{"a": [1]}', b'{"a": false}', b'{"a": 0}')],
    (BPE, {"merges.txt": b"#version: 0.2\nq q\n"}, "--merge-file .*merges.txt, line 2: 'q q'"),
    (BPE, {"merges.txt": b"q\n"}, "--merge-file .*merges.txt, line 1"),
    (BPE, {"merges.txt": b"\xff\xfe"}, "--merge-file .*merges.txt"),
    *[(LOWER, {"vocab.txt": content}, r"--vocab-file .*vocab.txt .*\[MASK\]")
      for content in (b"the\nin\n", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", b'{"[PAD]": 0}', b"")],
    (LOWER, {"vocab.txt": f"{MARKED}\nthe\nin\nthe\n".encode()}, "vocab.txt, line 8: 'the' .* 6"),
    (LOWER, {"vocab.txt": f"{MARKED}\n\nthe\n".encode()}, "vocab.txt, line 6"),
    (LOWER, {"vocab.txt": b"\xff\xfe"}, "--vocab-file .*vocab.txt"),
    (LOWER, {"vocab.txt": f"{MARKED}\nThe\nin\na\n".encode()}, f"vocab.txt: 1 of 3 .*{CASED}"),
    (CASED, {"vocab.txt": f"{MARKED}\nthe\nin\na\n".encode()}, f"vocab.txt: 0 of 3 .*{LOWER}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "files", "message"), REFUSED)
def test_files_that_are_missing_or_do_not_fit(
    tmp_path: Path, kind: str, files: dict[str, bytes | None], message: str
) -> None:
    """None: the file is not given. A file that is given, and is not there, is refused, too."""
    write_tokenizer(tmp_path)
    write_wordpiece(tmp_path)
    given: list[str | None] = [str(tmp_path / name) for name in file_names(kind)]
    for name, content in files.items():
        index = file_names(kind).index(name)
        if content is None:
            given[index] = "nowhere"
            with pytest.raises(FileNotFoundError, match=f"{message} nowhere"):
                build_tokenizer(kind, *[*given, None][:2])
            given[index] = None
        else:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_tokenizer(kind, *[*given, None][:2])


def test_flags_that_do_not_fit_the_kind() -> None:
    with pytest.raises(ValueError, match=f"--merge-file m .*{CASED}.*--vocab-file"):
        build_tokenizer(CASED, "v", "m")
    with pytest.raises(ValueError, match=f"--tokenizer-type T5 .*{BPE}"):
        build_tokenizer("T5", "v", "m")


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
