"""Fine-tuning over several seeds with the training loop, and evaluation of fine-tuned models.

The order of an epoch's examples is a function of (seed, epoch). A step takes the next
global_batch_size examples, and the last step of an epoch the remaining ones: every example is used
once per epoch, with the same weight as the others of its step.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.checkpoint.format import Checkpoint, step_folders
from megatron.checkpoint.retention import claim, remove
from megatron.checkpoint.save import save_checkpoint
from megatron.config.launch import SIGNALS, StopSignals
from megatron.config.model import FinetunedConfig, Head, ModelConfig
from megatron.config.parse import user_errors
from megatron.config.training import OptimizerConfig, PrecisionConfig, TrainingConfig
from megatron.data.batch import ExampleBatch
from megatron.data.files import write_atomically
from megatron.data.order import permute
from megatron.errors import UsageError, flag
from megatron.inference.generate import DivergedError
from megatron.models.build import build_on_meta
from megatron.models.registry import config_of
from megatron.optim.schedule import learning_rate
from megatron.parallel.agree import agree, on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.train.callbacks import Callback
from megatron.train.diagnose import NonFiniteError
from megatron.train.evaluate import find_newest, load_newest
from megatron.train.loop import Loop, train
from megatron.train.machine import choose_precision, environment
from megatron.train.metrics import Metrics
from megatron.train.monitors import usual
from megatron.train.state import DTYPES, TrainState, build_state
from megatron.train.step import StepResult
from tasks.job import RESULT, FinetuneJob
from tasks.protocol import Example, FinetuneSettings, Finetuning, Logits
from tasks.record import arrange, describe
from tasks.score import logits_of, make_batch

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
SEARCH = (
    "`chosen` has the highest {best} at the last epoch of one seed, on the very data that is "
    "evaluated, and so too good by what that choice gains; that seed is one of `seeds`; null "
    "stands for a training that diverged"
)
Result: TypeAlias = dict[str, Any]
"""Result of a seed: number, best epoch, checkpoints, and loss and figures of each epoch."""


class SeedDivergedError(ValueError):
    """The training with a seed has come to numbers that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The examples of each optimizer step of a training run, as a function of the step number."""

    examples: Sequence[Example]
    seed: int
    epochs: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def per_epoch(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    def __len__(self) -> int:
        return self.epochs * self.per_epoch

    def numbers(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples of a step; both are counted from 0."""
        epoch, place = divmod(step, self.per_epoch)
        start, size = place * self.global_batch_size, len(self.examples)
        places = np.arange(start, min(start + self.global_batch_size, size))
        return permute(places, size, seed=self.seed, epochs=np.full_like(places, epoch))

    def micro_batches(self, step: int, mesh: Mesh) -> list[ExampleBatch]:
        """This rank's share of a step: equally many batches of equal size on every rank.

        Examples of similar length are batched together, to save padding. Where the examples do not
        divide evenly, batches are filled with an example that is not part of the loss.
        """
        rows = [(number, self.examples[number]) for number in self.numbers(step)]
        rows.sort(key=lambda row: -row[1].longest)
        rounds = -(-len(rows) // (self.micro_batch_size * mesh.batch.size))
        shares = rounds * mesh.batch.size
        size = -(-len(rows) // shares)
        cuts = [len(rows) * number // shares for number in range(shares + 1)]
        # Numbers of samples go on over the epochs, so that dropout differs in each.
        epochs_before = step // self.per_epoch * len(self.examples)
        batches = []
        for share in range(mesh.batch.rank, shares, mesh.batch.size):
            own = rows[cuts[share] : cuts[share + 1]]
            numbers, examples = zip(*own, *[rows[-1]] * (size - len(own)), strict=True)
            # Ranks of one model replica compute together, and need the same number of tokens.
            longest = rows[cuts[share - mesh.tokens.rank]][1].longest
            batch = make_batch(examples, len(own), mesh.token_multiple, longest)
            batches.append(batch.numbered(np.array(numbers) + epochs_before))
        return batches


def finetuned_config(
    pretrained: ModelConfig, head: Head, labels: Sequence[str], **changes: Any
) -> FinetunedConfig:
    """The config of a pretrained BERT with this head in place of its own. changes: settings such as
    dropout, which belong to the run and not to the weights."""
    # torch's LayerNorm computes the same model; other kernels may not be installed here. Dropout is
    # by coordinates, even where that is slower; the embeddings' is --hidden-dropout.
    other: dict[str, Any] = {"layernorm_impl": "torch", "attention_dropout_rng": "coordinates"}
    other["cpu_offload_activations"] = False  # a memory setting of the pretraining run
    settings = {**asdict(pretrained), "embedding_dropout": None, **other, **changes}
    return FinetunedConfig(head=head, labels=tuple(labels), **settings)


def optimizer_config(settings: FinetuneSettings, steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        lr=settings.lr,
        min_lr=0.0,
        lr_decay_style="linear",
        lr_decay_iters=steps + 1,  # the rate reaches 0 after the last step
        lr_warmup_iters=round(settings.lr_warmup_fraction * steps),
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
    )


def start(
    pretrained: Checkpoint,
    config: FinetunedConfig,
    optimizer: OptimizerConfig,
    dtype: str,
    seed: int,
    mesh: Mesh,
    zero_stage: int = 0,
) -> TrainState:
    """A run at step 0 with the weights of the pretrained BERT, and a head initialised from the
    seed. zero_stage: ZeRO stage.

    Raises ValueError, naming the first one, where the checkpoint lacks a weight other than the
    head's, or has one that is not used here (except the pretraining heads' and a span's pooler).
    """
    state = build_state(
        config,
        mesh,
        pretrained.manifest["vocab_size"],
        seed=seed,
        dtype=DTYPES[dtype],
        optimizer=optimizer,
        precision=PrecisionConfig(fp16=dtype == "fp16"),
        zero_stage=zero_stage,
    )
    modules = {name.partition(".")[0] for name, _ in state.model.named_parameters()}
    surplus = {"mlm", "sop", "pooler"} - modules
    state.load_weights(pretrained, missing={"head"}, surplus=surplus)
    return state


@dataclass
class FinetuneRun:
    """Data that all seeds share, and the progress of the fine-tuning."""

    job: FinetuneJob
    mesh: Mesh
    environ: Mapping[str, str]
    pretrained: Checkpoint
    finished: dict[int, Result] = field(default_factory=dict)
    seed: int | None = None  # the seed in training
    epoch: int = 0  # its epoch, counted from 1; 0 before the first one

    @cached_property
    def config(self) -> FinetunedConfig:
        settings, task = self.job.settings, self.job.task
        return finetuned_config(
            config_of(self.pretrained.manifest),
            task.head,
            task.labels,
            hidden_dropout=settings.hidden_dropout,
            attention_dropout=settings.attention_dropout,
            recompute_granularity=settings.recompute_granularity,
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that a finished seed must share with this command to be reused."""
        facts, settings = self.job.facts, self.job.settings
        hashes = {each.get("file", each.get("folder")): each["sha256"] for each in facts["data"]}
        return {
            "--task": self.job.name,
            "--load": self.pretrained.manifest["checksum"],
            "--train-data": [hashes[str(file)] for file in settings.train_data],
            "--valid-data": [hashes[str(file)] for file in settings.valid_data],
            "the evaluations": list(self.job.task.evaluations),
            **{flag(name): value for name, value in facts["hyper_parameters"].items()},
        }

    def directory(self, seed: int) -> Path | None:
        save = self.job.settings.save
        return None if save is None else save / f"seed_{seed}"

    def status(self) -> str:
        """Message for a stop by a signal: what is finished, and how to continue."""
        place = f"in epoch {self.epoch}" if self.epoch else "before its first epoch"
        stopped = "stopped" if self.seed is None else f"seed {self.seed} stopped {place}"
        if self.job.settings.save is None:
            return f"{stopped}: without --save nothing is kept"
        resumed = "resumes" if self.seed is None else "begins it anew"
        finished = ", ".join(map(str, self.finished)) or "none"
        return f"{stopped}: the same command {resumed}; finished: {finished}"

    def train(self, seeds: Sequence[int]) -> list[Result]:
        """The results of these seeds; those that are finished in --save are not trained again.
        Raises SeedDivergedError, the same on every rank."""
        with user_errors(self.environ, agreed=True):
            load_finished(self, seeds)
        for seed in seeds:
            if seed not in self.finished:
                train_seed(self, seed)
        return [self.finished[seed] for seed in seeds]


def fine_tune(
    job: FinetuneJob, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with every seed; returns (record, figures for the paper's table)."""
    save, runs = job.settings.save, list[FinetuneRun]()
    # A signal ends the process at once: an unfinished epoch leaves nothing that could be used.
    try:
        with StopSignals(), ExitStack() as stack:
            with user_errors(environ, agreed=True):
                stack.enter_context(claim(None if save is None else str(save), mesh))
                # Raises ValueError, on every rank, where the ranks' devices would choose different
                # precisions.
                dtype = choose_precision(job.settings.dtype, mesh, "--dtype", ("--dtype", "fp32"))
                job = job.using(dtype=dtype)
                pretrained = find_newest(job.models[0], mesh)
            if job.task.labels and mesh.is_first:
                labels = (f"{number} {name}" for number, name in enumerate(job.task.labels))
                print(f"labels: {', '.join(labels)}", file=sys.stderr)
            tries, scores = job.tries(), list[float | None]()
            for values, each in tries:
                if mesh.is_first:
                    shown = ", ".join(f"{flag(key)} {value}" for key, value in values.items())
                    print(f"search: {shown}", file=sys.stderr)
                runs.append(FinetuneRun(each, mesh, environ, pretrained))
                try:
                    (result,) = runs[-1].train(job.seeds[:1])
                    score = result["epochs"][-1]["figures"][job.task.best]
                except SeedDivergedError as error:  # as a rate that is too high does
                    score = nan
                    if mesh.is_first:
                        print(f"warning: {error}; the search goes on", file=sys.stderr)
                scores.append(score if isfinite(score) else None)
            if tries:
                # The seed of the search is one of the chosen run's seeds, and is not trained again.
                ranked = [-math.inf if score is None else score for score in scores]
                chosen = ranked.index(max(ranked))
                runs.append(runs[chosen])
            else:
                runs.append(FinetuneRun(job, mesh, environ, pretrained))
            with user_errors(environ, agreed=True, kinds=(SeedDivergedError,)):
                if tries and scores[chosen] is None:
                    raise SeedDivergedError("--search: every combination of its values diverged")
                results = runs[-1].train(job.seeds)
            if not mesh.is_first:
                return {}, {}
            search = {}
            if tries:
                rows = [
                    {**values, job.task.best: score}
                    for (values, _), score in zip(tries, scores, strict=True)
                ]
                search = {"seed": job.settings.seed, "tries": rows, "chosen": tries[chosen][0]}
            return report(runs[-1], results, search)
    except SystemExit as stop:
        if mesh.is_first and stop.code in SIGNALS.values():
            status = runs[-1].status() if runs else "stopped before the first seed"
            if job.settings.search:
                status = f"search, combination {len(runs)} of {len(job.tries())}: {status}"
            print(status, file=sys.stderr, flush=True)
        raise


def train_seed(run: FinetuneRun, seed: int) -> None:
    """Train with this seed; the result goes to --save and to `run.finished`."""
    mesh, settings, directory = run.mesh, run.job.settings, run.directory(seed)
    run.seed, run.epoch = seed, 0
    steps = Steps(
        examples=run.job.task.train,
        seed=seed,
        epochs=settings.epochs,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
    )
    optimizer = optimizer_config(settings, len(steps))
    assert settings.dtype is not None  # fine_tune
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
        epochs = Epochs(run, steps)
        log_interval = -(-steps.per_epoch // LINES)
        callbacks = [epochs, *usual(f"{run.job.name}, seed {seed}", log_interval)]
        metrics = Metrics(file, mesh, start=0, callbacks=callbacks, stream=sys.stderr)
        epochs.metrics = metrics
    with metrics:
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
            log_interval=log_interval,
            save_interval=steps.per_epoch,
        )
        try:
            train(state, loop)
        except NonFiniteError as error:
            raise SeedDivergedError(_divergence(error, state, seed, run.epoch)) from error
        except DivergedError as error:
            raise SeedDivergedError(f"seed {seed}, epoch {run.epoch}: {error}") from error
    result = epochs.result()
    if directory is not None and mesh.is_first:
        names = {name: [file.name for file in getattr(settings, key)] for name, key in DATA.items()}
        kept = {"identity": run.identity, "files": names, "result": result}
        write_atomically(directory / RESULT, json.dumps(kept, indent=1).encode() + b"\n")
    run.seed, run.finished[seed] = None, result
    # Gradient hooks form a reference cycle with the model; the next model needs its memory.
    del state, loop, epochs, callbacks, metrics
    gc.collect()


def remove_all(folders: Sequence[Path], mesh: Mesh) -> None:
    """Remove folders on the first rank. Every rank calls this, and raises if that fails."""

    def act() -> None:
        for folder in folders if mesh.is_first else ():
            remove(folder)

    agree(mesh, act, "removing")


class Epochs(Callback):
    """The epochs of a seed, for the loop: batches, the evaluation at the end of each epoch, and the
    checkpoints of the last and the best epoch."""

    metrics: Metrics
    """Those of the seed, which have this callback."""

    def __init__(self, run: FinetuneRun, steps: Steps) -> None:
        super().__init__()
        self.run, self.steps = run, steps
        self.done: list[dict[str, Any]] = []
        self.loss_sum = self.examples_seen = 0.0

    def batches(self) -> Generator[list[ExampleBatch]]:
        for step in range(len(self.steps)):
            self.run.epoch = step // self.steps.per_epoch + 1
            self.metrics.prefix = f"seed {self.steps.seed} | epoch {self.run.epoch} | "
            yield self.steps.micro_batches(step, self.run.mesh)

    def post_step(self, result: StepResult) -> None:
        if not result.skipped:
            count = len(self.steps.numbers(self.training.state.step - 1))
            self.loss_sum += result.loss * count
            self.examples_seen += count

    def evaluate(self, state: TrainState) -> None:
        """Run all evaluations, and record the figures with the epoch's mean loss, without the steps
        that fp16 skipped."""
        run, size = self.run, self.steps.micro_batch_size
        loss = self.loss_sum / self.examples_seen if self.examples_seen else nan
        self.loss_sum = self.examples_seen = 0.0
        label = f"epoch {run.epoch}"
        logits = ask(run.job.task, state.model, run.config, run.mesh, size, label)
        figures = judge(run.job.task, logits) if run.mesh.is_first else {}
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
                "task": run.job.name,
                "pretrained": run.identity["--load"],
                "hyper_parameters": run.job.facts["hyper_parameters"],
                "seed": self.steps.seed,
                "epoch": number,
                "figures": self.done[-1]["figures"],
            },
        }
        # Without the optimizer's state: fine-tuning does not resume from an epoch.
        slices, beside = state.weights(), run.config.files(run.pretrained.path)
        files = {**beside, **run.job.tokenizer.files}
        path = save_checkpoint(directory, state.step, slices, facts, run.mesh, files).path
        former = [epoch for epoch in self.done if epoch["checkpoint"] is not None]
        self.done[-1]["checkpoint"] = str(path)
        for epoch in former if is_best else ():
            remove_all([Path(epoch["checkpoint"])], run.mesh)
            epoch["checkpoint"] = None

    def best(self) -> int:
        """Index of the first epoch with the highest figure."""
        values = [float(epoch["figures"][self.run.job.task.best]) for epoch in self.done]
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
                files = [each.name for each in getattr(run.job.settings, DATA[name])]
                old = zip(names.get(name, []), then.get(name, []), strict=False)
                differing = {file for file, _ in {*old} ^ {*zip(files, now, strict=True)}}
                what = f"with other {name}: {', '.join(sorted(differing)) or 'in another order'}"
            what = re.sub("([0-9a-f]{12})[0-9a-f]{52}", r"\1", what)
            raise UsageError(
                "--save", file.parents[1], f"another folder: this holds seeds of a run {what}"
            )
    return result


def report(
    run: FinetuneRun, results: Sequence[Result], search: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table); called only on the first rank."""
    last = [each["epochs"][-1]["figures"] for each in results]
    best = [each["epochs"][each["best_epoch"] - 1]["figures"] for each in results]
    here = {"last_epoch": medians(last), "best_epoch": medians(best)}
    vocab_size = run.pretrained.manifest["vocab_size"]
    model = build_on_meta(run.config, run.mesh, vocab_size)
    assert run.job.settings.dtype is not None
    facts = describe(run.pretrained, model, run.mesh, run.job.settings.dtype)
    facts["model"] |= {name: asdict(run.config)[name] for name in ("head", "labels")}
    protocol = PROTOCOL | ({"search": SEARCH} if search else {})
    figures = {
        "protocol": {name: text.format(best=run.job.task.best) for name, text in protocol.items()},
        **({"search": search} if search else {}),
        "seeds": list(results),
        "last_epoch": summarise(last),
        "best_epoch": summarise(best),
        **here["last_epoch"],
    }
    return assemble(run.job, facts, figures), here


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
    job: FinetuneJob, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table): each model and, of several, their mean logits."""
    rows, every = [], []
    for folders, dtype in zip(job.models, job.dtypes, strict=True):
        with user_errors(environ, agreed=True):
            checkpoint, model = load_newest(folders, mesh, DTYPES[dtype])
        manifest, size = checkpoint.manifest, job.settings.micro_batch_size
        with user_errors(environ, agreed=True, kinds=(DivergedError,)):
            every.append(ask(job.task, model, config_of(manifest), mesh, size, job.name))
        facts = describe(checkpoint, model, mesh, dtype)
        rows.append({**facts, "finetuned": manifest.get("finetuned", {})})
    if not mesh.is_first:
        return {}, {}
    each, first = [judge(job.task, logits) for logits in every], rows[0]
    if not job.settings.ensemble:
        return assemble(job, first, each[0]), {"this_model": each[0]}
    figures = judge(job.task, mean_logits(every))
    of_each = ("checkpoint", "checkpoint_hash", "step", "dtype", "finetuned")
    models = [
        {**{key: row[key] for key in of_each}, "figures": own}
        for row, own in zip(rows, each, strict=True)
    ]
    facts = {key: value for key, value in first.items() if key not in of_each}
    return assemble(job, {**facts, "models": models}, figures), {"ensemble": figures}


def assemble(
    job: FinetuneJob, facts: Mapping[str, Any], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """The record; figures may contain "protocol"."""
    words = {"labels": list(job.task.labels), "notes": dict(job.task.notes)}
    conventions = {"conventions": dict(job.task.conventions)}
    return arrange(job.name, {**conventions, **figures}, {**words, **facts, **job.facts})


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
    """The figures as JSON values: numpy scalars become numbers."""
    text = json.dumps(dict(task.score(logits)), default=lambda value: value.item())
    figures: dict[str, Any] = json.loads(text)
    return figures
