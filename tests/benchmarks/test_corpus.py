"""The questions about corpora in miniature: what they compare, refuse and report."""

import itertools
import json
import random
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from benchmarks import corpus_generator, corpus_steps, exact_join, tokenise
from benchmarks.corpus_generator import five_grams, generate, read
from benchmarks.harness import Rank
from benchmarks.report import Results
from tests.benchmarks.run import figures, run
from tests.data.samples import write_tokenizer
from tests.refusals import refusal, refused
from tests.tools.corpus.lines import content, write_jsonl
from tools.corpus import dedup, harvest

OURS = "this project"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "english.jsonl"
    harvest.run(harvest.Settings(output=file, max_bytes=450_000, workers=1))
    return file


def test_deduplication_finds_the_known_pairs(text: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_dedup", "--text", text, "--size", "300KB")
    ours, peer = (figures(record, name, "signatures") for name in (OURS, "datasketch"))
    assert ours["bytes"] == peer["bytes"] == pytest.approx(300_000, rel=0.3)
    assert 0 < ours["error"] < 0.05
    for name in (OURS, "datasketch"):
        found = figures(record, name, "the whole")
        assert found["missed"] == found["wrong"] == 0


def test_all_find_the_same_groups(tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_grouping", "--rows", 40_000, "--bands", 2)
    assert figures(record, OURS)["cpu"]


def test_cleaning_and_sentences(text: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_clean", "--text", text, "--megabytes", 0.2)
    sizes = {figures(record, name, "repair")["bytes"] for name in (OURS, "ftfy")}
    assert sizes == {figures(record, OURS, "whole step")["bytes"]}
    assert sizes.pop() == pytest.approx(200_000, rel=0.2)
    found = figures(record, OURS, "sentences")
    assert [found[key] for key in ("right", "extra", "missed")] == [50, 11, 3]
    assert figures(record, "sentencex", "sentences")["right"] == 48


def test_both_tokenise_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--size", "300KB"]
    record = run(tmp_path, "tokenise", *words)
    ours, peer = (figures(record, name) for name in (OURS, tokenise.PEER))
    assert ours["bytes"] == peer["bytes"] == pytest.approx(300_000, rel=0.3)


def test_steps_and_the_chain(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--sizes", "200KB"]
    record = run(tmp_path, "corpus_steps", *words, "--steps", "extract", "tokenise", "chain")
    found = {step: figures(record, "200KB", step) for step in ("extract", "tokenise", "chain")}
    assert found["chain"]["tasks"] > 0 < found["tokenise"]["tasks"]  # CPU seconds
    sizes = {each["bytes"] for each in found.values()}
    assert sizes.pop() == pytest.approx(200_000, rel=0.3)
    assert not sizes
    assert corpus_steps.power({"tasks": 8, "bytes": 4}, {"tasks": 2, "bytes": 2}) == 2


def test_step_over_the_limit(text: Path, tmp_path: Path) -> None:
    generate(tmp_path / "200KB" / "0", (text,), "200KB", 0)
    given = {"steps": ["dedup"], "tokenizer": "", "evaluation": [], "limit": 120_000_000}
    turn = corpus_steps.run(Rank(), "dedup", "200KB", str(tmp_path), given)
    with pytest.raises(MemoryError):
        turn()
    left_out = {"group": "dedup", "name": "200KB", "first": "200KB", "reason": "out of memory"}
    found = Results(corpus_steps.QUESTION, {"contenders": [left_out | {"facts": {}, "rounds": []}]})
    assert "dedup 200KB" in corpus_steps.failure(found)


# The generator


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 9,000 sentences of made-up words."""
    coin = random.Random(0)
    words = ["".join(coin.choices("abcdefghijkl\u00e9", k=coin.randint(2, 9))) for _ in range(3000)]
    documents = []
    for number in range(300):
        sentences = [" ".join(coin.choices(words, k=15)).capitalize() + "." for _ in range(30)]
        documents.append({"text": " ".join(sentences[: 30 - number % 20])})
        documents.append({"text": "\n\n".join(sentences)})
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", documents)


@pytest.fixture
def corpus(made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus_generator, "SHARD_BYTES", 400_000)
    generate(tmp_path / "made", (made_up,), "1.5MB")
    return tmp_path / "made"


def test_the_5_grams_of_a_text_by_hand() -> None:
    assert five_grams("A b\n c d") == {"a b c", " b c ", "b c d"}
    assert five_grams("A\tb") == {"a b"}


def test_near_duplicates_are_as_similar_as_said(corpus: Path) -> None:
    sets = {each["id"]: five_grams(each["text"]) for each in read(corpus / "shards")}
    truth = {each["id"]: each for each in read(corpus / "truth")}
    assert len(truth) == pytest.approx(0.05 * len(sets), abs=5)
    assert len({each["of"] for each in truth.values()} - truth.keys()) == len(truth)
    for each in truth.values():
        one, other = sets[each["id"]], sets[each["of"]]
        assert each["jaccard"] == len(one & other) / len(one | other)
    found = [each["jaccard"] for each in truth.values()]
    assert 0.45 < min(found) < 0.7
    assert 0.9 < max(found) <= 1
    others = [sets[name] for name in sets if name not in truth][:60]
    for one, other in itertools.combinations(others, 2):
        assert len(one & other) < 0.5 * len(one | other)


def test_generated_bytes_depend_on_seed_and_shard(
    made_up: Path, corpus: Path, tmp_path: Path
) -> None:
    generate(tmp_path / "again", (made_up,), "1.5MB")
    made = content(corpus)
    assert content(tmp_path / "again") == made
    assert sum(map(len, made.values())) == pytest.approx(1.5e6, rel=0.1)
    generate(tmp_path / "small", (made_up,), "900KB")
    small = content(tmp_path / "small")
    assert small["shards/part-00001.jsonl"] == made["shards/part-00001.jsonl"]
    generate(tmp_path / "other", (made_up,), "900KB", seed=5)
    texts = [{each["text"] for each in read(tmp_path / n / "shards")} for n in ("small", "other")]
    assert not texts[0] & texts[1]


# The exact join: all pairs, by brute force, and what it says of a run of the step.

WORDS = [f"{a}{b}" for a in "bcdfgkl" for b in ("and", "est", "ill", "orn")]


def draw_texts(count: int, seed: int) -> list[str]:
    """Texts of few words, most of them an earlier text with some words replaced."""
    draw, texts = random.Random(seed), []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 60))
        if texts and draw.random() < 0.6:
            words = draw.choice(texts).split()
            for _ in range(draw.randint(0, 5)):
                words[draw.randrange(len(words))] = draw.choice(WORDS)
        texts.append(" ".join(words))
    return texts


@pytest.mark.parametrize("least", ["0.2", "0.7", "1"])
@pytest.mark.parametrize("shingle", dedup.signatures.SHINGLES)
def test_exact_pairs_are_those_of_brute_force(shingle: str, least: str) -> None:
    for seed in range(4):
        grams = exact_join.gram_sets(draw_texts(60, seed), shingle)
        sets = [set(each.tolist()) for each in grams]
        expected = {
            (i, j)
            for i in range(len(sets))
            for j in range(i)
            if len(sets[i] & sets[j]) >= Fraction(least) * len(sets[i] | sets[j])
        }
        assert expected
        assert set(exact_join.exact_pairs(grams, Fraction(least))) == expected


def test_exact_join_names_what_the_step_misses(tmp_path: Path) -> None:
    records = [
        {"text": text, "id": f"d{k:03}", "source": "ab"[k % 2]}
        for k, text in enumerate(draw_texts(120, 1))
    ]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    words = {"input": (source,), "source_priority": ("b",), "workers": 1}
    for name, bands, rows, status in (("many", 42, 3, 0), ("few", 1, 40, 1)):
        kept, facts = tmp_path / name, tmp_path / f"{name}.json"
        dedup.run(
            dedup.Settings(output=kept, bands=bands, rows=rows, allow_large_removal=True, **words)
        )
        with pytest.raises(SystemExit) as end:
            exact_join.main(["--input", str(source), "--kept", str(kept), "--json", str(facts)])
        found = json.loads(facts.read_text())
        assert end.value.code == status
        assert found["documents"] == 120
        assert bool(found["kept_by_step_alone"]) == bool(status)
        assert found["kept_by_join_alone"] == []
        assert found["kept_by_join"] < found["documents"] < found["pairs"] + 120


def test_exact_join_refusals(tmp_path: Path) -> None:
    same = write_jsonl(tmp_path / "in.jsonl", [{"text": text, "id": "x"} for text in ("a", "b")])
    words = f"--input {same} --kept {tmp_path}"
    assert refused(exact_join.main, words) == "--kept"
    dedup.run(dedup.Settings(input=(same,), output=tmp_path / "out", workers=1))
    refusal(partial(exact_join.main, f"{words}/out".split()), field="--input")
