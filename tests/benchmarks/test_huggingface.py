"""benchmarks/huggingface.py in miniature: all contenders train the same model (the harness compares
their losses) and have figures."""

from pathlib import Path

import pytest

from benchmarks import huggingface
from tests.benchmarks.run import figures, run

SMALL = """--num-layers 1 --hidden-size 96 --seq-length 32 --vocab-size 512 --micro-batch-size 1"""
FLAGS = {"llama": f"{SMALL} --ffn-hidden-size 192", "gpt2": SMALL}


@pytest.mark.parametrize("kind", FLAGS)
def test_all_contenders_train_the_same_model(kind: str, tmp_path: Path) -> None:
    flags = ["--models", kind, "--dtypes", "fp32", f"--program-flags={FLAGS[kind]}"]
    record = run(tmp_path, "huggingface", *flags)
    for name in huggingface.RUNS[kind]:
        found = figures(record, name, f"{kind}, fp32")
        assert found["wall"][0] > 0
        assert found["peak_bytes"] > 0
