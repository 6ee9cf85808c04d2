"""What tasks/main.py computes, as a function that ranks can run."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megatron.config.parse import parse
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tasks.main import TASKS, evaluate
from tests.tiny import mesh_of_ranks


def figures_of(task: str, tensor_size: int, *words: str) -> dict[str, Any]:
    """What the program computes of these flags, on the ranks of this call or in this process."""
    mesh = mesh_of_ranks(tensor_size)
    module = import_module(TASKS[task])
    settings = parse(module.Settings, words, {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    inputs = module.prepare(settings, manifest, tokenizer)
    _, model = load_newest(folders, mesh)
    return dict(evaluate(inputs, model, mesh, settings.evaluation.micro_batch_size, task))


def without_words(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures alone; each says its convention, and no convention is of none."""
    numbers = {key: figures[key] for key in figures.keys() - {"conventions", "protocol"}}
    assert figures["conventions"].keys() - {"target"} == numbers.keys()
    assert all(figures["conventions"].values())
    return numbers
