"""Checkpoints of ZeRO: any stage and layout saves, any other loads, bit for bit."""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.load import model_slices
from megatron.config.parallel import TrainingParallelConfig
from megatron.inference.generate import Sampling, generate
from megatron.parallel.bucket import gathered
from megatron.parallel.dtensors import from_dtensors, to_dtensors
from megatron.parallel.sharding import gather_whole
from megatron.train.pipelining import plan_pipeline
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.checkpoint.saving import load, save, saver_into
from tests.dist import Pool
from tests.layouts.matrix import slices
from tests.tiny import (
    SEED,
    SEQUENCE,
    VOCABULARY,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    summed_loss,
    tiny_section,
    tiny_state,
)
from tools.layouts.layout import parse_layout

LAYOUTS = (
    "serial",
    "tensor=2",
    "data=2",
    "data=2,zero=1",
    "data=2,zero=3",
    "tensor=2,data=2,zero=2",
    "tensor=2,data=2,sequence,zero=3",
    "pipeline=2,data=2,zero=1",
    "data=3,zero=2",
    "data=4,zero=3",
)
Tensors = dict[str, Tensor]


def state_at(name: str, dtype: torch.dtype, seed: int = SEED, dropout: float = 0.0) -> TrainState:
    """Parts start at multiples of 64 elements, which cut rows of 24."""
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    layout, section = parse_layout(name), tiny_section(hidden_size=24, **rates)
    parallel = TrainingParallelConfig(**layout.settings)
    plan = plan_pipeline(parallel, section, seq_length=SEQUENCE, vocab_size=VOCABULARY)
    mesh, settings = layout.mesh(torch.device("cpu")), {"pipeline": plan, "seed": seed}
    return tiny_state(mesh, section, dtype=dtype, zero_stage=layout.zero, **settings)


def train_at(state: TrainState, steps: int) -> list[float]:
    """The losses; 12 samples a step, which 2, 3 and 4 ranks share out."""
    losses = []
    for _ in range(steps):
        batches = micro_batches(samples(12, first=state.samples), state.mesh, 1)
        losses.append(train_step(state, batches, 1e-2).loss)
    return losses


def save_at(name: str, directory: Path, dtype: torch.dtype, asynchronous: bool) -> Tensors:
    """All that is saved, whole; training goes on while it is written."""
    state = state_at(name, dtype)
    train_at(state, 2)
    saver, saved = saver_into(directory, state, asynchronous=asynchronous), slices(state)
    save(saver, state)
    train_at(state, 1)
    saver.close()
    return saved


def load_at(name: str, paths: dict[str, Path], dtype: torch.dtype) -> dict[str, Tensors]:
    """Each checkpoint in a state of another seed, whose moments and padding hold rubbish."""
    state, found = state_at(name, dtype, SEED + 1), {}
    for saved_at, path in paths.items():
        with torch.no_grad():
            for each in state.slices():
                each.local.fill_(7.0)
        load(state, path)
        found[saved_at] = slices(state)
        assert (state.step, state.samples) == (2, 24)
    assert train_at(state, 1)[0] > 0  # nothing is NaN
    return found


@pytest.mark.parametrize(
    ("dtype", "layouts"), [(torch.float32, LAYOUTS[2:7:2]), (torch.bfloat16, LAYOUTS)]
)
def test_every_tensor_is_the_same_at_another_layout(
    gloo: Pool, tmp_path: Path, dtype: torch.dtype, layouts: Sequence[str]
) -> None:
    """6 and 20 pairs: each loads those of the two layouts behind it."""
    saved: dict[str, Tensors] = {}
    for number, name in enumerate(layouts):
        ranks, directory = parse_layout(name).ranks, tmp_path / name
        saved[name] = gloo.run(ranks, save_at, name, directory, dtype, bool(number % 2))[0]
    for number, name in enumerate(layouts):
        others = [*layouts, *layouts][number + 1 : number + 3]
        paths = {other: tmp_path / other / "step_00000002" for other in others}
        for found in gloo.run(parse_layout(name).ranks, load_at, name, paths, dtype):
            for saved_at, tensors in found.items():
                wanted = saved[saved_at]
                assert tensors.keys() == wanted.keys()
                for key, each in tensors.items():
                    assert each.dtype == wanted[key].dtype
                    assert torch.equal(each, wanted[key]), (saved_at, name, key)


