"""Near-duplicates: the clusters against brute force, and on real pairs."""

import json
import random
from itertools import combinations
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from tools.corpus.dedup import (
    PERMUTATIONS,
    ROWS,
    candidates,
    dedup,
    find_clusters,
    normalise,
    shingles,
    signature,
)


def sets_of(texts: list[str]) -> list[set[str]]:
    """The plain definition: all 5-grams of characters."""
    normal = [normalise(text) for text in texts]
    return [{text[k : k + 5] for k in range(max(len(text) - 4, 1))} for text in normal]


def brute_force(texts: list[str], threshold: float) -> set[frozenset[int]]:
    """Clusters by comparing every pair."""
    sets = sets_of(texts)
    cluster = {i: {i} for i in range(len(texts))}
    for i, j in combinations(range(len(texts)), 2):
        if len(sets[i] & sets[j]) > threshold * len(sets[i] | sets[j]):
            merged = cluster[i] | cluster[j]
            cluster.update(dict.fromkeys(merged, merged))
    return {frozenset(members) for members in cluster.values()}


def edited_topics() -> list[str]:
    """Real text, each also with some of its words dropped: similarities from 0.3 to 1."""
    generator = random.Random(7)
    texts = []
    for _, text in sorted(topics.items())[:40]:
        words = text.split()[:300]
        texts.append(" ".join(words))
        for share in (0.0, 0.02, 0.05, 0.1, 0.2):
            texts.append("  ".join(w.upper() for w in words if generator.random() >= share))
    return texts


def test_shingles_are_the_distinct_5_grams() -> None:
    for text, plain in zip(edited_topics()[:12], sets_of(edited_topics()[:12]), strict=True):
        assert len(shingles(normalise(text))) == len(plain)
    assert len(shingles("ab")) == len(shingles("abcde")) == len(shingles("")) == 1


def test_signatures_estimate_the_similarity() -> None:
    texts = edited_topics()[:30]
    sets = sets_of(texts)
    signatures = [signature(shingles(normalise(text)), block=100) for text in texts]
    for i, j in combinations(range(len(texts)), 2):
        truth = len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        assert np.mean(signatures[i] == signatures[j]) == pytest.approx(truth, abs=0.2)


@pytest.mark.parametrize("threshold", [0.7, 0.8])
def test_clusters_equal_brute_force(threshold: float) -> None:
    texts = edited_topics()
    truth = brute_force(texts, threshold)
    assert 40 < len(truth) < len(texts)
    assert {frozenset(c) for c in find_clusters(texts, threshold)} == truth


def test_every_permutation_is_in_a_band() -> None:
    same = np.arange(PERMUTATIONS, dtype=np.uint64)
    for start in range(0, PERMUTATIONS, ROWS):
        other = same + np.uint64(1_000)
        other[start : start + ROWS] = same[start : start + ROWS]
        assert list(candidates(np.stack([same, other]))) == [(0, 1)]


def test_all_pairs_of_a_bucket_are_candidates() -> None:
    signatures = np.zeros((4, 128), np.uint64)
    signatures[3] = np.arange(128)
    assert set(candidates(signatures)) == {(0, 1), (0, 2), (1, 2)}


def test_one_of_each_cluster_is_kept_whatever_the_order(tmp_path: Path) -> None:
    texts = edited_topics()
    records = [{"id": f"{n:04}", "text": text, "source": "x"} for n, text in enumerate(texts)]
    expected = {f"{min(members):04}" for members in brute_force(texts, 0.7)}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for _ in range(2):
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        dedup((source,), output, tmp_path / "report.json")
        kept = [json.loads(line)["id"] for line in output.read_text().splitlines()]
        assert len(kept) == len(expected)
        assert set(kept) == expected
        random.Random(1).shuffle(records)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sources"] == {"x": {"input": len(texts), "output": len(expected)}}


def test_the_true_pairs_of_real_articles_are_found(test_data: Path) -> None:
    folder = test_data / "neardup"
    articles = (folder / "articles_1000.train").read_text().splitlines()
    ids, texts = zip(*(line.split(" ", 1) for line in articles), strict=True)
    truth = {frozenset(line.split()) for line in (folder / "articles_1000.truth").open()}
    clusters = find_clusters(texts, 0.7)
    assert {frozenset(ids[i] for i in c) for c in clusters if len(c) > 1} == truth
