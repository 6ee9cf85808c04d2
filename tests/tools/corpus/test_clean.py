"""The clean step: repair, newlines, language and length of documents."""

import html.entities
import itertools
import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ftfy
import pycld2
import pytest
from ftfy.badness import is_bad
from tokenizers import ByteLevelBPETokenizer

from tests.tools.corpus.lines import dropped, manifest, read_jsonl, write_jsonl
from tools.corpus.clean import Settings, count_pieces, has_tokens, run, token_counter
from tools.corpus.language import REFUSED, identify
from tools.corpus.repair import CURLY, EASY, UNTOUCHED, mend_newlines, repair

ENGLISH = "The quick brown fox jumps over the lazy dogs and cats. " * 12
GERMAN = "Das ist ein kurzer Text in deutscher Sprache, der hier nicht bleiben darf. " * 20
NUMBERS = "1234 5678 9012 3456 " * 60

# Signs that ftfy looks for, and what surrounds them; surrogates stand alone and in pairs.
FRAGMENTS = [
    *"\n\r\t\f\v\x00\x07\x1c\x1f\x7f\x80\x85\x92\x9f\xa0\xad\u200b\u2028\u2029\ufeff\ufffd\ufffe",
    *"<>&#;'\"?! aZ9\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u02bc\u2013\u2014\u2026",
    *"\u2022\u2122©®«»·éÉßœÃÂàŉﬁＦ　ｱ가\u1100\u1161\u0301\u2126£€²\xd7°√±Øβ\U0001f642\ud83d\ude42",
    *["&amp;", "&lt;b&gt;", "&#233;", "&#x85;", "&#0;", "&#28;", "&NTILDE;", "&eacute", "&x;"],
    *["\r\n", "\n\n", "\x1b[31m", "word", " The end. ", "e\u0301", "schÃ¶n", "â€™", "â€œ", "Ã "],
    *["é”a", "£“", "вЂ", "Ø®Ù€", "\ud83d\ude42", "vis-Ã -vis", "ä½ å¥½", "�?", "naïve"],
    "don\u2019t",
]


def read_c4(folder: Path) -> list[str]:
    return [each["text"] for each in read_jsonl(folder / "neardup" / "c4_sample.jsonl.gz")]


def clean(tmp_path: Path, records: list[dict[str, Any]], **more: Any) -> Path:
    source = write_jsonl(tmp_path / "in.jsonl", records)
    output: Path = more.pop("output", tmp_path / "out")
    run(Settings(input=(source,), output=output, workers=1, **more))
    return output


# Repair


def odd_strings() -> Iterator[str]:
    """Every ASCII character and entity, strings of what ftfy looks for, and random characters."""
    lines = [f"a{chr(code)}b" for code in range(256)]
    lines += [f"a &{name} b &{name.upper()} c" for name in html.entities.html5]
    yield from ("\n".join(lines), "\n".join(lines).replace("<", ""))
    generator = random.Random(1)
    for length in (0, *generator.choices(range(1, 20), k=6000)):
        yield "".join(generator.choices(FRAGMENTS, k=length))
    planes = [range(0x80), range(0x250), range(0x2000, 0x2200), range(0x11000)]
    for _ in range(2000):
        yield "".join(chr(generator.choice(generator.choice(planes))) for _ in range(20))


def test_repair_is_ftfys() -> None:
    for text in odd_strings():
        assert repair(text) == ftfy.fix_text(text), ascii(text)


@pytest.mark.parametrize("place", [0, 10, 1_000_050])
def test_repair_is_ftfys_on_lines_that_it_takes_in_pieces(place: int) -> None:
    """The pieces are of a million characters: one cuts an entity, others precede the markup."""
    line = "a &amp; b".ljust(999_998, ".") + "&amp; ” c".ljust(200, ".") + "&amp; d &lt;"
    text = f"{line[:place]}<{line[place:]}\n&amp; e"
    assert repair(text) == ftfy.fix_text(text)
    assert repair(f"{line}\n{text}") == ftfy.fix_text(f"{line}\n{text}")


def test_ftfy_uncurls_easy_lines_and_does_no_more() -> None:
    """Any four of the characters in a row, beside one of each kind of ASCII that ftfy tells apart.

    Signs longer than four that it looks for have letters of other alphabets in their first four.
    """
    symbols = [*CURLY, *UNTOUCHED, *"aZ1 .?-"]
    text = "".join(itertools.chain.from_iterable(itertools.product(symbols, repeat=4)))
    assert EASY.fullmatch(text)
    assert not is_bad(text)
    straight = text.translate(dict(zip(map(ord, CURLY), "''\"\"", strict=True)))
    assert ftfy.fix_text(text) == straight == repair(text)
    for pair in itertools.product([*CURLY, *UNTOUCHED], map(chr, range(32, 127))):
        assert not is_bad("".join(pair) + pair[0])


