"""Source A: transformers' GPT-2 by both plans is a plain loop in one process, in fp64; and what
each plan computes and sends."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from examples import huggingface_gpt2 as example
from megatron.api import build_mesh, parallelize, serial_mesh, whole_state_dict
from tests import plain
from tests.dist import Pool
from tests.examples.test_examples import printed
from tests.tiny import assert_relative, mesh_of_ranks
from tools.layouts.work import Meter

STEPS = 4


class Run(NamedTuple):
    steps: list[tuple[float, float]]  # loss, gradient norm
    weights: dict[str, Tensor]


def built(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(example.CONFIG).to(dtype)


def ours(sizes: dict[str, int], plan: str, is_checkpointed: bool) -> Run:
    mesh = build_mesh(sizes, torch.device("cpu")) if sizes else serial_mesh()
    model = built()
    if is_checkpointed:
        example.recompute(model)
    steps = [*example.train(model, plan, mesh, STEPS)]
    return Run(steps, whole_state_dict(model))


def plain_run(model: Any) -> Run:
    """With no line of this project."""
    optimizer, steps = torch.optim.Adam(model.parameters(), lr=1e-3), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = example.BATCH, example.SEQUENCE
        tokens = torch.randint(example.WORDS, shape, generator=draw).sort().values
        logits = model.train()(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        norm = plain.update(optimizer, loss, 1.0)
        steps.append((loss.item(), norm.item()))
    return Run(steps, model.state_dict())


@pytest.mark.parametrize("plan", example.PLANS)
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "tensor": 2}])
def test_huggingface_gpt2_is_a_plain_loop(gloo: Pool, sizes: dict[str, int], plan: str) -> None:
    wanted = plain_run(built())
    world = int(np.prod([*sizes.values()]))
    for found in gloo.run(world, ours, sizes, plan, world == 4):
        assert_run(found, wanted)


def test_huggingface_gpt2_on_one_process_is_a_plain_loop() -> None:
    assert_run(ours({}, "megatron", False), plain_run(built()))


def test_transformers_5_17_has_another_name_of_it() -> None:
    older = Mock(spec=["gradient_checkpointing_enable"])
    example.recompute(older)
    older.gradient_checkpointing_enable.assert_called_once_with({"use_reentrant": False})


def assert_run(found: Run, wanted: Run) -> None:
    assert np.array(found.steps) == pytest.approx(np.array(wanted.steps), rel=1e-12)
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        ours = found.weights[name]
        if name.endswith("c_attn.bias"):  # of keys the gradient is noise, which Adam makes a step
            weight, ours = (each.view(3, -1)[[0, 2]] for each in (weight, ours))
        assert_relative(ours, weight, 1e-10, name)


def test_its_folders_are_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    start = partial(printed, "examples/huggingface_gpt2.py", "--tensor", 2, folder=tmp_path)
    assert len(start("--steps", 2, "--save", folder)) == 2
    file = folder / "config.json"  # by which most folders drop, as its own do not
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resid_pdrop": 0.1}))
    wanted = plain_run(GPT2LMHeadModel.from_pretrained(folder, resid_pdrop=0.0))
    found = start("--load", folder, "--plan", "literal", "--checkpoint", "--steps", STEPS)
    assert found[:, 1:] == pytest.approx(np.array(wanted.steps), abs=2e-4)
    assert wanted.steps[0][0] != pytest.approx(plain_run(built()).steps[0][0], abs=1e-3)


def counted(world: int, plan: str, layers: int) -> np.ndarray:
    """By one rank, forward and backward: collectives, bytes sent, FLOPs of matmuls with weights and
    of attention's kernels."""
    mesh = mesh_of_ranks(world)
    config = GPT2Config(**example.CONFIG.to_dict() | {"n_layer": layers})
    model: Any = parallelize(GPT2LMHeadModel(config).double(), example.PLANS[plan], mesh)
    tokens = torch.randint(example.WORDS, (2, example.SEQUENCE))
    with Meter(mesh) as meter:
        example.loss_of(model(tokens, use_cache=False).logits, tokens).backward()
    work, flops = meter.work[""], Counter[bool]()
    for each, times in work.matmuls.items():
        flops[each.fused] += each.flops * times
    sent = sum(call.sent(world) * times for call, times in work.calls.items())
    return np.array([work.calls.total(), sent, flops[False], flops[True]])


def test_a_layer_costs_by_each_plan_what_the_page_says(gloo: Pool) -> None:
    """The table of docs/sources.md."""
    world = 4

    def of_a_layer(ranks: int, plan: str) -> list[float]:
        one, two = (gloo.run(ranks, counted, ranks, plan, layers)[0] for layers in (1, 2))
        return list(two - one)

    *_, matmuls, attention = of_a_layer(1, "megatron")
    unit = (world - 1) / world * 2 * example.SEQUENCE * example.CONFIG.n_embd * 8
    assert of_a_layer(world, "megatron") == [4, 8 * unit, matmuls / world, attention / world]
    assert of_a_layer(world, "literal") == [6, 12 * unit, matmuls / world, attention]
