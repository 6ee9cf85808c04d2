"""Any layout and ZeRO stage saves, any other loads, and a resumed run is the undisturbed one
(promises 4, 5)."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import (
    load_checkpoint,
    load_optimizer,
    model_slices,
    newest_checkpoint,
    optimizer_slices,
    verify,
)
from megatron.checkpoint.resume import find_start
from megatron.checkpoint.save import save_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.inference.generate import Sampling, generate
from megatron.parallel.bucket import gathered
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import own_rows
from megatron.parallel.dtensors import from_dtensors, to_dtensors
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import TensorSlice, gather_whole, replicated, sharding_specs
from megatron.train.machine import environment
from megatron.train.pretrain import build
from megatron.train.state import TrainState
from megatron.train.step import train_step
from megatron.train.trained import changes_on_resume
from tests.checkpoint.saving import load, names, save, saver_into, train
from tests.config.test_checks import settings
from tests.dist import Pool, on_ranks
from tests.layouts.matrix import slices
from tests.refusals import refusal
from tests.tiny import (
    SEED,
    VOCABULARY,
    assert_exact,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    state_at,
    summed_loss,
    tiny_config,
    tiny_state,
    whole_slices,
)
from tools.layouts.layout import parse_layout

LAYOUTS = ("data=3,zero=2", "tensor=2,data=2,sequence,zero=3", "pipeline=2,data=2,zero=1")
Tensors = dict[str, Tensor]


def narrow_state(
    name: str, dtype: torch.dtype, seed: int = SEED, dropout: float = 0.0
) -> TrainState:
    """Parts start at multiples of 64 elements, which cut rows of 24."""
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return state_at(name, tiny_config(hidden_size=24, **rates), dtype=dtype, seed=seed)


def train_at(state: TrainState, steps: int) -> list[float]:
    """The losses; 12 samples a step, which 1, 2 and 3 ranks share out in two micro-batches."""
    losses, size = [], 6 // state.mesh.batch.size
    for _ in range(steps):
        batches = micro_batches(samples(12, first=state.samples), state.mesh, size)
        losses.append(train_step(state, batches, 1e-2).loss)
    return losses


def save_at(name: str, directory: Path, dtype: torch.dtype, asynchronous: bool) -> Tensors:
    """All that is saved, whole; training goes on while it is written."""
    state = narrow_state(name, dtype)
    train_at(state, 2)
    saver, saved = saver_into(directory, state, asynchronous=asynchronous), slices(state)
    save(saver, state)
    train_at(state, 1)
    saver.close()
    return saved


def load_at(name: str, paths: dict[str, Path], dtype: torch.dtype) -> dict[str, Tensors]:
    """Each checkpoint in a state of another seed, whose moments and padding hold rubbish."""
    state, found = narrow_state(name, dtype, SEED + 1), {}
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
    ("dtype", "layouts"),
    [(torch.float32, ("tensor=2", "data=2,zero=3")), (torch.bfloat16, LAYOUTS)],
)
def test_every_tensor_is_the_same_at_another_layout(
    gloo: Pool, tmp_path: Path, dtype: torch.dtype, layouts: Sequence[str]
) -> None:
    """Each loads those of the two layouts after it."""
    saved: dict[str, Tensors] = {}
    for number, name in enumerate(layouts):
        ranks, directory = parse_layout(name).ranks, tmp_path / name
        saved[name] = gloo.run(ranks, save_at, name, directory, dtype, bool(number % 2))[0]
    for number, name in enumerate(layouts):
        others = [*layouts, *layouts][number + 1 : number + 3]
        paths = {other: tmp_path / other / "step_00000002" for other in others}
        for found in gloo.run(parse_layout(name).ranks, load_at, name, paths, dtype):
            for saved_at, tensors in found.items():
                assert_exact(tensors, saved[saved_at])


def resumed(name: str, path: Path | None, save_to: Path | None) -> tuple[Tensors, list[float]]:
    """Two steps from scratch or from `path`; then saved, and two more."""
    state = narrow_state(name, torch.float64, dropout=0.1)
    if path is not None:
        load(state, path)
    losses = train_at(state, 2)
    if save_to is not None:
        save_state(state, save_to, vocab_size=VOCABULARY)
        losses += train_at(state, 2)
    return slices(state), losses


@pytest.mark.parametrize(
    ("name", "other"),
    [("tensor=2,data=2,zero=2", "serial"), ("data=3,zero=3", "tensor=2,context=2:p2p,zero=3")],
)
def test_a_run_goes_on_as_if_undisturbed(gloo: Pool, tmp_path: Path, name: str, other: str) -> None:
    """At the same stage and layout in all bits, at another but for the order of sums."""
    ranks, path = parse_layout(name).ranks, tmp_path / "step_00000002"
    straight, losses = gloo.run(ranks, resumed, name, None, tmp_path)[0]
    again, losses_again = gloo.run(ranks, resumed, name, path, None)[0]
    assert losses_again == losses[2:]
    assert_exact(again, straight)
    elsewhere, losses_again = gloo.run(parse_layout(other).ranks, resumed, other, path, None)[0]
    assert losses_again == pytest.approx(losses[2:], rel=1e-10)
    torch.testing.assert_close(elsewhere, straight, rtol=0, atol=1e-10)


def read_back(model: nn.Module, expected: Tensors) -> Tensors:
    """Half of the tensors after from_dtensors, as torch's tools write, has set them to twice."""
    from_dtensors(model, {key.removeprefix("model."): 2 * each for key, each in expected.items()})
    return {key: each / 2 for key, each in whole_slices(model_slices(model)).items()}


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_model_is_copied_and_read(stage: int) -> None:
    """Readers beside the optimizer: a copy keeps its weights, whatever becomes of the model; a save
    of parameters that are not there is refused."""
    state = tiny_state(mesh_of_ranks(1), zero_stage=stage)
    (batch,) = micro_batches(samples(2), state.mesh, 1)

    def loss_of(model: Any) -> float:
        with torch.no_grad(), gathered(model):
            return summed_loss(model, batch, state.mesh.device)[0].item()

    copied, before = deepcopy(state.model), loss_of(state.model)
    expected = whole_slices(state.weights())
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


