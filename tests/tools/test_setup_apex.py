"""scripts/setup.sh --with-apex, in a copy of the project whose Python and nvcc are stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest

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
            timeout=120,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls() if "-m pip install" in call]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--with-apex"], {"checkout"}),
        (["--with-apex", "nowhere"], {"checkout"}),
        (["--with-apex", "nvidia"], {"nvcc"}),
        (["--with-apex", "nvidia"], {"torch"}),
        (["--test", "--with-apex"], {"checkout", "nvcc", "torch"}),
    ],
)
def test_nothing_is_installed_where_a_part_of_apex_is_missing(
    copy: Copy, arguments: list[str], missing: set[str]
) -> None:
    copy.checkout()
    if "nvcc" not in missing:
        copy.stub(copy.tools / "nvcc", "#!/usr/bin/env bash\n")
    ended = copy.setup(*arguments, TORCH_STATUS="1" if "torch" in missing else "0")
    assert ended.returncode == 2
    assert {word for word in ("checkout", "nvcc", "torch") if word in ended.stderr} == missing
    assert not copy.installs()


def test_a_checkout_is_built_with_its_cuda_extensions_and_only_if_asked_for(copy: Copy) -> None:
    copy.checkout()
    copy.stub(copy.tools / "nvcc", "#!/usr/bin/env bash\n")
    for _ in range(2):  # the second time all is complete
        assert copy.setup("--test").returncode == 0
        assert len(copy.installs()) == 2
    assert copy.installs()[0].endswith("--requirement requirements-test.txt")
    ended = copy.setup("--with-apex", "nvidia")
    assert ended.returncode == 0, ended.stderr
    build = copy.installs()[-1]
    assert build.startswith("11 ")  # APEX_CPP_EXT and APEX_CUDA_EXT
    assert build.endswith(f" {copy.root.parent}/nvidia")
