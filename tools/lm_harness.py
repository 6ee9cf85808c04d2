"""Evaluate a checkpoint with EleutherAI's lm-evaluation-harness (pip install lm-eval).

    python tools/lm_harness.py --load checkpoints --tasks hellaswag,piqa
    python tools/lm_harness.py --load checkpoints --tasks lambada_openai,wikitext \\
        --lambada-data lambada_test.jsonl --wikitext-data wiki.test.tokens --output harness.json

The harness provides tasks, prompts and metrics, this project log-probabilities. Under torchrun each
data-parallel rank scores its share, and the model may be sharded over the processes.

Two tasks can read local files, where the harness's data sets cannot be downloaded. Their
definitions include the harness's own and change only the source of the data, so prompt, target,
detokenisation and metrics stay the harness's.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import positive
from megatron.config.launch import interruptible, world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.errors import UsageError, flag
from megatron.libraries import Library, load
from megatron.train.trained import begin_of, begin_token_of, open_trained
from tasks.lambada import read_passages
from tasks.protocol import EvaluationConfig
from tasks.record import describe, identify, publish
from tasks.wikitext103 import cut_articles, read_articles

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

HARNESS = "lm-eval"  # its name for pip
harness_tasks = Library("lm_eval.tasks")
defaults = Library("lm_eval.defaults")
evaluator = Library("lm_eval.evaluator")

# By task: the setting of its local file; its definition inside lm_eval/tasks and the key of the
# text in its documents; the reader of its texts.
LOCAL = {"lambada_openai": "lambada_data", "wikitext": "wikitext_data"}
DEFINITIONS = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "text"),
    "wikitext": ("wikitext/wikitext.yaml", "page"),
}


# Called with the file and its flag. WikiText is cut before the title of every article.
READERS: Mapping[str, Callable[[Path, str], list[str]]] = {
    "lambada_openai": lambda file, flag: [text for _, text in read_passages(file, flag)[1]],
    "wikitext": lambda file, flag: cut_articles(read_articles(file, flag)),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    trained: TrainedConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    tasks: str
    """Comma-separated names of the harness's tasks."""

    lambada_data: Path | None = None
    """Passages for lambada_openai in place of its data set: {"text": ...} lines, or plain text."""

    wikitext_data: Path | None = None
    """Raw WikiText (wiki.test.tokens) for wikitext in place of its data set."""

    limit: int | None = None
    """Evaluate only the first documents of each task; all by default."""

    micro_batch_size: int = 8
    """Windows per forward pass; changes the result only by rounding."""

    output: Path | None = field(default=None, metadata={"alias": "json"})
    """JSON file for the result, which is also printed. Also spelt --json."""

    def __post_init__(self) -> None:
        positive(self, "limit")
        assert self.evaluation  # runs its checks
        if not self.names:
            raise UsageError(
                "--tasks", None, "followed by names", works=("--tasks", "lambada_openai,wikitext")
            )
        for task, name in LOCAL.items():
            if getattr(self, name) is not None and task not in self.names:
                raise UsageError(
                    flag(name),
                    getattr(self, name),
                    f"given with the task {task} among --tasks {self.tasks}",
                    works=(flag(name), str(getattr(self, name)), "--tasks", f"{self.tasks},{task}"),
                )

    @property
    def names(self) -> list[str]:
        return [name for name in self.tasks.split(",") if name]

    @property
    def evaluation(self) -> EvaluationConfig:
        return EvaluationConfig(micro_batch_size=self.micro_batch_size, output=self.output)

    @property
    def local_data(self) -> dict[str, Path]:
        """The local file of each task that has one."""
        files = {task: getattr(self, name) for task, name in LOCAL.items()}
        return {task: file for task, file in files.items() if file is not None}


def find_harness() -> Path:
    """The folder of the installed lm_eval. Raises MissingLibrary."""
    return Path(str(load("lm_eval").__file__)).parent


def write_local(folder: Path, harness: Path, files: Mapping[str, Path]) -> None:
    """Write definitions for tasks that read local files."""
    for task, file in files.items():
        write_definition(folder, harness, task, READERS[task](file, flag(LOCAL[task])))


def write_definition(folder: Path, harness: Path, task: str, texts: Sequence[str]) -> None:
    """Write TASK.yaml and TASK.jsonl, its documents, into the folder.

    harness: the folder of lm_eval. The harness stores its copy of the documents in `folder`, too.
    """
    original, key = DEFINITIONS[task]
    data = folder.resolve() / f"{task}.jsonl"
    data.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    definition = {
        "include": str(harness / "tasks" / original),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(data.with_name("cache")),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    # JSON is valid YAML.
    (folder / f"{task}.yaml").write_text(json.dumps(definition, indent=1), encoding="utf-8")


def find_tasks(names: Sequence[str], folder: Path) -> TaskManager:
    """A task manager that knows these tasks; raises UsageError if none does.

    The harness's own definitions, fourteen thousand files, are read only if needed.
    """
    manager = harness_tasks.TaskManager(include_path=[str(folder)], include_defaults=False)
    if set(names) <= manager.task_index.keys():
        return manager
    manager = harness_tasks.TaskManager(include_path=[str(folder)])
    if missing := [name for name in names if name not in manager.task_index]:
        raise UsageError(
            "--tasks",
            ",".join(missing),
            "known to lm-eval",
            works=("--tasks", "lambada_openai,wikitext"),
        )
    return manager


def ask(lm: LM, names: Sequence[str], manager: TaskManager, limit: int | None) -> dict[str, Any]:
    """Results of the harness, without standard errors; the same on every rank."""
    tasks = manager.load(list(names))
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)  # chooses the examples in a prompt
    return {**evaluator.evaluate(lm, tasks, limit=limit, bootstrap_iters=0)}


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        with user_errors(environ):
            settings = parse(Settings, arguments, environ)
            harness = find_harness()
            folders, tokenizer, manifest = open_trained(
                settings.trained, settings.parallel, world_size(environ)
            )
            write_local(folder, harness, settings.local_data)
            manager = find_tasks(settings.names, folder)

        from megatron.inference.generate import DivergedError
        from megatron.train.evaluate import load_newest
        from megatron.train.launch import launch
        from megatron.train.state import DTYPES
        from tasks.language_model import CheckpointLM

        with launch(settings.parallel, environ) as mesh:
            with user_errors(environ, agreed=True):
                checkpoint, model = load_newest(folders, mesh, DTYPES[settings.trained.dtype])
            begin, size = begin_of(manifest, tokenizer), settings.micro_batch_size
            lm = CheckpointLM(model, mesh, tokenizer, size, begin)
            with user_errors(environ, agreed=True, kinds=(DivergedError,)):
                found = ask(lm, settings.names, manager, settings.limit)
            if mesh.is_first:
                record = {
                    "results": found["results"],
                    "documents": found["n-samples"],
                    "versions": found["versions"],
                    "begin_token": begin_token_of(manifest, tokenizer),
                    "limit": settings.limit,
                    "micro_batch_size": settings.micro_batch_size,
                    "data": [identify(file) for file in settings.local_data.values()],
                    "lm_eval": version(HARNESS),
                    **describe(checkpoint, model, mesh, settings.trained.dtype),
                    "command": ["tools/lm_harness.py", *arguments],
                }
                with user_errors(environ):
                    publish(record, settings.evaluation)


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
