"""Evaluate a checkpoint: python tasks/main.py --task HELDOUT --load checkpoints ...

Under torchrun the model is cut over the processes (--tensor-model-parallel-size). What each task
takes: --task NAME --help.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tasks`, when run as a script

from megatron.config.checks import SettingError
from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.train.trained import open_trained

# Each module has
#   Settings, a dataclass with the sections `trained`, `evaluation` and `parallel`;
#   prepare(settings, manifest, tokenizer) -> inputs, which reads and checks, without torch;
#   run(settings, inputs, model, manifest, tokenizer, mesh) -> figures, on the first rank.
TASKS = {"HELDOUT": "tasks.heldout"}


def split_task(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The module of --task NAME or --task=NAME, and the other arguments."""
    words = [part for word in arguments for part in _split_equals(word)]
    if "--task" not in words[:-1]:
        raise SettingError(f"--task is missing; --task NAME takes one of: {', '.join(TASKS)}")
    place = words.index("--task")
    name = words[place + 1]
    if name not in TASKS:
        raise SettingError(f"--task {name} is not known; it takes one of: {', '.join(TASKS)}")
    return TASKS[name], words[:place] + words[place + 2 :]


def _split_equals(word: str) -> list[str]:
    return ["--task", word.removeprefix("--task=")] if word.startswith("--task=") else [word]


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        name, rest = split_task(arguments)
        task = import_module(name)
        settings = parse(task.Settings, rest, environ)
        folders, tokenizer, manifest = open_trained(
            settings.trained, settings.parallel, world_size(environ)
        )
        inputs = task.prepare(settings, manifest, tokenizer)

    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch

    with launch(settings.parallel, environ) as mesh:
        checkpoint, model = load_newest(folders, mesh)
        figures = task.run(settings, inputs, model, manifest, tokenizer, mesh)
        if mesh.is_first:
            text = json.dumps({"checkpoint": str(checkpoint), **figures}, indent=1)
            print(text)
            if settings.evaluation.output is not None:
                Path(settings.evaluation.output).write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
