"""Any layout saves, any layout loads, and a resumed run is the undisturbed one (promises 4, 5)."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint import load as loading
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
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import own_rows
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import (
    TensorSlice,
    gather_whole,
    materialize,
    replicated,
    sharding_specs,
)
from megatron.train.pretrain import build
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.checkpoint.saving import load, names, train
from tests.config.test_checks import settings
from tests.dist import Pool
from tests.tiny import (
    SEED,
    VOCABULARY,
    mesh_of_ranks,
    micro_batches,
    samples,
    save_state,
    tiny_section,
    tiny_state,
)

Tensors = dict[str, Tensor]
FACTS: dict[str, Any] = {"vocab_size": VOCABULARY}


def whole(state: TrainState) -> Tensors:
    return {each.key: gather_whole(each.local, each.spec) for each in state.slices()}


def train_and_save(tensor_size: int, directory: Path, dtype: torch.dtype) -> Tensors:
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype)
    train(state, 2)
    save_state(state, directory, **FACTS)
    return whole(state)


def load_whole_state(tensor_size: int, path: Path, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Into a model of another seed, whose moments and padding hold rubbish."""
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype, seed=SEED + 1)
    with torch.no_grad():
        for each in state.slices():
            each.local.fill_(7.0)
    load(state, path)
    return whole(state), state.samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), (2, 2), (4, 2)])
def test_every_tensor_is_the_same_at_another_layout(
    gloo: Pool, tmp_path: Path, world: int, tensor_size: int, dtype: torch.dtype
) -> None:
    saved, *others = gloo.run(world, train_and_save, tensor_size, tmp_path, dtype)
    masters = {"master"} if dtype == torch.bfloat16 else set()
    assert {key.split(".")[0] for key in saved} == {"model", "exp_avg", "exp_avg_sq"} | masters
    for other in others:
        assert all(torch.equal(other[key], saved[key]) for key in saved)
    path = tmp_path / "step_00000002"
    shards = {f"shard_{rank:05d}.safetensors" for rank in range(tensor_size)}
    assert {file.name for file in path.iterdir()} == shards | {"manifest.json"}
    assert names(tmp_path) == ["latest", path.name]
    assert {oct(file.stat().st_mode & 0o444) for file in path.iterdir()} == {"0o444"}
    for other_world, other_size in ((1, 1), (2, 1), (2, 2), (4, 4)):
        for tensors, count in gloo.run(other_world, load_whole_state, other_size, path, dtype):
            assert count == 8
            assert tensors.keys() == saved.keys()
            for key, tensor in tensors.items():
                assert tensor.dtype == saved[key].dtype
                assert torch.equal(tensor, saved[key]), key


def resumed(
    tensor_size: int, path: Path | None, save_to: Path | None
) -> tuple[Tensors, list[float]]:
    """Three steps from scratch or from `path`, in fp64; then saved, and three more."""
    section = tiny_section(hidden_dropout=0.1, attention_dropout=0.1)
    state = tiny_state(mesh_of_ranks(tensor_size), section)
    if path is not None:
        load(state, path)
    losses = train(state, 3)
    if save_to is not None:
        save_state(state, save_to, **FACTS)
        losses += train(state, 3)
    return whole(state), losses


@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), (2, 2), (2, 1)])
def test_resuming_at_the_same_layout_is_exact(
    gloo: Pool, tmp_path: Path, world: int, tensor_size: int
) -> None:
    straight = gloo.run(world, resumed, tensor_size, None, tmp_path)
    again = gloo.run(world, resumed, tensor_size, tmp_path / "step_00000003", None)
    for (tensors, losses), (tensors_again, losses_again) in zip(straight, again, strict=True):
        assert losses[3:] == losses_again
        for key, tensor in tensors.items():
            assert torch.equal(tensor, tensors_again[key]), key


def test_resuming_at_another_layout_goes_on(gloo: Pool, tmp_path: Path) -> None:
    straight, losses = gloo.run(2, resumed, 2, None, tmp_path)[0]
    path = tmp_path / "step_00000003"
    for world, tensor_size in ((1, 1), (4, 4), (2, 1), (4, 2)):
        for tensors, losses_again in gloo.run(world, resumed, tensor_size, path, None):
            assert losses_again == pytest.approx(losses[3:], rel=1e-10)
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, straight[key], rtol=0, atol=1e-10)


