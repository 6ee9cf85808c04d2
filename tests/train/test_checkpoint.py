"""Checkpoints: any layout saves, any layout loads, and they are whole or absent."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from megatron.parallel.layers import VocabParallelEmbedding
from megatron.parallel.sharding import sharding_specs
from megatron.train.checkpoint import Piece, load, read_manifest, save, verify
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.dist import Pool
from tests.tiny import (
    SEED,
    VOCABULARY,
    gather_whole,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_section,
    tiny_state,
)

Tensors = dict[str, Tensor]
FACTS: dict[str, Any] = {"vocab_size": VOCABULARY}


def latest_checkpoint(directory: Path) -> Path:
    return directory / (directory / "latest").read_text().strip()


def fresh() -> TrainState:
    return tiny_state(mesh_of_ranks(1), dtype=torch.float32)


def train(state: TrainState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        batch = samples(4, first=state.samples)
        losses.append(train_step(state, micro_batches(batch, state.mesh, 1), 1e-3).loss)
    return losses


def whole(state: TrainState) -> Tensors:
    return {piece.key: gather_whole(piece.local, piece.spec) for piece in state.pieces()}


def train_and_save(tensor_size: int, directory: Path, dtype: torch.dtype) -> Tensors:
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype)
    train(state, 2)
    state.save(str(directory), FACTS)
    return whole(state)


def load_whole_state(tensor_size: int, path: Path, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Into a model of another seed, whose moments and padding hold rubbish."""
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype, seed=SEED + 1)
    with torch.no_grad():
        for piece in state.pieces():
            piece.local.fill_(7.0)
    state.load(path)
    return whole(state), state.samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), (2, 2), (4, 2)])
def test_every_tensor_is_the_same_at_another_layout(
    gloo: Pool, tmp_path: Path, world: int, tensor_size: int, dtype: torch.dtype
) -> None:
    saved, *others = gloo.run(world, train_and_save, tensor_size, tmp_path, dtype)
    kinds = {key.split(".")[0] for key in saved}
    assert kinds == {"model", "exp_avg", "exp_avg_sq"} | (
        {"master"} if dtype == torch.bfloat16 else set()
    )
    for other in others:
        assert all(torch.equal(other[key], saved[key]) for key in saved)
    path = latest_checkpoint(tmp_path)
    for other_world, other_size in ((1, 1), (2, 1), (2, 2), (4, 4)):
        for tensors, count in gloo.run(other_world, load_whole_state, other_size, path, dtype):
            assert count == 8
            assert tensors.keys() == saved.keys()
            for key, tensor in tensors.items():
                assert tensor.dtype == saved[key].dtype
                assert torch.equal(tensor, saved[key]), key


def resumed(
    tensor_size: int, dropout: float, path: Path | None, save_to: Path | None
) -> tuple[Tensors, list[float]]:
    """Three steps from scratch or from `path`, in fp64."""
    section = tiny_section(hidden_dropout=dropout, attention_dropout=dropout)
    state = tiny_state(mesh_of_ranks(tensor_size), section)
    if path is not None:
        state.load(path)
    losses = train(state, 3)
    if save_to is not None:
        state.save(str(save_to), FACTS)
        losses += train(state, 3)
    return whole(state), losses


@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), (2, 2), (2, 1)])
def test_resuming_at_the_same_layout_is_exact(
    gloo: Pool, tmp_path: Path, world: int, tensor_size: int
) -> None:
    straight = gloo.run(world, resumed, tensor_size, 0.1, None, tmp_path)
    again = gloo.run(world, resumed, tensor_size, 0.1, latest_checkpoint(tmp_path), None)
    for (tensors, losses), (tensors_again, losses_again) in zip(straight, again, strict=True):
        assert losses[3:] == losses_again
        for key, tensor in tensors.items():
            assert torch.equal(tensor, tensors_again[key]), key


def test_resuming_at_another_layout_goes_on(gloo: Pool, tmp_path: Path) -> None:
    straight, losses = gloo.run(2, resumed, 2, 0.0, None, tmp_path)[0]
    path = latest_checkpoint(tmp_path)
    for world, tensor_size in ((1, 1), (4, 4), (2, 1), (4, 2)):
        for tensors, losses_again in gloo.run(world, resumed, tensor_size, 0.0, path, None):
            assert losses_again == pytest.approx(losses[3:], rel=1e-10)
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, straight[key], rtol=0, atol=1e-10)


def save_at(tensor_size: int, directory: Path) -> None:
    tiny_state(mesh_of_ranks(tensor_size), dtype=torch.bfloat16).save(str(directory), FACTS)


def test_files_hold_whole_tensors_without_padding_or_pickle(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, save_at, 2, tmp_path)
    path = latest_checkpoint(tmp_path)
    # The ranks of the second model write nothing.
    files = sorted(file.name for file in path.iterdir())
    assert files == ["manifest.json", "shard_00000.safetensors", "shard_00001.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest", path.name]
    assert {oct(file.stat().st_mode & 0o444) for file in path.iterdir()} == {"0o444"}

    elements: dict[str, int] = {}
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no dict
                elements[key] = elements.get(key, 0) + file.get_tensor(key).numel()
    table = sharding_specs(tiny_state(mesh_of_ranks(1)).model)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tensors"]["model.word_embedding.weight"]["shape"] == [VOCABULARY, 32]
    for key, count in elements.items():
        shape = table[key.split(".", 1)[1]].shape
        assert count == torch.Size(shape).numel(), key
        assert manifest["tensors"][key]["shape"] == list(shape)


