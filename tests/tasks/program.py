"""tasks/main.py as the tests call it."""

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.config.parse import parse
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tasks.main import TASKS, main
from tasks.score import score_task
from tests.tiny import mesh_of_ranks

TASK = "tests.tasks.made"
SIZES = ["--global-batch-size", "16", "--micro-batch-size", "16"]
FEW = ["--epochs", "2", "--lr", "3e-3", *SIZES, "--dtype", "fp32"]


def run(words: list[str]) -> None:
    """The program; words: the task and its flags."""
    main(["--task", *words], {})


def printed(words: list[str], task: str = TASK) -> tuple[str, str]:
    """Output of a command: stdout, and stderr."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        run([task, *words])
    return out.getvalue(), err.getvalue()


def result(words: list[str], task: str = TASK) -> dict[str, Any]:
    """The record that a command prints."""
    return dict(json.loads(printed(words, task)[0]))


def warnings_of(words: list[str], task: str = TASK) -> list[str]:
    return [line for line in printed(words, task)[1].splitlines() if "warning: " in line]


def evaluating(save: Path) -> list[str]:
    """The flags that evaluate on what was evaluated in training."""
    return ["--valid-data", str(save.parent / "near"), str(save.parent / "far")]


def figures_of(task: str, tensor_size: int | str, *words: str) -> dict[str, Any]:
    """The program's figures for these flags, on the ranks of this call or in this process."""
    mesh = mesh_of_ranks(tensor_size)
    module = import_module(TASKS[task])
    settings = parse(module.Settings, words, {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    inputs = module.prepare(settings, manifest, tokenizer)
    _, model = load_newest(folders, mesh)
    return dict(score_task(inputs, model, mesh, settings.evaluation.micro_batch_size, task))


def without_words(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures alone; each says its convention, and no convention is of none."""
    numbers = {key: figures[key] for key in figures.keys() - {"conventions", "protocol"}}
    assert figures["conventions"].keys() - {"target"} == numbers.keys()
    assert all(figures["conventions"].values())
    return numbers
