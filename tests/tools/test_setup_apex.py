"""scripts/setup.sh --with-apex, in a copy of the project whose Python and nvcc are stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT

# Records its arguments and apex's switches; $TORCH_STATUS answers whether torch is one for CUDA.
PYTHON = """#!/usr/bin/env bash
echo "${APEX_CPP_EXT:-}${APEX_CUDA_EXT:-} $*" >> "$LOG"
case "$*" in *torch.version.cuda*) exit "${TORCH_STATUS:-0}" ;; esac
"""


def stub(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The copy, some tools, and something like a checkout of apex."""
    stub(tmp_path / "copy" / ".venv" / "bin" / "python", PYTHON)
    (tmp_path / "copy" / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "copy" / "scripts")
    for name in ("copy/requirements.txt", "copy/requirements-test.txt", "log"):
        (tmp_path / name).touch()
    stub(tmp_path / "tools" / "nvcc", "#!/usr/bin/env bash\n")
    for name in ("bash", "env", "dirname", "realpath", "cat", "cmp", "rm", "tee"):
        (tmp_path / "tools" / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "nvidia" / "apex").mkdir(parents=True)
    (tmp_path / "nvidia" / "setup.py").touch()
    return tmp_path


def setup(folder: Path, *words: str, torch_status: int = 0) -> tuple[int, str, list[str]]:
    """(status, text on stderr, all calls of pip install until now)."""
    environ = {"PATH": str(folder / "tools"), "CUDA_HOME": "/none", "LOG": str(folder / "log")}
    environ["TORCH_STATUS"] = str(torch_status)
    command = ["bash", "copy/scripts/setup.sh", *words]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    calls = (folder / "log").read_text().splitlines()
    return ended.returncode, ended.stderr, [call for call in calls if "-m pip install" in call]


def test_missing_parts(folder: Path) -> None:
    (folder / "tools" / "nvcc").unlink()
    for place, torch_status, missing in (
        ("nowhere", 0, {"checkout", "nvcc"}),
        ("nvidia", 1, {"nvcc", "torch"}),
    ):
        status, said, installs = setup(folder, "--with-apex", place, torch_status=torch_status)
        assert (status, installs) == (2, [])
        assert {word for word in ("checkout", "nvcc", "torch") if word in said} == missing


def test_build_of_apex(folder: Path) -> None:
    for words, count in (((), 2), (["--test"], 4), (["--test"], 4)):  # at the end all is complete
        status, _, installs = setup(folder, *words)
        assert (status, len(installs)) == (0, count)
    status, _, installs = setup(folder, "--with-apex", "nvidia")
    assert status == 0
    assert installs[-1].startswith("11 ")  # APEX_CPP_EXT and APEX_CUDA_EXT
    assert installs[-1].endswith(f" {folder}/nvidia")
    moved = folder.rename(folder.with_name("moved"))  # where its environment does not work
    status, _, again = setup(moved)
    assert (status, len(again)) == (0, len(installs) + 2)
