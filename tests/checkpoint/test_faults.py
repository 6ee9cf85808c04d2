"""Everything that can go wrong on a disk, while saving, after it, and in the writer's own process.

A save that fails leaves the former checkpoint, a name without a dot is whole, and every rank is
told (promises 5 and 19).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import save as saving
from megatron.checkpoint.format import seal, step_folders
from megatron.checkpoint.load import newest_whole, verify
from megatron.config.checks import UsageError
from megatron.train.state import TrainState
from tests.checkpoint.saving import (
    BOTH,
    contents,
    fail,
    flip,
    fresh,
    load,
    names,
    save,
    save_steps,
    saver_into,
)
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, tiny_section, tiny_state

# Every call that a save makes on the file system, and the name it is known by.
CALLS = {
    "remove_leftovers": (saving, "remove_leftovers"),
    "mkdir": (Path, "mkdir"),
    "write_atomically": (saving, "write_atomically"),
    "write_atomically of latest": (saving, "write_atomically"),
    "save_file": (saving, "save_file"),
    "chmod": (Path, "chmod"),
    "sha256": (saving, "sha256"),
    "fsync": (os, "fsync"),
    "set_aside": (saving, "set_aside"),
    "rename": (Path, "rename"),
}


@BOTH
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_anywhere_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, asynchronous: bool
) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1, 2])
    before = names(tmp_path), contents(tmp_path / "step_00000001")
    saver = saver_into(tmp_path, state, asynchronous=asynchronous, start_step=1)
    with monkeypatch.context() as patch:
        owner, name = CALLS[call]
        function = getattr(owner, name)

        def fail_at_latest(file: Path, content: bytes) -> None:
            (fail if "latest" in file.name else function)(file, content)

        patch.setattr(owner, name, fail_at_latest if call.endswith("latest") else fail)
        with pytest.raises(OSError, match="on rank data 0, tensor 0: .*no luck"):
            save_steps(saver, state, [3])
    if call == "rename":  # nothing was; also where checkpoints were to be set aside
        assert names(tmp_path) == before[0]
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert contents(tmp_path / "step_00000001") == before[1]
    (report,) = save_steps(saver, state, [3])  # and what it did not set aside, this one does
    assert names(tmp_path) == [
        "latest",
        "step_00000001",
        "step_00000002.abandoned",
        "step_00000003",
    ]
    assert len(report.notes) == 1
    load(state, report.path)


@pytest.mark.parametrize("number", range(4))
def test_a_kill_between_any_two_renames_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """While step 1 is saved again: former one aside, new one in; `latest`."""
    state = fresh()
    saver = saver_into(tmp_path, state)
    save_steps(saver, state, [1])
    calls = iter(range(100))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Path, target: Path) -> Any:
            counts = ".tmp" not in self.name
            if counts and next(calls) == number:
                raise KeyboardInterrupt
            return function(self, target)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "replace", counted(Path.replace))
        try:
            save_steps(saver, state, [1])
            assert number == 3
        except KeyboardInterrupt:
            assert number < 3
    former = "step_00000001" if number == 0 else "step_00000001.abandoned"
    load(state, tmp_path / former)
    there = {former} | ({"step_00000001"} if number > 1 else set())
    assert {path.name for path in tmp_path.glob("*step_*")} == there
    save_steps(saver, state, [2])
    assert not list(tmp_path.glob("latest.*"))
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


def fail_on_rank_1(directory: Path, asynchronous: bool) -> str:
    state = fresh(2)
    saver = saver_into(directory, state, asynchronous=asynchronous)
    save_steps(saver, state, [1])
    with pytest.MonkeyPatch.context() as patch:
        if state.mesh.control.rank == 1:
            patch.setattr(saving, "save_file", fail)
        with pytest.raises(OSError, match="no luck") as caught:
            save_steps(saver, state, [2])
    return str(caught.value)


@BOTH
def test_a_failure_on_one_rank_is_one_on_all(
    gloo: Pool, tmp_path: Path, asynchronous: bool
) -> None:
    for message in gloo.run(2, fail_on_rank_1, tmp_path, asynchronous):
        assert "on rank data 0, tensor 1" in message
        assert "shard_00001.safetensors" in message
    assert names(tmp_path) == ["latest", "step_00000001"]


@BOTH
@pytest.mark.parametrize("attached", [False, True])
def test_a_full_disk_is_an_error_with_what_is_needed_and_free(
    small_disk: Path, asynchronous: bool, attached: bool
) -> None:
    small, large = fresh(num_layers=1, hidden_size=8), fresh(hidden_size=96, num_layers=4)
    save_steps(saver_into(small_disk, small), small, [1])
    before = contents(small_disk / "step_00000001")
    needed = sum(each.spec.real(each.local).nbytes for each in large.slices())
    extra, state, file = {}, large, "shard_00000.safetensors"
    if attached:
        extra, state, file = {"vocab.json": b"x" * 2_000_000}, small, "vocab.json"
        needed = 2_000_000
    saver = saver_into(small_disk, state, asynchronous=asynchronous, start_step=1, attached=extra)
    with pytest.raises(OSError, match=rf"{file}: .*it needs {needed:,} bytes, "):
        save_steps(saver, state, [2])
    assert names(small_disk) == ["latest", "step_00000001"]
    assert contents(small_disk / "step_00000001") == before
    save_steps(saver_into(small_disk, small, start_step=1), small, [3])  # this one has room
    load(small, small_disk / "step_00000003")


KILLED = """
import os, sys, threading
from pathlib import Path
from megatron.checkpoint import save as saving
from tests.checkpoint.saving import fail, fresh, save, save_steps, saver_into

