"""What an installation holds, and what a program loads of it only when asked."""

import re
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


@pytest.mark.parametrize(
    "module", ["megatron.train.pretrain", "tools.corpus.dedup", "tasks.main", "tools.generate"]
)
def test_no_program_loads_what_nobody_asked_for(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {OPTIONAL} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
