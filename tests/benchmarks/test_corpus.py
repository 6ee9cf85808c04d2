"""The questions about corpora in miniature: what they compare, refuse and report."""

import itertools
import random
from pathlib import Path

import pytest

from benchmarks import corpus_generator, tokenise
from benchmarks.corpus_generator import five_grams, generate, read
from tests.benchmarks.run import figures, run
from tests.data.samples import write_tokenizer
from tests.tools.corpus.lines import content, write_jsonl
from tools.corpus import harvest

OURS = "this project"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "english.jsonl"
    harvest.run(harvest.Settings(output=file, max_bytes=800_000, workers=1))
    return file


def test_deduplication_finds_the_known_pairs(text: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_dedup", "--text", text, "--size", "400KB")
    ours, peer = (figures(record, name, "signatures") for name in (OURS, "datasketch"))
    assert ours["bytes"] == peer["bytes"] == pytest.approx(400_000, rel=0.3)
    assert 0 < ours["error"] < 0.05
    for name in (OURS, "datasketch"):
        found = figures(record, name, "the whole")
        assert found["missed"] == found["wrong"] == 0


def test_all_find_the_same_groups(tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_grouping", "--rows", 140_000, "--bands", 2)
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
    words = ["--tokenizer", tmp_path, "--text", text, "--size", "600KB"]
    record = run(tmp_path, "tokenise", *words)
    ours, peer = (figures(record, name) for name in (OURS, tokenise.PEER))
    assert ours["bytes"] == peer["bytes"] == pytest.approx(600_000, rel=0.2)


def test_steps_run_one_after_another_and_as_a_chain(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--sizes", "200KB", "600KB"]
    record = run(tmp_path, "corpus_steps", *words, "--steps", "extract", "tokenise", "chain")
    small, large = ({step: figures(record, size, step) for step in ("tokenise", "chain")}
                    for size in ("200KB", "600KB"))  # fmt: skip
    for each in (small, large):
        assert each["chain"]["tasks"] > 0 < each["tokenise"]["tasks"]  # CPU seconds
    assert large["chain"]["bytes"] > 2 * small["chain"]["bytes"] > 0


def test_a_step_over_the_limit_is_a_failure(text: Path, tmp_path: Path) -> None:
    words = ["--text", text, "--steps", "dedup", "--sizes", "200KB", "--limit", "120MB"]
    record = run(tmp_path, "corpus_steps", *words, status=1)
    (only,) = record["contenders"]
    assert only["reason"]
    assert "dedup 200KB" in record["page"]


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


def test_near_duplicates_are_as_similar_as_said_and_all_others_stay_apart(corpus: Path) -> None:
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


def test_bytes_depend_on_seed_and_shard_alone(made_up: Path, corpus: Path, tmp_path: Path) -> None:
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
