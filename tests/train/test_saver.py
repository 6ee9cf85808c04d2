"""Saving beside training: the same bytes, what is told of it, and going back."""

import json
import threading
from pathlib import Path
from typing import Any

import torch

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checkpoints import read_manifest, step_folders
from megatron.train import checkpoint as checkpoint_module
from megatron.train.saver import Saver
from tests.dist import Pool
from tests.train.saving import (
    BOTH,
    contents,
    fresh,
    names,
    save_steps,
    saver_into,
    train,
)


def save_both_ways(tensor_size: int, directory: Path) -> tuple[int, list[str]]:
    """One state, synchronous and asynchronous; the weights change while the latter is written."""
    state = fresh(tensor_size)
    train(state)
    with saver_into(directory / "sync", state) as saver:
        saver.save(state, 3.5)
    release = threading.Event()
    save_file = checkpoint_module.save_file

    def slow_save_file(*arguments: Any) -> None:
        release.wait(60)
        save_file(*arguments)

    checkpoint_module.save_file = slow_save_file
    try:
        with saver_into(directory / "async", state, asynchronous=True) as saver:
            saver.save(state, 3.5)
            before = len(saver.reports())
            train(state)
            release.set()
    finally:
        checkpoint_module.save_file = save_file
    return before, [thread.name for thread in threading.enumerate() if thread.name == "save"]


def test_what_is_saved_beside_training_is_what_a_synchronous_save_writes(
    gloo: Pool, tmp_path: Path
) -> None:
    for unfinished, threads in gloo.run(4, save_both_ways, 2, tmp_path):
        assert unfinished == 0  # it was still being written while training went on
        assert threads == []
    ours, theirs = (contents(tmp_path / kind / "step_00000001") for kind in ("sync", "async"))
    assert sorted(ours) == [
        "manifest.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    assert ours == theirs


@BOTH
def test_saves_in_quick_succession_are_all_written(tmp_path: Path, asynchronous: bool) -> None:
    state = fresh()
    expected = []
    with saver_into(tmp_path, state, asynchronous=asynchronous) as saver:
        for _ in range(3):
            train(state)
            expected.append({p.key: p.local.clone() for p in state.pieces()})
            saver.save(state, None)
    assert [report.step for report in saver.reports()] == [1, 2, 3]
    assert saver.reports() == []
    assert names(tmp_path) == ["latest", *(f"step_0000000{step}" for step in (1, 2, 3))]
    for tensors, path in zip(expected, reversed(step_folders(tmp_path)), strict=True):
        state.load(path)
        assert all(torch.equal(piece.local, tensors[piece.key]) for piece in state.pieces())


def test_a_report_says_what_was_saved(tmp_path: Path) -> None:
    state = fresh()
    (report,) = save_steps(saver_into(tmp_path, state), state, [7])
    assert (report.step, report.path) == (7, tmp_path / "step_00000007")
    assert report.bytes == (report.path / "shard_00000.safetensors").stat().st_size
    assert report.stall_seconds >= report.save_seconds > 0  # synchronous: all of it is waited for
    assert json.loads(json.dumps(report.facts()))["checkpoint_bytes"] == report.bytes
    assert str(report.path) in str(report)


def test_the_manifest_tells_of_the_run(tmp_path: Path) -> None:
    state = fresh()
    train(state)
    with saver_into(tmp_path, state) as saver:
        saver.save(state, 2.25)
        state.step = 2
        saver.save(state, float("nan"))
    second, first = (read_manifest(path) for path in step_folders(tmp_path))
    assert (first["run"], first["validation_loss"], first["precision"]) == ("tiny", 2.25, "bf16")
    assert second["validation_loss"] is None
    assert first["counters"]["samples"] == 4
    environment = first["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment["device"] == "cpu"


@BOTH
def test_every_checkpoint_holds_what_is_attached(tmp_path: Path, asynchronous: bool) -> None:
    state, section = fresh(), CheckpointConfig(save=str(tmp_path), async_save=asynchronous)
    with Saver(state.mesh, section, {}, attached={"vocab.json": b"{}"}) as saver:
        first, second = save_steps(saver, state, [1, 2])
    for report in (first, second):
        assert (report.path / "vocab.json").read_bytes() == b"{}"
        assert report.bytes == 2 + (report.path / "shard_00000.safetensors").stat().st_size
    state.load(second.path)


def test_without_a_directory_nothing_is_saved() -> None:
    state = fresh()
    with Saver(state.mesh, CheckpointConfig(), {}) as saver:
        saver.save(state, None)
    assert saver.reports() == []


def test_whatever_has_the_name_is_set_aside(tmp_path: Path) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1])
    kept = contents(tmp_path / "step_00000001")
    (tmp_path / "step_00000002").write_text("a file")
    again, other = save_steps(saver_into(tmp_path, state, start_step=1), state, [1, 2])
    assert contents(tmp_path / "step_00000001.abandoned") == kept
    assert (tmp_path / "step_00000002.abandoned").read_text() == "a file"
    assert [len(report.notes) for report in (again, other)] == [1, 1]
    assert "step_00000001.abandoned: this run saved that step again" in again.notes[0]
    state.load(tmp_path / "step_00000001")
    state.load(tmp_path / "step_00000002")


def test_checkpoints_beyond_the_start_are_set_aside(tmp_path: Path) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1, 2, 3])
    (tmp_path / "step_00000003.abandoned").mkdir()
    kept = contents(tmp_path / "step_00000003")
    saver = saver_into(tmp_path, state, start_step=1)
    first, second = save_steps(saver, state, [2, 3])
    assert names(tmp_path) == [
        "latest",
        "step_00000001",
        "step_00000002",
        "step_00000002.abandoned",
        "step_00000003",
        "step_00000003.abandoned",
        "step_00000003.abandoned-2",
    ]
    assert contents(tmp_path / "step_00000003.abandoned-2") == kept
    assert len(first.notes) == 2
    assert "step_00000003.abandoned-2: this run went on from step 1" in first.notes[0]
    assert second.notes == ()
