"""benchmarks/train_step.py in miniature: every contender trains the same model and has figures."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Flags
from benchmarks.train_step import TOLERANCES, contenders
from tests.benchmarks.run import figures, run

SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --vocab-size 512 --micro-batch-size 2"""


def miniature(folder: Path, size: int, *words: object) -> dict[str, Any]:
    flags = ["--presets", "quickstart", "--dtypes", "fp32", "--tensor-parallel", size]
    return run(folder, "train_step", *flags, f"--program-flags={SMALL}", *words)


@pytest.mark.parametrize(
    ("size", "peers"),
    [
        (1, ["plain torch", "transformers", "floor"]),
        (2, ["this project, sequence parallel", "DTensor", "floor"]),
    ],
)
def test_all_contenders_have_their_figures(tmp_path: Path, size: int, peers: list[str]) -> None:
    names, folder = ["this project", *peers], tmp_path / "profile"
    record = miniature(tmp_path, size, "--contenders", *names, "--profile", folder)
    for name in names:
        found = figures(record, name, f"quickstart, fp32, t = {size}")
        assert found["wall"][0] > 0
        assert found["cpu"][0] > 0
        assert found["peak_bytes"] > 0
        assert ("tokens" in found) == (name != "floor")
    profile = (folder / f"quickstart_fp32_t_=_{size}_this_project.txt").read_text()
    assert "aten::mm" in profile
    assert ("communication runs for 0.00 ms" in profile) == (size == 1)


@pytest.mark.parametrize(
    ("first", "tolerance"), [("this project", 0.0), ("transformers", TOLERANCES["fp32"])]
)
def test_recomputation_is_exact_beside_this_project_alone(first: str, tolerance: float) -> None:
    flags = Flags(contenders=(first, "this project, full recomputation"))
    _, own = contenders(flags, presets=("quickstart",), dtypes=("fp32",), tensor_parallel=(1,))
    assert own.same == {"loss": tolerance}


@pytest.mark.skipif(find_spec("megatron.core") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("size", [1, 2])
def test_megatron_core_trains_the_same_model(tmp_path: Path, size: int) -> None:
    record = miniature(tmp_path, size, "--contenders", "this project", "Megatron-Core")
    group = f"quickstart, fp32, t = {size}"
    assert figures(record, "Megatron-Core", group)["wall"][0] > 0
