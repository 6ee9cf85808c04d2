"""tools/plot.py draws a user's own runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    for name, terms in (("gpt2", ("loss",)), ("bert", ("loss", "mlm_loss"))):
        lines = [{"step": 0, "device": "cpu"}]
        lines += [{"step": k, **dict.fromkeys(terms, 9 / k)} for k in (1, 2, 3)]
        lines += [{"step": 3, **{f"validation_{term}": 3.5 for term in terms}}]
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    return tmp_path / "gpt2", tmp_path / "bert"


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/plot.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


def test_runs_are_drawn_together(runs: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "losses.svg"
    done = plot(runs[0], runs[1] / "metrics.jsonl", "--output", picture)
    assert done.returncode == 0, done.stderr
    labels = re.findall(r"<!-- (\w+, \w+) -->", picture.read_text())
    kinds = ("training", "validation")
    assert labels == [f"{name}, {kind}" for name in ("gpt2", "bert") for kind in kinds]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gpt2", "--output", "loss.txt"], "--output"),
        (["gpt2", "--output", "loss.png", "--term", "mlm_loss"], "--term"),
        (["nowhere", "--output", "loss.png"], "nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    runs: tuple[Path, Path], tmp_path: Path, arguments: list[str], named: str
) -> None:
    places = [word if word.startswith("--") or word == "mlm_loss" else tmp_path / word
              for word in arguments]  # fmt: skip
    done = plot(*places)
    assert done.returncode == 2
    assert named in done.stderr
