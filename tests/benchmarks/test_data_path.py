"""The benchmark of the data path: what it writes and reads, and a whole run of it in miniature."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.data_path import (
    CACHE,
    DISK,
    DOCUMENT,
    SPARSE,
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
    write_sparse(tmp_path / "p", 909_090_909)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == data.num_documents * DOCUMENT == 999_999_999_900
    assert sum(512 * file.stat().st_blocks for file in tmp_path.iterdir()) < 2**20
    train = open_inputs(f"{tmp_path}/p", "gpt2", 64).train
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 64)
    assert not train.batch(range(10**9, 10**9 + 4)).tokens.any()


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
