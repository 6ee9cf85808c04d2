"""The benchmark of the data path: what it writes and reads, and a whole run of it in miniature."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.comparison import ROOT
from benchmarks.data_path import Settings, fastest, open_inputs
from benchmarks.data_sets import DOCUMENT, write_documents, write_sentences, write_sparse
from megatron.data.indexed import IndexedDataset
from tools.data_files import verify

FIGURES = {"this project": {"tokens_per_second": {"median": 5.0}}}
OTHERS = {"plain torch": {"tokens_per_second": {"median": 7.0}}}


def settings(model: str) -> Settings:
    return Settings(model=model, seq_length=64, micro_batch_size=2, global_batch_size=4)


@pytest.mark.parametrize(("model", "write"), [("gpt2", write_documents), ("bert", write_sentences)])
def test_its_data_sets_are_sound_and_as_long_as_said(tmp_path: Path, model: str, write) -> None:
    write(tmp_path / "p", 3_000_000)
    report = verify(str(tmp_path / "p"))
    assert report.described
    assert report.tokens / report.documents == pytest.approx(DOCUMENT, rel=0.15)
    batch = open_inputs(tmp_path / "p", settings(model)).train.batch(range(4))
    assert batch.tokens.shape == (4, 64)
    assert len(np.unique(batch.tokens)) > 100


def test_the_sparse_data_set_opens_as_a_whole_one(tmp_path: Path) -> None:
    documents = write_sparse(tmp_path / "p", 10**12)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == documents * DOCUMENT == pytest.approx(1e12)
    assert data.num_documents == documents
    on_disk = sum(512 * file.stat().st_blocks for file in tmp_path.iterdir())
    assert on_disk < 2**20
    train = open_inputs(tmp_path / "p", settings("gpt2")).train
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 64)
    assert not train.batch(range(10**9, 10**9 + 4)).tokens.any()


def test_training_is_the_fastest_figure_of_one_run_or_of_several(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"contenders": FIGURES | OTHERS}))
    assert fastest(file) == ("plain torch (steps)", 7.0)
    file.write_text(json.dumps({"fp32": {"contenders": OTHERS}, "bf16": {"contenders": FIGURES}}))
    assert fastest(file) == ("plain torch (fp32)", 7.0)
    file.write_text(json.dumps({"fp32": {}}))
    with pytest.raises(SystemExit, match="no figures of"):
        fastest(file)


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_all_figures_are_there(tmp_path: Path, model: str) -> None:
    training, written = tmp_path / "steps.json", tmp_path / "data.json"
    training.write_text(json.dumps({"contenders": FIGURES}))
    command = [sys.executable, "benchmarks/data_path.py", "--model", model]
    command += ["--tokens", "300000", "--seq-length", "64", "--rounds", "2", "--steps", "2"]
    command += ["--training", str(training), "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(written.read_text())
    speeds = record["tokens_per_second"]
    assert {place: len(rounds) for place, rounds in speeds.items()} == {"page cache": 2, "disk": 2}
    assert all(min(rounds) > 0 for rounds in speeds.values())
    assert record["memory_growth_bytes"] < 2**25
    gpu, other = record["beside"]
    assert gpu["tokens_per_second"] == 575_000
    assert other["whose"] == "this project (steps)"
    assert other["ratios"]["disk"]["median"] == pytest.approx(np.median(speeds["disk"]) / 5)
    assert "times as many from the page cache, at least the 20 wanted" in done.stdout
    if model == "gpt2":
        assert record["opening"]["seconds"] < 5
        assert record["opening"]["memory_bytes"] < 2**24
        assert "999,999,999,900 tokens in 909,090,909 documents" in done.stdout
