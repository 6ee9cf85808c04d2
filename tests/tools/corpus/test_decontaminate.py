"""The decontaminate step: what is cut where, evaluation sets, and the n-grams that are sought."""

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.refusals import refusal
from tests.tools.corpus.lines import dropped, manifest, read_jsonl, write_jsonl
from tools.corpus import ngrams as module
from tools.corpus.decontaminate import Settings, run
from tools.corpus.evaluation import hash_passage, load_evaluation, normalise_title, read_passages
from tools.corpus.ngrams import NgramSet, fold_table, hash_ngrams, split_words

Record = dict[str, Any]
FILLER = [f"filler{k}" for k in range(1000)]
GRAM = [f"Gram{k}" for k in range(13)]


def decontaminate(
    folder: Path, records: list[Record], evaluation: Path | tuple[Path, ...], **flags: Any
) -> tuple[list[Record], Record]:
    """(records out, manifest)"""
    source = write_jsonl(folder / "in.jsonl", records)
    files = evaluation if isinstance(evaluation, tuple) else (evaluation,)
    settings = {"output": folder / "out", "workers": 1, "min_tokens": 1} | flags
    run(Settings(input=(source,), evaluation=files, **settings))
    return read_jsonl(settings["output"]), manifest(settings["output"])


def place(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def evaluation_file(folder: Path) -> Path:
    return place(folder, "test.txt", " ".join(GRAM))


def named(texts: dict[str, str]) -> list[Record]:
    return [{"text": text, "id": name} for name, text in texts.items()]


def filler(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(FILLER, k=words))


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + n]) for k in range(len(words) - n + 1)]


class Oracle:
    """The rule in plain Python, on texts of lower-case letters and single blanks."""

    def __init__(self, passages: list[str], n: int, margin: int, most: int) -> None:
        self.grams = {gram for each in passages for gram in ngrams(each.split(), n)}
        self.n, self.margin, self.most = n, margin, most

    def pieces(self, text: str) -> list[str] | None:
        """None of a document with too many cuts."""
        words, gone = text.split(), bytearray(len(text))
        places = [len(" ".join(words[:k])) + bool(k) for k in range(len(words))]
        for k, gram in enumerate(ngrams(words, self.n)):
            if gram in self.grams:
                start = max(places[k] - self.margin, 0)
                stop = places[k] + len(" ".join(gram)) + self.margin
                gone[start:stop] = b"\1" * len(gone[start:stop])
        marked = "".join("\0" if hole else c for c, hole in zip(text, gone, strict=True))
        if len(re.findall("\0+", marked)) > self.most:
            return None
        return [piece for piece in marked.split("\0") if piece.strip()]


def shares(evaluation: list[str], texts: Iterable[str], n: int) -> tuple[float, float]:
    seen = {gram for text in texts for gram in ngrams(text.split(), n)}
    counts = Counter(gram for each in evaluation for gram in ngrams(each.split(), n))
    total = sum(counts.values())
    found = [count for gram, count in counts.items() if gram in seen]
    return sum(found) / total, len(found) / len(counts)


