"""Saving beside training: the same bytes, the reports, going back, and what is kept."""

import json
import os
import re
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import save as saving
from megatron.checkpoint.format import read_manifest, step_folders
from megatron.checkpoint.save import Saver, SaveReport
from megatron.config.checkpoint import CheckpointConfig
from tests.checkpoint.saving import (
    BOTH,
    contents,
    failing,
    flip,
    fresh,
    load,
    names,
    save,
    save_steps,
    saver_into,
    train,
)
from tests.dist import Pool


def save_both_ways(tensor_size: int, directory: Path) -> int:
    """One state, synchronous and asynchronous; the weights change while the latter is written.
    Returns how many saves were finished then."""
    state = fresh(tensor_size)
    train(state)
    attached = {"vocab.json": b"{}"} if state.mesh.is_first else {"other": b"is not written"}
    with saver_into(directory / "sync", state, attached=attached) as saver:
        save(saver, state, 3.5)
    release, save_file = threading.Event(), saving.save_file

    def slow_save_file(*arguments: Any) -> None:
        release.wait()
        save_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_file", slow_save_file)
        into = directory / "async"
        with saver_into(into, state, asynchronous=True, attached=attached) as saver:
            save(saver, state, 3.5)
            finished = len(saver.reports())
            train(state)
            release.set()
    assert not [thread for thread in threading.enumerate() if thread.name == "save"]
    return finished


def test_an_asynchronous_save_writes_the_same_bytes(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(4, save_both_ways, 2, tmp_path) == [0] * 4
    ours, theirs = (contents(tmp_path / kind / "step_00000001") for kind in ("sync", "async"))
    shards = ["shard_00000.safetensors", "shard_00001.safetensors"]
    assert sorted(ours) == ["manifest.json", *shards, "vocab.json"]
    assert ours == theirs


@BOTH
def test_saves_in_quick_succession_are_all_written(tmp_path: Path, asynchronous: bool) -> None:
    state = fresh()
    expected = []
    with saver_into(tmp_path, state, asynchronous=asynchronous) as saver:
        for loss in (2.25, None, float("nan")):
            train(state)
            expected.append({each.key: each.local.clone() for each in state.slices()})
            save(saver, state, loss)
    first, *others = saver.reports()
    assert [report.step for report in (first, *others)] == [1, 2, 3]
    assert saver.reports() == []
    for tensors, path in zip(expected, reversed(step_folders(tmp_path)), strict=True):
        load(state, path)
        assert all(torch.equal(each.local, tensors[each.key]) for each in state.slices())
    assert first.bytes == (first.path / "shard_00000.safetensors").stat().st_size
    assert json.loads(json.dumps(first.facts()))["checkpoint_bytes"] == first.bytes
    manifests = [read_manifest(path) for path in step_folders(tmp_path)]
    assert [each["validation_loss"] for each in manifests] == [None, None, 2.25]
    assert (manifests[0]["run"], manifests[0]["precision"]) == ("tiny", "bf16")
    assert manifests[0]["counters"]["samples"] == 12
    assert manifests[0]["environment"]["torch"] == torch.__version__


def test_without_a_directory_nothing_is_saved() -> None:
    state = fresh()
    with Saver(state.mesh, CheckpointConfig(), {}) as saver:
        save(saver, state)
    assert saver.reports() == []


def test_what_a_run_leaves_behind_by_going_back_is_set_aside(tmp_path: Path) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1, 2, 3])
    (tmp_path / "step_00000003.abandoned").mkdir()
    (tmp_path / "step_00000004").write_text("a file")
    kept = contents(tmp_path / "step_00000003")
    reports = save_steps(saver_into(tmp_path, state, start_step=1), state, [2, 3, 4, 4])
    steps = "1 2 2.abandoned 3 3.abandoned 3.abandoned-2 4 4.abandoned 4.abandoned-2"
    assert names(tmp_path) == ["latest", *(f"step_0000000{each}" for each in steps.split())]
    assert contents(tmp_path / "step_00000003.abandoned-2") == kept
    assert [len(report.notes) for report in reports] == [2, 0, 1, 1]
    for path in step_folders(tmp_path):
        load(state, path)


def save_and_keep(tensor_size: int, directory: Path, asynchronous: bool) -> list[SaveReport]:
    state = fresh(tensor_size)
    saver = saver_into(directory, state, asynchronous=asynchronous, keep=2)
    return save_steps(saver, state, [1, 2, 3, 4, 5], {1: 3.0, 2: 1.5, 4: 2.0})


