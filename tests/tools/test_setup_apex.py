"""scripts/setup.sh --with-apex, in a copy of the project whose Python and nvcc are stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dist import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# Records its arguments and apex's switches; $TORCH_STATUS answers whether torch is one for CUDA.
PYTHON = """#!/usr/bin/env bash
echo "${APEX_CPP_EXT:-}${APEX_CUDA_EXT:-} $*" >> "$LOG"
case "$*" in *torch.version.cuda*) exit "${TORCH_STATUS:-0}" ;; esac
"""


class Copy:
    def __init__(self, folder: Path) -> None:
        self.root, self.log, self.tools = folder / "copy", folder / "log", folder / "tools"
        (self.root / "scripts").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copy(ROOT / "scripts" / "setup.sh", self.root / "scripts")
        for name in ("requirements.txt", "requirements-test.txt"):
            (self.root / name).write_text("")
        self.stub(self.root / ".venv" / "bin" / "python", PYTHON)
        for name in ("bash", "env", "dirname", "realpath", "cat", "cmp", "rm", "tee"):
            (self.tools / name).symlink_to(str(shutil.which(name)))

    def stub(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def checkout(self) -> None:
        """Something like a checkout of apex, beside the copy."""
        self.stub(self.root.parent / "nvidia" / "setup.py", "from setuptools import setup\n")
        (self.root.parent / "nvidia" / "apex").mkdir()

    def setup(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "scripts" / "setup.sh"), *arguments],
            cwd=self.root.parent,
            env={"PATH": str(self.tools), "CUDA_HOME": "/none", "LOG": str(self.log), **environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls() if "-m pip install" in call]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "checkout", "nvcc", "torch", "missing"),
    [
        (["--with-apex"], True, True, True, ["checkout"]),
        (["--with-apex", "nowhere"], False, True, True, ["checkout", "nowhere"]),
        (["--with-apex", "nvidia"], True, False, True, ["nvcc"]),
        (["--with-apex", "nvidia"], True, True, False, ["torch"]),
        (["--with-apex"], False, False, False, ["checkout", "nvcc", "torch"]),
        (["--test", "--with-apex"], False, True, True, ["checkout"]),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    copy: Copy, arguments: list[str], checkout: bool, nvcc: bool, torch: bool, missing: list[str]
) -> None:
    if checkout:
        copy.checkout()
    if nvcc:
        copy.stub(copy.tools / "nvcc", "#!/usr/bin/env bash\n")
    ended = copy.setup(*arguments, TORCH_STATUS="0" if torch else "1")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert all(word in ended.stderr for word in missing)
    for word in {"checkout", "nvcc", "torch"} - set(missing):
        assert word not in ended.stderr
    assert not copy.installs()


@pytest.mark.parametrize("flags", [[], ["--test"]])
def test_a_checkout_is_built_with_its_cuda_extensions(copy: Copy, flags: list[str]) -> None:
    copy.checkout()
    copy.stub(copy.tools / "nvcc", "#!/usr/bin/env bash\n")
    ended = copy.setup(*flags, "--with-apex", "nvidia")
    assert ended.returncode == 0, ended.stderr
    build = copy.installs()[-1]
    assert build.startswith("11 ")  # APEX_CPP_EXT and APEX_CUDA_EXT
    assert "--no-build-isolation" in build
    for extension in ("cpp_ext", "cuda_ext"):
        assert f"--config-settings --build-option=--{extension}" in build
    assert build.endswith(f" {copy.root.parent}/nvidia")
    assert any("amp_C" in call for call in copy.calls()[copy.calls().index(build) :])
    requirements = f"requirements{'-test' if flags else ''}.txt"
    assert any(call.endswith(f"--requirement {requirements}") for call in copy.installs())


def test_without_the_flag_there_is_no_apex(copy: Copy) -> None:
    assert copy.setup().returncode == 0
    assert len(copy.installs()) == 2
    assert not [call for call in copy.calls() if "apex" in call]
    assert copy.setup().returncode == 0
    assert len(copy.installs()) == 2  # complete already
