"""A --save directory belongs to one run, and one that cannot be written to is found at once."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.mesh import serial_mesh
from megatron.train import claim as claim_module
from megatron.train.claim import claim
from tests.dist import Pool
from tests.tiny import mesh_of_ranks

HOLD = """
import sys, threading
from megatron.parallel.mesh import serial_mesh
from megatron.train.claim import claim

with claim(sys.argv[1], serial_mesh()):
    print("held", flush=True)
    threading.Event().wait()
"""


def take(directory: Path | str | None) -> None:
    with claim(None if directory is None else str(directory), serial_mesh()):
        pass


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    save = tmp_path / "a" / "b"
    command = [sys.executable, "-c", HOLD, str(save)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(OSError, match=f"--save {save}/: another run is writing there; "):
                take(f"{save}/")
            take(tmp_path / "a")  # its neighbours are free
        finally:
            process.send_signal(signal.SIGKILL)
    take(save)
    assert list(save.iterdir()) == []


def test_it_is_held_within_and_free_after(tmp_path: Path) -> None:
    with claim(str(tmp_path), serial_mesh()):
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match="another run"):
            take(tmp_path)
    take(tmp_path)


def test_no_directory_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    take(None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for save in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match=f"--save {save}: .*; a directory that can be written"):
            take(save)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_only_read_is_refused(tmp_path: Path) -> None:
    # Root may write everywhere but there.
    save = tmp_path / "kept" if os.geteuid() else Path("/proc/self")
    if os.geteuid():
        save.mkdir(mode=0o555)
    with pytest.raises(OSError, match=f"--save {save}: .*; a directory that can be written to"):
        take(save)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("broken", [(os, "open"), (fcntl, "flock"), (os, "fsync")])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    (tmp_path / "a").mkdir()
    save = tmp_path / "a" / "b" / "c"
    with monkeypatch.context() as patch:
        patch.setattr(*broken, failing(errno.EDQUOT))
        with pytest.raises(OSError, match=f"--save {save}: Disk quota exceeded"):
            take(save)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(claim_module.fcntl, "flock", failing(number))
    with pytest.warns(UserWarning, match=f"--save {tmp_path}: .* no locks"):
        take(tmp_path)


def claimed_by_all(directory: str) -> list[str]:
    """What each rank is told: at first nothing, then of a file in the place of the folder."""
    mesh = mesh_of_ranks(1)
    told = []
    for save in (directory, f"{directory}/file"):
        try:
            with claim(save, mesh):
                mesh.control.gather(None)
                (Path(directory) / "file").touch()
            told.append("")
        except OSError as error:
            told.append(str(error))
    return told


def test_all_ranks_are_told_alike(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, claimed_by_all, str(tmp_path / "save"))
    assert first == second
    assert first[0] == ""
    assert first[1].startswith(f"--save {tmp_path}/save/file: ")
