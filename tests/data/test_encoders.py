"""The fast encoder: the reference's ids on real text and on fuzzed strings, or not taken."""

import gzip
import json
import random
import sys
import tarfile
import types
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.encoders import PROBES, Encoder, Gigatoken, build_encoder, find_difference
from megatron.data.tokenizer import GPT2BPETokenizer
from tests.data.samples import write_tokenizer
from tools.train_tokenizer import train_tokenizer

gigatoken = pytest.importorskip("gigatoken")

PIECES = [
    "<|endoftext|>", "'s", "'S", "'ll", " 's", "\r\n", " \n", "\n ", "\t \t", "\u017f", "'\u017f",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "e\u0301", "\u0661\u0662",
    "\u01c5", "\u1e9e", "\ue000", "\U000f0000", "\uffff", "\u2028", "the", " the", "  the", "in",
]  # fmt: skip
CHARACTERS = (
    "  \n\n\t\r\x0b\x0c\x85\xa0\u2028\u3000'''sdmtlrevSDabcABC0123.,!?-<|>_\x00\ufeff\u0301"
)


@cache
def categories() -> list[list[str]]:
    """All characters that can be encoded, by their Unicode category."""
    found = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            found[unicodedata.category(chr(code))].append(chr(code))
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


def both(files: tuple[str, str]) -> tuple[Gigatoken, Encoder]:
    bpe = GPT2BPETokenizer(*files).library
    return Gigatoken(bpe), Encoder(bpe)


def check_equal(files: tuple[str, str], texts: Sequence[str]) -> None:
    fast, reference = both(files)
    expected = reference.lists(texts)
    assert fast.lists(texts) == expected
    for encoder in (fast, reference):
        ids, sizes = encoder.arrays(texts)
        assert (ids.dtype, sizes.dtype) == (np.uint32, np.int32)
        assert sizes.tolist() == [len(each) for each in expected]
        assert ids.tolist() == [number for each in expected for number in each]


def gpt2(test_data: Path) -> tuple[str, str]:
    return str(test_data / "gpt2" / "vocab.json"), str(test_data / "gpt2" / "merges.txt")


def real_documents(folder: Path) -> list[str]:
    """Some of every kind of text; which, is up to the seed."""
    web = gzip.decompress((folder / "neardup" / "c4_sample.jsonl.gz").read_bytes()).splitlines()
    documents = [json.loads(line)["text"] for line in web]
    with tarfile.open(folder / "race" / "RACE_dev.tar.xz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".txt"):
                file = archive.extractfile(member)
                assert file is not None
                documents.append(json.load(file)["article"])
    lambada = (folder / "lambada" / "lambada_development_plain_text.txt").read_text("utf-8")
    documents += lambada.splitlines()
    sample = random.Random(7).sample(documents, 1500)
    return [*sample, (folder / "wikitext103" / "wiki.valid.tokens").read_text("utf-8")[:300_000]]


def test_real_documents_get_the_references_ids(test_data: Path) -> None:
    check_equal(gpt2(test_data), real_documents(test_data))


def test_fuzzed_strings_get_the_references_ids_with_gpt2s_vocabulary(test_data: Path) -> None:
    check_equal(gpt2(test_data), fuzz(1, 8000))


def test_characters_of_all_planes_get_the_references_ids(test_data: Path) -> None:
    letters = [letter for category in categories() for letter in category]
    fast, reference = both(gpt2(test_data))
    texts = [f"a{letter} {letter}{letter}  {letter}1" for letter in letters[::37]]
    assert fast.lists(texts) == reference.lists(texts)


def test_other_vocabularies_get_the_references_ids(tmp_path: Path) -> None:
    """One with hardly a merge, one that was trained, and that one with fewer merges."""
    check_equal(write_tokenizer(tmp_path), [*PROBES, *fuzz(2, 2000)])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in fuzz(3, 500))
    (tmp_path / "in.jsonl").write_text(lines)
    train_tokenizer((tmp_path / "in.jsonl",), 2048, tmp_path)
    files = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    check_equal(files, fuzz(4, 2000))
    merges = Path(files[1]).read_text("utf-8").splitlines(keepends=True)
    Path(files[1]).write_text("".join(merges[:500]), "utf-8")
    check_equal(files, fuzz(5, 2000))


def test_no_texts_and_empty_texts(tmp_path: Path) -> None:
    files = write_tokenizer(tmp_path)
    check_equal(files, [])
    check_equal(files, ["", "a", "", ""])


@pytest.fixture
def bpe(tmp_path: Path) -> Any:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path)).library


def test_auto_is_gigatoken_and_each_can_be_forced(bpe: Any) -> None:
    assert build_encoder("auto", bpe).said.startswith("gigatoken ")
    assert build_encoder("gigatoken", bpe).name == "gigatoken"
    assert build_encoder("tokenizers", bpe).said.startswith("tokenizers ")
    with pytest.raises(ValueError, match="--encoder fast is unknown; known: auto, gigatoken"):
        build_encoder("fast", bpe)


def test_without_gigatoken_the_reference_encodes(bpe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder = build_encoder("auto", bpe)
    assert (encoder.name, "gigatoken cannot be used" in encoder.said) == ("tokenizers", True)
    with pytest.raises(ValueError, match="cannot be used.*; --encoder tokenizers would work"):
        build_encoder("gigatoken", bpe)


def test_an_encoder_of_other_ids_is_not_taken(bpe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that drops blanks at the end of a text, which few texts show."""

    library = gigatoken.Tokenizer

    class Wrong:
        @staticmethod
        def from_json(content: str) -> Any:
            right = library.from_json(content)

            def encode_batch(texts: list[str], parallel: bool) -> Any:
                return right.encode_batch([text.rstrip(" ") for text in texts], parallel=parallel)

            return types.SimpleNamespace(encode_batch=encode_batch)

    monkeypatch.setattr(gigatoken, "Tokenizer", Wrong)
    encoder = build_encoder("auto", bpe)
    assert encoder.name == "tokenizers"
    assert "gigatoken gives other ids than tokenizers for" in encoder.said
    with pytest.raises(ValueError, match="--encoder gigatoken: gigatoken gives other ids"):
        build_encoder("gigatoken", bpe)


def test_the_probes_tell_encoders_apart(bpe: Any) -> None:
    """A text that is lost, changed or swapped is found."""
    reference = Encoder(bpe)

    class Changed(Encoder):
        def lists(self, texts: Sequence[str]) -> list[list[int]]:
            return super().lists([text.replace("\r", "\n") for text in texts])

    assert find_difference(reference, reference) is None
    assert "lone" in str(find_difference(Changed(bpe), reference))
