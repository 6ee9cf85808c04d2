"""Fine-tuning over several seeds with the training loop, and evaluation of fine-tuned models."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.checkpoint.format import Checkpoint, step_folders
from megatron.checkpoint.retention import claim, remove
from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import FinetunedConfig
from megatron.config.parse import user_errors
from megatron.config.training import TrainingConfig
from megatron.data.batch import ExampleBatch
from megatron.data.files import write_atomically
from megatron.errors import UsageError, flag
from megatron.inference.generate import DivergedError
from megatron.models.build import build_on_meta
from megatron.models.registry import config_of
from megatron.optim.schedule import learning_rate
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.train.diagnose import NonFiniteError
from megatron.train.evaluate import find_newest, load_newest
from megatron.train.loop import Loop, train
from megatron.train.machine import choose_precision, environment
from megatron.train.metrics import Metrics
from megatron.train.signals import SIGNALS, StopSignals
from megatron.train.state import DTYPES, TrainState
from megatron.train.step import StepResult
from tasks.examples import Steps, finetuned_config, logits_of, optimizer_config, start
from tasks.plan import RESULT, Plan
from tasks.protocol import Finetuning, figure_name
from tasks.record import arrange, describe

METRICS = "metrics.jsonl"
LINES = 10  # of metrics per epoch
PROTOCOL = {
    "figures": "at the top level: medians over the seeds, each at its last epoch",
    "last_epoch": "median, lowest and highest over the seeds, each at its last epoch",
    "best_epoch": "the same, each at its epoch with the highest {best} on the very data that is "
    "evaluated, and so too good by what that choice gains",
    "training": "every example once an epoch, in an order of the seed and the epoch; the last step "
    "of an epoch has the examples that are left; linear warm-up, then linear decay to 0",
}
DATA = {"--train-data": "train_data", "--valid-data": "valid_data"}
Result: TypeAlias = dict[str, Any]
"""Result of a seed: number, best epoch, checkpoints, and loss and figures of each epoch."""
Logits: TypeAlias = Mapping[str, Sequence[NDArray[np.float32]]]
"""Logits of each example, by evaluation."""


@dataclass(kw_only=True)
class FinetuneRun:
    """Data that all seeds share, and the progress of the fine-tuning."""

    plan: Plan
    mesh: Mesh
    environ: Mapping[str, str]
    pretrained: Checkpoint
    config: FinetunedConfig
    identity: Mapping[str, Any]
    """Values that a finished seed must share with this command to be reused."""
    finished: dict[int, Result] = field(default_factory=dict)
    seed: int | None = None  # the seed in training
    epoch: int = 0  # its epoch, counted from 1; 0 before the first one

    @property
    def best(self) -> str:
        return figure_name(*self.plan.task.best)

    def directory(self, seed: int) -> Path | None:
        save = self.plan.settings.save
        return None if save is None else save / f"seed_{seed}"

    def status(self) -> str:
        """Message for a stop by a signal: what is finished, and how to continue."""
        place = f"in epoch {self.epoch}" if self.epoch else "before its first epoch"
        stopped = "stopped" if self.seed is None else f"seed {self.seed} stopped {place}"
        if self.plan.settings.save is None:
            return f"{stopped}: without --save nothing is kept"
        goes_on = "goes on" if self.seed is None else "begins it anew"
        finished = ", ".join(map(str, self.finished)) or "none"
        return f"{stopped}: the same command {goes_on}; finished: {finished}"


def fine_tune(
    plan: Plan, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with every seed; returns (record, figures for the paper's table)."""
    settings = plan.settings
    seeds = range(settings.seed, settings.seed + settings.seeds)
    run: FinetuneRun | None = None
    # A signal ends the process at once: an unfinished epoch leaves nothing that could be used.
    try:
        with StopSignals(), ExitStack() as stack:
            with user_errors(environ, agreed=True):
                stack.enter_context(claim(str(settings.save) if settings.save else None, mesh))
                run = start_run(with_dtype(plan, mesh), mesh, environ)
                load_finished(run, seeds)
            if plan.task.labels and mesh.is_first:
                labels = ", ".join(
                    f"{number} {each}" for number, each in enumerate(plan.task.labels)
                )
                print(f"labels: {labels}", file=sys.stderr)
            for seed in seeds:
                if seed not in run.finished:
                    train_seed(run, seed)
            results = [run.finished[seed] for seed in seeds]
            return report(run, results) if mesh.is_first else ({}, {})
    except SystemExit as stop:
        if mesh.is_first and stop.code in SIGNALS.values():
            status = run.status() if run else "stopped before the first seed"
            print(status, file=sys.stderr, flush=True)
        raise