def test_repair_is_ftfys_on_real_text(test_data: Path) -> None:
    for text in read_c4(test_data):
        assert repair(text) == ftfy.fix_text(text)
    for number, text in enumerate(read_c4(test_data)[:300]):
        encoding = ("latin-1", "sloppy-windows-1252", "macroman")[number % 3]
        garbled = text[:2000].encode().decode(encoding)
        assert repair(garbled) == ftfy.fix_text(garbled)


# Newlines


@pytest.mark.parametrize("width", [50, 72, 100])
def test_wrapped_paragraphs_become_one_line_each(width: int) -> None:
    words = [" ".join(text.replace("-", "").split()[:150]) for text in list(topics.values())[:20]]
    wrapped = "\n\n".join(textwrap.fill(text, width) for text in words)
    assert mend_newlines(wrapped) == "\n\n".join(words)


WRAPPED = textwrap.fill(ENGLISH, 60)
Y, Z = "y" * 54, "z" * 64
WIDEST = f"{'x' * 59} {'y' * 60}"  # 120 characters
# A text, and what becomes of it where that is another one: text that is not wrapped stays.
LINES = [
    (f"A heading\n{WRAPPED}\n  an indented line\nand its neighbour",
     f"A heading\n{ENGLISH.strip()}\n  an indented line\nand its neighbour"),
    (f"{'x' * 59}well-\nknown {Y} -\n{Z}\nthe end", f"{'x' * 59}well-known {Y} - {Z} the end"),
    ("\n\na \nb\n \t\n\n\nc\n\nd\n", "a\nb\n\nc\n\nd"),
    ("\n".join(["one paragraph a line, and " + "long, " * 40 + "end"] * 5), None),
    ("Shall I compare thee to a summer's day?\nThou art more lovely\nand more temperate:\n"
     "Rough winds do shake the darling buds of May,\nAnd summer's lease\nhath all too short", None),
    ("\n".join(["milk", "eggs", "bread", "butter", "flour"] * 3), None),
    ("two lines of which the first one is so long that it\nmight have been wrapped", None),
    ("one line", None),
    ("\n".join([WIDEST] * 5), " ".join([WIDEST] * 5)),
    ("\n".join([f"{WIDEST}z"] * 5), None),
    ("\n".join([*[Z] * 4, "f" * 60, "are not full"]),  # the next word just fits
     " ".join([*[Z] * 4, "f" * 60]) + "\nare not full"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mended"), LINES)
def test_newlines_that_wrap_and_superfluous_ones_go(text: str, mended: str | None) -> None:
    assert mend_newlines(text) == (text if mended is None else mended)


# Language


def test_languages_are_told_apart() -> None:
    assert identify(ENGLISH) == "en"
    assert identify(GERMAN) == "de"
    assert identify(NUMBERS) == "un"
    assert identify("<p " + ENGLISH) == "en"  # text as it stands, no markup to be left out
    assert identify("") == "un"
    assert identify(NUMBERS * 10 + ENGLISH * 10 + NUMBERS * 10) == "en"  # start and middle decide


def test_no_code_point_stops_the_identification() -> None:
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(codes), 512):
        identify(ENGLISH + "".join(map(chr, codes[start : start + 512])))
    assert identify("\x00\ufffe\x85" + ENGLISH) == "en"
    for refused in filter(REFUSED.match, map(chr, codes)):
        with pytest.raises(pycld2.error):
            pycld2.detect(ENGLISH + refused)


# Length


def odd_texts(seed: int) -> Iterator[str]:
    """Words, contractions, runs of blanks of all kinds, long words, text without blanks."""
    generator = random.Random(seed)
    parts = [*"  \n\t\xa0\u3000\x1c\x1d\x85'srevtlmdaZ1!", "word", "'re", "'ll ", "漢字", "-" * 30]
    for _ in range(3000):
        yield "".join(generator.choices(parts, k=generator.randrange(1, 160)))


def test_the_shortcut_to_pieces_is_exact() -> None:
    generator = random.Random(3)
    for text in odd_texts(4):
        pieces = count_pieces(text)
        for least in {1, 2, 5, pieces, pieces + 1, generator.randrange(1, 40)}:
            assert has_tokens(text, least, count_pieces) == (pieces >= least), ascii(text)


def test_the_shortcut_to_tokens_is_exact(tmp_path: Path) -> None:
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(
        [*topics.values(), "-" * 1000, "\n" * 1000], 1000, show_progress=False
    )
    model.add_special_tokens(["<|endoftext|>"])
    model.save_model(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    count = token_counter(Settings(input=(), output=tmp_path, **files))
    for text in itertools.islice(odd_texts(5), 1000):
        tokens = count(text)
        for least in {1, 3, tokens, tokens + 1}:
            assert has_tokens(text, least, count) == (tokens >= least), ascii(text)


def test_the_documents_kept_are_those_of_128_tokens(test_data: Path, tmp_path: Path) -> None:
    records = [{"text": text} for text in read_c4(test_data)]
    vocabulary, merges = (test_data / "gpt2" / name for name in ("vocab.json", "merges.txt"))
    folder = clean(tmp_path, records, language="any", vocab_file=vocabulary, merge_file=merges)
    peer = ByteLevelBPETokenizer(str(vocabulary), str(merges))
    texts = [ftfy.fix_text(record["text"]) for record in records]
    lengths = [len(encoding.ids) for encoding in peer.encode_batch(texts)]
    kept = [text for text, length in zip(texts, lengths, strict=True) if length >= 128]
    assert 0 < len(kept) < len(texts)
    assert [record["text"] for record in read_jsonl(folder)] == kept
    assert dropped(manifest(folder)) == {"under 128 tokens": len(texts) - len(kept)}


# The step


def test_long_english_documents_stay_with_all_their_fields(tmp_path: Path) -> None:
    records = [
        {"text": ENGLISH + "schÃ¶n" + "\x07" * 400, "source": "cc-stories", "id": 7},
        {"text": "Too short to be kept, but English all the same.", "id": 8},
        {"text": GERMAN, "id": 9},
        {"text": NUMBERS, "id": 10},
        {"text": "\x00\x07 \x00", "id": 11},
    ]
    folder = clean(tmp_path, records)
    assert read_jsonl(folder) == [{"text": ENGLISH + "schön", "source": "cc-stories", "id": 7}]
    facts = manifest(folder)
    gone = {"another language": 1, "language unknown": 2, "under 128 pieces": 1}
    assert dropped(facts) == gone
    assert facts["languages"] == {"de": 1, "en": 2, "un": 2}
    assert (facts["repaired"], facts["newlines_removed"]) == (1, 0)
    assert facts["unit_of_length"] == "pieces"
    assert facts["lengths"]["after"] == {"512": 1}
    assert [*facts["lengths"]["before"].items()] == [("4", 1), ("32", 1), ("1024", 3)]


def test_any_language_may_stay_but_no_empty_text(tmp_path: Path) -> None:
    texts = [GERMAN, NUMBERS, "\x00\x07", "&#28; \x00\n"]
    records = [{"text": text} for text in texts]
    folder = clean(tmp_path, records, language="any", min_tokens=1)
    assert [record["text"] for record in read_jsonl(folder)] == texts[:2]
    assert dropped(manifest(folder)) == {"empty once repaired": 2}
    assert manifest(folder)["languages"] == {}
    folder = clean(tmp_path, records, language="de", output=tmp_path / "de")
    assert [record["text"] for record in read_jsonl(folder)] == texts[:1]


def test_newlines_go_from_the_sources_that_are_named(tmp_path: Path) -> None:
    wrapped = textwrap.fill(ENGLISH, 70) + "\n\n\n\n" + textwrap.fill(ENGLISH, 70)
    records = [{"text": wrapped, "source": name} for name in ("cc-stories", "books", "news")]
    mended = f"{ENGLISH.strip()}\n\n{ENGLISH.strip()}"
    folder = clean(tmp_path, records)
    assert [record["text"] for record in read_jsonl(folder)] == [mended, wrapped, wrapped]
    assert manifest(folder)["newlines_removed"] == 1
    folder = clean(tmp_path, records, newlines=("books", "news"), output=tmp_path / "two")
    assert [record["text"] for record in read_jsonl(folder)] == [wrapped, mended, mended]
    assert manifest(folder)["newlines_removed"] == 2


def test_a_source_without_newlines_to_remove_is_said_if_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"text": ENGLISH, "source": name} for name in ("books", "news")]
    for newlines, is_said in ((("news", "books"), False), (("news", "boks"), True)):
        clean(tmp_path, records, newlines=newlines, output=tmp_path / newlines[1])
        assert ("--newlines boks" in capsys.readouterr().err) == is_said
