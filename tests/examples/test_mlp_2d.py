"""Colossal-AI's MLP in every mode: as a program, and beside plain torch in fp64."""

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from examples import mlp_2d
from megatron.api import gather_whole, materialize, serial_mesh, sharding_specs
from megatron.parallel.mesh import Mesh
from tests import threads
from tests.examples.test_examples import ROOT, run
from tests.tiny import scatter_weights

WIDTH, STEPS = 8, 3
MODES = [
    ("1d", {"tensor": 4}),
    ("2d", {"row": 2, "column": 2}),
    ("2d", {"data": 2, "row": 2, "column": 2}),
    ("2.5d", {"depth": 2, "row": 2, "column": 2}),
    ("3d", {"weight": 2, "input": 2, "output": 2}),
]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    specs = sharding_specs(model)
    return {name: gather_whole(each, specs[name]) for name, each in model.named_parameters()}


@cache
def initial_weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    weights = weights_of(mlp_2d.build(serial_mesh(), WIDTH))
    return {name: each.double() for name, each in weights.items()}


def train(mesh: Mesh, weights: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        model = mlp_2d.build(mesh, WIDTH)
    materialize(model, device=mesh.device, dtype=torch.float64, seed=None)
    scatter_weights(model, weights)
    twin = mlp_2d.plain_twin(model, WIDTH)
    losses = list(mlp_2d.train(mesh, model, twin, WIDTH, STEPS))
    assert len({loss for loss, _ in losses}) == STEPS
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=1e-12)
    after = dict(twin.named_parameters())
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, after[name].detach(), rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize(("mode", "sizes"), MODES, ids=str)
def test_the_mlp_of_every_mode_is_plain_torch(mode: str, sizes: dict[str, int]) -> None:
    threads.run(mode, sizes, train, initial_weights())


@pytest.mark.parametrize(
    ("processes", "words"), [(1, ()), (4, ("--mode", "2d")), (8, ("--mode", "3d"))]
)
def test_the_program_prints_both_losses_and_what_ranks_hold(
    processes: int, words: tuple[str, ...]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    file = ROOT / "examples" / "mlp_2d.py"
    ended = run(*launcher[: 4 * (processes > 1)], file, *words, "--width", "8", "--steps", "2")
    assert ended.returncode == 0, ended.stderr
    losses = re.findall(r"loss (\S+) \| plain torch (\S+)", ended.stdout)
    assert len(losses) == 2
    assert all(float(loss) == pytest.approx(float(other), abs=2e-4) for loss, other in losses)
    held = re.findall(r"rank \d+ holds (\d+) parameters", ended.stdout)
    assert len(held) == processes
    least, vectors = 2 * mlp_2d.INSIDE * 8 * 8 // processes, 8 + 3 * mlp_2d.INSIDE * 8
    assert all(least < int(each) <= least + vectors for each in held)
