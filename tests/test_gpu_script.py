"""scripts/test.sh gpu: its parts, what it needs, and its tests in miniature on a CPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# In place of Python: finds every package; a part that is named in $FAILS fails, one in $EMPTY has
# no test.
FAKE = """#!/usr/bin/env bash
[[ $1 = - ]] && exit 0
echo "ran $*"
[[ "$*" = *${FAILS:-nothing}* ]] && exit 1
[[ "$*" = *${EMPTY:-nothing}* ]] && exit 5
exit 0
"""


def script(folder: Path, python: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """test.sh gpu of a copy that has no .venv, with this text as python3."""
    for name in ("scripts", "tests/gpu", "bin"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("test.sh", "packages.sh"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    for name in ("test_a.py", "test_b.py"):
        (folder / "tests" / "gpu" / name).touch()
    (folder / "bin" / "python3").write_text(python)
    (folder / "bin" / "python3").chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    command = ["bash", str(folder / "scripts" / "test.sh"), "gpu", "--device", "cpu"]
    return subprocess.run(
        command, env={**os.environ, "PATH": path, **environ}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, 0),
        ({"FAILS": "test_a.py"}, 1),
        ({"FAILS": "--part 8/8"}, 1),
        ({"EMPTY": "tests/layouts"}, 0),
        ({"EMPTY": "tests/"}, 5),
        ({"EMPTY": "tests/layouts", "FAILS": "test_b.py"}, 1),
    ],
)
def test_the_whole_fails_where_a_part_does(
    tmp_path: Path, environ: dict[str, str], status: int
) -> None:
    ended = script(tmp_path, FAKE, **environ)
    assert ended.returncode == status, ended.stderr
    ran = [line for line in ended.stdout.splitlines() if line.startswith("ran ")]
    assert [sum(part in line for line in ran) for part in ("test_a.py", "test_b.py")] == [1, 1]
    assert [f"--part {n}/8" in line for n, line in enumerate(ran[2:], 1)] == [True] * 8
    assert all(line.index("--device cuda") < line.index("--device cpu") for line in ran)


def test_packages_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    """Also beside a folder of wheels that has none of them."""
    (tmp_path / "wheels").mkdir()
    bare = f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'  # sees no installed package
    ended = script(tmp_path, bare)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("error: ")]
    assert {"torch", "tyro", "docstring-parser"} <= {*line.replace(";", "").split()}


def test_the_tests_of_a_gpu_run_on_a_cpu() -> None:
    """The cheap ones; not as they stand beside the others, from which the marker keeps them."""
    words = "-p no:cacheprovider -p no:xdist -q -m gpu tests/gpu/test_kernels.py"
    words += " tests/gpu/test_steps.py -k (kernels.py or waits or graph) and not gpt2-compiled"
    command = [sys.executable, "-m", "pytest", *words.split(" ", 9), "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout
    assert " skipped" not in ended.stdout.splitlines()[-1]


@pytest.mark.sweep
def test_all_of_it_runs_on_a_cpu() -> None:
    command = ["bash", "scripts/test.sh", "gpu", "--device", "cpu"]
    environ = os.environ | {"LIMIT": "3600"}  # there are fewer cores
    assert subprocess.run(command, cwd=ROOT, env=environ).returncode == 0
