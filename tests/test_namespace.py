"""NVIDIA's megatron.core may be installed in the same environment: megatron is a namespace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist import PATIENCE

ROOT = Path(__file__).resolve().parents[1]


def run(cwd: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_megatron_itself_is_no_module() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_second_megatron_on_the_path_is_found_beside_this_one(
    tmp_path: Path, ours_first: bool
) -> None:
    core = tmp_path / "other" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("NAME = 'core'\n")
    folders = [str(ROOT), str(core.parents[1])]
    path = os.pathsep.join(folders if ours_first else folders[::-1])
    code = (
        "import megatron.core, megatron.config, megatron.parallel.mesh\n"
        "print(megatron.core.NAME, megatron.config.__file__)"
    )
    ended = run(tmp_path, "-c", code, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["core", str(ROOT / "megatron" / "config" / "__init__.py")]


@pytest.mark.parametrize(
    "program", ["tools/generate.py", "tools/plan.py", "tools/convert_hf.py", "pretrain_gpt2.py"]
)
def test_a_program_runs_from_any_folder(tmp_path: Path, program: str) -> None:
    ended = run(tmp_path, str(ROOT / program), "--help")
    assert ended.returncode == 0, ended.stderr


def test_the_installed_package_is_found_without_the_repository(tmp_path: Path) -> None:
    """As an editable installation leaves it, beside another megatron.core."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    ended = run(tmp_path, "-c", "import megatron.core, megatron.config")
    if "No module named 'megatron.config'" in ended.stderr and not installed():
        pytest.skip("the project is not installed; scripts/setup.sh installs it")
    assert ended.returncode == 0, ended.stderr


def installed() -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return bool(distribution("megatron-lm-reproduction"))
    except PackageNotFoundError:
        return False
