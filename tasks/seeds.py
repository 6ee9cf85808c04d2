"""Fine-tuning over several seeds: every epoch evaluated, finished seeds kept, median and spread."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from megatron.config.checkpoints import step_folders
from megatron.config.model import FinetunedConfig
from megatron.config.parse import user_errors
from megatron.parallel.factory import factory_1d
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import RandomStreams
from megatron.train.agree import agree, refuse_alike
from megatron.train.checkpoint import read_manifest
from megatron.train.claim import claim
from megatron.train.finetune import Course, begin, finetuned_section, save_finetuned, train_epoch
from megatron.train.folder import remove
from megatron.train.launch import default_precision
from megatron.train.metrics import Metrics
from megatron.train.models import MODELS, section_of
from megatron.train.start import newest_whole
from megatron.train.state import TrainState
from tasks.finetune import Plan, assemble
from tasks.finetuning import figure_name
from tasks.finished import identity_of, keep_result, read_result
from tasks.judging import ask, divergence_told, judge
from tasks.log import Log
from tasks.record import describe
from tasks.spread import medians, summarise
from tasks.stopping import Progress, stoppable

PROTOCOL = {
    "figures": "at the top level: medians over the seeds, each at its last epoch",
    "last_epoch": "median, lowest and highest over the seeds, each at its last epoch",
    "best_epoch": "the same, each at its epoch with the highest {best} on the very data that is "
    "evaluated, and so too good by what that choice gains",
    "training": "every example once an epoch, in an order of the seed and the epoch; the last step "
    "of an epoch has the examples that are left; linear warm-up, then linear decay to 0",
}


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What the runs of all seeds have in common."""

    plan: Plan
    mesh: Mesh
    pretrained: Path
    section: FinetunedConfig
    identity: Mapping[str, Any]  # of finished.identity_of
    progress: Progress

    @property
    def best(self) -> str:
        return figure_name(*self.plan.task.best)

    def directory(self, seed: int) -> Path | None:
        save = self.plan.settings.save
        return None if save is None else save / f"seed_{seed}"

    def course(self, seed: int) -> Course:
        own = {name: getattr(self.plan.settings, name) for name in SETTINGS}
        return Course(examples=self.plan.task.train, seed=seed, **own)


METRICS = "metrics.jsonl"
SETTINGS = [name for name in Course.__dataclass_fields__ if name not in ("examples", "seed")]


def fine_tune(
    plan: Plan, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table) of training with every seed."""
    settings = plan.settings
    seeds = range(settings.seed, settings.seed + settings.seeds)
    progress = Progress(save=settings.save)
    with ExitStack() as stack:
        stack.enter_context(stoppable(progress, mesh))
        with user_errors(environ, agreed=True):
            save = None if settings.save is None else str(settings.save)
            stack.enter_context(claim(save, mesh))
            runs = start(with_dtype(plan, mesh), mesh, progress)
            finished = take_up(runs, seeds)
        if plan.task.labels and mesh.is_first:
            labels = ", ".join(f"{number} {name}" for number, name in enumerate(plan.task.labels))
            print(f"labels: {labels}", file=sys.stderr)
        results = [finished.get(seed) or run_seed(runs, seed, environ) for seed in seeds]
        return report(runs, results) if mesh.is_first else ({}, {})


def with_dtype(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with the precision that pretraining would choose, where --dtype is not given.

    Raises ValueError, on every rank, where the devices of the ranks differ in that.
    """
    chosen = mesh.control.gather(plan.settings.dtype or default_precision(mesh.device))
    if len(set(chosen)) > 1:
        raise ValueError(
            f"the ranks' devices would compute in {' and '.join(sorted(set(chosen)))}; "
            "--dtype fp32, for all of them, would work"
        )
    dtype = chosen[0]
    settings: Any = replace(plan.settings, dtype=dtype)
    facts = {**plan.facts, "hyper_parameters": {**plan.facts["hyper_parameters"], "dtype": dtype}}
    return replace(plan, settings=settings, facts=facts)


def start(plan: Plan, mesh: Mesh, progress: Progress) -> Runs:
    """Find the newest whole checkpoint to start from."""
    settings, task = plan.settings, plan.task
    pretrained, manifest, passed_over = newest_whole(plan.models[0], mesh)
    for reason in passed_over if mesh.is_first else ():
        print(f"warning: passed over: {reason}", file=sys.stderr)
    section = finetuned_section(
        section_of(manifest),
        task.head,
        task.labels,
        hidden_dropout=settings.hidden_dropout,
        attention_dropout=settings.attention_dropout,
        recompute_granularity=settings.recompute_granularity,
    )
    identity = identity_of(plan, manifest["checksum"])
    return Runs(
        plan=plan,
        mesh=mesh,
        pretrained=pretrained,
        section=section,
        identity=identity,
        progress=progress,
    )


def take_up(runs: Runs, seeds: Sequence[int]) -> dict[int, Any]:
    """The results, by seed, of those that --save holds finished; the first rank's hold for all.

    Raises ValueError, on every rank, where one is of another command.
    """
    finished: dict[int, Any] = {}
    settings = runs.plan.settings

    def read() -> None:
        for seed in seeds if runs.mesh.is_first else ():
            directory = runs.directory(seed)
            result = None if directory is None else read_result(directory, runs.identity, settings)
            if result is not None:
                finished[seed] = result

    refuse_alike(runs.mesh, read)
    for seed in finished:
        print(f"seed {seed} is finished in {runs.directory(seed)}", file=sys.stderr)
    results: dict[int, Any] = runs.mesh.control.gather(finished)[0]
    runs.progress.finished.extend(results)
    return results


