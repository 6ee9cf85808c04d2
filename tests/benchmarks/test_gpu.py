"""The one command for a GPU, in miniature on a CPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import train_step
from benchmarks.harness import Flags, Rank
from tests.benchmarks.run import ROOT

SIZES = """--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 16
--max-position-embeddings 16 --vocab-size 512 --micro-batch-size 2"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "benchmarks/gpu.sh", *words, "--device", "cpu", "--small"]
    environ = {**os.environ, "OUT": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def test_runs_leave_pages_and_one_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "output_layer.json").mkdir()  # so that the run cannot write
    ended = run(tmp_path, "loss", "profile")
    assert (ended.returncode, "output_layer" in ended.stderr) == (1, True)
    page = (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "124M_profile.md").read_text() in page
    assert "# output_layer\n" in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["without_figures"] == ["output_layer"]
    assert [each["contender"] for each in found["rows"]] == [
        "this project", "plain torch, compiled", "this project, not compiled",
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["tokens_per_s"] == pytest.approx(64 / row["seconds"])
        assert row["peak_gib"] > 0
        assert {"matmul", "elementwise", "optimizer", "norm", "idle"} <= {*row["device_ms"]}
        assert min(row["device_ms"].values()) > 0
    assert run(tmp_path, "speeed").returncode == 2


@pytest.mark.parametrize(
    ("model", "flags", "names"),
    [
        ("gpt2_124m", "", ("plain torch, compiled", "transformers")),
        ("llama_1b", "--num-query-groups 2 --ffn-hidden-size 96", ("transformers, compiled",)),
    ],
)
def test_contenders_of_a_gpu_train_one_model(
    model: str, flags: str, names: tuple[str, ...]
) -> None:
    """Initial weights are those of the device's generator, of this project and of its peers."""
    chosen = Flags(contenders=(train_step.OURS, *names))
    settings = {"presets": (model,), "dtypes": ("fp32",), "tensor_parallel": (1,)}
    found = train_step.contenders(
        chosen, **settings, program_flags=f"{SIZES} {flags}", fast_weights=True
    )
    with torch.compiler.set_stance("force_eager"):  # a compiler takes minutes
        turns = [each.run(Rank(), **each.arguments) for each in found]
        first, *others = ([float((turn() or {})["loss"]) for _ in range(3)] for turn in turns)
    assert len(others) == len(names)
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    names = "hardware speed sizes loss dropout offload modes hf"
    ended = run(tmp_path, *names.split())
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not [row for row in found["rows"] if "reason" in row]
