"""The benchmark of the data path: what it writes and reads, and a whole run of it in miniature."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data_path import (
    CACHE,
    DISK,
    DOCUMENT,
    SPARSE,
    fastest,
    open_inputs,
    write_data,
    write_sparse,
)
from megatron.data.indexed import IndexedDataset
from tests.benchmarks.run import figures, run
from tools.data_files import verify


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_its_data_sets_are_sound_and_as_long_as_said(tmp_path: Path, model: str) -> None:
    write_data(tmp_path / "p", model, 3_000_000)
    report = verify(str(tmp_path / "p"))
    assert report.described
    assert report.tokens / report.documents == pytest.approx(DOCUMENT, rel=0.15)
    batch = open_inputs(f"{tmp_path}/p", model, 64).train.batch(range(4))
    assert batch.tokens.shape == (4, 64)
    assert len(np.unique(batch.tokens)) > 100


def test_the_sparse_data_set_opens_as_a_whole_one(tmp_path: Path) -> None:
    documents = write_sparse(tmp_path / "p", 10**12)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == documents * DOCUMENT == pytest.approx(1e12)
    assert data.num_documents == documents
    assert sum(512 * file.stat().st_blocks for file in tmp_path.iterdir()) < 2**20
    train = open_inputs(f"{tmp_path}/p", "gpt2", 64).train
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 64)
    assert not train.batch(range(10**9, 10**9 + 4)).tokens.any()


def test_training_is_the_fastest_of_the_contenders(tmp_path: Path) -> None:
    file, rounds = tmp_path / "steps.json", [{"wall": [2.0, 4.0], "tokens": 30}, {"wall": [3.0]}]
    slow = {"name": "slow", "group": "g", "rounds": [{"wall": [5.0], "tokens": 30}]}
    out = {"name": "out of memory", "group": "g", "rounds": []}
    floor = {"name": "floor", "group": "g", "rounds": [{"wall": [1.0]}]}
    ours = {"name": "ours", "group": "g", "rounds": rounds}
    file.write_text(json.dumps([{"contenders": [out, slow]}, {"contenders": [floor, ours]}]))
    assert fastest(file) == ("ours, g", 10.0)
    file.write_text(json.dumps([{"contenders": [out, floor]}]))
    with pytest.raises(ValueError, match="--training"):
        fastest(file)


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_all_figures_are_there(tmp_path: Path, model: str) -> None:
    words = ["--model", model, "--tokens", 300_000, "--seq-length", 64, "--steps", 2]
    record = run(tmp_path, "data_path", *words)
    for name in (CACHE, DISK):
        found = figures(record, name, model)
        assert 0.5 < found["tokens"] / (2 * 64 * 64) <= 1
        assert 0 < found["wall"][0] < 1
        assert 0 <= found["peak_bytes"] < 2**25
    if model == "gpt2":
        found = figures(record, SPARSE, model)
        assert found["opening"] < 5
        assert found["peak_bytes"] < 2**24
        assert found["on_disk"] < 2**20 < found["index"]
        assert record["sparse"] == "999,999,999,900 tokens in 909,090,909 documents"