FACTS: dict[str, Any] = {"vocab_size": VOCABULARY}


@on_ranks(3)
def test_a_rank_may_hold_padding_only(tmp_path: Path) -> None:
    """A vocabulary of which all but the first rank hold padding only."""
    mesh = mesh_of_ranks(torch.distributed.get_world_size())
    layer = VocabParallelEmbedding(mesh, 5, 4, divisible_by=128, std=1.0)
    materialize(layer, device=mesh.device, dtype=torch.float32, seed=None)
    spec = sharding_specs(layer)["weight"]
    weight = layer.weight.detach()
    value = torch.arange(20.0).view(5, 4)
    weight.fill_(9.0)
    spec.real(weight).copy_(value[spec.local_slices])
    report = save_checkpoint(tmp_path, 1, [TensorSlice("weight", spec, weight)], {}, mesh)
    loaded = torch.full_like(weight, 8.0)
    load_checkpoint(verify(report.path, mesh), [TensorSlice("weight", spec, loaded)])
    assert torch.equal(gather_whole(loaded, spec), value)
    assert names(report.path) == ["manifest.json", "shard_00000.safetensors"]


def test_counts_and_the_loss_scale_are_loaded_from_a_moved_folder(tmp_path: Path) -> None:
    """So is the number of updates of Adam's bias correction; a skipped step is none."""
    state, other = (tiny_state(mesh_of_ranks(1), dtype=torch.float16) for _ in range(2))
    state.step, state.samples, state.skipped = 9, 36, 2
    state.scaler.scale, state.scaler.good_steps = 64.0, 5
    save_state(state, tmp_path, **FACTS)
    shutil.move(tmp_path / "step_00000009", tmp_path / "moved")
    load(other, tmp_path / "moved")
    assert (other.step, other.samples, other.skipped) == (9, 36, 2)
    assert other.scaler == state.scaler
    (adam,) = other.optimizer.optimizers
    assert {each for group in adam.updates for each in group.tolist()} == {7}


