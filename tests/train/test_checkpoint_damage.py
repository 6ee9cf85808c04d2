"""A damaged checkpoint is refused by name: shards, manifest, tensors, shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.checkpoints import seal
from megatron.train.checkpoint import load, verify
from megatron.train.state import TrainState
from tests.dist import Pool
from tests.tiny import VOCABULARY, mesh_of_ranks, tiny_section, tiny_state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    fresh().save(str(tmp_path), {"vocab_size": VOCABULARY})
    return tmp_path / "step_00000000"


def fresh(**changes: Any) -> TrainState:
    return tiny_state(mesh_of_ranks(1), tiny_section(**changes), dtype=torch.float32)


def edit_tensors(path: Path, key: str, value: dict[str, Any] | None) -> None:
    """Another entry for a tensor, or none, in a manifest that is none the less sealed."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["tensors"][key]
    if value is not None:
        manifest["tensors"][key] = value
    (path / "manifest.json").write_text(json.dumps(seal(manifest)))


def test_what_is_damaged_is_named(checkpoint: Path) -> None:
    shard = checkpoint / "shard_00000.safetensors"
    good = shard.read_bytes()

    shard.write_bytes(good[:-100])
    with pytest.raises(ValueError, match=rf"{shard}: {len(good) - 100} bytes.*{len(good)}"):
        fresh().load(checkpoint)

    for place in (20, len(good) // 2, len(good) - 1):
        flipped = bytearray(good)
        flipped[place] ^= 1
        shard.write_bytes(flipped)
        with pytest.raises(ValueError, match=f"{shard} is damaged"):
            fresh().load(checkpoint)

    shard.unlink()
    with pytest.raises(FileNotFoundError, match=str(shard)):
        fresh().load(checkpoint)
    shard.write_bytes(good)
    fresh().load(checkpoint)


def refusal(path: Path) -> tuple[str, list[str]]:
    mesh = mesh_of_ranks(2)
    with pytest.raises(ValueError, match="damaged") as caught:
        tiny_state(mesh, tiny_section(), dtype=torch.float32).load(path)
    return str(caught.value), verify(path, mesh)


def test_damage_that_one_rank_finds_is_known_to_all(gloo: Pool, checkpoint: Path) -> None:
    shard = checkpoint / "shard_00000.safetensors"
    flipped = bytearray(shard.read_bytes())
    flipped[-1] ^= 1
    shard.write_bytes(flipped)
    answers = gloo.run(4, refusal, checkpoint)
    for message, found in answers:
        assert str(shard) in message
        assert found == answers[0][1]
        assert [str(shard) in line for line in found] == [True]


def test_what_was_verified_just_now_is_not_read_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    monkeypatch.setattr("megatron.train.checkpoint.damage", lambda *_: ["read again"])
    with pytest.raises(ValueError, match="read again"):
        load(checkpoint, state.pieces(), state.mesh)
    load(checkpoint, state.pieces(), state.mesh, verified=True)


def test_verify_finds_nothing_in_a_whole_checkpoint_and_a_line_in_another(checkpoint: Path) -> None:
    mesh = mesh_of_ranks(1)
    assert verify(checkpoint, mesh) == []
    (checkpoint / "manifest.json").unlink()
    (line,) = verify(checkpoint, mesh)
    assert f"{checkpoint / 'manifest.json'} is not there" in line


def test_a_manifest_cut_short_is_named(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text()[:-200])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        fresh().load(checkpoint)


def test_a_missing_manifest_or_tensor_is_named(checkpoint: Path) -> None:
    name = "exp_avg.final_norm.bias"
    edit_tensors(checkpoint, name, None)
    with pytest.raises(ValueError, match=rf"{checkpoint} has no tensor {name}"):
        fresh().load(checkpoint)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        fresh().load(checkpoint)


def test_slices_that_leave_a_hole_or_overlap_are_refused(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    name = "model.final_norm.bias"
    saved = manifest["tensors"][name]
    for slices in ([], saved["slices"] * 2):
        edit_tensors(checkpoint, name, saved | {"slices": slices})
        with pytest.raises(ValueError, match=f"{name} do not cover it exactly once"):
            fresh().load(checkpoint)


def test_another_shape_or_format_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"word_embedding.weight is \[101, 32\].*\[101, 64\]"):
        fresh(hidden_size=64).load(checkpoint)
    with pytest.raises(ValueError, match=r"has no tensor model\.transformer\.layers\.2"):
        fresh(num_layers=3).load(checkpoint)
    text = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(text.replace('"format": 2', '"format": 99'))
    with pytest.raises(ValueError, match="its format is 99, only 2 is read here"):
        fresh().load(checkpoint)
