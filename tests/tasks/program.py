"""tasks/main.py as the tests of fine-tuning call it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.main import main

TASK = "tests.tasks.made"
SIZES = ["--global-batch-size", "16", "--micro-batch-size", "16"]
FEW = ["--epochs", "2", "--lr", "3e-3", *SIZES, "--dtype", "fp32"]
Capture = pytest.CaptureFixture[str]


def result(words: list[str], capsys: Capture, task: str = TASK) -> dict[str, Any]:
    """The record that a command prints."""
    capsys.readouterr()
    main(["--task", task, *words], {})
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def refusal(words: list[str], capsys: Capture, task: str = TASK) -> str:
    """What a command that ends with status 2 says on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["--task", task, *words], {})
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    return said


def told(words: list[str], capsys: Capture, task: str = TASK) -> list[str]:
    """The warnings of a command."""
    capsys.readouterr()
    main(["--task", task, *words], {})
    return [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]


def evaluating(save: Path) -> list[str]:
    """The flags that evaluate on what was evaluated in training."""
    return ["--valid-data", str(save.parent / "near"), str(save.parent / "far")]
