"""benchmarks/zero.py in miniature: all contenders train the same model (the harness compares their
losses) and have figures."""

from pathlib import Path

import pytest

from benchmarks import zero
from tests.benchmarks.run import figures, run

SMALL = "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 32 --vocab-size 512"
# A process of each rank takes seconds.
RUNS = {
    "fp32, stage 3": [zero.OURS, zero.FULLY_SHARD],
    "bf16, stage 3": [zero.OURS, zero.KEEPING, zero.WHOLE],
    "bf16, stage 2": [zero.OURS, zero.FULLY_SHARD],
    "fp32, stage 1": [zero.OURS, zero.REDUNDANCY],
}
SLOW = [pytest.param(group, marks=pytest.mark.slow) for group in [*RUNS][1:]]


@pytest.mark.parametrize("group", ["fp32, stage 3", *SLOW])
def test_all_contenders_train_the_same_model(group: str, tmp_path: Path) -> None:
    flags = ["--dtypes", group[:4], "--stages", group[-1], f"--program-flags={SMALL}"]
    record = run(tmp_path, "zero", *flags, "--contenders", *RUNS[group])
    for name in RUNS[group]:
        found = figures(record, name, group)
        assert found["wall"][0] > 0
        assert found["peak_bytes"] > 0
