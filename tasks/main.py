"""Evaluate a checkpoint: python tasks/main.py --task HELDOUT --load checkpoints ...

Under torchrun the model is cut over the processes (--tensor-model-parallel-size).
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
from megatron.config.parse import parse, user_errors
from megatron.train.trained import open_trained

# Each module has Settings, a dataclass with the sections `trained`, `evaluation` and `parallel`,
# and run(settings, model, manifest, tokenizer, mesh) -> figures.
TASKS = {"HELDOUT": "tasks.heldout"}


def split_task(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The module of --task NAME, and the other arguments."""
    if len(arguments) < 2 or arguments[0] != "--task" or arguments[1] not in TASKS:
        raise SettingError(f"the first flag is --task NAME, with one of: {', '.join(TASKS)}")
    return TASKS[arguments[1]], list(arguments[2:])


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        name, rest = split_task(arguments)
        task = import_module(name)
        settings = parse(task.Settings, rest, environ)
        checkpoint, tokenizer = open_trained(settings.trained)

    from megatron.train.evaluate import load_model
    from megatron.train.launch import launch

    with launch(settings.parallel.tensor_model_parallel_size, environ) as mesh:
        model, manifest = load_model(checkpoint, mesh)
        figures = task.run(settings, model, manifest, tokenizer, mesh)
        if mesh.is_first:
            text = json.dumps({"checkpoint": str(checkpoint), **figures}, indent=1)
            print(text)
            if settings.evaluation.output is not None:
                Path(settings.evaluation.output).write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