def run_seed(runs: Runs, seed: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Train with this seed; the figures of every epoch, and which one was best."""
    mesh, directory, course = runs.mesh, runs.directory(seed), runs.course(seed)
    runs.progress.begin(seed)
    with user_errors(environ, agreed=True):
        clear(directory, mesh)
        state = begin(runs.pretrained, runs.section, course, mesh)
    file = None if directory is None else directory / METRICS
    with Metrics(file, mesh, start=0, steps=course.steps) as metrics:
        metrics.bar.set_description(f"{runs.plan.name}, seed {seed}")
        log = Log(metrics, state, course)
        with divergence_told(environ):
            epochs = train(runs, course, state, log, directory)
    best = best_of(epochs, runs.best)
    paths = {"last": epochs[-1]["checkpoint"], "best": epochs[best]["checkpoint"]}
    epochs = [{key: epoch[key] for key in epoch if key != "checkpoint"} for epoch in epochs]
    result = {"seed": seed, "best_epoch": best + 1, "checkpoints": paths, "epochs": epochs}
    if directory is not None and mesh.is_first:
        keep_result(directory, runs.identity, runs.plan.settings, result)
    runs.progress.end(seed)
    # Hooks of the gradients refer to the model that holds them; the next one needs its memory.
    del state, log
    gc.collect()
    return result


def clear(directory: Path | None, mesh: Mesh) -> None:
    """Remove the checkpoints of a run with this seed that did not come to its end; it is told."""
    if directory is not None:
        folders = step_folders(directory) if mesh.is_first else []
        if mesh.is_first and (folders or (directory / METRICS).exists()):
            print(f"{directory}: this seed was interrupted and begins anew", file=sys.stderr)
        agree(mesh, lambda: [remove(folder) for folder in folders], "removing")


def train(
    runs: Runs, course: Course, state: TrainState, log: Log, directory: Path | None
) -> list[dict[str, Any]]:
    """What is known of each epoch; the checkpoints of the last and of the best one are kept."""
    task, size, epochs = runs.plan.task, course.micro_batch_size, list[dict[str, Any]]()
    for epoch in range(course.epochs):
        log.epoch = runs.progress.epoch = epoch + 1
        loss = train_epoch(state, course, epoch, log.step)
        logits = ask(task, state.model, runs.section, runs.mesh, size, f"epoch {epoch + 1}")
        figures = judge(task, logits) if runs.mesh.is_first else {}
        figures = runs.mesh.control.gather(figures)[0]
        line = {"epoch": epoch + 1, "train_loss": loss if isfinite(loss) else None}
        log.told({**line, "step": state.step, **figures})
        epochs.append({**line, "figures": figures, "checkpoint": None})
        if directory is not None:
            keep(runs, course, state, epochs, directory)
    return epochs


def keep(
    runs: Runs, course: Course, state: TrainState, epochs: list[dict[str, Any]], directory: Path
) -> None:
    """Save the epoch if it is the last or the best, and let go of the one that was the best."""
    number, is_last = len(epochs), len(epochs) == course.epochs
    is_best = best_of(epochs, runs.best) == number - 1
    if not (is_last or is_best):
        return
    facts = {
        "task": runs.plan.name,
        "pretrained": runs.identity["--load"],
        "hyper_parameters": runs.plan.facts["hyper_parameters"],
        "seed": course.seed,
        "epoch": number,
        "figures": epochs[-1]["figures"],
    }
    path = save_finetuned(
        state, runs.section, directory, runs.pretrained, runs.plan.tokenizer.files, facts
    )
    epochs[-1]["checkpoint"] = str(path)
    former = [epoch for epoch in epochs[:-1] if epoch["checkpoint"] is not None]
    for epoch in former if is_best else ():
        folders = [Path(epoch["checkpoint"])] if runs.mesh.is_first else []
        agree(runs.mesh, lambda folders=folders: [remove(each) for each in folders], "removing")
        epoch["checkpoint"] = None


def best_of(epochs: Sequence[Mapping[str, Any]], figure: str) -> int:
    """The place of the first epoch with the highest figure."""
    values = [float(epoch["figures"][figure]) for epoch in epochs]
    return max(range(len(values)), key=lambda place: (isfinite(values[place]), values[place]))


def report(
    runs: Runs, results: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table); only the first rank asks."""
    last = [each["epochs"][-1]["figures"] for each in results]
    best = [each["epochs"][each["best_epoch"] - 1]["figures"] for each in results]
    here = {"last_epoch": medians(last), "best_epoch": medians(best)}
    section = asdict(runs.section)
    manifest = read_manifest(runs.pretrained)
    model = outline(runs, manifest["vocab_size"])
    facts = describe(runs.pretrained, model, runs.mesh, runs.plan.settings.dtype)
    facts["model"] |= {name: section[name] for name in ("head", "labels")}
    protocol = {name: text.format(best=runs.best) for name, text in PROTOCOL.items()}
    figures = {
        "protocol": protocol,
        "seeds": list(results),
        "last_epoch": summarise(last),
        "best_epoch": summarise(best),
        **here["last_epoch"],
    }
    return assemble(runs.plan, facts, figures), here


def outline(runs: Runs, vocab_size: int) -> Any:
    """The model uncut and without memory, for its parameters' shapes."""
    _, make = MODELS[runs.section.kind]
    with torch.device("meta"):
        return make(runs.section, factory_1d(runs.mesh, RandomStreams(0, runs.mesh)), vocab_size)
