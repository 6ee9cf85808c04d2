"""benchmarks/huggingface.py in miniature: all contenders train the same model (the harness compares
their losses) and have figures."""

from pathlib import Path

import pytest

from benchmarks.huggingface import BY_PLAN, NATIVE, TORCH, TRANSFORMERS
from tests.benchmarks.run import figures, run

SMALL = """--num-layers 1 --hidden-size 96 --seq-length 32 --vocab-size 512 --micro-batch-size 1"""
# A process of each rank takes seconds: plain Llama is in test_llama.py.
RUNS = {
    "llama": (f"{SMALL} --ffn-hidden-size 192", [BY_PLAN, TRANSFORMERS, TORCH]),
    "gpt2": (SMALL, [BY_PLAN, NATIVE]),
}


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_all_contenders_train_the_same_model(kind: str, tmp_path: Path) -> None:
    sizes, names = RUNS[kind]
    flags = ["--models", kind, "--dtypes", "fp32", f"--program-flags={sizes}"]
    record = run(tmp_path, "huggingface", *flags, "--contenders", *names)
    for name in names:
        found = figures(record, name, f"{kind}, fp32")
        assert found["wall"][0] > 0
        assert found["peak_bytes"] > 0
