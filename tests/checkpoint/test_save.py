"""Saving beside training: the same bytes, the reports, what is kept; and a --save directory, which
belongs to one run."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint import retention
from megatron.checkpoint.format import read_manifest, step_folders
from megatron.checkpoint.retention import claim
from megatron.checkpoint.save import SaveReport
from megatron.parallel.mesh import serial_mesh
from tests.checkpoint.saving import (
    BOTH,
    SAVE_FILE,
    SHARD,
    contents,
    flip,
    fresh,
    load,
    names,
    save,
    save_steps,
    saver_into,
    train,
)
from tests.dist import Pool, on_ranks
from tests.files import before_calls, failing
from tests.refusals import refusal
from tests.tiny import assert_exact, mesh_of_ranks, tensors


def save_both_ways(tensor_size: int, directory: Path) -> int:
    """One state, synchronous and asynchronous; the weights change while the latter is written.
    Returns how many saves were finished then."""
    state = fresh(tensor_size)
    train(state)
    attached = {"vocab.json": b"{}"} if state.mesh.is_first else {"other": b"is not written"}
    with saver_into(directory / "sync", state, attached=attached) as saver:
        save(saver, state, 3.5)
    release = threading.Event()
    with before_calls(lambda *_: release.wait(), SAVE_FILE):
        into = directory / "async"
        with saver_into(into, state, asynchronous=True, attached=attached) as saver:
            save(saver, state, 3.5)
            finished = len(saver.reports())
            train(state)
            release.set()
    return finished


def test_a_save_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks memory would let its start wait for ever."""
    state, before = fresh(), {*threading.enumerate()}
    with saver_into(tmp_path, state, asynchronous=True) as saver:
        started = {*threading.enumerate()} - before
        monkeypatch.setattr(threading.Thread, "start", None)
        for _ in range(2):
            save(saver, state, 3.5)
            train(state)
    monkeypatch.undo()
    for thread in started:
        thread.join(60)
    assert [thread.is_alive() for thread in started] == [False]
    assert len(step_folders(tmp_path)) == 2


