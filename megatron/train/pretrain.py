"""Pretraining, a story in order: parse, launch, build, train.

Imports of torch stand inside the functions: what is wrong with the input is told before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from math import exp, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.checkpoint.resume import (
    Start,
    check_start,
    data_fingerprint,
    find_start,
    newest_readable,
    run_id,
)
from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig
from megatron.train.inputs import Inputs
from megatron.train.signals import StopSignals, exit_code

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.start import Began
    from megatron.train.state import TrainState

Program = TypeVar("Program", bound=PretrainConfig)


def pretrain(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    program: type[Program],
    open_inputs: Callable[[Program], Inputs],
) -> None:
    """program: its settings. open_inputs: its data, opened and checked without torch.

    Raises SystemExit with status 75 where SIGTERM or SIGUSR1 asked for it: the same command with
    --load goes on.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        with user_errors(environ):
            plan = make_plan(arguments, environ, program, open_inputs)

        from megatron.checkpoint.retention import claim
        from megatron.train.launch import launch
        from megatron.train.loop import train

        with user_errors(environ):
            mesh = stack.enter_context(launch(plan.config.parallel, environ))
        with user_errors(environ, agreed=True):
            stack.enter_context(claim(plan.config.checkpoint.save, mesh))
            state, began, facts = build(plan, mesh)
        loop = open_loop(plan, state, began, facts, signals, environ, stack)
        log_start(plan, state, began, loop)
        signals.arm()
        end = train(state, loop)
        log_end(plan, state, loop, end)
        if code := exit_code(end):
            raise SystemExit(code)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run whose settings, data and checkpoint fit together."""

    config: PretrainConfig
    world: int
    inputs: Inputs
    start: Start
    saved_precision: str | None
    """That of the checkpoint it goes on from."""

    def check(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raise ValueError where the checkpoint's run is another one than this."""
        identity, finetune = self.inputs.corpus.identity, self.start.finetune
        check_start(self.config, path, manifest, identity=identity, finetune=finetune)


def make_plan(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    program: type[Program],
    open_inputs: Callable[[Program], Inputs],
) -> Plan:
    """Raises ValueError or OSError, naming the flag or the file, for what is wrong."""
    world = world_size(environ)
    config = parse(program, arguments, environ)
    config.check(world)
    inputs, start = open_inputs(config), find_start(config.checkpoint)
    plan = Plan(config=config, world=world, inputs=inputs, start=start, saved_precision=None)
    if not start.folders:
        return plan
    newest, _ = newest_readable(start.folders)
    plan.check(newest.path, newest.manifest)
    saved = None if start.finetune else newest.manifest["precision"]
    return Plan(config=config, world=world, inputs=inputs, start=start, saved_precision=saved)


def build(plan: Plan, mesh: Mesh) -> tuple[TrainState, Began, dict[str, Any]]:
    """(the state, fresh or taken up, how it began, facts for the manifests of its checkpoints)."""
    from megatron.train.compiled import choose_compile
    from megatron.train.start import begin, choose_precision
    from megatron.train.state import DTYPES, build_state

    config, identity = plan.config, plan.inputs.corpus.identity
    precision = choose_precision(config.precision.name, plan.saved_precision, mesh)
    compiled, news = choose_compile(config.training.compile, mesh)
    state = build_state(
        config.model,
        config.optimizer,
        config.precision,
        mesh,
        plan.inputs.corpus.vocab_size,
        seed=config.training.seed,
        dtype=DTYPES[precision],
        compiled=compiled,
    )
    described = {"kind": config.model.kind, "config": asdict(config), "precision": precision}
    facts = {**described, **identity}
    began = begin(state, plan.start, plan.check, facts)
    began.news.extend(news)
    ids = {"run": run_id(began.manifest), "weights_of": began.weights_of}
    return state, began, {**facts, **ids}


