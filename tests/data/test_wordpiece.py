"""BERT's tokenizers: transformers' ids, places in the text, and vocabularies that do not fit."""

import gzip
import json
import random
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from megatron.data import encoders
from megatron.data.encoders import Encoder, Words, build_encoder
from megatron.data.tokenizer import (
    GPT2BPETokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from megatron.data.wordpiece import (
    MARKS,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    count_casing,
)
from tests.data.samples import write_tokenizer, write_wordpiece

TRICKY = [
    "",
    " \t\n",
    "[SEP][CLS] [MASK] [PAD] [UNK] [unused0] [sep]",
    "##ing a##s ## # ###",
    "Élan naïve Ünïcödé e\u0301 A\u0308\u0323 \u0301 ñ İstanbul \u0131 ß ẞ ǅ ﬁ",
    "漢字かなカナ 한글 中a中 \U00020000\U0002f800 〇々",
    "a\x00b\x01c\x7fd\x85e\xadf\u200bg\u200dh\ufeffi\u2060j\ufffdk\ue000l",
    "tab\tnew\nline\r\nfeed\x0b\x0c\xa0nbsp\u2003em\u2028ls\u3000wide",
    "x" * 100 + " " + "x" * 101 + " " + "漢" * 101 + " a" * 300,
    "'s don't -- ... $1.50 €2 “q” —…\u2018\u2019 C3PO a_b a.b@c.d (x)[y]{z} ^~`|\\",
    "ΑΣ ΟΔΟΣ ς \u0130 \u01c5 ǰ ŉ",
    "👩‍👩‍👧 🇩🇪 ❤️ \U000f0000 \U0010ffff",
    "อักษรไทย हिन्दी العربية עִבְרִית русский Ёё Йй",
]


def fuzz(seed: int, count: int) -> list[str]:
    """Strings of characters of all categories, letters and blanks between them."""
    kinds = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        kinds[unicodedata.category(chr(code))].append(chr(code))
    del kinds["Cs"]
    draw = random.Random(seed)
    categories = list(kinds.values())

    def letter() -> str:
        if draw.random() < 0.6:
            return draw.choice("aeinstAEINST  .,'#[]-\n")
        return draw.choice(draw.choice(categories))

    return ["".join(letter() for _ in range(draw.randint(1, 40))) for _ in range(count)]


def transformers_ids(vocab_file: str, texts: list[str], *, lower: bool) -> list[list[int]]:
    from transformers import BertTokenizer

    lines = Path(vocab_file).read_bytes().decode().removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(lines)}
    theirs = BertTokenizer(vocab=vocabulary, do_lower_case=lower)
    encoded = theirs(texts, split_special_tokens=True, add_special_tokens=False)
    return list(encoded["input_ids"])