def test_weights_match_by_name_but_for_what_is_allowed(tmp_path: Path) -> None:
    saved = tiny_state(mesh_of_ranks(1), dtype=torch.bfloat16)
    train(saved, 1)
    save_state(saved, tmp_path, **FACTS)
    state = tiny_state(mesh_of_ranks(1), seed=SEED + 1)
    path = verify(tmp_path / "step_00000001", state.mesh)
    before, masters = whole_slices(state.slices()), whole_slices(saved.slices())
    refusal(lambda: state.load_weights(path, missing=["final_norm"]), "final_norm.bias")
    larger = tiny_state(mesh_of_ranks(1), tiny_config(num_layers=3))
    refusal(lambda: larger.load_weights(path, surplus=["transformer"]), "transformer.layers.2")
    state.load_weights(path, missing=["final_norm"], surplus=["final_norm"])
    assert (state.step, state.samples) == (0, 0)
    for key, tensor in whole_slices(state.slices()).items():
        kind, _, name = key.partition(".")
        is_loaded = kind == "model" and not name.startswith("final_norm")
        expected = masters[f"master.{name}"].double() if is_loaded else before[key]
        assert torch.equal(tensor, expected), key


@on_ranks(2)
def test_each_stage_starts_from_its_own_weights(tmp_path: Path) -> None:
    half = torch.bfloat16  # rounded from masters
    saved, state = (state_at("pipeline=2", dtype=half) for _ in range(2))
    for each in saved.optimizer.masters():
        each.local.mul_(3)
    saved.optimizer.publish()
    save_state(saved, tmp_path, **FACTS)
    state.load_weights(verify(tmp_path / "step_00000000", state.mesh))
    assert_exact(slices(state), slices(saved))


# Made by commit 98c61ae with the state and the steps below, from scratch: six steps, saved after
# three, at two tensor-parallel ranks. These are the losses of steps 4 to 6 there.
OLD = Path(__file__).parent / "of_98c61ae"
OLD_LOSSES = [3.942508969988142, 3.9448824564615887, 3.9357579549153647]
SIZES = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 2}
REST = {"max_position_embeddings": 16, "weight_decay": 0.1, "train_iters": 6, "micro_batch_size": 4}
OLD_CONFIG = settings(**SIZES, **REST, attention_dropout=0.0, hidden_dropout=0.0)


