"""examples/zero_own_model.py as a program, and beside plain torch in one process, in fp64."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples import zero_own_model
from examples.zero_own_model import Model
from megatron.api import (
    GradientBuckets,
    MasterWeights,
    Mesh,
    OptimizerConfig,
    gather_whole,
    serial_mesh,
)
from tests import plain
from tests.dist import Pool
from tests.examples.test_examples import printed
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

STEPS = 4
Run = tuple[list[tuple[float, float]], float, dict[str, Tensor]]


def build(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def train(stages: list[int], folder: Path | None = None) -> Run:
    """Losses and norms, loss of unseen samples, weights; of several stages each goes on from the
    checkpoint of the one before, in a model with other initial weights."""
    mesh, rows = mesh_of_ranks(1), list[tuple[float, float]]()
    for number, stage in enumerate(stages, start=1):
        model, steps = build(number), STEPS * number // len(stages)
        save = None if folder is None else str(folder)
        found = zero_own_model.train(mesh, model, stage, steps, save)
        rows += [(loss, norm) for _, loss, norm in found]
    with torch.no_grad():
        return rows, zero_own_model.evaluate(mesh, model), weights_of(mesh, model)


def weights_of(mesh: Mesh, model: nn.Module) -> dict[str, Tensor]:
    """Whole, as its layers see them: in stage 3 they are there while a layer is called."""
    found = dict[str, Tensor]()

    def keep(module: nn.Module, *_: object) -> None:
        found.update({names[id(p)]: p.detach().clone() for p in module.parameters(recurse=False)})

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    zero_own_model.evaluate(mesh, model)
    for hook in hooks:
        hook.remove()
    return found


@cache
def plain_run() -> Run:
    model, mesh, rows = build(), serial_mesh(), list[tuple[float, float]]()
    optimizer = plain.adamw(model, OptimizerConfig(weight_decay=0.1))
    for step in range(STEPS):
        first = step * zero_own_model.BATCH
        loss = zero_own_model.loss_of(model, mesh, range(first, first + zero_own_model.BATCH))
        norm = plain.update(optimizer, loss, zero_own_model.CLIP)
        rows.append((loss.item(), norm.item()))
    after = {name: each.detach() for name, each in model.named_parameters()}
    return rows, zero_own_model.evaluate(mesh, model), after


def assert_plain(found: Run) -> None:
    rows, unseen, weights = plain_run()
    close = torch.testing.assert_close
    close(found[0], rows, rtol=1e-11, atol=0)
    assert found[1] == pytest.approx(unseen, rel=1e-10)
    assert found[2].keys() == weights.keys()
    for name, whole in weights.items():
        assert (found[2][name] - whole).norm() <= 1e-10 * whole.norm(), name


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_each_zero_stage_is_plain_torch(gloo: Pool, stage: int, world: int) -> None:
    for found in gloo.run(world, train, [stage]):
        assert_plain(found)


@pytest.mark.parametrize("stages", [[3, 1], [2, 3]], ids=str)
def test_a_run_goes_on_at_another_zero_stage(gloo: Pool, stages: list[int], tmp_path: Path) -> None:
    for found in gloo.run(2, train, stages, tmp_path):
        assert_plain(found)


def with_other_weights(stage: int) -> str:
    mesh = mesh_of_ranks(1)
    model = build()
    if mesh.rank("data") == 1:
        model.blocks[1].up = nn.Linear(64, 256).double()
    make = GradientBuckets.for_master_weights
    return str(refusal(lambda: make(model, mesh=mesh, zero_stage=stage)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_initial_weights_that_differ_are_named(gloo: Pool, stage: int) -> None:
    for message in gloo.run(2, with_other_weights, stage):
        assert {"blocks.1.up.weight", "blocks.1.up.bias"} <= {*re.split(r"[ ,]+", message)}
        assert "blocks.1.down.weight" not in message


def fill_from_meta() -> tuple[dict[str, Tensor], float, str]:
    """(whole weights, loss, error of a wrong name) of a model that is built on meta."""
    mesh, values = mesh_of_ranks(1), build()
    with torch.device("meta"):
        model = Model().double()
    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, zero_stage=3)
    assert not any(each.is_meta for each in model.parameters())
    optimizer = MasterWeights(gradients, OptimizerConfig())
    optimizer.fill((name, each) for name, each in values.named_parameters())
    whole = {each.key: gather_whole(each.local, each.spec) for each in optimizer.weights()}
    wrong = refusal(lambda: optimizer.fill([("blocks.7.up.bias", torch.zeros(256))]))
    return whole, zero_own_model.evaluate(mesh, model), str(wrong)


def test_a_model_on_meta_is_filled_one_weight_at_a_time(gloo: Pool) -> None:
    model = build()
    expected = zero_own_model.evaluate(serial_mesh(), model)
    for whole, loss, message in gloo.run(2, fill_from_meta):
        for name, each in model.named_parameters():
            assert torch.equal(whole[f"model.{name}"], each), name
        assert loss == pytest.approx(expected, rel=1e-12)
        assert "blocks.7.up.bias" in message


def test_the_program_prints_what_one_process_computes() -> None:
    torch.manual_seed(1)
    expected = [*zero_own_model.train(serial_mesh(), Model(), 0, 3)]
    found = printed(Path(zero_own_model.__file__), "--zero-stage", "3", "--steps", "3")
    assert np.array(found) == pytest.approx(np.array(expected), abs=2e-4)
