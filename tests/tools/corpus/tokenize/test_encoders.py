"""The fast encoders: the reference's ids on real text and on fuzzed strings, or not taken."""

import json
import random
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPT2TokenizerFast

from megatron.data.tokenizer import (
    MARKS,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
)
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.refusals import field_of, refusal
from tests.tools.convert.models import make_tokenizer
from tests.tools.corpus.lines import read_jsonl, write_jsonl
from tools.corpus.tokenize import encoders
from tools.train_tokenizer import train_tokenizer

PIECES = [
    "<|endoftext|>", "'s", "'S", "'ll", " 's", "\r\n", " \n", "\n ", "\t \t", "\u017f", "'\u017f",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "e\u0301", "\u0661\u0662",
    "\u01c5", "\u1e9e", "\ue000", "\U000f0000", "\uffff", "\u2028", "the", " the", "  the", "in",
    "[SEP]", "##ing",
]  # fmt: skip
CHARACTERS = (
    "  \n\n\t\r\x0b\x0c\x85\xa0\u2028\u3000'''sdmtlrevSDabcABC0123.,!?-<|>_\x00\ufeff\u0301#[]"
)
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


@cache
def categories() -> list[list[str]]:
    """All assigned characters that can be encoded, by their Unicode category.

    gigatoken takes for letters 4,657 characters that Python's Unicode does not assign: those of
    newer versions, which the reference does not know.
    """
    found = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        if (kind := unicodedata.category(chr(code))) not in ("Cs", "Cn"):
            found[kind].append(chr(code))
    return list(found.values())


def fuzz(seed: int, count: int) -> list[str]:
    """Strings of all kinds of characters, some of them in long runs."""
    draw = random.Random(seed)

    def piece() -> str:
        kind = draw.random()
        if kind < 0.4:
            run = 1 if draw.random() < 0.9 else draw.randint(2, 80)
            return draw.choice(CHARACTERS) * run
        return draw.choice(PIECES) if kind < 0.7 else draw.choice(draw.choice(categories()))

    return ["".join(piece() for _ in range(draw.randint(1, 30))) for _ in range(count)]


def lists(encoder: encoders.Encoder, texts: Sequence[str]) -> list[list[int]]:
    ids, sizes = encoder.arrays(texts)
    return [each.tolist() for each in np.split(ids, np.cumsum(sizes))[:-1]]


def check_equal(
    several: Sequence[encoders.Encoder], texts: Sequence[str], expected: Any = None
) -> None:
    """Each encoder gives the expected ids, or else those of the first one."""
    expected = expected or lists(several[0], texts)
    for encoder in several:
        ids, sizes = encoder.arrays(texts)
        assert (ids.dtype, sizes.dtype) == (np.uint32, np.int32)
        assert sizes.tolist() == [len(each) for each in expected]
        assert ids.tolist() == [number for each in expected for number in each]


def check_gigatoken(files: tuple[str, str], texts: Sequence[str]) -> None:
    library = GPT2BPETokenizer(*files).library
    check_equal([encoders.Encoder(library), encoders.Gigatoken(library)], texts)


def gpt2(test_data: Path) -> tuple[str, str]:
    return str(test_data / "gpt2" / "vocab.json"), str(test_data / "gpt2" / "merges.txt")


def real_documents(folder: Path) -> list[str]:
    web = read_jsonl(folder / "neardup" / "c4_sample.jsonl.gz")[:600]
    wiki = (folder / "wikitext103" / "wiki.valid.tokens").read_text("utf-8")[:100_000]
    return [wiki, *(record["text"] for record in web)]


def test_a_bpe_on_real_text_and_all_planes_gets_the_ids_of_both_references(test_data: Path) -> None:
    """With GPT-2's own vocabulary: those of `tokenizers`, and on real text of transformers."""
    letters = [letter for category in categories() for letter in category]
    planes = [f"a{letter} {letter}{letter}  {letter}1" for letter in letters[::101]]
    files, texts = gpt2(test_data), real_documents(test_data)
    vocabulary = json.loads(Path(files[0]).read_text("utf-8"))
    lines = Path(files[1]).read_text("utf-8").splitlines()[1:]
    theirs = GPT2TokenizerFast(vocab=vocabulary, merges=[tuple(line.split()) for line in lines])
    expected = theirs(texts, split_special_tokens=True)["input_ids"]
    ours = GPT2BPETokenizer(*files)
    assert (ours.vocab_size, ours.eod) == (50_257, 50_256)
    fast = encoders.build_encoder("auto", ours.library)
    assert isinstance(fast, encoders.Gigatoken)
    check_equal([encoders.Encoder(ours.library), fast], texts, expected)
    check_equal([encoders.Encoder(ours.library), fast], [*fuzz(1, 1500), *planes])