def with_dtype(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with the precision that pretraining would choose, if --dtype is not given.

    Raises ValueError, on every rank, where the ranks' devices would choose different ones.
    """
    dtype = choose_precision(plan.settings.dtype, mesh, "--dtype", ("--dtype", "fp32"))
    settings: Any = replace(plan.settings, dtype=dtype)
    parameters = {**plan.facts["hyper_parameters"], "dtype": dtype}
    return replace(plan, settings=settings, facts={**plan.facts, "hyper_parameters": parameters})


def start_run(plan: Plan, mesh: Mesh, environ: Mapping[str, str]) -> FinetuneRun:
    """The run, which starts from the newest undamaged checkpoint."""
    settings, task = plan.settings, plan.task
    pretrained = find_newest(plan.models[0], mesh)
    manifest = pretrained.manifest
    config = finetuned_config(
        config_of(manifest),
        task.head,
        task.labels,
        hidden_dropout=settings.hidden_dropout,
        attention_dropout=settings.attention_dropout,
        recompute_granularity=settings.recompute_granularity,
    )
    hashes = {each.get("file", each.get("folder")): each["sha256"] for each in plan.facts["data"]}
    identity = {
        "--task": plan.name,
        "--load": manifest["checksum"],
        "--train-data": [hashes[str(file)] for file in settings.train_data],
        "--valid-data": [hashes[str(file)] for file in settings.valid_data],
        "the evaluations": list(task.evaluations),
        **{flag(name): value for name, value in plan.facts["hyper_parameters"].items()},
    }
    return FinetuneRun(
        plan=plan,
        mesh=mesh,
        environ=environ,
        pretrained=pretrained,
        config=config,
        identity=identity,
    )


def train_seed(run: FinetuneRun, seed: int) -> None:
    """Train with this seed; the result goes to --save and to `run.finished`."""
    mesh, settings, directory = run.mesh, run.plan.settings, run.directory(seed)
    run.seed, run.epoch = seed, 0
    steps = Steps(
        examples=run.plan.task.train,
        seed=seed,
        epochs=settings.epochs,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
    )
    optimizer = optimizer_config(settings, len(steps))
    assert settings.dtype is not None  # with_dtype
    assert optimizer.lr_decay_iters is not None
    with user_errors(run.environ, agreed=True):
        if directory is not None:  # it may hold checkpoints of an interrupted run
            folders = step_folders(directory) if mesh.is_first else []
            if mesh.is_first and (folders or (directory / METRICS).exists()):
                print(f"{directory}: this seed was interrupted and begins anew", file=sys.stderr)
            remove_all(folders, mesh)
        state = start(
            run.pretrained,
            run.config,
            optimizer,
            settings.dtype,
            seed,
            mesh,
            settings.parallel.stage_of_zero,
        )
        file = None if directory is None else directory / METRICS
        metrics = Metrics(file, mesh, start=0, steps=len(steps), stream=sys.stderr)
    with metrics:
        metrics.bar.set_description(f"{run.plan.name}, seed {seed}")
        epochs = Epochs(run, steps, metrics)
        loop = Loop(
            training=TrainingConfig(
                train_iters=len(steps),
                eval_interval=steps.per_epoch,
                check_replicas_interval=steps.per_epoch,
            ),
            batches=epochs.batches(),
            learning_rate=partial(learning_rate, optimizer, decay_iters=optimizer.lr_decay_iters),
            evaluate=epochs.evaluate,
            save=epochs.save,
            metrics=metrics,
            signals=StopSignals(),
            facts=lambda state: {"seed": seed, "epoch": run.epoch},
            log_interval=-(-steps.per_epoch // LINES),
            save_interval=steps.per_epoch,
            post_step=epochs.post_step,
        )
        try:
            train(state, loop)
        except NonFiniteError as error:
            with user_errors(run.environ, agreed=True):
                raise ValueError(_divergence(error, state, seed, run.epoch)) from error
    result = epochs.result()
    if directory is not None and mesh.is_first:
        names = {name: [file.name for file in getattr(settings, key)] for name, key in DATA.items()}
        kept = {"identity": run.identity, "files": names, "result": result}
        write_atomically(directory / RESULT, json.dumps(kept, indent=1).encode() + b"\n")
    run.seed, run.finished[seed] = None, result
    # Gradient hooks form a reference cycle with the model; the next model needs its memory.
    del state, loop, epochs
    gc.collect()


def remove_all(folders: Sequence[Path], mesh: Mesh) -> None:
    """Remove folders on the first rank. Every rank calls this, and raises if that fails."""

    def act() -> None:
        for folder in folders if mesh.is_first else ():
            remove(folder)

    agree(mesh, act, "removing")


class Epochs:
    """The epochs of a seed, for the loop: batches, the evaluation at the end of each epoch, and the
    checkpoints of the last and the best epoch."""

    def __init__(self, run: FinetuneRun, steps: Steps, metrics: Metrics) -> None:
        self.run, self.steps, self.metrics = run, steps, metrics
        self.done: list[dict[str, Any]] = []
        self.loss_sum = self.examples_seen = 0.0

    def batches(self) -> Generator[list[ExampleBatch]]:
        for step in range(len(self.steps)):
            self.run.epoch = step // self.steps.per_epoch + 1
            self.metrics.prefix = f"seed {self.steps.seed} | epoch {self.run.epoch} | "
            yield self.steps.micro_batches(step, self.run.mesh)

    def post_step(self, state: TrainState, result: StepResult) -> None:
        if not result.skipped:
            count = len(self.steps.numbers(state.step - 1))
            self.loss_sum += result.loss * count
            self.examples_seen += count

    def evaluate(self, state: TrainState) -> None:
        """Run all evaluations, and record the figures with the epoch's mean loss, without the steps
        that fp16 skipped."""
        run, size = self.run, self.steps.micro_batch_size
        loss = self.loss_sum / self.examples_seen if self.examples_seen else nan
        self.loss_sum = self.examples_seen = 0.0
        label = f"epoch {run.epoch}"
        with user_errors(run.environ, agreed=True, kinds=(DivergedError,)):
            logits = ask(run.plan.task, state.model, run.config, run.mesh, size, label)
        figures = judge(run.plan.task, logits) if run.mesh.is_first else {}
        figures = run.mesh.control.gather(figures)[0]
        line = {"epoch": run.epoch, "train_loss": loss if isfinite(loss) else None}
        self.metrics.write({"step": state.step, "seed": self.steps.seed, **line, **figures})
        shown = {"train_loss": loss, **figures}
        words = [f"{name} {value:.4g}" for name, value in shown.items() if _is_number(value)]
        self.metrics.log(" | ".join([f"step {state.step}", *words]))
        self.done.append({**line, "figures": figures, "checkpoint": None})

    def save(self, state: TrainState, validation_loss: float | None) -> None:
        """Save the epoch if it is the last or the best one, and remove the previous best."""
        run, number = self.run, len(self.done)
        directory = run.directory(self.steps.seed)
        is_best = self.best() == number - 1
        if directory is None or not (is_best or number == self.steps.epochs):
            return
        manifest = run.pretrained.manifest
        facts = {
            "kind": run.config.kind,
            "config": {"model": asdict(run.config), "data": manifest["config"]["data"]},
            "precision": state.precision,
            **{key: manifest[key] for key in ("vocab_size", "tokenizer", "data")},
            "run": None,
            "weights_of": manifest.get("run"),
            "counters": state.counters(),
            "environment": environment(state.mesh),
            "validation_loss": None,
            "finetuned": {
                "task": run.plan.name,
                "pretrained": run.identity["--load"],
                "hyper_parameters": run.plan.facts["hyper_parameters"],
                "seed": self.steps.seed,
                "epoch": number,
                "figures": self.done[-1]["figures"],
            },
        }
        # Without the optimizer's state: fine-tuning does not resume from an epoch.
        slices, beside = state.weights(), run.config.files(run.pretrained.path)
        files = {**beside, **run.plan.tokenizer.files}
        path = save_checkpoint(directory, state.step, slices, facts, run.mesh, files).path
        former = [epoch for epoch in self.done if epoch["checkpoint"] is not None]
        self.done[-1]["checkpoint"] = str(path)
        for epoch in former if is_best else ():
            remove_all([Path(epoch["checkpoint"])], run.mesh)
            epoch["checkpoint"] = None

    def best(self) -> int:
        """Index of the first epoch with the highest figure."""
        values = [float(epoch["figures"][self.run.best]) for epoch in self.done]
        return max(range(len(values)), key=lambda place: (isfinite(values[place]), values[place]))

    def result(self) -> Result:
        best = self.best()
        paths = {"last": self.done[-1]["checkpoint"], "best": self.done[best]["checkpoint"]}
        epochs = [{key: epoch[key] for key in epoch if key != "checkpoint"} for epoch in self.done]
        return {
            "seed": self.steps.seed, "best_epoch": best + 1, "checkpoints": paths, "epochs": epochs,
        }  # fmt: skip


def _divergence(error: NonFiniteError, state: TrainState, seed: int, epoch: int) -> str:
    """Message: where the divergence began, and what may help."""
    scaler, found = state.scaler, error.found
    scale = f" at loss scale {scaler.scale:g}" if scaler.is_scaling else ""
    seen = f"; first seen in {found.what}, on the rank at {found.coordinates}" if found else ""
    helps = ["a lower --lr", "a larger --lr-warmup-fraction"]
    helps += ["--dtype bf16"] if scaler.is_scaling else []
    return (
        f"seed {seed}, epoch {epoch}, step {state.step + 1}: the {error.what} is not finite"
        f"{scale}{seen}; {' or '.join(helps)} may help"
    )


def load_finished(run: FinetuneRun, seeds: Sequence[int]) -> None:
    """Load the results of the seeds finished in --save; the first rank reads them for all.

    Raises ValueError, on every rank, where one is from another command.
    """

    def read() -> dict[int, Result]:
        finished = dict(run.finished)
        for seed in seeds if run.mesh.is_first else ():
            directory = run.directory(seed)
            if directory is not None and (directory / RESULT).is_file():
                finished[seed] = read_result(directory / RESULT, run)
                print(f"seed {seed} is finished in {directory}", file=sys.stderr)
        return finished

    run.finished = run.mesh.control.gather(on_all_ranks(run.mesh, read))[0]


def read_result(file: Path, run: FinetuneRun) -> Result:
    """The result of a finished seed; ValueError, naming the difference, if from another run."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        result: Result = kept["result"]
        then, names = kept["identity"], kept.get("files", {})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: {error!r}; without that file the seed is run again"
        ) from error
    for name, now in json.loads(json.dumps(run.identity)).items():
        if then.get(name) != now:
            what = f"with {name} {then.get(name)}, and here it is {now}"
            if name in DATA:
                files = [each.name for each in getattr(run.plan.settings, DATA[name])]
                old = zip(names.get(name, []), then.get(name, []), strict=False)
                differing = {file for file, _ in {*old} ^ {*zip(files, now, strict=True)}}
                what = f"with other {name}: {', '.join(sorted(differing)) or 'in another order'}"
            what = re.sub("([0-9a-f]{12})[0-9a-f]{52}", r"\1", what)
            raise UsageError(
                "--save", file.parents[1], f"another folder: this holds seeds of a run {what}"
            )
    return result


