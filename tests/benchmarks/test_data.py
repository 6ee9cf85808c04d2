"""The questions about data and evaluation in miniature."""

from pathlib import Path

import pytest

from benchmarks import data
from benchmarks.data_path import CACHE, DISK, DOCUMENT, SPARSE, SPLIT, configure, write_sparse
from megatron.data.indexed import IndexedDataset
from tests.benchmarks.run import figures, run
from tests.data.samples import write_texts
from tools.layouts.job import open_samples


def test_data_path(tmp_path: Path) -> None:
    record = run(tmp_path, "data_path", "--tokens", 3_000_000, warm_up=0)
    for name in (CACHE, DISK, SPARSE):
        found = figures(record, name)
        assert 0.5 < found["tokens"] / (32 * 64 * 1024) <= 1
        assert found["opened"] < 2**25 > found["peak_bytes"]
    assert found["index"] > 10**10


def test_sources_of_data(tmp_path: Path) -> None:
    documents, words, samples, steps_of_run, batch = 900, 40, 32 * 64, 2, 4
    text = tmp_path / "text.jsonl"
    write_texts(text, [" word" * words] * documents)
    rows = {data.threads(name, 2): True for name in (data.LINES, data.SAVED, data.PARQUET)}
    rows |= {data.threads(name, 1): False for name in (data.PACKED, "mock")}
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    flags += " --max-position-embeddings 16"
    given = ["--text", text, "--vocab-size", 270, "--steps", steps_of_run]
    given += [f"--program-flags={flags}", "--contenders", *rows]
    record = run(tmp_path, "data", *given, warm_up=0)
    for row, is_padded in rows.items():
        found = figures(record, row, data.READING)
        assert found["tokens"] == samples * (words + 1 if is_padded else 1024)
        assert found["places"] == samples * 1024
        step = figures(record, row, data.TRAINING)
        assert step["tokens"] == step["places"] == steps_of_run * batch * 16
        assert step.get("cut") == (steps_of_run * batch if is_padded else None)


def test_evaluation(tmp_path: Path, test_data: Path) -> None:
    files = ["--wikitext-data", test_data / "wikitext103" / "wiki.valid.tokens"]
    files += ["--tokenizer", test_data / "gpt2"]
    record = run(tmp_path, "evaluation", "--characters", 2000, *files)
    found = [each["rounds"][0] for each in record["contenders"]]
    assert len(found) == 3  # and equal sums, which the question itself compares
    assert len({each["tokens"] for each in found}) == 1


def test_sparse_data_set(tmp_path: Path) -> None:
    write_sparse(tmp_path / "p", 909_090_909)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == data.num_documents * DOCUMENT == 999_999_999_900
    assert sum(512 * file.stat().st_blocks for file in tmp_path.iterdir()) < 2**20
    train, _ = open_samples(configure("--split", SPLIT, "--data-path", f"{tmp_path}/p"))
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 1024)
    assert not train.batch(range(10**8, 10**8 + 4)).tokens.any()
