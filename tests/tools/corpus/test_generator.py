"""The generator of corpora of any size, in miniature."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import corpus_generator
from benchmarks.corpus_generator import (
    SHORTEST,
    TARGETS,
    edit,
    five_grams,
    generate,
    jaccard,
    least_sentences,
    load_base,
    read,
)
from tests.tools.corpus.lines import content, write_jsonl


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 9,000 sentences of made-up words."""
    coin = random.Random(0)
    words = [
        "".join(coin.choices("abcdefghijklmnop\u00e9", k=coin.randint(2, 9))) for _ in range(3000)
    ]
    documents = []
    for number in range(300):
        sentences = [" ".join(coin.choices(words, k=15)).capitalize() + "." for _ in range(30)]
        documents.append({"text": " ".join(sentences[: 30 - number % 20])})
        documents.append({"text": "\n\n".join(sentences)})
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", documents)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_generator, "SHARD_BYTES", 400_000)


@pytest.fixture(scope="module")
def corpus(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_generator, "SHARD_BYTES", 400_000)
        generate((text,), output=folder, size="1.5MB", workers=1)
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {record["id"]: record["text"] for record in read(folder)[0]}


def truth(folder: Path) -> list[dict[str, Any]]:
    return read(folder)[1]


def test_the_similarity_of_texts_by_hand() -> None:
    assert five_grams("A b\n c d") == {"a b c", " b c ", "b c d"}
    assert five_grams("A\tb") == {"a b"}
    assert jaccard({"a", "b", "c"}, {"b", "c", "d"}) == 0.5


def test_the_truth_is_what_the_documents_say(corpus: Path) -> None:
    documents = texts(corpus)
    assert truth(corpus)
    for line in truth(corpus):
        one, other = (five_grams(documents[line[key]]) for key in ("id", "of"))
        assert line["jaccard"] == jaccard(one, other)


def test_near_duplicates_are_the_asked_share_and_near_the_targets(corpus: Path) -> None:
    lines = truth(corpus)
    assert len(lines) == pytest.approx(0.05 * len(texts(corpus)), abs=1)
    for line in lines:
        assert min(abs(line["jaccard"] - target) for target in TARGETS) < 0.02
    assert len({round(line["jaccard"], 1) for line in lines}) >= 4


def test_no_document_is_the_original_of_two_and_no_near_duplicate_is_one(corpus: Path) -> None:
    lines = truth(corpus)
    originals = {line["of"] for line in lines}
    assert len(originals) == len(lines)
    assert not originals & {line["id"] for line in lines}
    assert any(line["of"][:5] < line["id"][:5] for line in lines), "none in another shard"


def test_all_other_pairs_stay_below_half(corpus: Path) -> None:
    documents = texts(corpus)
    planted = {frozenset((line["id"], line["of"])) for line in truth(corpus)}
    names = list(documents)[:60]
    sets = {name: five_grams(documents[name]) for name in names}
    for one, other in itertools.combinations(names, 2):
        if frozenset((one, other)) not in planted:
            assert jaccard(sets[one], sets[other]) < 0.5


def test_every_document_has_the_least_length(corpus: Path) -> None:
    copies = {line["id"] for line in truth(corpus)}
    lengths = [len(text) for name, text in texts(corpus).items() if name not in copies]
    assert min(lengths) >= SHORTEST - 2  # the white space after the last sentence is cut off


def test_workers_do_not_change_a_byte(text: Path, corpus: Path, tmp_path: Path) -> None:
    generate((text,), output=tmp_path / "again", size="1.5MB", workers=2)
    assert content(tmp_path / "again") == content(corpus)


def test_a_smaller_corpus_is_the_beginning_of_a_larger(
    text: Path, corpus: Path, tmp_path: Path
) -> None:
    generate((text,), output=tmp_path / "small", size="900KB", workers=1)
    small, large = content(tmp_path / "small"), content(corpus)
    assert small["shards/part-00000.jsonl"] == large["shards/part-00000.jsonl"]
    assert large["truth.jsonl"].startswith(small["truth.jsonl"])
    assert len(small) < len(large)


def test_another_seed_draws_other_documents(text: Path, corpus: Path, tmp_path: Path) -> None:
    generate((text,), output=tmp_path / "other", size="1.5MB", seed=5, workers=1)
    assert not set(texts(tmp_path / "other").values()) & set(texts(corpus).values())


def test_the_size_is_what_was_asked_for(corpus: Path) -> None:
    size = sum(file.stat().st_size for file in (corpus / "shards").iterdir())
    assert size == pytest.approx(1.5e6, rel=0.1)
    assert len(list((corpus / "shards").iterdir())) == 4


def test_a_share_of_zero_plants_none(text: Path, tmp_path: Path) -> None:
    generate((text,), output=tmp_path / "none", size="300KB", near_duplicates=0, workers=1)
    assert truth(tmp_path / "none") == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_edit_gets_near_every_target(text: Path, target: float) -> None:
    base = load_base((str(text),))
    original = " ".join(base.sentences[:12])
    changed, found = edit(base, original, target, np.random.default_rng(1))
    assert found == pytest.approx(target, abs=0.02)
    assert found == jaccard(five_grams(original), five_grams(changed))


def test_too_little_text_for_a_size_is_refused_by_name(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--text"):
        generate((text,), output=tmp_path / "large", size="500GB")
    assert not (tmp_path / "large").exists()


def test_more_short_documents_need_more_sentences(text: Path) -> None:
    base = load_base((str(text),))
    longer = base._replace(lengths=base.lengths + 10 * SHORTEST)
    assert least_sentences(base, 1e6) > least_sentences(base, 1e4) > 0
    assert least_sentences(longer, 1e6) == 0


def test_a_folder_that_is_in_use_is_refused_by_name(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--output"):
        generate((text,), output=tmp_path, size="300KB")