state, directory, stage = fresh(), Path(sys.argv[1]), sys.argv[2]
saver = saver_into(directory, state, asynchronous=True, attached={"vocab.json": b"{}"})
save_steps(saver, state, [1])
function = getattr(saving, stage)

def half(*arguments):
    if stage == "save_file":
        function(*arguments)
        content = arguments[1].read_bytes()
        arguments[1].write_bytes(content[: len(content) // 2])
    os.write(1, b"half\\n")  # not print, which would write the line and its end apart
    threading.Event().wait()

setattr(saving, stage, half)
state.step = 2
save(saver, state)
os.write(1, b"training goes on\\n")
threading.Event().wait()
"""


@pytest.mark.parametrize("stage", ["save_file", "set_aside"])
def test_a_writer_killed_at_any_stage_leaves_the_former_checkpoint(
    tmp_path: Path, stage: str
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), stage]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip() for _ in range(2)}
        process.send_signal(signal.SIGKILL)
    assert lines == {"half", "training goes on"}
    assert names(tmp_path) == [".step_00000002.partial", "latest", "step_00000001"]
    (tmp_path / ".step_00000007.removed").mkdir()  # and of one killed while it removed
    (tmp_path / "latest.tmp123").touch()
    state = fresh()
    load(state, step_folders(tmp_path)[0])
    save_steps(saver_into(tmp_path, state, start_step=1), state, [2])
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    load(state, tmp_path / "step_00000002")


def save_and_fail(directory: Path) -> None:
    state = fresh()
    with saver_into(directory, state, asynchronous=True) as saver:
        save(saver, state)
        raise ZeroDivisionError


def test_an_error_in_training_waits_for_the_save_and_carries_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):
        save_and_fail(tmp_path / "a")
    assert names(tmp_path / "a") == ["latest", "step_00000000"]
    assert not [thread for thread in threading.enumerate() if thread.name == "save"]
    monkeypatch.setattr(saving, "save_file", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        save_and_fail(tmp_path / "b")
    assert any("no luck" in note for note in caught.value.__notes__)
    assert names(tmp_path / "b") == []


def test_a_failed_save_is_seen_before_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    monkeypatch.setattr(saving, "save_file", fail)
    saver = saver_into(tmp_path, state, asynchronous=True)
    assert not saver.failed
    save(saver, state)
    for thread in threading.enumerate():
        if thread.name == "save":
            thread.join()
    assert saver.failed
    with pytest.raises(OSError, match="no luck"):
        saver.reports()
    assert not saver.failed
    saver.close()


SHARD, MANIFEST = "shard_00000.safetensors", "manifest.json"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def repeat_slices(manifest: Path, times: int) -> None:
    """Another number of slices, in a manifest that is sealed none the less."""
    content = json.loads(manifest.read_text())
    content["tensors"]["model.final_norm.bias"]["slices"] *= times
    manifest.write_text(json.dumps(seal(content)))


# What happens to a file after it was saved: the error names the file.
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "short shard": (SHARD, cut),
    "flipped header": (SHARD, lambda file: flip(file, 20)),
    "flipped byte": (SHARD, lambda file: flip(file, 40_000)),
    "flipped last byte": (SHARD, flip),
    "no shard": (SHARD, Path.unlink),
    "unreadable shard": (SHARD, replace_by_folder),
    "flipped tokenizer": ("vocab.json", lambda file: flip(file, 0)),
    "short manifest": (MANIFEST, cut),
    "no manifest": (MANIFEST, Path.unlink),
    "hole": (MANIFEST, lambda file: repeat_slices(file, 0)),
    "overlap": (MANIFEST, lambda file: repeat_slices(file, 2)),
}


def plain(**changes: Any) -> TrainState:
    return tiny_state(mesh_of_ranks(1), tiny_section(**changes), dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints of `plain`."""
    directory, state = tmp_path_factory.mktemp("saved"), plain()
    save_steps(saver_into(directory, state, attached={"vocab.json": b"{}"}), state, [1, 2])
    return directory


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """The later of the two, in a copy."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True) / "step_00000002"


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named_and_passed_over(path: Path, damage: str) -> None:
    mesh, (name, spoil) = mesh_of_ranks(1), DAMAGE[damage]
    assert verify(path, mesh).path == path
    spoil(path / name)
    with pytest.raises(ValueError, match=f"^{path / name}") as caught:
        verify(path, mesh)
    newest, passed_over = newest_whole(step_folders(path.parent), mesh, any_loop=True)
    assert (newest.path.name, newest.manifest["counters"]["step"]) == ("step_00000001", 1)
    assert passed_over == [str(caught.value)]
    spoil(newest.path / name)
    with pytest.raises(UsageError) as refused:
        newest_whole(step_folders(path.parent), mesh, "--from", any_loop=True)
    assert refused.value.flag == "--from"
    assert all(str(folder) in str(refused.value) for folder in (path, newest.path))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="damaged") as caught:
        verify(path, mesh_of_ranks(2))
    return str(caught.value)


def test_damage_that_one_rank_finds_is_known_to_all(gloo: Pool, path: Path) -> None:
    flip(path / SHARD)
    answers = gloo.run(4, refusal, path)
    assert answers == [answers[0]] * 4
    assert str(path / SHARD) in answers[0]


def test_another_model_is_refused(saved: Path) -> None:
    path = saved / "step_00000002"
    with pytest.raises(ValueError, match=r"word_embedding.weight is \[101, 32\].*\[101, 64\]"):
        load(plain(hidden_size=64), path)
    with pytest.raises(ValueError, match=r"has no tensor model\.transformer\.layers\.2"):
        load(plain(num_layers=3), path)