@BOTH
def test_the_newest_and_the_best_are_kept(gloo: Pool, tmp_path: Path, asynchronous: bool) -> None:
    reports, others = gloo.run(2, save_and_keep, 2, tmp_path, asynchronous)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000004", "step_00000005"]
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
    removed = [report.removed for report in reports]
    assert removed == [(), (), ("step_00000001",), (), ("step_00000003",)]
    assert removed == [report.removed for report in others]


def test_what_does_not_count_is_kept_and_said_once(tmp_path: Path) -> None:
    state = fresh()
    for name in ("step_1", "step_00000001.abandoned", "step_00000001.bak", "notes"):
        (tmp_path / name).mkdir()
    others = names(tmp_path)
    save_steps(saver_into(tmp_path, state, run="other"), state, [1])
    save_steps(saver_into(tmp_path, state, start_step=1), state, [2, 3, 4])
    shard = tmp_path / "step_00000003" / "shard_00000.safetensors"
    flip(shard)
    # Another process, which has not yet read any of them back.
    saver = saver_into(tmp_path, state, keep=2, start_step=4)
    first, second = save_steps(saver, state, [5, 6])
    assert len(first.notes) == 2
    assert any(str(shard) in note for note in first.notes)
    assert any(str(tmp_path / "step_00000001") in note for note in first.notes)
    assert first.removed == ("step_00000002",)  # 4 and 5 are whole
    assert (second.notes, second.removed) == ((), ("step_00000004",))
    kept = [f"step_0000000{step}" for step in (1, 3, 5, 6)]
    assert names(tmp_path) == sorted([*others, "latest", *kept])


def test_damaged_saves_do_not_count_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    saver = saver_into(tmp_path, state, keep=2)
    save_steps(saver, state, [1, 2])
    set_aside = saving.set_aside

    def damage_and_set_aside(final: Path, step: int | None) -> tuple[str, ...]:
        flip(final.with_name(f".{final.name}.partial") / "shard_00000.safetensors")
        return set_aside(final, step)

    monkeypatch.setattr(saving, "set_aside", damage_and_set_aside)
    reports = save_steps(saver, state, [3, 4])
    assert [report.removed for report in reports] == [(), ()]
    assert [len(report.notes) for report in reports] == [1, 1]
    assert len(step_folders(tmp_path)) == 4


def keep_where_rank_0_fails(directory: Path, call: str, of: str) -> list[SaveReport]:
    state = fresh(2)
    saver = saver_into(directory, state, keep=2)
    save_steps(saver, state, [1])
    with failing(call, of=of) if state.mesh.is_first else nullcontext():
        return save_steps(saver, state, [2, 3])


@pytest.mark.parametrize(
    ("call", "of"), [("megatron.checkpoint.retention.step_folders", ""), ("shutil.rmtree", "")]
)
def test_a_failure_after_a_save_is_a_note(gloo: Pool, tmp_path: Path, call: str, of: str) -> None:
    ours, theirs = gloo.run(2, keep_where_rank_0_fails, tmp_path, call, of)
    assert [report.notes for report in ours] == [report.notes for report in theirs]
    assert len(ours[-1].notes) == 1
    assert [report.removed for report in (*ours, *theirs)] == [()] * 4
    there = {"latest", "step_00000002", "step_00000003"}
    assert there <= set(names(tmp_path))


def test_everything_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power a name must not stand for what was never written."""
    calls: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def flush(descriptor: int) -> None:
        calls.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def move(function: Any) -> Any:
        def call(path: Path, target: Path) -> Any:
            if path.suffix != ".part":
                calls.append(("name", Path(target).name))
            return function(path, target)

        return call

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", move(rename))
    monkeypatch.setattr(Path, "replace", move(replace))
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1])
    done, latest = calls.index(("name", "step_00000001")), calls.index(("name", "latest"))
    flushed = [
        re.sub(r"\.[0-9a-f]+\.part$", "", name) for kind, name in calls[:done] if kind == "flush"
    ]
    assert {"shard_00000.safetensors", "manifest.json", "latest"} <= {*flushed}
    assert flushed[-1] == ".step_00000001.partial"
    folder = ("flush", tmp_path.name)
    assert folder in calls[done:latest], "the checkpoint has its name before `latest` says it"
    assert folder in calls[latest:]


def test_a_run_that_skipped_is_resumed_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Adam's bias correction counts updates, of which a skipped step is none."""
    state = fresh()
    train(state, 2)
    state.step, state.skipped = state.step + 3, 3
    with saver_into(tmp_path, state) as saver:
        save(saver, state)
    resumed = fresh()
    load(resumed, tmp_path / "step_00000005")
    assert resumed.updates == 2
    train(state)
    train(resumed)
    found = {each.key: each.local for each in resumed.slices()}
    for each in state.slices():
        assert torch.equal(found[each.key], each.local), each.key
