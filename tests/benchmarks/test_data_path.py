"""The benchmark of the data path: what it writes and reads, and a whole run of it in miniature."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.data_path import (
    CACHE,
    DISK,
    DOCUMENT,
    SPARSE,
    SPLIT,
    configure,
    write_data,
    write_sparse,
)
from megatron.data.indexed import IndexedDataset
from tests.benchmarks.run import figures, run
from tools.data_files import verify
from tools.layouts.job import open_samples


def test_its_data_set_is_sound_and_as_long_as_said(tmp_path: Path) -> None:
    write_data(tmp_path / "p", 3_000_000)
    report = verify(str(tmp_path / "p"))
    assert report.described
    assert report.tokens / report.documents == pytest.approx(DOCUMENT, rel=0.15)
    batch = open_samples(configure("--split", SPLIT, "--data-path", f"{tmp_path}/p"))[0].batch(
        range(4)
    )
    assert batch.tokens.shape == (4, 1024)
    assert len(np.unique(batch.tokens)) > 1000


def test_the_sparse_data_set_opens_as_a_whole_one(tmp_path: Path) -> None:
    write_sparse(tmp_path / "p", 909_090_909)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == data.num_documents * DOCUMENT == 999_999_999_900
    assert sum(512 * file.stat().st_blocks for file in tmp_path.iterdir()) < 2**20
    train, _ = open_samples(configure("--split", SPLIT, "--data-path", f"{tmp_path}/p"))
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 1024)
    assert not train.batch(range(10**8, 10**8 + 4)).tokens.any()


def test_all_figures_are_there(tmp_path: Path) -> None:
    record = run(tmp_path, "data_path", "--tokens", 3_000_000)
    for name in (CACHE, DISK, SPARSE):
        found = figures(record, name)
        assert 0.5 < found["tokens"] / (32 * 64 * 1024) <= 1
        assert 0 < found["opening"] < 5
        assert found["opened"] < 2**25 > found["peak_bytes"]
    assert found["index"] > 10**10