def open_loop(
    plan: Plan,
    state: TrainState,
    began: Began,
    facts: dict[str, Any],
    signals: StopSignals,
    environ: Mapping[str, str],
    stack: ExitStack,
) -> Loop:
    """What the training loop reads and writes; the stack closes it."""
    from megatron.checkpoint.save import Saver
    from megatron.optim.schedule import learning_rate
    from megatron.train.loader import prefetch
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.sinks import open_sinks

    config, mesh = plan.config, state.mesh
    file, at, steps = config.metrics_file(), state.step, config.training.train_iters
    sinks = open_sinks(config.logging, file, environ, at, facts, mesh, signals.ask)
    metrics = stack.enter_context(Metrics(file, mesh, start=at, steps=steps, sinks=sinks))
    attached = plan.inputs.attached
    saver = Saver(mesh, config.checkpoint, facts, attached=attached, start_step=at)

    def save(state: TrainState, validation_loss: float | None) -> None:
        if config.checkpoint.save is not None:
            saver.save(state.step, state.pieces(), state.facts(), validation_loss)

    size = config.global_batch_size(plan.world)
    batches = prefetch(
        plan.inputs.train,
        range(state.samples, state.samples + (steps - at) * size, size),
        micro_batch_size=config.training.micro_batch_size,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
    )
    return Loop(
        training=config.training,
        batches=batches,
        learning_rate=partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()),
        evaluate=lambda state: validate(plan, state, metrics),
        save=save,
        saver=stack.enter_context(saver),
        metrics=metrics,
        signals=signals,
        facts=lambda state: {"samples": state.samples},
        log_interval=config.logging.log_interval,
        save_interval=config.checkpoint.save_interval,
        owes_evaluation=began.owes_evaluation,
    )


def validate(plan: Plan, state: TrainState, metrics: Metrics) -> float | None:
    """Records and returns the validation loss; None without a split or with --eval-iters 0."""
    from megatron.train.evaluate import mean_losses
    from megatron.train.loop import spell

    data, training = plan.inputs.validation, plan.config.training
    if data is None or training.eval_iters == 0:
        return None
    wanted = training.eval_iters * plan.config.global_batch_size(plan.world)
    samples = min(wanted, data.samples_per_epoch)  # a smaller split is evaluated whole
    terms = mean_losses(
        state.model, state.objective, data, samples, training.micro_batch_size, state.mesh
    )
    loss, of_tokens = sum(terms.values()), next(iter(terms.values()))
    perplexity = inf if of_tokens > 700 else exp(of_tokens)  # of a run that diverges
    metrics.write(
        {
            "step": state.step,
            "samples": state.samples,
            "validation_loss": loss,
            **{f"validation_{name}": mean for name, mean in terms.items()},
            "validation_perplexity": perplexity,
            "validation_samples": samples,
        }
    )
    metrics.log(
        f"step {state.step} | validation loss {loss:.4f}{spell(terms)} | "
        f"perplexity {perplexity:.2f}"
    )
    return loss


def log_start(plan: Plan, state: TrainState, began: Began, loop: Loop) -> None:
    """Say, on the console and in the record, where the run starts and what it runs on."""
    facts, data = state.describe(), data_fingerprint(plan.inputs.corpus.identity)
    loop.metrics.describe(facts)
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in (state.mesh.data, state.mesh.tensor))
    size = f"{facts['parameters']:,} parameters in {facts['dtype']}"
    lr = loop.learning_rate(state.updates + 1)
    for text in (
        f"{size} on {facts['device']}, ranks {axes}",
        *began.news,
        *plan.config.warnings(state.mesh.device.type),
        f"step {state.step}, {state.samples} samples consumed, learning rate {lr:.3e}, data {data}",
    ):
        loop.metrics.log(text)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    loop.metrics.write({"step": state.step, "started": now, "data": data, **facts})


def log_end(plan: Plan, state: TrainState, loop: Loop, end: str) -> None:
    """Say what ended the run, and whether it can go on: only a checkpoint can be resumed."""
    loop.metrics.write({"step": state.step, "ended": end, "exit_code": exit_code(end)})
    text = f"ended by {end}; the same command with --load goes on"
    if end == "train_iters":
        text = f"done: --train-iters {plan.config.training.train_iters}"
    elif plan.config.checkpoint.save is None:
        text = f"ended by {end}; without --save nothing is kept"
    loop.metrics.log(f"step {state.step} | {text}")