@pytest.mark.parametrize("seed", range(8))
def test_cuts_and_leakage_are_those_of_a_plain_loop(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def stream(most: int) -> str:
        words = ("a", "b", "c", "d", "aa", "bb", "cc", "dd")
        return " ".join(rng.choices(words, k=rng.randint(4, most)))

    evaluation = {name: [stream(12) for _ in range(9)] for name in ("a.txt", "b.txt")}
    files = [place(tmp_path, name, "\n".join(each)) for name, each in evaluation.items()]
    texts = [stream(100) for _ in range(40)]
    margin, most = rng.randint(0, 6), 1 + seed % 2
    oracle = Oracle([p for each in evaluation.values() for p in each], 4, margin, most)
    flags = {"ngram": 4, "leakage_ngram": 3, "margin": margin, "max_cuts": most, "unit": "1KB"}
    given = named({f"d{k}": text for k, text in enumerate(texts)})
    records, found = decontaminate(tmp_path, given, tuple(files), **flags)
    expected = []
    for k, text in enumerate(texts):
        pieces = oracle.pieces(text) or []
        names = [f"d{k}"] if len(pieces) == 1 else [f"d{k}-{i}" for i in range(len(pieces))]
        expected += list(zip(names, pieces, strict=True))
    assert [(record["id"], record["text"]) for record in records] == expected
    cut_away = sum(oracle.pieces(text) is None for text in texts)
    assert dropped(found).get(f"over {most} cuts", 0) == cut_away > 0
    for name, passages in evaluation.items():
        leakage = found["leakage"][name]
        before = shares(passages, texts, 3)
        after = shares(passages, (record["text"] for record in records), 3)
        assert (leakage["before"], leakage["before_distinct"]) == pytest.approx(before, abs=1e-12)
        assert (leakage["after"], leakage["after_distinct"]) == pytest.approx(after, abs=1e-12)
        assert after < before


def test_a_cut_takes_200_characters_on_either_side(tmp_path: Path) -> None:
    rng = random.Random(0)
    left, right, hit = filler(rng, 200) + "; ", "? " + filler(rng, 200), ", ".join(GRAM).upper()
    record = {"text": left + hit + right, "id": 7, "source": "web", "url": "u"}
    unnamed = {"text": f"{' '.join(GRAM)} {'x' * 300}"}  # which gets the name of the text it had
    touching = {"text": f"{' '.join(GRAM)} {'y' * 398} {' '.join(GRAM)}"}  # whose cuts are one
    given = [record, unnamed, touching]
    records, found = decontaminate(tmp_path, given, evaluation_file(tmp_path))
    assert records == [
        {"text": left[:-200], "id": "7-0", "source": "web", "url": "u"},
        {"text": right[200:], "id": "7-1", "source": "web", "url": "u"},
        {"text": "x" * 101, "id": hashlib.sha256(unnamed["text"].encode()).hexdigest()[:32]},
    ]
    assert (found["pieces"], found["documents_cut"], found["cuts"]) == (1, 3, 3)
    lost = found["input"]["bytes"] - found["output"]["bytes"]
    assert lost == found["characters_cut"]


def test_short_pieces_are_dropped_and_counted(tmp_path: Path) -> None:
    rng = random.Random(0)
    hit = " ".join(GRAM)
    texts = {
        "one": f"{filler(rng, 300)} {hit} {filler(rng, 40)}",
        "none": f"{filler(rng, 40)} {hit} {filler(rng, 40)}",
        "nothing": f"{hit}{' ' * 500}",
    }
    path = evaluation_file(tmp_path)
    records, found = decontaminate(tmp_path, named(texts), path, min_tokens=128)
    assert [record["id"] for record in records] == ["one"]
    assert dropped(found) == {"nothing left beside a cut": 1, "piece under 128 pieces": 3}
    assert found["pieces"] == 2
    lost = found["input"]["bytes"] - found["output"]["bytes"]
    short = found["dropped"]["piece under 128 pieces"]["bytes"]
    assert lost == found["characters_cut"] + short + 300  # blanks


def test_overlap_can_drop_at_once(tmp_path: Path) -> None:
    records, found = decontaminate(
        tmp_path,
        [{"text": f"{'x' * 900} {' '.join(GRAM)}"}, {"text": " ".join(GRAM[1:])}],
        evaluation_file(tmp_path),
        on_overlap="drop",
    )
    assert [record["text"] for record in records] == [" ".join(GRAM[1:])]
    assert dropped(found) == {"evaluation text": 1}


def test_evaluation_articles_leave_wikipedia_by_title_and_by_overlap(tmp_path: Path) -> None:
    rng = random.Random(0)
    body = rng.sample(FILLER, 200)
    path = place(tmp_path, "wiki.tokens", f" = M @-@ 82 ( Road ) = \n \n {' '.join(body)} \n")
    little = " ".join(body[:22]) + " " + " ".join(f"new{k}" for k in range(90))
    much = " ".join(body[:23]) + " " + " ".join(f"new{k}" for k in range(89))
    records = [
        {"id": "title", "title": "M-82 (road)", "text": "Something else", "source": "wikipedia"},
        {"id": "line", "text": "\n M-82 (Road)\n\nSomething else", "source": "wikipedia"},
        {"id": "other", "title": "M-82", "text": "M-82 (Road)\n\nIt", "source": "wikipedia"},
        {"id": "web", "title": "M-82 (Road)", "text": "Something else", "source": "web"},
        {"id": "much", "text": much, "source": "wikipedia"},
        {"id": "little", "text": little, "source": "wikipedia"},
        {"id": "much of the web", "text": much, "source": "web"},
    ]
    kept, found = decontaminate(tmp_path, records, path)
    assert [record["id"] for record in kept] == ["other", "web", "little", "much of the web"]
    assert dropped(found) == {
        "text of an evaluation article": 1,
        "title of an evaluation article": 2,
    }
    assert found["titles"] == {"known": 1, "with_unk": 0}
    assert found["leakage"]["wiki.tokens"]["before"] > found["leakage"]["wiki.tokens"]["after"] == 0


def test_real_passages_are_cut_where_they_were_planted(test_data: Path, tmp_path: Path) -> None:
    files = (
        test_data / "wikitext103" / "wiki.valid.tokens",
        test_data / "lambada" / "lambada_development_plain_text.txt",
        test_data / "lambada" / "lambada_test_first500.jsonl",
    )
    rng = random.Random(0)
    records, expected = [], []
    for file in files:
        for passage in rng.sample(read_passages(file), 5):
            part = first_part(passage)
            left, right = filler(rng, 200) + ". ", " -- " + filler(rng, 200)
            records.append({"text": left + part + right, "source": "web"})
            expected += [left[:-200], right[200:]]
    kept, found = decontaminate(tmp_path, records, files)
    assert [record["text"] for record in kept] == expected
    assert all(facts["before"] > facts["after"] == 0 for facts in found["leakage"].values())


def first_part(passage: str) -> str:
    """Running text of 20 words or more, from its first word to its last."""
    part = next(part for part in passage.split("<unk>") if len(hash_passage(part)[0]) >= 20)
    for tokenised, running in {" @-@ ": "-", " @,@ ": ",", " @.@ ": ".", " , ": ", "}.items():
        part = part.replace(tokenised, running)
    running = part.replace(" n't", "n't")
    words = split_words(running)
    return running[words.starts[0] : words.ends[-1]]


def test_pieces_are_measured_in_tokens_of_the_vocabulary(test_data: Path, tmp_path: Path) -> None:
    rare = " ".join(f"qzx{k}vj" for k in range(70))  # more tokens than pieces
    text = f"{' '.join(GRAM)} {'-' * 198} {rare}"
    path = evaluation_file(tmp_path)
    flags = {"min_tokens": 300}
    refusal(partial(decontaminate, tmp_path, [{"text": text}], path, **flags))  # none is left
    gpt2 = test_data / "gpt2"
    flags |= {"vocab_file": gpt2 / "vocab.json", "merge_file": gpt2 / "merges.txt"}
    kept, _ = decontaminate(tmp_path, [{"text": text}], path, output=tmp_path / "tokens", **flags)
    assert [record["text"] for record in kept] == [rare]


# Evaluation sets

WIKITEXT = """ 
 = M @-@ 82 ( Michigan highway ) = 
 
 One two <unk> three . 
 
 = = History = = 
 
 Four , five . 
 = Tikal <unk> = 
 
 Six . 
"""  # noqa: W291, W293, it is what such files are like


def test_an_article_of_wikitext_is_a_passage(tmp_path: Path) -> None:
    """Titles are those of articles without <unk>, and those of a list."""
    wiki = place(tmp_path, "wiki.tokens", WIKITEXT)
    passages = [passage.split() for passage in read_passages(wiki)]
    assert [each[:3] for each in passages] == [["=", "M", "@-@"], ["=", "Tikal", "<unk>"]]
    assert "Four" in passages[0]
    listed = place(tmp_path, "more.txt", "Mount Elbert\n\nB of the Bang\n")
    found = load_evaluation((wiki,), (listed,), 3, 2)
    assert found.titles == {"m-82(michiganhighway)", "mountelbert", "bofthebang"}
    assert found.unknown_titles == 1


def test_titles_of_wikitext_and_of_wikipedia_agree() -> None:
    pairs = {
        "M @-@ 82 ( Michigan highway )": "M-82 (Michigan highway)",
        "Battle of Edson 's Ridge": "Battle of  Edson's Ridge ",
        "1 @,@ 000 Words": "1,000 words",
        "Section 2 @.@ 5": "Section 2.5",
    }
    assert [*map(normalise_title, pairs)] == [*map(normalise_title, pairs.values())]
    assert normalise_title("C") != normalise_title("C++")


def test_passages_of_text_are_paragraphs_or_lines_and_of_json_its_text_or_all_its_strings(
    tmp_path: Path,
) -> None:
    paragraphs = place(tmp_path, "a.txt", "one\ntwo\n\nthree\n \nfour\n")
    assert read_passages(paragraphs) == ["one\ntwo", "three", "four"]
    assert read_passages(place(tmp_path, "b.txt", "\ufeffone\ntwo\n")) == ["one", "two"]
    lines = [
        {"text": "the text", "other": "left out"},
        {"article": "an article", "id": "x1", "options": [["a b", "c"]], "n": 3},
    ]
    expected = ["the text", "an article", "a b"]
    written = "".join(json.dumps(line) + "\n\n" for line in lines)
    assert read_passages(place(tmp_path, "a.jsonl", written)) == expected
    assert read_passages(place(tmp_path, "b.json", json.dumps(lines, indent=1))) == expected
    assert read_passages(place(tmp_path, "c.txt", json.dumps(lines[1]))) == expected[1:]


def test_tokenised_text_has_the_words_of_running_text() -> None:
    tokenised = "`` It was n't 0 @.@ 7 , '' said Edson 's well @-@ known dog ; they did N'T ."
    running = "\"It wasn't 0.7,\" said Edson's well-known dog; they didN'T."
    assert hash_passage(tokenised)[0].tolist() == split_words(running).hashes.tolist()


def test_an_unk_breaks_ngrams(tmp_path: Path) -> None:
    found = load_evaluation((place(tmp_path, "a.txt", "a b c d <unk> e f g"),), (), 3, 2)
    assert found.cut.find(split_words("a b c d e f g").hashes).positions.tolist() == [0, 1, 4]


def test_passages_that_are_too_short_are_counted(tmp_path: Path) -> None:
    """All of them are, for the leakage."""
    path = place(tmp_path, "a.txt", "a b\nc d e\nf g <unk> h i\nj k l m\n")
    _, found = decontaminate(tmp_path, [{"text": "some text"}], path, ngram=3)
    counted = {"passages": 4, "not_searched": 2, "words": 13, "distinct_ngrams": 3}
    assert {"name": "a.txt", **counted}.items() <= found["evaluation"][0].items()
    assert found["leakage"]["a.txt"]["ngrams"] == 0


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    for text, count in (("a b c", 1), ("a b c d e", 3), ("a b c def", 2)):  # two of one size
        path = place(tmp_path, "a.txt", text)
        os.utime(path, (count, count))
        assert len(load_evaluation((path,), (), 3, 2).cut) == count


# Words and n-grams

CHARACTERS = "abAB1 ,.'-\n\u00a0éÉßẞİ\u0131Σ\u03c3ςДд中\u0301🙂\U0001d538_"


def words_by_hand(text: str) -> list[tuple[int, int, str]]:
    """(start, stop, lower case) of every word."""
    return [
        (word.start(), word.end(), "".join(each.lower()[0] for each in word[0]))
        for word in re.finditer(r"[^\W_]+", text)
    ]


def test_the_table_folds_every_code_point_as_python_does() -> None:
    every = map(chr, range(0x110000))
    assert fold_table().tolist() == [ord(c.lower()[0]) if c.isalnum() else 0 for c in every]


def test_words_are_where_a_plain_loop_finds_them() -> None:
    names: dict[str, int] = {}
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choices(CHARACTERS, k=rng.randrange(60)))
        found = split_words(text)
        expected = words_by_hand(text)
        assert found.starts.tolist() == [start for start, _, _ in expected]
        assert found.ends.tolist() == [stop for _, stop, _ in expected]
        for digest, (_, _, word) in zip(found.hashes.tolist(), expected, strict=True):
            assert names.setdefault(word, digest) == digest
    assert len(set(names.values())) == len(names) > 500


def test_a_text_in_blocks_has_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices(CHARACTERS, k=10)) for _ in range(30)]
    texts = [" ".join(words), "a " * 50, " " * 100]
    whole = [[*map(list, split_words(text))] for text in texts]
    monkeypatch.setattr(module, "BLOCK", 16)
    assert [[*map(list, split_words(text))] for text in texts] == whole
    assert split_words("x" * 70).ends.tolist() == [32, 64, 70]


def test_the_bitmap_turns_nothing_away_that_is_in_a_large_set() -> None:
    words = np.random.default_rng(0).integers(1 << 64, size=200_000, dtype=np.uint64)
    grams = hash_ngrams(words, 13)
    found = NgramSet(13, grams[::2]).find(words)
    assert found.positions.tolist() == list(range(0, len(grams), 2))
