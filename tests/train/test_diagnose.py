"""The report of a run that stops for a number that is not finite: module, rank, samples."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.training import OptimizerConfig
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import Mesh
from megatron.train.diagnose import Finding, NonFiniteError, find_first, non_finite
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, train_step
from tests.dist import on_ranks
from tests.tiny import (
    assert_exact,
    mesh_of_ranks,
    micro_batches,
    samples,
    tensors,
    tiny_config,
    tiny_state,
)

UP = "transformer.layers.1.mlp.up"
GLOBAL_BATCH = 4
Fault = Callable[[TrainState, nn.Module], object]


# Each of the first three goes wrong in the second micro-batch.


def infinite_output(state: TrainState, module: nn.Module) -> None:
    """In one element."""

    def spoil(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        wrong = torch.zeros_like(output)
        wrong[-1, -1] = torch.inf if state.micro_batch == 1 else 0.0
        return output + wrong

    module.register_forward_hook(spoil)


def infinite_gradient(state: TrainState, module: nn.Module) -> None:
    def spoil(gradient: Tensor) -> Tensor:
        return gradient * torch.inf if state.micro_batch == 1 else gradient

    module.register_forward_hook(lambda _, inputs, output: output.register_hook(spoil) and None)


def infinite_weight_gradient(state: TrainState, module: nn.Module) -> None:
    view = module.gradient_views["weight"]
    right = view.add_matmul

    def spoil(dy: Tensor, x: Tensor) -> None:
        right(dy, x)
        if state.micro_batch == 1:
            view.gradient[0, 0] -= torch.inf

    view.add_matmul = spoil


@torch.no_grad()
def nan_weight(state: TrainState, module: nn.Module) -> None:
    module.get_parameter("weight")[0, 0] = torch.nan


@torch.no_grad()
def large_weight(state: TrainState, module: nn.Module) -> None:
    """So large that the matmul overflows in fp16, in the first micro-batch already."""
    module.get_parameter("weight")[:, ::2] = 60_000.0


@torch.no_grad()
def nan_master(state: TrainState, module: nn.Module) -> None:
    """In the part of the weight that this rank has."""
    master = next(each for each in state.optimizer.masters() if each.key == f"{UP}.weight")
    master.local[-1:] = torch.nan
    state.optimizer.publish()


FAULTS: dict[str, tuple[Fault, str]] = {
    "output": (infinite_output, f"the output of {UP}"),
    "gradient": (infinite_gradient, f"the gradient at {UP}"),
    "weight gradient": (infinite_weight_gradient, f"the gradient of the weight {UP}.weight"),
    "weight": (nan_weight, f"the weight {UP}.weight itself"),
    "master": (nan_master, f"the weight {UP}.weight itself"),
    "matmul": (large_weight, f"the output of {UP}"),
}

# The result that is not finite in the end, for the faults that any dtype can have.
WHAT = {"output": "loss", "gradient": "gradient", "weight gradient": "gradient"}
Diagnosis = tuple[str, str, str, str]
"""(what is not finite in the end, where it was first seen, the rank, the message)"""


def diagnosis(
    mesh: Mesh,
    fault: str,
    bad: tuple[int, int],
    granularity: str,
    dtype: torch.dtype,
    zero: int = 0,
    offloads: bool = False,
) -> Diagnosis:
    """The error of the second step, where the rank at (replicas, tensor) coordinates goes wrong."""
    how = {"recompute_granularity": granularity, "cpu_offload_activations": offloads}
    config = tiny_config(hidden_dropout=0.1, **how)
    optimizer = OptimizerConfig(optimizer_cpu_offload=offloads)
    state = tiny_state(mesh, config, optimizer, dtype=dtype, zero_stage=zero)
    step(state)
    if (mesh.replicas.rank, mesh.tensor.rank) == bad:
        FAULTS[fault][0](state, state.model.get_submodule(UP))
    before = tensors(state)
    hooks = count_hooks(state.model)
    state.scaler = LossScaler()
    with pytest.raises(NonFiniteError) as raised:
        step(state)
    assert count_hooks(state.model) == hooks, "a hook is left behind"
    assert (state.step, state.samples) == (1, GLOBAL_BATCH)
    assert_exact(tensors(state), before, equal_nan=True)
    error = raised.value
    return error.what, error.found.what, error.found.coordinates, str(error)


def step(state: TrainState) -> None:
    batch = samples(GLOBAL_BATCH, first=state.samples)
    train_step(state, micro_batches(batch, state.mesh, 1), 1e-3)


def count_hooks(model: nn.Module) -> int:
    modules = sum(len(module._forward_hooks) for module in model.modules())
    return modules + sum(len(each._backward_hooks or {}) for each in model.parameters())


@pytest.mark.parametrize(
    ("layout", "bad", "place", "how"),
    [
        ("tensor=2,context=2", (1, 1), "data 0, context 1, tensor 1", ("full", 0, False)),
        ("tensor=2,data=2", (1, 1), "data 1, tensor 1", ("none", 2, False)),
        ("data=2", (1, 0), "data 1, tensor 0", ("full", 3, True)),
        # The other one reads the same samples.
        ("context=2:p2p", (1, 0), "data 0, context 1, tensor 0", ("full", 3, False)),
    ],
)
@on_ranks("layout")
def test_every_rank_names_the_module(
    layout: str, bad: tuple[int, int], place: str, how: tuple[Any, ...]
) -> None:
    """how: granularity of the recomputation, stage of ZeRO, and whether it offloads."""
    mesh, (granularity, *others) = mesh_of_ranks(layout), how
    # Micro-batches of one sample.
    sample = GLOBAL_BATCH + mesh.data.size + (bad[0] if mesh.data.size > 1 else 0)
    for fault, what in WHAT.items():
        how = granularity, torch.float32, *others
        *where, message = diagnosis(mesh, fault, bad, *how)
        assert where == [what, FAULTS[fault][1], place]
        assert message.startswith("step 2: ")
        assert f"samples {sample} to {sample} " in message


# Values of tensor rank 1 reach rank 0 in the next all-reduce, of the layer after.
NARROW = [("weight", "none", torch.bfloat16), ("matmul", "none", torch.float16)]
# In ZeRO stage 3 all ranks would gather it.
MASTERS = [
    ("master", granularity, torch.bfloat16, zero, offloads)
    for granularity, zero, offloads in (("none", 3, False), ("none", 0, True), ("full", 3, True))
]


@pytest.mark.parametrize(
    ("tensor_size", "bad", "cases"), [(2, (0, 1), NARROW), (1, (1, 0), MASTERS)]
)
@on_ranks(2)
def test_the_rank_at_fault_is_named(tensor_size: int, bad: tuple[int, int], cases: Any) -> None:
    """cases: the fault and how it is run."""
    mesh = mesh_of_ranks(tensor_size)
    for fault, *how in cases:
        place = "data {}, tensor {}".format(*bad)
        assert diagnosis(mesh, fault, bad, *how)[1:3] == (FAULTS[fault][1], place)


def test_a_norm_alone_may_overflow() -> None:
    """Each gradient is finite, and their squares are not: no module is accused."""
    state = tiny_state(mesh_of_ranks(1), dtype=torch.float32)
    state.model.final_norm.bias.register_hook(lambda gradient: gradient * 0 + 1e30)
    with pytest.raises(NonFiniteError) as raised:
        step(state)
    assert f"samples 0 to {GLOBAL_BATCH - 1}" in str(raised.value)
    assert (raised.value.what, raised.value.found) == ("gradient", None)


def test_an_earlier_micro_batch_that_ran_later_is_named() -> None:
    """As in a pipeline, which runs forwards ahead of a backward."""
    state = tiny_state(mesh_of_ranks(1))

    def replay() -> None:
        for number in (1, 0):
            state.micro_batch = number
            state.model.final_norm(torch.full((1, 32), torch.nan, dtype=torch.float64))

    found = find_first(state, replay)
    assert found is not None
    assert found.micro_batch == 0


@on_ranks(4)
def test_the_second_run_leaves_the_gradients_of_the_first() -> None:
    config = tiny_config(hidden_dropout=0.3, attention_dropout=0.3)
    state = tiny_state(mesh_of_ranks(2), config)
    batches = micro_batches(samples(GLOBAL_BATCH), state.mesh, 1)
    counts = count(state, batches)
    forward_backward(state, batches, counts)
    first = [bucket.gradients.clone() for bucket in state.gradients.buckets]
    assert all(each.any() for each in first)
    non_finite(state, batches, "loss", lambda: forward_backward(state, batches, counts))
    assert all(map(torch.equal, first, (bucket.gradients for bucket in state.gradients.buckets)))


def test_samples_are_those_of_all_ranks_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 3D: two models of two ranks, each with two micro-batches of one sample."""
    finding = Finding(1, 0, 0, 3, "it", 3, "data 1")
    monkeypatch.setattr("megatron.train.diagnose.find_first", lambda *_: finding)
    axes = {name: SimpleNamespace(size=size) for name, size in (("batch", 4), ("input", 2))}
    state: Any = SimpleNamespace(
        mesh=SimpleNamespace(**axes), scaler=LossScaler(), samples=8, step=1
    )
    batches: list[Any] = [SimpleNamespace(num_samples=1)] * 2
    message = str(non_finite(state, batches, "loss", lambda: None))
    assert "in samples 14 to 15 (the step reads samples 8 to 15)" in message
