"""The questions about corpora in miniature: what they compare, refuse and report."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import corpus_grouping, corpus_steps, tokenise
from tests.benchmarks.run import figures, run
from tests.data.samples import write_tokenizer
from tools.corpus import harvest

OURS = "this project"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "english.jsonl"
    harvest.run(harvest.Settings(output=file, max_bytes=800_000, workers=1))
    return file


def test_signatures_estimate_what_was_planted(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    record = run(tmp_path, "corpus_signatures", "--text", text, "--size", "300KB")
    for shingle in ("char5", "word5"):
        ours, peer = (figures(record, name, shingle) for name in (OURS, "datasketch"))
        assert ours["bytes"] == peer["bytes"] == pytest.approx(300_000, rel=0.3)
        assert 0 < ours["error"] < 0.05
        assert figures(record, f"{OURS}, plain numpy", shingle)["error"] == ours["error"]
    assert "MB/s of character 5-grams" in record["page"]


def test_grouping_finds_the_groups_that_sorting_finds(tmp_path: Path) -> None:
    corpus_grouping.make_rows(tmp_path, 2, 70_000)
    files = sorted(tmp_path.glob("*.keys"))
    expected = []
    for file in files:
        keys = np.fromfile(file, np.uint64)
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        members = np.flatnonzero(counts[inverse] > 1)
        expected.append((int((counts > 1).sum()), len(members), int(members.sum())))
    assert [*corpus_grouping.ours(files)] == expected
    record = run(tmp_path, "corpus_grouping", "--rows", 140_000, "--bands", 2)
    assert figures(record, OURS)["rows"] == 140_000


def test_cleaning_is_that_of_the_peers(text: Path, tmp_path: Path) -> None:
    record = run(tmp_path, "corpus_clean", "--text", text, "--megabytes", 0.2)
    sizes = {figures(record, name, "repair")["bytes"] for name in (OURS, "ftfy")}
    assert sizes == {figures(record, OURS, "whole step")["bytes"]}
    assert sizes.pop() == pytest.approx(200_000, rel=0.2)


def test_deduplication_keeps_what_the_truth_keeps(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    record = run(tmp_path, "corpus_dedup", "--text", text, "--size", "400KB")
    for name in (OURS, "datasketch"):
        found = figures(record, name)
        assert found["missed"] == found["wrong"] == 0
        assert found["documents"] > 60
        assert found["peak_bytes"] > 2**20


def test_both_tokenise_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--real", text]
    record = run(tmp_path, "tokenise", *words, "--size", "600KB", "--peer-size", "200KB")
    ours, peer = (figures(record, name, "generated text") for name in (OURS, tokenise.PEER))
    assert ours["bytes"] > 2 * peer["bytes"] > 200_000
    assert figures(record, OURS, "real text")["bytes"] == text.stat().st_size
    for each in (ours, peer):  # what so little text takes more than none may be anything
        assert each["speed"]
        assert each["cpu"][0] > 0


def test_steps_run_one_after_another_and_as_a_chain(text: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    words = ["--tokenizer", tmp_path, "--text", text, "--workers", 1, "--sizes", "300KB"]
    record = run(tmp_path, "corpus_steps", *words, "--steps", "clean", "dedup", "chain")
    found = {step: figures(record, "300KB", step) for step in ("clean", "dedup", "chain")}
    cpu = {step: each["cpu"][0] for step, each in found.items()}
    assert all(0 < each["tasks"] < cpu[step] for step, each in found.items())
    assert "300KB go through the whole chain" in record["page"]


def test_a_step_at_two_sizes_is_drawn(text: Path, tmp_path: Path) -> None:
    words = ["--text", text, "--steps", "urls", "--sizes", "200KB", "2MB"]
    record = run(tmp_path, "corpus_steps", *words)
    small, large = (figures(record, size, "urls") for size in ("200KB", "2MB"))
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
    with pytest.raises(KeyError):
        corpus_steps.power(first, first)


def test_a_run_is_described_by_its_steps() -> None:
    given = {"steps": ["dedup", "tokenise"], "workers": 3, "evaluation": [], "tokenizer": "/v"}
    found = tomllib.loads(corpus_steps.describe(Path("/t"), Path("/o"), given))
    words = {"vocab_file": "/v/vocab.json", "merge_file": "/v/merges.txt", "append_eod": True}
    own = {"input": ["/t"], "dedup": {}, "tokenise": words}
    assert found == {"output": "/o", "workers": 3, **own}
    raw = corpus_steps.describe(Path("/t"), Path("/o"), {**given, "steps": ["extract"]})
    assert tomllib.loads(raw)["extract"]["generated"]["input"] == ["/t"]
