"""Evaluate a checkpoint: python tasks/main.py --task WIKITEXT103 --load checkpoints ...

Under torchrun the model is cut over the processes (--tensor-model-parallel-size). What each task
takes: --task NAME --help. The result is one JSON record: what the figures mean, how they were
taken, of which model and data, and last, to be seen on a screen, the figures.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tasks`, when run as a script

from megatron.config.checkpoints import read_manifest, step_of
from megatron.config.checks import SettingError
from megatron.config.interrupt import interruptible
from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.data.files import sha256, write_whole
from megatron.train.trained import open_trained
from tasks import paper
from tasks.common import EvaluationConfig, Task, continue_prompts, score_windows

if TYPE_CHECKING:
    from megatron.model.gpt2 import GPT2
    from megatron.parallel.mesh import Mesh

# The module of each; tasks/common.py says what it has. A module of one's own is named itself.
TASKS = {
    "WIKITEXT103": "tasks.wikitext103",
    "LAMBADA": "tasks.lambada",
    "HELDOUT": "tasks.heldout",
}
_KNOWN = f"{', '.join(TASKS)}, or a module of your own such as tasks.mine"
ROOT = Path(__file__).resolve().parents[1]


def wants_list(arguments: Sequence[str]) -> bool:
    """Whether this is --help without a task."""
    words = {word.partition("=")[0] for word in arguments}
    return "--task" not in words and bool(words & {"--help", "-h"})


def list_tasks() -> str:
    """The tasks, each with the first line of its module; none is imported."""
    lines = ["usage: tasks/main.py --task NAME --load DIRECTORY ...", ""]
    for name, module in TASKS.items():
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<12} {summary}")
    own = "  tasks.mine   A module of your own: tasks/README.md says what it has."
    return "\n".join([*lines, own, "", "The flags of a task: tasks/main.py --task NAME --help"])


def split_task(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The NAME of --task NAME or --task=NAME, in capitals if TASKS has it so, and the others."""
    words = [part for word in arguments for part in _split_equals(word)]
    if "--task" not in words[:-1]:
        raise SettingError(f"--task is missing; {_KNOWN} would work, and --help lists them")
    place = words.index("--task")
    name = words[place + 1]
    known = name.upper() if name.upper() in TASKS else name
    return known, words[:place] + words[place + 2 :]


def _split_equals(word: str) -> list[str]:
    return ["--task", word.removeprefix("--task=")] if word.startswith("--task=") else [word]


def find_module(name: str) -> ModuleType:
    """The task's module; raises SettingError where there is none."""
    module = TASKS.get(name, name)
    if (
        "." not in module
        or find_spec(module.partition(".")[0]) is None
        or find_spec(module) is None
    ):
        raise SettingError(f"--task {name} is not known; {_KNOWN} would work")
    found = import_module(module)
    if missing := {"Settings", "prepare"} - vars(found).keys():
        raise SettingError(f"--task {name}: the module has no {min(missing)}; {_KNOWN} would work")
    return found


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    if wants_list(arguments):
        if environ.get("RANK", "0") == "0":
            print(list_tasks())
        return
    with user_errors(environ):
        name, rest = split_task(arguments)
        module = find_module(name)
        settings = parse(module.Settings, rest, environ)
        if settings.evaluation.compare_paper:
            paper.column_of(name)
        folders, tokenizer, manifest = open_trained(
            settings.trained, settings.parallel, world_size(environ)
        )
        task = module.prepare(settings, manifest, tokenizer)
        data = [identify(file) for file in settings.files]

    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch
    from megatron.train.state import DTYPES

    size = settings.evaluation.micro_batch_size
    with launch(settings.parallel, environ) as mesh:
        with user_errors(environ, agreed=True):
            checkpoint, model = load_newest(folders, mesh, DTYPES[settings.trained.dtype])
        # What goes wrong here is a fault of the task, which its traceback finds.
        figures = evaluate(task, model, mesh, size, name)
        if mesh.is_first:
            facts = describe(checkpoint, model, mesh, settings.trained.dtype)
            how = {"data": data, "micro_batch_size": size, "command": ["tasks/main.py", *arguments]}
            record = arrange(name, figures, facts | how)
            with user_errors(environ, agreed=True):
                publish(name, record, settings.evaluation)


def identify(file: Path) -> dict[str, Any]:
    """What tells whether two records are of the same input."""
    return {"file": str(file), "bytes": file.stat().st_size, "sha256": sha256(file)}


def arrange(name: str, figures: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record: words first and numbers last, where a screen shows them."""
    words = {key: figures[key] for key in ("conventions", "protocol") if key in figures}
    return {"task": name, **words, **facts, **figures}


def evaluate(
    task: Task, model: GPT2, mesh: Mesh, micro_batch_size: int, name: str
) -> Mapping[str, Any]:
    """The task's figures on the first rank, nothing on the others; every rank calls this."""
    scores = score_windows(model, mesh, task, micro_batch_size, name)
    written: list[list[int]] = []
    if task.prompts is not None:
        written = continue_prompts(model, mesh, task.prompts, micro_batch_size, f"{name}, greedy")
    return task.score(scores, written) if mesh.is_first else {}


def describe(checkpoint: Path, model: GPT2, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """What was evaluated, and on what."""
    from megatron.parallel.layout import layouts
    from megatron.train.start import environment

    manifest = read_manifest(checkpoint)
    section = manifest["config"]["model"]
    shape = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    return {
        "model": {
            **{key: section[key] for key in shape},
            "vocab_size": model.vocab_size,
            "parameters": sum(prod(each.shape) for each in layouts(model).values()),
        },
        "checkpoint": str(checkpoint),
        "checkpoint_hash": manifest["checksum"],
        "step": step_of(checkpoint),
        "tokenizer": manifest["tokenizer"],
        "dtype": dtype,
        "version": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        **environment(mesh),
    }


def publish(name: str, record: dict[str, Any], section: EvaluationConfig) -> None:
    """Print the record, then the paper beside it, and write it whole or not at all."""
    beside = ""
    if section.compare_paper:
        parameters = record["model"]["parameters"]
        value = record[paper.column_of(name).figure]
        comparison = paper.compare(name, value, parameters)
        record, beside = {"paper": comparison, **record}, paper.as_text(comparison, parameters)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    print(text, flush=True)
    if beside:
        print(beside, file=sys.stderr)
    if section.output is not None:
        write_whole(section.output, text.encode() + b"\n")


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