def embedding_round_trip(directory: Path) -> bool:
    """A vocabulary of which all but the first rank hold padding only."""
    mesh = mesh_of_ranks(torch.distributed.get_world_size())
    layer = VocabParallelEmbedding(mesh, 5, 4, divisible_by=128, std=1.0)
    spec = sharding_specs(layer)["weight"]
    weight = layer.weight.detach()
    value = torch.arange(20.0).view(5, 4)
    weight.fill_(9.0)
    spec.real(weight).copy_(value[spec.place])
    path = save(directory, 1, [Piece("weight", spec, weight)], {}, mesh)
    loaded = torch.full_like(weight, 8.0)
    load(path, [Piece("weight", spec, loaded)], mesh)
    return torch.equal(gather_whole(loaded, spec), value)


def test_a_rank_may_hold_padding_only(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(3, embedding_round_trip, tmp_path) == [True, True, True]
    assert [file.name for file in (tmp_path / "step_00000001").glob("shard*")] == [
        "shard_00000.safetensors"
    ]


def test_latest_moves_only_when_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    state.save(str(tmp_path), FACTS)
    old, before = latest_checkpoint(tmp_path), whole(state)
    train(state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            state.save(str(tmp_path), FACTS)
    assert latest_checkpoint(tmp_path) == old
    assert not (tmp_path / "step_00000001").exists()
    other = fresh()
    train(other, 1)
    other.load(latest_checkpoint(tmp_path))
    assert other.step == 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in whole(other).items())

    # What the crash left behind is in nobody's way.
    state.save(str(tmp_path), FACTS)
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "latest",
        "step_00000000",
        "step_00000001",
    ]


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    state = fresh()
    for _ in range(2):
        state.save(str(tmp_path), FACTS)
    shutil.copytree(latest_checkpoint(tmp_path), tmp_path / "moved")
    other = fresh()
    other.load(tmp_path / "moved")  # a checkpoint knows nothing of where it lies
    assert all(torch.equal(each, whole(state)[key]) for key, each in whole(other).items())


def test_what_an_interrupted_save_left_is_cleaned_up(tmp_path: Path) -> None:
    state = fresh()
    state.save(str(tmp_path), FACTS)
    for name in (".step_00000007.partial", ".step_00000003.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard_00000.safetensors").write_text("half of it")
    state.step = 1
    state.save(str(tmp_path), FACTS)
    fresh().load(latest_checkpoint(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "latest",
        "step_00000000",
        "step_00000001",
    ]


def test_counters_and_loss_scale_go_on(tmp_path: Path) -> None:
    state, other = (tiny_state(mesh_of_ranks(1), dtype=torch.float16) for _ in range(2))
    state.step, state.samples, state.skipped = 9, 36, 2
    state.scaler.scale, state.scaler.good_steps = 64.0, 5
    state.save(str(tmp_path), FACTS)
    other.load(latest_checkpoint(tmp_path))
    assert (other.step, other.samples, other.skipped) == (9, 36, 2)
    assert other.scaler == state.scaler
    steps = {each.item() for each in other.optimizer.adam.updates}
    assert steps == {7}


ATTACHED = {"vocab.json": b"{}", "merges.txt": b"#version: 0.2\n"}


def save_attached(directory: Path) -> None:
    state = tiny_state(mesh_of_ranks(2), dtype=torch.float32)
    # What another rank than the first has attached is not written.
    attached = ATTACHED if state.mesh.is_first else {"vocab.json": b"other", "more": b"more"}
    facts = {"counters": state.counters(), **FACTS}
    save(directory, 0, state.pieces(), facts, state.mesh, attached)


def test_attached_files_are_as_safe_as_the_tensors(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_attached, tmp_path)
    path, mesh = latest_checkpoint(tmp_path), mesh_of_ranks(1)
    shards = {"shard_00000.safetensors", "shard_00001.safetensors"}
    assert {file.name for file in path.iterdir()} == {"manifest.json", *shards, *ATTACHED}
    assert read_manifest(path)["files"].keys() == {*shards, *ATTACHED}
    fresh().load(path)  # which opens the files of tensors alone
    for name, content in ATTACHED.items():
        assert (path / name).read_bytes() == content
        (path / name).write_bytes(content[:-1] + b"x")
        assert [line.split(" is ")[0] for line in verify(path, mesh)] == [str(path / name)]
        (path / name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=f"{name}: .* bytes, its manifest says"):
            read_manifest(path)
        (path / name).write_bytes(content)
    assert verify(path, mesh) == []


def test_an_attached_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    write_bytes = Path.write_bytes

    def fail(self: Path, content: bytes) -> int:
        if self.name == "merges.txt":
            raise OSError(28, "No space left on device")
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"merges.txt: No space left .* needs 14 bytes"):
        save(tmp_path, 0, state.pieces(), FACTS, state.mesh, ATTACHED)
    assert list(tmp_path.iterdir()) == []
