"""The exact join: all pairs, by brute force, and what it says of a run of the step."""

import json
import random
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from benchmarks import exact_join
from tests.refusals import field_of, refusal, refused
from tests.tools.corpus.lines import write_jsonl
from tools.corpus import dedup

WORDS = [f"{a}{b}" for a in "bcdfgkl" for b in ("and", "est", "ill", "orn")]


def corpus(count: int, seed: int) -> list[str]:
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
def test_pairs_are_those_of_brute_force(shingle: str, least: str) -> None:
    for seed in range(8):
        grams = exact_join.gram_sets(corpus(60, seed), shingle)
        sets = [set(each.tolist()) for each in grams]
        expected = {
            (i, j)
            for i in range(len(sets))
            for j in range(i)
            if len(sets[i] & sets[j]) >= Fraction(least) * len(sets[i] | sets[j])
        }
        assert expected
        assert set(exact_join.exact_pairs(grams, Fraction(least))) == expected


def test_the_step_is_compared_and_a_pair_that_it_misses_is_named(tmp_path: Path) -> None:
    records = [
        {"text": text, "id": f"d{k:03}", "source": "ab"[k % 2]}
        for k, text in enumerate(corpus(120, 1))
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


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    same = write_jsonl(tmp_path / "in.jsonl", [{"text": text, "id": "x"} for text in ("a", "b")])
    words = f"--input {same} --kept {tmp_path}"
    assert refused(exact_join.main, words) == "--kept"
    dedup.run(dedup.Settings(input=(same,), output=tmp_path / "out", workers=1))
    error = refusal(partial(exact_join.main, f"{words}/out".split()))
    assert field_of(error) == "--input"
