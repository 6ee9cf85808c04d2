"""A --save directory belongs to one run, and one that cannot be written to is found at once."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.retention import claim
from megatron.parallel.mesh import serial_mesh
from tests.checkpoint.saving import failing
from tests.dist import Pool
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

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
    save = tmp_path / "a" / "b"
    command = [sys.executable, "-c", HOLD, str(save)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout.readline() == "held\n"
            assert f"--save {save}: " in str(refusal(lambda: take(f"{save}/")))
            take(tmp_path / "a")  # its neighbours are free
        finally:
            process.send_signal(signal.SIGKILL)
    take(save)
    assert list(save.iterdir()) == []
    take(None)


def test_what_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    only_read = tmp_path / "kept" if os.geteuid() else Path("/proc/self")
    if os.geteuid():  # root may write everywhere but there
        only_read.mkdir(mode=0o555)
    for save in (tmp_path / "file", tmp_path / "file" / "a", only_read):
        assert f"--save {save}: " in str(refusal(lambda path=save: take(path)))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock", "os.fsync"])
def test_a_failed_claim_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "a").mkdir()
    save = tmp_path / "a" / "b" / "c"
    with failing(call, errno.EDQUOT):
        assert f"--save {save}: " in str(refusal(lambda: take(save)))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path) -> None:
    with failing("fcntl.flock", errno.ENOLCK), pytest.warns(UserWarning, match=str(tmp_path)):
        take(tmp_path)


def claimed_by_all(directory: str) -> list[str]:
    """The error on each rank: at first none, then of a file in the place of the folder."""
    mesh = mesh_of_ranks(1)
    errors = []
    for save in (directory, f"{directory}/file"):
        try:
            with claim(save, mesh):
                mesh.control.gather(None)
                (Path(directory) / "file").touch()
            errors.append("")
        except OSError as error:
            errors.append(str(error))
    return errors


def test_all_ranks_raise_the_same_error(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, claimed_by_all, str(tmp_path / "save"))
    assert first == second
    assert first[0] == ""
    assert first[1].startswith(f"--save {tmp_path}/save/file: ")