def report(run: FinetuneRun, results: Sequence[Result]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table); called only on the first rank."""
    last = [each["epochs"][-1]["figures"] for each in results]
    best = [each["epochs"][each["best_epoch"] - 1]["figures"] for each in results]
    here = {"last_epoch": medians(last), "best_epoch": medians(best)}
    vocab_size = run.pretrained.manifest["vocab_size"]
    model = build_on_meta(run.config, run.mesh, vocab_size)
    assert run.plan.settings.dtype is not None
    facts = describe(run.pretrained, model, run.mesh, run.plan.settings.dtype)
    facts["model"] |= {name: asdict(run.config)[name] for name in ("head", "labels")}
    figures = {
        "protocol": {name: text.format(best=run.best) for name, text in PROTOCOL.items()},
        "seeds": list(results),
        "last_epoch": summarise(last),
        "best_epoch": summarise(best),
        **here["last_epoch"],
    }
    return assemble(run.plan, facts, figures), here


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, lowest and highest value of each figure over the seeds, also inside mappings. Counts
    that are equal for all seeds are left out."""

    def spread(values: Sequence[float]) -> dict[str, float] | None:
        if isinstance(values[0], int) and len(set(values)) == 1:
            return None
        return {"median": median(values), "min": min(values), "max": max(values)}

    return _of_each(rows, spread)


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the seeds, and counts that are equal for all seeds."""
    return _of_each(rows, lambda values: values[0] if len(set(values)) == 1 else median(values))


def _of_each(rows: Sequence[Mapping[str, Any]], of: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """of: maps the values of a figure to a result, or None to skip it; non-numbers are skipped."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, Mapping):
            found[name] = _of_each(values, of)
        elif all(map(_is_number, values)) and (figure := of(values)) is not None:
            found[name] = figure
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluate_models(
    plan: Plan, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table): each model and, of several, their mean logits."""
    rows, every = [], []
    for folders, dtype in zip(plan.models, plan.dtypes, strict=True):
        with user_errors(environ, agreed=True):
            checkpoint, model = load_newest(folders, mesh, DTYPES[dtype])
        manifest, size = checkpoint.manifest, plan.settings.micro_batch_size
        with user_errors(environ, agreed=True, kinds=(DivergedError,)):
            every.append(ask(plan.task, model, config_of(manifest), mesh, size, plan.name))
        facts = describe(checkpoint, model, mesh, dtype)
        rows.append({**facts, "finetuned": manifest.get("finetuned", {})})
    if not mesh.is_first:
        return {}, {}
    each, first = [judge(plan.task, logits) for logits in every], rows[0]
    if not plan.settings.ensemble:
        return assemble(plan, first, each[0]), {"this_model": each[0]}
    figures = judge(plan.task, mean_logits(every))
    of_each = ("checkpoint", "checkpoint_hash", "step", "dtype", "finetuned")
    models = [
        {**{key: row[key] for key in of_each}, "figures": own}
        for row, own in zip(rows, each, strict=True)
    ]
    facts = {key: value for key, value in first.items() if key not in of_each}
    return assemble(plan, {**facts, "models": models}, figures), {"ensemble": figures}


def assemble(plan: Plan, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The record; figures may contain "protocol"."""
    words = {"labels": list(plan.task.labels), "notes": dict(plan.task.notes)}
    conventions = {"conventions": dict(plan.task.conventions)}
    return arrange(plan.name, {**conventions, **figures}, {**words, **facts, **plan.facts})


def ask(task: Finetuning, model: Any, config: Any, mesh: Mesh, size: int, label: str) -> Logits:
    """The model's logits for every example of all evaluations, the same on every rank."""
    return {
        name: logits_of(model, config, mesh, examples, size, f"{label} {name}".strip())
        for name, examples in task.evaluations.items()
    }


def mean_logits(every: Sequence[Logits]) -> Logits:
    """The models' mean logits for each example (paper, table 5: ensemble)."""
    return {
        name: [np.mean(each, axis=0) for each in zip(*(own[name] for own in every), strict=True)]
        for name in every[0]
    }


def judge(task: Finetuning, logits: Logits) -> dict[str, Any]:
    """The figures of all evaluations, by their names in the record, as JSON values."""
    each = {name: task.figures(name, logits[name]) for name in task.evaluations}
    named = {
        figure_name(evaluation, figure): value
        for evaluation, figures in each.items()
        for figure, value in figures.items()
    }
    further = task.combined(each)
    assert not named.keys() & further.keys(), "two figures of one name"
    # Numpy scalars become numbers.
    text = json.dumps(named | dict(further), default=lambda value: value.item())
    figures: dict[str, Any] = json.loads(text)
    return figures
