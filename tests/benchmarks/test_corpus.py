"""The questions about corpora in miniature: what they compare, refuse and report."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import corpus_clean, corpus_grouping, corpus_steps, tokenise
from tests.benchmarks.run import figures, run
from tests.data.samples import write_tokenizer
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


def test_grouping_finds_the_groups_that_sorting_finds(tmp_path: Path) -> None:
    random, expected = np.random.default_rng(0), []
    for band in range(2):
        keys = random.integers(50_000, size=70_000, dtype=np.uint64) << np.uint64(48)
        keys.tofile(tmp_path / f"{band}.keys")
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        members = np.flatnonzero(counts[inverse] > 1)
        expected.append([(counts > 1).sum(), len(members), members.sum()])
    found = corpus_grouping.ours(sorted(tmp_path.glob("*.keys")))
    assert np.array_equal(np.sum(found, axis=0), np.sum(expected, axis=0))
    record = run(tmp_path, "corpus_grouping", "--rows", 140_000, "--bands", 2)
    rate = 0.14 / figures(record, OURS)["cpu"][0]
    assert f"{rate:.1f} million rows per CPU second" in record["page"]


def test_cleaning_and_sentences(text: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_clean", "--text", text, "--megabytes", 0.2)
    sizes = {figures(record, name, "repair")["bytes"] for name in (OURS, "ftfy")}
    assert sizes == {figures(record, OURS, "whole step")["bytes"]}
    assert sizes.pop() == pytest.approx(200_000, rel=0.2)
    found = figures(record, OURS, "sentences")
    assert [found[key] for key in ("right", "extra", "missed")] == [50, 11, 3]
    assert figures(record, "sentencex", "sentences")["right"] == 48
    assert "cuts 50 of 60 cases as wanted" in record["page"]


@pytest.mark.parametrize(
    ("split", "right", "extra", "missed"),
    [
        (lambda text: text.replace("! ", "!|").split("|"), 2, 0, 0),
        (lambda text: [text], 1, 0, 1),
        (str.split, 0, 3, 0),
    ],
)
def test_marks(monkeypatch, tmp_path: Path, split, right: int, extra: int, missed: int) -> None:
    file = tmp_path / "cases.txt"
    file.write_text("# a case a line\nA b! | C d.\nE\\n f.\n")
    monkeypatch.setattr(corpus_clean, "CASES", file)
    assert corpus_clean.marks(split) == {"right": right, "extra": extra, "missed": missed}


def test_both_tokenise_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--size", "600KB"]
    record = run(tmp_path, "tokenise", *words)
    ours, peer = (figures(record, name) for name in (OURS, tokenise.PEER))
    assert ours["bytes"] == peer["bytes"] == pytest.approx(600_000, rel=0.2)
    assert ours["start"] > 0
    assert peer["cpu"][0] > 0


def test_steps_run_one_after_another_and_as_a_chain(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--sizes", "300KB", "--steps", "extract"]
    record = run(tmp_path, "corpus_steps", *words, "clean", "decontaminate", "tokenise", "chain")
    found = {step: figures(record, "300KB", step) for step in ("clean", "tokenise", "chain")}
    assert all(0 < each["tasks"] < each["cpu"][0] for each in found.values())
    assert found["chain"]["tasks"] > found["tokenise"]["tasks"]
    assert "300KB go through the whole chain" in record["page"]


def test_a_step_at_two_sizes_is_drawn(text: Path, tmp_path: Path) -> None:
    words = ["--text", text, "--steps", "extract", "--sizes", "200KB", "2MB"]
    record = run(tmp_path, "corpus_steps", *words)
    small, large = (figures(record, size, "extract") for size in ("200KB", "2MB"))
    assert large["bytes"] > 4 * small["bytes"] > 0
    assert "No step takes more than" in record["page"]
    assert (tmp_path / "page.png").stat().st_size > 5000


def test_a_step_over_the_limit_is_a_failure(text: Path, tmp_path: Path) -> None:
    words = ["--text", text, "--steps", "dedup", "--sizes", "200KB", "--limit", "120MB"]
    record = run(tmp_path, "corpus_steps", *words, status=1)
    (only,) = record["contenders"]
    assert "out of memory" in only["reason"]
    assert "Not measured: dedup 200KB" in record["page"]


def test_growth_is_a_power_of_the_size() -> None:
    first, own = {"tasks": 2.0, "bytes": 10}, {"tasks": 16.0, "bytes": 20}
    assert corpus_steps.power(own, first) == pytest.approx(3)