def resumed(name: str, path: Path | None, save_to: Path | None) -> tuple[Tensors, list[float]]:
    """Two steps from scratch or from `path`; then saved, and two more."""
    state = state_at(name, torch.float64, dropout=0.1)
    if path is not None:
        load(state, path)
    losses = train_at(state, 2)
    if save_to is not None:
        save_state(state, save_to, vocab_size=VOCABULARY)
        losses += train_at(state, 2)
    return slices(state), losses


@pytest.mark.parametrize(
    "name", ["serial", "tensor=2", "data=2,zero=1", "tensor=2,data=2,zero=2", "data=3,zero=3"]
)
def test_a_run_goes_on_as_if_undisturbed(gloo: Pool, tmp_path: Path, name: str) -> None:
    """At the same stage and layout in all bits, at others but for the order of sums."""
    ranks, path = parse_layout(name).ranks, tmp_path / "step_00000002"
    straight, losses = gloo.run(ranks, resumed, name, None, tmp_path)[0]
    again, losses_again = gloo.run(ranks, resumed, name, path, None)[0]
    assert losses_again == losses[2:]
    for key, tensor in straight.items():
        assert torch.equal(tensor, again[key]), key
    for other in ("serial", "data=2,zero=3", "tensor=2,data=2,zero=1", "data=2"):
        elsewhere, losses_again = gloo.run(parse_layout(other).ranks, resumed, other, path, None)[0]
        assert losses_again == pytest.approx(losses[2:], rel=1e-10)
        for key, tensor in straight.items():
            torch.testing.assert_close(elsewhere[key], tensor, rtol=0, atol=1e-10)


def read_back(model: nn.Module, expected: Tensors) -> Tensors:
    """What was written as torch's tools do."""
    from_dtensors(model, {key.removeprefix("model."): 2 * each for key, each in expected.items()})
    own = {each.key: gather_whole(each.local, each.spec) for each in model_slices(model)}
    return {key: each / 2 for key, each in own.items()}


def check_readers_of_a_model(stage: int) -> None:
    """Others than the optimizer: a copy keeps its weights, whatever becomes of the model; what
    would save parameters that are not there is refused."""
    state = tiny_state(mesh_of_ranks(1), zero_stage=stage)
    (batch,) = micro_batches(samples(2), state.mesh, 1)

    def loss_of(model: Any) -> float:
        with torch.no_grad(), gathered(model):
            return summed_loss(model, batch, state.mesh.device)[0].item()

    copied, before = deepcopy(state.model), loss_of(state.model)
    expected = {each.key: gather_whole(each.local, each.spec) for each in state.weights()}
    train_step(state, [batch], 1e-2)
    assert loss_of(copied) == before > loss_of(state.model)
    readers = {
        "model_slices": lambda: {each.key: each.local for each in model_slices(copied)},
        "to_dtensors": lambda: {
            f"model.{n}": w for n, w in to_dtensors(copied, state.mesh).items()
        },
        "state_dict": lambda: {f"model.{n}": w for n, w in copied.state_dict().items()},
        "the layers: state_dict": lambda: copied.transformer.state_dict() and {},
        "from_dtensors": lambda: read_back(copied, expected),
        "generate": lambda: generate(copied.eval(), state.mesh, [[1]], Sampling(2), ends=()) and {},
    }
    for name, read in readers.items():
        reader = name.split()[-1]
        with pytest.raises(ValueError, match=reader) if stage == 3 else nullcontext():
            for key, own in read().items():
                whole = own.full_tensor() if hasattr(own, "full_tensor") else own
                assert torch.equal(whole[: len(expected[key])], expected[key]), (name, key)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_is_copied_and_read(gloo: Pool, stage: int) -> None:
    gloo.run(2, check_readers_of_a_model, stage)