def embedding_round_trip(directory: Path) -> bool:
    """A vocabulary of which all but the first rank hold padding only."""
    mesh = mesh_of_ranks(torch.distributed.get_world_size())
    layer = VocabParallelEmbedding(mesh, 5, 4, divisible_by=128, std=1.0)
    materialize(layer, device=mesh.device, dtype=torch.float32, seed=None)
    spec = sharding_specs(layer)["weight"]
    weight = layer.weight.detach()
    value = torch.arange(20.0).view(5, 4)
    weight.fill_(9.0)
    spec.real(weight).copy_(value[spec.local_slices])
    report = save_checkpoint(directory, 1, [TensorSlice("weight", spec, weight)], {}, mesh)
    loaded = torch.full_like(weight, 8.0)
    loading.load_checkpoint(verify(report.path, mesh), [TensorSlice("weight", spec, loaded)])
    return torch.equal(gather_whole(loaded, spec), value)


def test_a_rank_may_hold_padding_only(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(3, embedding_round_trip, tmp_path) == [True, True, True]
    assert names(tmp_path / "step_00000001") == ["manifest.json", "shard_00000.safetensors"]


def test_a_checkpoint_knows_nothing_of_where_it_lies(tmp_path: Path) -> None:
    state, other = (tiny_state(mesh_of_ranks(1), dtype=torch.float16) for _ in range(2))
    state.step, state.samples, state.skipped = 9, 36, 2
    state.scaler.scale, state.scaler.good_steps = 64.0, 5
    save_state(state, tmp_path, **FACTS)
    shutil.move(tmp_path / "step_00000009", tmp_path / "moved")
    load(other, tmp_path / "moved")
    assert (other.step, other.samples, other.skipped) == (9, 36, 2)
    assert other.scaler == state.scaler
    (adam,) = other.optimizer.adams
    assert {each.item() for each in adam.updates} == {7}


def test_weights_match_by_name_but_for_what_is_allowed(tmp_path: Path) -> None:
    saved = tiny_state(mesh_of_ranks(1), dtype=torch.bfloat16)
    train(saved, 1)
    save_state(saved, tmp_path, **FACTS)
    state = tiny_state(mesh_of_ranks(1), seed=SEED + 1)
    path = verify(tmp_path / "step_00000001", state.mesh)
    before, masters = whole(state), whole(saved)
    with pytest.raises(ValueError, match=r"has final_norm\.bias"):
        state.load_weights(path, missing=["final_norm"])
    larger = tiny_state(mesh_of_ranks(1), tiny_section(num_layers=3))
    with pytest.raises(ValueError, match=r"has no transformer\.layers\.2"):
        larger.load_weights(path, surplus=["transformer"])
    state.load_weights(path, missing=["final_norm"], surplus=["final_norm"])
    assert (state.step, state.samples) == (0, 0)
    for key, tensor in whole(state).items():
        kind, _, name = key.partition(".")
        is_loaded = kind == "model" and not name.startswith("final_norm")
        expected = masters[f"master.{name}"].double() if is_loaded else before[key]
        assert torch.equal(tensor, expected), key


# Made by commit 98c61ae with the state and the steps below, from scratch: six steps, saved after
# three, at one process and at two tensor-parallel ones (which gave the same losses to the last
# digit). These are the losses of steps 4 to 6 there.
OLD, OLD_LOSSES = (
    Path(__file__).parent / "of_98c61ae",
    [3.942508969988142, 3.9448824564615887, 3.9357579549153647],
)
OLD_CONFIG = settings(
    num_layers=1,
    hidden_size=4,
    num_attention_heads=2,
    max_position_embeddings=16,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    weight_decay=0.1,
    train_iters=6,
    micro_batch_size=4,
)


def resume_old(tensor_size: int, zero_stage: int, directory: Path) -> tuple[list[str], list[float]]:
    mesh, identity = mesh_of_ranks(tensor_size), {"vocab_size": 51, "tokenizer": "f", "data": []}
    inputs: Any = SimpleNamespace(
        corpus=SimpleNamespace(vocab_size=51, identity=identity),
        train=SimpleNamespace(samples_per_epoch=64),
        samples_in=lambda epochs: 64 * epochs,
    )
    start = find_start(CheckpointConfig(load=str(directory)))
    size = 4 // mesh.data.size
    config = replace(
        OLD_CONFIG,
        training=replace(OLD_CONFIG.training, micro_batch_size=size),
        parallel=replace(OLD_CONFIG.parallel, zero_stage=zero_stage),
    )
    run = build(config, inputs, start, mesh)
    state = run.state
    losses = []
    for _ in range(3):
        batch = samples(4, first=state.samples)
        batch = replace(batch, tokens=batch.tokens // 2, labels=batch.labels // 2)
        losses.append(train_step(state, micro_batches(batch, mesh, size), 1e-2).loss)
    return run.messages, losses


@pytest.mark.parametrize("directory", ["one", "tensor_2"])
@pytest.mark.parametrize(
    ("world", "tensor_size", "zero_stage"), [(1, 1, 0), (2, 2, 0), (2, 1, 3), (4, 2, 3)]
)
def test_checkpoints_of_98c61ae_are_resumed(
    gloo: Pool, directory: str, world: int, tensor_size: int, zero_stage: int
) -> None:
    arguments = (tensor_size, zero_stage, OLD / directory)
    for messages, losses in gloo.run(world, resume_old, *arguments):
        changed = [each for each in messages if each.startswith("changed")]
        # What one rank computed at once, two share out.
        assert len(changed) == (zero_stage == 3)
        assert all("--micro-batch-size" in each for each in changed)
        # Equal to the last digit on the machine that made them; fp32, so that other processors
        # and versions of torch may add in another order. Without the moments they differ by 1e-3.
        assert losses == pytest.approx(OLD_LOSSES, rel=1e-6)
    assert read_manifest(OLD / directory / "step_00000003")["run"] == "0123456789abcdef"


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
        assert found is not None
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


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("begun", [0, 3])
def test_a_training_of_ones_own_goes_on_at_another_layout(
    gloo: Pool, tmp_path: Path, make: Callable[..., Any], begun: int
) -> None:
    """From where an optimizer has made no step, too."""
    expected = own_training(1, make, range(5), None, None)
    gloo.run(2, own_training, 2, make, range(begun), None, tmp_path)
    rest = range(begun, 5)
    found = [own_training(1, make, rest, tmp_path, None)]
    found += gloo.run(2, own_training, 1, make, rest, tmp_path, None)
    found += gloo.run(2, own_training, 2, make, rest, tmp_path, None, True)
    for each in found:
        for name, weight in expected.items():
            torch.testing.assert_close(each[name], weight, rtol=1e-11, atol=1e-11)


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    mesh = serial_mesh()
    model, other = Own(mesh), Own(mesh)
    for optimizer in (torch.optim.Adafactor(model.parameters()), adam(other)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with pytest.raises(ValueError, match=r"optimizer|Adafactor"):
            optimizer_slices(model, optimizer)
    slices = model_slices(model)
    with pytest.raises(ValueError, match=r"model\.scale"):
        save_checkpoint(tmp_path, 1, [*slices, *model_slices(other)], {}, mesh)
    with pytest.raises(ValueError, match="tensors"):
        save_checkpoint(tmp_path, 1, slices, {"tensors": 3}, mesh)
    with pytest.raises(OSError, match="no tensor"):
        save_checkpoint(tmp_path, 1, [], {}, mesh)
    assert newest_checkpoint(tmp_path, mesh) is None
    save_checkpoint(tmp_path, 1, [*slices, *model_slices(other, "mean")], {}, mesh)
    found = newest_checkpoint(tmp_path, mesh)
    assert found is not None
    for wrong in (slices[1:], []):
        with pytest.raises(ValueError, match="partial"):
            load_checkpoint(found, wrong)
    load_checkpoint(found, slices[1:], partial=True)
    load_checkpoint(found, model_slices(model, "mean"))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