def test_an_asynchronous_save_writes_the_same_bytes(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(4, save_both_ways, 2, tmp_path) == [0] * 4
    ours, theirs = (contents(tmp_path / kind / "step_00000001") for kind in ("sync", "async"))
    shards = ["shard_00000.safetensors", "shard_00001.safetensors"]
    assert sorted(ours) == ["manifest.json", *shards, "vocab.json"]
    assert ours == theirs
    path = tmp_path / "sync" / "step_00000001"
    kinds = {key.split(".")[0] for key in read_manifest(path)["tensors"]}
    assert kinds == {"model", "exp_avg", "exp_avg_sq", "master"}
    assert {oct(file.stat().st_mode & 0o444) for file in path.iterdir()} == {"0o444"}


@BOTH
def test_saves_in_quick_succession_are_all_written(tmp_path: Path, asynchronous: bool) -> None:
    state = fresh()
    expected = []
    with saver_into(tmp_path, state, asynchronous=asynchronous) as saver:
        for loss in (2.25, None, float("nan")):
            train(state)
            expected.append(tensors(state))
            save(saver, state, loss)
    first, *others = saver.reports()
    assert [report.step for report in (first, *others)] == [1, 2, 3]
    assert saver.reports() == []
    for saved, path in zip(expected, reversed(step_folders(tmp_path)), strict=True):
        load(state, path)
        assert_exact(tensors(state), saved)
    assert first.bytes == (first.path / "shard_00000.safetensors").stat().st_size
    assert json.loads(json.dumps(first.facts()))["checkpoint_bytes"] == first.bytes
    manifests = [read_manifest(path) for path in step_folders(tmp_path)]
    assert [each["validation_loss"] for each in manifests] == [None, None, 2.25]
    assert (manifests[0]["run"], manifests[0]["precision"]) == ("tiny", "bf16")
    assert manifests[0]["counters"]["samples"] == 12
    assert manifests[0]["environment"]["torch"] == torch.__version__


def test_going_back_sets_checkpoints_aside(tmp_path: Path) -> None:
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


def test_damaged_saves_do_not_count_as_kept(tmp_path: Path) -> None:
    state = fresh()
    saver = saver_into(tmp_path, state, keep=2)
    save_steps(saver, state, [1, 2])

    def damage(_: str, given: Sequence[Path]) -> None:
        if given[0].suffix == ".partial":
            flip(given[0] / SHARD)

    with before_calls(damage, "pathlib.Path.rename"):
        reports = save_steps(saver, state, [3, 4])
    assert [report.removed for report in reports] == [(), ()]
    assert [len(report.notes) for report in reports] == [1, 1]
    assert len(step_folders(tmp_path)) == 4
    train(state)
    with before_calls(damage, "pathlib.Path.rename"):  # whole so far, and saved again
        save_steps(saver, state, [2])
    (report,) = save_steps(saver, state, [5])
    assert report.removed == (), "1 and 5 alone are whole"


def keep_where_rank_0_fails(directory: Path, call: str) -> list[SaveReport]:
    state = fresh(2)
    saver = saver_into(directory, state, keep=2)
    save_steps(saver, state, [1])
    with failing(call) if state.mesh.is_first else nullcontext():
        return save_steps(saver, state, [2, 3])


@pytest.mark.parametrize("call", ["megatron.checkpoint.retention.step_folders", "shutil.rmtree"])
def test_a_failure_after_a_save_is_a_note(gloo: Pool, tmp_path: Path, call: str) -> None:
    ours, theirs = gloo.run(2, keep_where_rank_0_fails, tmp_path, call)
    assert [report.notes for report in ours] == [report.notes for report in theirs]
    assert len(ours[-1].notes) == 1
    assert [report.removed for report in (*ours, *theirs)] == [()] * 4
    there = {"latest", "step_00000002", "step_00000003"}
    assert there <= set(names(tmp_path))


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """After a loss of power a name must not stand for what was never written."""
    calls: list[tuple[str, str]] = []

    def note(call: str, given: Sequence[Any]) -> None:
        if call == "os.fsync":
            calls.append(("flush", Path(f"/proc/self/fd/{given[0]}").readlink().name))
        elif given[0].suffix != ".part":
            calls.append(("name", Path(given[1]).name))

    state = fresh()
    with before_calls(note, "os.fsync", "pathlib.Path.rename", "pathlib.Path.replace"):
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


HOLD = """
import sys, threading
from megatron.checkpoint.retention import claim
from megatron.parallel.mesh import serial_mesh

with claim(sys.argv[1], serial_mesh()):
    print("held", flush=True)
    threading.Event().wait()
"""


def take(directory: Path | str | None) -> None:
    with claim(None if directory is None else str(directory), serial_mesh()):
        pass


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    command = [sys.executable, "-c", HOLD, str(place)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout.readline() == "held\n"
            assert f"--save {place}: " in str(refusal(lambda: take(f"{place}/")))
            take(tmp_path / "a")  # its neighbours are free
        finally:
            process.send_signal(signal.SIGKILL)
    take(place)
    assert list(place.iterdir()) == []
    take(None)


def test_what_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    only_read = tmp_path / "kept" if os.geteuid() else Path("/proc/self")
    if os.geteuid():  # root may write everywhere but there
        only_read.mkdir(mode=0o555)
    for path in (tmp_path / "file", tmp_path / "file" / "a", only_read):
        assert f"--save {path}: " in str(refusal(lambda path=path: take(path)))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("call", "error", "left"),
    [
        *((call, errno.EDQUOT, 0) for call in ("os.open", "fcntl.flock", "os.fsync")),
        ("fcntl.flock", errno.EAGAIN, 2),  # but for the folders of another run
    ],
)
def test_a_failed_claim_leaves_nothing_behind(
    tmp_path: Path, call: str, error: int, left: int
) -> None:
    (tmp_path / "a").mkdir()
    place = tmp_path / "a" / "b" / "c"
    with failing(call, error):
        assert f"--save {place}: " in str(refusal(lambda: take(place)))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", place.parent, place][: 1 + left]


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path) -> None:
    with failing("fcntl.flock", errno.ENOLCK), pytest.warns(UserWarning, match=str(tmp_path)):
        take(tmp_path)


@on_ranks(2)
def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    """Where a file is in the place of the folder."""
    mesh, directory = mesh_of_ranks(1), tmp_path / "save"
    with claim(str(directory), mesh):
        mesh.control.gather(None)
        (directory / "file").touch()
    error = str(refusal(claim(f"{directory}/file", mesh).__enter__))
    assert error.startswith(f"--save {directory}/file: ")
    assert mesh.control.gather(error) == [error] * 2


@on_ranks(2)
def test_a_folder_that_one_host_has_is_a_warning(tmp_path: Path) -> None:
    mesh = mesh_of_ranks(1)
    own = tmp_path / ("one" if mesh.is_first else "other")
    own.mkdir()
    with chdir(own), patch.object(retention, "_APPEARS", 0):
        always = {"record": True, "action": "always"}
        with warnings.catch_warnings(**always) as warned, claim("save", mesh):
            assert [str(each.message).partition(": hosts")[0] for each in warned] == (
                ["--save save: not seen by rank 1"] * mesh.is_first
            )
        with warnings.catch_warnings(**always) as warned, claim(str(tmp_path), mesh):
            assert not warned
        exists = Path.exists

        def of_a_dead_mount(path: Path) -> bool:
            if path.name.startswith(".claim-"):
                raise OSError(errno.ESTALE, "Stale file handle")
            return exists(path)

        dead = patch.object(Path, "exists", of_a_dead_mount)
        with dead, warnings.catch_warnings(**always) as warned, claim(str(tmp_path), mesh):
            assert len(warned) == mesh.is_first