def real_texts(folder: Path) -> list[str]:
    web = gzip.decompress((folder / "neardup" / "c4_sample.jsonl.gz").read_bytes()).splitlines()
    text = (folder / "wikitext103" / "wiki.valid.tokens").read_text("utf-8")
    pieces = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    return [*(json.loads(line)["text"] for line in web[:300]), *pieces[:50]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertWordPieceLowerCase:
    return BertWordPieceLowerCase(write_wordpiece(tmp_path, "thing", "inn", "ea", "sep"))


def test_pieces_by_hand(tokenizer: BertWordPieceLowerCase, tmp_path: Path) -> None:
    tokens = (tmp_path / "vocab.txt").read_text().splitlines()
    ids = {token: number for number, token in enumerate(tokens)}
    expected = ["the", "thing", "##s", ",", "in", "##q", "e", "##l", "##a", "##n", "ea", "[UNK]"]
    assert tokenizer.encode("The things, INQ élan Éa 漢") == [ids[each] for each in expected]
    assert tokenizer.vocab_size == len(tokens)
    assert (tokenizer.pad, tokenizer.cls, tokenizer.eod) == (0, ids["[CLS]"], tokenizer.sep)
    assert (tokenizer.sep, tokenizer.mask) == (ids["[SEP]"], ids["[MASK]"])
    assert tokenizer.unknown == ids["[UNK]"]
    assert tokenizer.is_continuation.tolist() == [token.startswith("##") for token in tokens]
    assert tokenizer.decode([ids["thing"], ids["##s"], ids["in"]]) == "things in"


def test_marks_spelled_out_are_text(tokenizer: BertWordPieceLowerCase, tmp_path: Path) -> None:
    tokens = (tmp_path / "vocab.txt").read_text().splitlines()
    found = tokenizer.encode("[SEP] [sep]")
    assert [tokens[number] for number in found] == ["[", "sep", "]"] * 2


def test_text_without_a_word_has_no_token(tokenizer: BertWordPieceLowerCase) -> None:
    ids, sizes = tokenizer.encode_arrays(["the", "\u200b \x00", "", "in"])
    assert sizes.tolist() == [1, 0, 0, 1]
    assert (ids.dtype, sizes.dtype) == (np.uint32, np.int32)


def test_offsets_are_places_in_the_text_as_given(tokenizer: BertWordPieceLowerCase) -> None:
    text = "  E\u0301a\x00 THINGS\t漢the"
    ids, spans = tokenizer.offsets(text)
    assert ids == tokenizer.encode(text)
    assert [text[start:end] for start, end in spans] == [
        "E\u0301a", "THING", "S", "漢", "the",
    ]  # fmt: skip


def test_the_same_ids_as_transformers(test_data: Path) -> None:
    """On real text, on tricky strings and on fuzzed ones, with BERT's own vocabulary."""
    vocab_file = str(test_data / "bert" / "vocab.txt")
    ours = build_tokenizer("BertWordPieceLowerCase", vocab_file, None)
    assert isinstance(ours, BertWordPieceLowerCase)
    assert (ours.vocab_size, ours.pad, ours.cls, ours.sep, ours.mask) == (30_522, 0, 101, 102, 103)
    texts = [*real_texts(test_data), *TRICKY, *fuzz(1, 4000)]
    expected = transformers_ids(vocab_file, texts, lower=True)
    assert ours.encode_batch(texts) == expected
    for encoder in (ours.encoder, Encoder(ours.library)):
        ids, sizes = encoder.arrays(texts)
        assert sizes.tolist() == [len(each) for each in expected]
        assert ids.tolist() == [number for each in expected for number in each]
    for text, each in zip(texts[-500:], expected[-500:], strict=True):
        found, spans = ours.offsets(text)
        assert found == each
        assert all(0 <= start < end <= len(text) for start, end in spans)


def test_the_same_ids_as_transformers_with_capitals(test_data: Path, tmp_path: Path) -> None:
    """With a cased vocabulary of the words and letters of real text."""
    texts = real_texts(test_data)[:100]
    words = sorted({word for text in texts for word in text.split()})
    letters = sorted({letter for text in texts for letter in text if not letter.isspace()})
    tokens = dict.fromkeys([*MARKS, *letters, *(f"##{letter}" for letter in letters), *words[::3]])
    vocab_file = tmp_path / "vocab.txt"
    vocab_file.write_bytes("\n".join(tokens).encode())
    ours = BertWordPieceCase(str(vocab_file))
    checked = [*texts, *TRICKY, *fuzz(2, 1000)]
    assert ours.encode_batch(checked) == transformers_ids(str(vocab_file), checked, lower=False)


def test_each_word_is_encoded_once(tokenizer: BertWordPieceLowerCase) -> None:
    assert isinstance(tokenizer.encoder, Words)
    assert tokenizer.encoder.said.endswith(", once for each word")
    assert build_encoder("tokenizers", tokenizer.library).name == "tokenizers"
    with pytest.raises(
        ValueError, match="--encoder gigatoken: .*WordPiece.*; --encoder tokenizers"
    ):
        build_encoder("gigatoken", tokenizer.library)


def test_only_so_many_words_are_remembered(
    tokenizer: BertWordPieceLowerCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "REMEMBERED", 50)
    texts = [f"the things {number}s in inn{number}" for number in range(30)]
    expected = build_encoder("tokenizers", tokenizer.library).lists(texts)
    assert isinstance(tokenizer.encoder, Words)
    for start in range(0, 30, 3):
        assert tokenizer.encode_batch(texts[start : start + 3]) == expected[start : start + 3]
        assert tokenizer.encoder._size < 120


def test_words_are_not_for_a_bpe(tmp_path: Path) -> None:
    bpe = GPT2BPETokenizer(*write_tokenizer(tmp_path))
    with pytest.raises(ValueError, match="--encoder words: .* for a WordPiece, and this is a BPE"):
        build_encoder("words", bpe.library)


def test_from_its_files_it_is_made_again(tokenizer: BertWordPieceLowerCase, tmp_path: Path) -> None:
    assert file_names(tokenizer.kind) == tuple(tokenizer.files) == ("vocab.txt",)
    assert tokenizer.files["vocab.txt"] == (tmp_path / "vocab.txt").read_bytes()
    again = read_tokenizer(tokenizer.kind, tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("things") == tokenizer.encode("things")


def test_line_ends_do_not_count_but_the_kind_does(tmp_path: Path) -> None:
    content = "\n".join([*MARKS, "1", "漢", ""])
    (tmp_path / "vocab.txt").write_bytes(content.encode())
    first = BertWordPieceLowerCase(str(tmp_path / "vocab.txt"))
    assert BertWordPieceCase(str(tmp_path / "vocab.txt")).fingerprint != first.fingerprint
    (tmp_path / "vocab.txt").write_bytes(content.replace("\n", "\r\n").encode())
    again = BertWordPieceLowerCase(str(tmp_path / "vocab.txt"))
    assert (again.fingerprint, again.vocab_size) == (first.fingerprint, 7)


MARKED = "\n".join(MARKS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the\nin\n", r"has 2 lines and lacks \[PAD\] \[UNK\] \[CLS\] \[SEP\] \[MASK\]"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", r"lacks \[MASK\]: it is no vocabulary"),
        (b'{"[PAD]": 0}', "is JSON, and lacks .*a vocab.txt with a token a line would work"),
        (f"{MARKED}\nthe\nin\nthe\n".encode(), "line 8: 'the' stands in line 6 too"),
        (f"{MARKED}\n\nthe\n".encode(), "line 6: empty"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"", "lacks"),
        (f"{MARKED}\nThe\nin\na\n".encode(),
         "1 of 3 tokens with letters .*--tokenizer-type BertWordPieceCase would work"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"--vocab-file .*vocab.txt.*{message}"):
        BertWordPieceLowerCase(str(tmp_path / "vocab.txt"))


def test_bytes_of_gpt2_are_no_wordpiece(tmp_path: Path) -> None:
    vocab_file, merge_file = write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="--vocab-file .* is JSON, and lacks"):
        build_tokenizer("BertWordPieceLowerCase", vocab_file, None)
    refused = "--merge-file .*merges.txt is no part of .*Case, which takes --vocab-file only"
    with pytest.raises(ValueError, match=refused):
        build_tokenizer("BertWordPieceCase", write_wordpiece(tmp_path), merge_file)


def test_a_lower_case_vocabulary_is_not_taken_for_cased_text(tmp_path: Path) -> None:
    lower = r"0 of \d+ tokens .* capitals are \[UNK\]; --tokenizer-type BertWordPieceLowerCase"
    with pytest.raises(ValueError, match=lower):
        BertWordPieceCase(write_wordpiece(tmp_path))


def test_berts_own_vocabulary_is_lower_case(test_data: Path) -> None:
    with pytest.raises(ValueError, match="0 of 27\\d* tokens"):
        BertWordPieceCase(str(test_data / "bert" / "vocab.txt"))


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
    assert count_casing([text, "", text]) == tuple(2 * count for count in counts)


def test_flags_are_named_that_the_kind_has(tmp_path: Path) -> None:
    assert file_flags("GPT2BPETokenizer") == "--vocab-file and --merge-file"
    assert file_flags("BertWordPieceCase") == "--vocab-file"
    message = "cannot be read: .*vocab.txt: no such file; --vocab-file would work in its place"
    with pytest.raises(ValueError, match=message):
        read_tokenizer("BertWordPieceCase", tmp_path)