def resume_old(tensor_size: int, zero_stage: int) -> tuple[list[str], list[float]]:
    mesh, identity = mesh_of_ranks(tensor_size), {"vocab_size": 51, "tokenizer": "f", "data": []}
    inputs: Any = SimpleNamespace(
        corpus=SimpleNamespace(vocab_size=51, identity=identity),
        train=SimpleNamespace(samples_per_epoch=64),
        samples_in=lambda epochs: 64 * epochs,
    )
    start = find_start(CheckpointConfig(load=str(OLD)))
    size = 4 // mesh.data.size
    training = replace(OLD_CONFIG.training, micro_batch_size=size)
    parallel = replace(OLD_CONFIG.parallel, zero_stage=zero_stage)
    config = replace(OLD_CONFIG, training=training, parallel=parallel)
    run = build(config, inputs, start, mesh)
    state, losses = run.state, []
    for _ in range(3):
        batch = samples(4, first=state.samples)
        batch = replace(batch, tokens=batch.tokens // 2, labels=batch.labels // 2)
        losses.append(train_step(state, micro_batches(batch, mesh, size), 1e-2).loss)
    return run.messages, losses


@pytest.mark.parametrize(("world", "tensor_size", "zero_stage"), [(4, 2, 3), (1, 1, 0)])
def test_a_checkpoint_of_98c61ae_is_resumed(
    gloo: Pool, world: int, tensor_size: int, zero_stage: int
) -> None:
    for messages, losses in gloo.run(world, resume_old, tensor_size, zero_stage):
        changed = [each for each in messages if each.startswith("changed")]
        # Two ranks share out the parts that one rank computed at once.
        assert len(changed) == (zero_stage == 3)
        assert all("--micro-batch-size" in each for each in changed)
        # Equal to the last digit on the machine that made them; fp32, so that other processors
        # and versions of torch may add in another order. Without the moments they differ by 1e-3.
        assert losses == pytest.approx(OLD_LOSSES, rel=1e-6)
    assert read_manifest(OLD / "step_00000003")["run"] == "0123456789abcdef"


def test_a_switch_of_the_first_checkpoints_is_stage_1() -> None:
    mesh = serial_mesh()
    saved = read_manifest(OLD / "step_00000003") | {"environment": environment(mesh)}
    saved["config"]["parallel"] = {"use_distributed_optimizer": True}
    state: Any = SimpleNamespace(mesh=mesh, kernel_seed=None)
    (said,) = changes_on_resume(saved, saved, state, 2)
    assert "--zero-stage is 2, and was 1" in said
    assert not changes_on_resume(saved, saved, state, 0), "which sums in the same order"
    saved["environment"]["threads"] += 1
    (said,) = changes_on_resume(saved, saved, state, 0)
    assert "threads" in said


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class Own(nn.Module):
    """Layers of both kinds, and a number."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(mesh, 4, 8), RowParallelLinear(mesh, 8, 4)
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x))) * self.scale


def own_training(
    tensor_size: int,
    make: Callable[..., Any],
    steps: range,
    load: Path | None,
    save: Path | None,
    sequence_parallel: bool = False,
) -> Tensors:
    """A module, loop and optimizer of the user's own; the whole weights at the end."""
    torch.manual_seed(SEED + steps.start)  # what is loaded is not what is built
    mesh = mesh_of_ranks(tensor_size, sequence_parallel=sequence_parallel)
    model = Own(mesh).double()
    specs = {
        name: replicated(each, mesh)
        for name, each in model.named_parameters()
        if name.startswith(("norm", "scale"))
    }
    optimizer = make(model)
    if load is not None:
        found = newest_checkpoint(load, mesh)
        assert found.manifest["steps"] == steps.start
        load_checkpoint(found, model_slices(model, specs=specs))
        load_optimizer(found, model, optimizer, specs)
    gradients = GradientBuckets(model, specs=specs)
    for step in steps:
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        rows = x.chunk(mesh.size("batch"))[mesh.rank("batch")]
        with gradients.accumulate(is_last=True):
            model(own_rows(rows, mesh.stream)).pow(4).sum().backward()
        optimizer.step()
    if save is not None:
        assert newest_checkpoint(save, mesh) is None
        slices = [*model_slices(model, specs=specs), *optimizer_slices(model, optimizer, specs)]
        save_checkpoint(save, steps.stop, slices, {"steps": steps.stop}, mesh)
    table = sharding_specs(model, specs)
    return {name: gather_whole(each, table[name]) for name, each in model.named_parameters()}


@pytest.mark.parametrize(("make", "begun"), [(adam, 0), (momentum, 3)])
def test_an_own_training_goes_on(
    gloo: Pool, tmp_path: Path, make: Callable[..., Any], begun: int
) -> None:
    """Also where the optimizer has made no step."""
    expected = own_training(1, make, range(5), None, None)
    gloo.run(2, own_training, 2, make, range(begun), None, tmp_path)
    rest = range(begun, 5)
    found = [own_training(1, make, rest, tmp_path, None)]
    found += gloo.run(2, own_training, 1, make, rest, tmp_path, None)
    found += gloo.run(2, own_training, 2, make, rest, tmp_path, None, True)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-11, atol=1e-11)


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    mesh = serial_mesh()
    model, other = Own(mesh), Own(mesh)
    for optimizer in (torch.optim.Adafactor(model.parameters()), adam(other)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        refusal(lambda each=optimizer: optimizer_slices(model, each))
    slices = model_slices(model)
    for given, facts, named in (
        ([*slices, *model_slices(other)], {}, "model.scale"),
        (slices, {"tensors": 3}, "tensors"),
        ([], {}, "step_00000001"),
    ):
        refusal(lambda g=given, f=facts: save_checkpoint(tmp_path, 1, g, f, mesh), named)
    assert newest_checkpoint(tmp_path, mesh) is None
    save_checkpoint(tmp_path, 1, [*slices, *model_slices(other, "mean")], {}, mesh)
    found = newest_checkpoint(tmp_path, mesh)
    for wrong in (slices[1:], []):
        with pytest.raises(ValueError, match="partial"):
            load_checkpoint(found, wrong)
    load_checkpoint(found, slices[1:], partial=True)
    load_checkpoint(found, model_slices(model, "mean"))
    assert_exact([*model.parameters()], [*other.parameters()])
