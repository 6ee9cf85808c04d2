"""The generator of corpora of any size, in miniature."""

import itertools
import random
from pathlib import Path

import pytest

from benchmarks import corpus_generator
from benchmarks.corpus_generator import five_grams, generate, read
from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import content, write_jsonl


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 9,000 sentences of made-up words."""
    coin = random.Random(0)
    words = ["".join(coin.choices("abcdefghijkl\u00e9", k=coin.randint(2, 9))) for _ in range(3000)]
    documents = []
    for number in range(300):
        sentences = [" ".join(coin.choices(words, k=15)).capitalize() + "." for _ in range(30)]
        documents.append({"text": " ".join(sentences[: 30 - number % 20])})
        documents.append({"text": "\n\n".join(sentences)})
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", documents)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_generator, "SHARD_BYTES", 400_000)


@pytest.fixture
def corpus(text: Path, tmp_path: Path) -> Path:
    generate(tmp_path / "made", (text,), "1.5MB")
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


def test_bytes_depend_on_seed_and_shard_alone(text: Path, corpus: Path, tmp_path: Path) -> None:
    generate(tmp_path / "again", (text,), "1.5MB")
    made = content(corpus)
    assert content(tmp_path / "again") == made
    assert sum(map(len, made.values())) == pytest.approx(1.5e6, rel=0.1)
    generate(tmp_path / "small", (text,), "900KB")
    small = content(tmp_path / "small")
    assert small["shards/part-00001.jsonl"] == made["shards/part-00001.jsonl"]
    generate(tmp_path / "other", (text,), "900KB", seed=5)
    texts = [{each["text"] for each in read(tmp_path / n / "shards")} for n in ("small", "other")]
    assert not texts[0] & texts[1]


def test_what_cannot_be_made_is_refused(text: Path, corpus: Path, tmp_path: Path) -> None:
    error = refusal(lambda: generate(tmp_path / "large", (text,), "500GB"))
    assert field_of(error) == "--text"
    assert not (tmp_path / "large").exists()
    with pytest.raises(FileExistsError):
        generate(corpus, (text,), "300KB")