def test_other_vocabularies_get_the_references_ids(tmp_path: Path) -> None:
    """One with hardly a merge, one that was trained, and that one with fewer merges."""
    files = write_tokenizer(tmp_path)
    for texts in ([*encoders.PROBES, *TRICKY, *fuzz(2, 1000)], [], ["", "a", "", ""]):
        check_gigatoken(files, texts)
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in fuzz(3, 500)])
    train_tokenizer((source,), 2048, tmp_path)
    check_gigatoken(files, fuzz(4, 1000))
    merges = Path(files[1]).read_text("utf-8").splitlines(keepends=True)
    Path(files[1]).write_text("".join(merges[:500]), "utf-8")
    check_gigatoken(files, fuzz(5, 1000))


def check_wordpiece(
    ours: BertWordPieceLowerCase | BertWordPieceCase, file: str, texts: Any
) -> None:
    theirs = make_tokenizer(Path(file), ours.is_lower_case)
    expected = theirs(texts, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    fast = encoders.build_encoder("auto", ours.library)
    assert isinstance(fast, encoders.Words)
    check_equal([encoders.Encoder(ours.library), fast], texts, expected)
    for text, each in zip(texts[-500:], expected[-500:], strict=True):
        found, spans = ours.offsets(text)
        assert found == each
        assert all(0 <= start < end <= len(text) for start, end in spans)


def test_a_wordpiece_gets_the_ids_of_transformers(tmp_path: Path) -> None:
    texts = [*encoders.PROBES, *TRICKY, *fuzz(6, 1000)]
    lower = write_wordpiece(tmp_path, "thing", "inn", "漢", "и")
    check_wordpiece(BertWordPieceLowerCase(lower), lower, texts)
    letters = sorted({letter for text in texts for letter in text if letter.isprintable()})
    words = [word for text in fuzz(7, 300) for word in text.split()]
    tokens = dict.fromkeys([*MARKS, *letters, *(f"##{letter}" for letter in letters), *words])
    cased = tmp_path / "cased.txt"
    cased.write_bytes("\n".join(token for token in tokens if token.isprintable()).encode())
    check_wordpiece(BertWordPieceCase(str(cased)), str(cased), texts)


def test_berts_own_vocabulary_on_real_text(test_data: Path) -> None:
    vocab_file = str(test_data / "bert" / "vocab.txt")
    ours = BertWordPieceLowerCase(vocab_file)
    assert (ours.vocab_size, ours.pad, ours.cls, ours.sep, ours.mask) == (30_522, 0, 101, 102, 103)
    check_wordpiece(ours, vocab_file, [*real_documents(test_data), *TRICKY, *fuzz(1, 1000)])
    refusal(lambda: BertWordPieceCase(vocab_file))  # none of its tokens has a capital


def test_only_so_many_words_are_cached(tmp_path: Path) -> None:
    """Words that are dropped are asked for again."""
    library = BertWordPieceLowerCase(write_wordpiece(tmp_path, "thing", "inn")).library
    asked: list[int] = []

    class Counting:
        model, pre_tokenizer = library.model, library.pre_tokenizer

        def encode_batch_fast(self, words: list[str]) -> Any:
            asked.append(len(words))
            return library.encode_batch_fast(words)

    texts = [f"the things {number}s in inn{number}" for number in range(30)]
    expected = lists(encoders.Encoder(library), texts)
    for limit, least, most in ((1 << 22, 63, 63), (50, 64, 1 << 22)):
        words = encoders.Words(Counting(), limit)
        asked.clear()
        for start in range(0, 30, 3):
            assert lists(words, texts[start : start + 3]) == expected[start : start + 3]
        assert least <= sum(asked) <= most
    assert sum(asked) > 63


def test_auto_is_the_fastest_that_is_for_the_tokenizer(tmp_path: Path) -> None:
    """An encoder that is named is taken. Those that the program refuses by name: test_step.py."""
    bpe = GPT2BPETokenizer(*write_tokenizer(tmp_path))
    wordpiece = BertWordPieceLowerCase(write_wordpiece(tmp_path))
    for tokenizer, choice, name in (
        (bpe, "auto", "gigatoken"),
        (bpe, "tokenizers", "tokenizers"),
        (wordpiece, "auto", "words"),
        (wordpiece, "words", "words"),
        (wordpiece, "tokenizers", "tokenizers"),
        (HuggingFaceTokenizer(write_tokenizer_json(tmp_path / "json")), "auto", "tokenizers"),
    ):
        assert encoders.build_encoder(choice, tokenizer.library).name == name


def test_an_encoder_that_is_absent_or_of_other_ids_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that drops blanks at the end of a text, which few texts show, or takes \\r for \\n."""
    bpe = GPT2BPETokenizer(*write_tokenizer(tmp_path)).library

    def assert_not_taken() -> None:
        assert encoders.build_encoder("auto", bpe).name == "tokenizers"
        assert field_of(refusal(lambda: encoders.build_encoder("gigatoken", bpe))) == "--encoder"

    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "gigatoken", None)
        assert_not_taken()
    right = encoders.Gigatoken.arrays
    for wrong in (lambda text: text.rstrip(" "), lambda text: text.replace("\r", "\n")):

        def arrays(self: Any, texts: Sequence[str], wrong: Any = wrong) -> Any:
            return right(self, [*map(wrong, texts)])

        monkeypatch.setattr(encoders.Gigatoken, "arrays", arrays)
        assert_not_taken()
