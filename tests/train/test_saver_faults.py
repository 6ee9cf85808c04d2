"""Saves that fail, at every point and in every way: the former checkpoint stays, all ranks know."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config.checkpoints import step_folders
from megatron.train import checkpoint as checkpoint_module
from megatron.train.state import TrainState
from tests.dist import Pool
from tests.train.saving import BOTH, contents, fail, fresh, names, save_steps, saver_into


def test_a_save_that_fails_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1, 2])
    before = names(tmp_path)
    saver = saver_into(tmp_path, state, start_step=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_file", fail)
        with pytest.raises(OSError, match="no luck"):
            save_steps(saver, state, [2])
    assert names(tmp_path) == before
    assert save_steps(saver, state, [2])[0].notes  # done by the next one


# Every call that a save makes on the file system, and the name it is known by.
CALLS = {
    "prepare": (checkpoint_module, "prepare"),
    "mkdir": (Path, "mkdir"),
    "save_file": (checkpoint_module, "save_file"),
    "chmod": (Path, "chmod"),
    "checksum_of": (checkpoint_module, "checksum_of"),
    "fsync": (os, "fsync"),
    "write_bytes": (Path, "write_bytes"),
    "set_aside": (checkpoint_module, "set_aside"),
    "rename": (Path, "rename"),
    "replace": (Path, "replace"),
}


@BOTH
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_anywhere_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, asynchronous: bool
) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1])
    saver = saver_into(tmp_path, state, asynchronous=asynchronous, start_step=1)
    before = contents(tmp_path / "step_00000001")
    with monkeypatch.context() as patch:
        patch.setattr(*CALLS[call], fail)
        with pytest.raises(OSError, match="saving failed on rank data 0, tensor 0: .*no luck"):
            save_steps(saver, state, [2])
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    assert contents(tmp_path / "step_00000001") == before
    assert not list(tmp_path.glob(".step_*"))
    for path in step_folders(tmp_path):  # one that has its name is whole
        state.load(path)
    save_steps(saver_into(tmp_path, state, start_step=2), state, [3])
    # The second has its name where `latest` alone was not replaced.
    others = ["step_00000002"] if call == "replace" else []
    assert names(tmp_path) == ["latest", "step_00000001", *others, "step_00000003"]


@pytest.mark.parametrize("number", range(4))
def test_a_failure_while_a_step_is_saved_again_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    state = fresh()
    saver = saver_into(tmp_path, state)
    save_steps(saver, state, [1])
    calls = iter(range(100))
    rename, replace = Path.rename, Path.replace

    def at_times(function: Callable[..., Path]) -> Callable[..., Path]:
        def renamed(self: Path, target: Path) -> Path:
            if next(calls) == number:
                raise KeyboardInterrupt
            return function(self, target)

        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", at_times(rename))
        patch.setattr(Path, "replace", at_times(replace))
        if number < 3:  # the former aside, the new one in, latest; then nothing more is renamed
            with pytest.raises(KeyboardInterrupt):
                save_steps(saver, state, [1])
        else:
            save_steps(saver, state, [1])
    former = "step_00000001" if number == 0 else "step_00000001.abandoned"
    state.load(tmp_path / former)
    there = {former} | ({"step_00000001"} if number > 1 else set())
    assert {path.name for path in tmp_path.glob("*step_*")} == there
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def fail_on_rank_1(directory: Path, asynchronous: bool) -> str:
    state = fresh(2)
    saver = saver_into(directory, state, asynchronous=asynchronous)
    save_steps(saver, state, [1])
    save_file = checkpoint_module.save_file
    if state.mesh.control.rank == 1:
        checkpoint_module.save_file = fail
    try:
        save_steps(saver, state, [2])
    except OSError as error:
        return str(error)
    finally:
        checkpoint_module.save_file = save_file
    raise AssertionError("the save did not fail")


@BOTH
def test_a_failure_on_one_rank_is_told_on_all(
    gloo: Pool, tmp_path: Path, asynchronous: bool
) -> None:
    for message in gloo.run(2, fail_on_rank_1, tmp_path, asynchronous):
        assert "on rank data 0, tensor 1" in message
        assert "shard_00001.safetensors" in message
    assert names(tmp_path) == ["latest", "step_00000001"]


@BOTH
def test_a_full_disk_is_told_with_what_is_needed_and_free(
    small_disk: Path, asynchronous: bool
) -> None:
    small, large = fresh(num_layers=1, hidden_size=8), fresh(hidden_size=96, num_layers=4)
    save_steps(saver_into(small_disk, small), small, [1])
    before = contents(small_disk / "step_00000001")
    needed = sum(piece.spec.real(piece.local).nbytes for piece in large.pieces())
    saver = saver_into(small_disk, large, asynchronous=asynchronous, start_step=1)
    with pytest.raises(OSError, match=r"shard_00000\.safetensors: .*(No space|too large)") as error:
        save_steps(saver, large, [2])
    assert f"it needs {needed:,} bytes" in str(error.value)
    free = int(str(error.value).split("bytes, ")[1].split(" are free")[0].replace(",", ""))
    assert "too large" in str(error.value) or 0 < free < needed
    assert names(small_disk) == ["latest", "step_00000001"]
    assert contents(small_disk / "step_00000001") == before
    small.load(small_disk / "step_00000001")
    save_steps(saver_into(small_disk, small, start_step=1), small, [3])  # this one has room
    small.load(small_disk / "step_00000003")


def save_and_fail(directory: Path, state: TrainState) -> None:
    with saver_into(directory, state, asynchronous=True) as saver:
        saver.save(state, None)
        raise ZeroDivisionError


def test_a_save_in_flight_is_finished_when_training_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        save_and_fail(tmp_path, fresh())
    assert names(tmp_path) == ["latest", "step_00000000"]
    assert not [thread for thread in threading.enumerate() if thread.name == "save"]


def test_the_error_of_training_is_raised_with_that_of_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "save_file", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        save_and_fail(tmp_path, fresh())
    assert any("no luck" in note for note in caught.value.__notes__)
    assert names(tmp_path) == []


def test_a_failed_save_is_seen_before_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    monkeypatch.setattr(checkpoint_module, "save_file", fail)
    saver = saver_into(tmp_path, state, asynchronous=True)
    assert not saver.failed
    saver.save(state, None)
    for thread in threading.enumerate():
        if thread.name == "save":
            thread.join()
    assert saver.failed
    with pytest.raises(OSError, match="no luck"):
        saver.reports()
    assert not saver.failed
    saver.close()


KILLED = """
import os, sys, threading
from pathlib import Path
from megatron.train import checkpoint
from tests.train.saving import fresh, save_steps, saver_into

state, directory = fresh(), Path(sys.argv[1])
saver = saver_into(directory, state, asynchronous=True)
save_steps(saver, state, [1])
save_file = checkpoint.save_file

def half(tensors, file):
    save_file(tensors, file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    os.write(1, b"half\\n")  # not print, which would write the line and its end apart
    threading.Event().wait()

checkpoint.save_file = half
state.step = 2
saver.save(state, None)
os.write(1, b"training goes on\\n")
threading.Event().wait()
"""


def test_a_process_killed_in_mid_write_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip() for _ in range(2)}
        process.send_signal(signal.SIGKILL)
    assert lines == {"half", "training goes on"}
    assert names(tmp_path) == [".step_00000002.partial", "latest", "step_00000001"]
    state = fresh()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000001"]
    state.load(tmp_path / "step_00000001")
    save_steps(saver_into(tmp_path, state, start_step=1), state, [2])
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    state.load(tmp_path / "step_00000002")
