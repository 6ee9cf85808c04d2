"""Evaluate a checkpoint, or fine-tune one.

    python tasks/main.py --task WIKITEXT103 --load checkpoints --valid-data wiki.test.tokens
    python tasks/main.py --task MNLI --load bert --train-data train.tsv --valid-data dev.tsv

Under torchrun the model is sharded over the processes (--tensor-model-parallel-size). Flags of a
task: --task NAME -h. The result is one JSON record: the meaning of the figures, how they were
measured, the model and the data, and the figures at the end, where a screen shows them.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tasks`, when run as a script

from megatron.config import help as helps
from megatron.config.launch import interruptible, is_first, world_size
from megatron.config.parse import parse, user_errors
from megatron.errors import UsageError
from megatron.train.trained import begin_token_of, open_model, open_trained
from tasks import paper
from tasks.job import check_judged, make_job
from tasks.protocol import FinetuneSettings, ImageSettings, TaskSettings
from tasks.record import arrange, describe, identify, publish, version

# The module of each task, or module:class; tasks/protocol.py describes its contents. A user's own
# task is given by its module's name.
TASKS = {
    "WIKITEXT103": "tasks.wikitext103",
    "LAMBADA": "tasks.lambada",
    "HELDOUT": "tasks.heldout",
    "RACE": "tasks.readers.race",
    "MNLI": "tasks.readers.glue:MNLI",
    "QQP": "tasks.readers.glue:QQP",
    "SQUAD": "tasks.readers.squad",
    "CIFAR10": "tasks.cifar10",
}
_KNOWN = f"{', '.join(TASKS)}, or a module of your own such as tasks.mine"


def list_tasks() -> str:
    """The tasks, each with the first line of its docstring."""
    lines = ["usage: tasks/main.py --task NAME --load DIRECTORY ...", ""]
    for name in TASKS:
        summary = (find_module(name).__doc__ or "").partition("\n")[0]
        lines.append(f"  {name:<12} {summary}")
    lines.append("  tasks.mine   A module of your own: tasks/README.md says what it has.")
    return "\n".join([*lines, "", "The flags of a task: tasks/main.py --task NAME -h", ""])


def split_task(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """(NAME of --task NAME or --task=NAME, in capitals if TASKS has it so, other arguments)."""
    words: list[str] = []
    for word in arguments:
        words += word.split("=", 1) if word.startswith("--task=") else [word]
    if "--task" not in words[:-1]:
        raise UsageError("--task", None, f"given: {_KNOWN}; --help lists them")
    place = words.index("--task")
    name = words[place + 1]
    known = name.upper() if name.upper() in TASKS else name
    return known, words[:place] + words[place + 2 :]


def find_module(name: str) -> Any:
    """The task's module, or the class in a module; raises UsageError where there is none."""
    module, _, part = TASKS.get(name, name).partition(":")
    if (
        "." not in module
        or find_spec(module.partition(".")[0]) is None
        or find_spec(module) is None
    ):
        raise UsageError("--task", name, f"one of {_KNOWN}")
    found = import_module(module)
    if part:
        found = vars(found).get(part)
    if missing := {"Settings", "prepare"} - set(dir(found)):
        what = "class" if part else "module"
        raise UsageError("--task", name, f"a {what} with {min(missing)}, or one of {_KNOWN}")
    return found


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        flags = {word.partition("=")[0] for word in arguments}
        if "--task" not in flags and flags & helps.WORDS:
            if is_first(environ):
                print(helps.with_examples(list_tasks(), helps.examples()), end="")
            return
        name, rest = split_task(arguments)
        module = find_module(name)
        prog, about = f"tasks/main.py --task {name}", module.__doc__
        settings = parse(module.Settings, rest, environ, prog=prog, description=about)
    command = ["tasks/main.py", *arguments]
    if isinstance(settings, FinetuneSettings):
        run_finetuned(name, module, settings, command, environ)
    else:
        run_evaluation(name, module, settings, command, environ)


def run_finetuned(
    name: str,
    module: Any,
    settings: FinetuneSettings,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Fine-tune a BERT, evaluate fine-tuned ones, or score the answers in a file."""
    with user_errors(environ):
        if settings.is_judged:
            check_judged(settings)
            figures = module.score_only(settings)
            data = [identify(each) for each in settings.files]
            record = arrange(
                name, figures, {"version": version(), "data": data, "command": command}
            )
            if is_first(environ):
                publish(record, settings.evaluation)
            return
        job = make_job(name, module, settings, command, world_size(environ))

    from megatron.train.launch import launch
    from megatron.train.watch import one_message
    from tasks.finetune import evaluate_models, fine_tune

    is_exact = settings.deterministic
    with one_message(environ), launch(settings.parallel, environ, deterministic=is_exact) as mesh:
        act = fine_tune if settings.train_data else evaluate_models
        record, here = act(job, mesh, environ)
        if mesh.is_first:
            with user_errors(environ, agreed=True):
                publish(record, settings.evaluation, job.task.paper or name, here)


def run_evaluation(
    name: str,
    module: Any,
    settings: TaskSettings | ImageSettings,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Evaluate a GPT-2, a Llama or a ViT without fine-tuning, and publish the record."""
    with user_errors(environ):
        if settings.evaluation.compare_paper:
            paper.columns_of(name)
        parallel, world, of_tokens = settings.parallel, world_size(environ), dict[str, Any]()
        if isinstance(settings, ImageSettings):
            folders, manifest = open_model(settings.trained.load, parallel, world, ["vit"])
            task = module.prepare(settings, manifest, None)
            data = [task.data]
        else:
            folders, tokenizer, manifest = open_trained(settings.trained, parallel, world)
            task = module.prepare(settings, manifest, tokenizer)
            data = [identify(file) for file in settings.files]
            of_tokens = {"begin_token": begin_token_of(manifest, tokenizer)}

    from megatron.inference.generate import DivergedError
    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch
    from megatron.train.state import DTYPES
    from tasks.score import score_task

    size = settings.evaluation.micro_batch_size
    with launch(parallel, environ) as mesh:
        with user_errors(environ, agreed=True):
            checkpoint, model = load_newest(folders, mesh, DTYPES[settings.trained.dtype])
        # Any other exception here is a bug of the task, and its traceback is shown.
        with user_errors(environ, agreed=True, kinds=(DivergedError,)):
            figures = score_task(task, model, mesh, size, name)
        if mesh.is_first:
            facts = describe(checkpoint, model, mesh, settings.trained.dtype) | of_tokens
            facts |= {"data": data, "micro_batch_size": size, "command": command}
            record = arrange(name, figures, facts)
            with user_errors(environ, agreed=True):
                publish(record, settings.evaluation, name, {"this_model": figures})


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
