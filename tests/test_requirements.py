"""What an installation holds, and what a program loads of it only when asked."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Imported where a flag asks for them.
OPTIONAL = ["apex", "datasets", "datasketch", "pyarrow", "tensorboard", "wandb"]


def required(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {re.split(r"[=\[]", line)[0] for line in lines if line and not line.startswith("-r")}


def test_the_package_depends_on_what_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[>=\[]", each)[0] for each in project["dependencies"]}
    assert names == required("requirements.txt")
    assert {"wandb", "datasketch"} <= names
    assert not names & required("requirements-test.txt")


def programs() -> list[Path]:
    """Files that are run, or of `python -m` what Python reads first."""
    files = [file for file in ROOT.glob("[!.]*/**/*.py") if "tests" not in file.parts]
    starts = [file for file in (*ROOT.glob("*.py"), *files) if "__main__" in file.read_text()]
    tools = ROOT / "tools"
    is_inner = [tools in file.parents and file.parent != tools for file in starts]
    return [tools / "__init__.py",
            *(file for file, inner in zip(starts, is_inner, strict=True) if not inner)]  # fmt: skip


def test_every_program_says_which_python_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before it imports anything; an older one can parse the whole file."""
    started = programs()
    assert len(started) > 50
    before = set(sys.modules)
    for file in started:
        ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 8))
        monkeypatch.setattr("sys.hexversion", 0x30A0DF0)
        with pytest.raises(SystemExit) as refused:
            runpy.run_path(str(file), run_name="__main__")
        monkeypatch.undo()
        assert re.fullmatch(r".*\b3\.11\b.*", str(refused.value.code)), file
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "module", ["megatron.train.pretrain", "tools.corpus.dedup", "tasks.main", "tools.generate"]
)
def test_no_program_loads_what_nobody_asked_for(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {OPTIONAL} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
