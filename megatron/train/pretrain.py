"""Pretraining from the command line to the last checkpoint: parse, launch, build, train.

torch is imported inside the functions: wrong input is reported before that takes its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from math import exp, inf
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.resume import (
    Start,
    changes,
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
    --load resumes the run.
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
            run = build(plan, mesh)
        loop = open_loop(run, signals, environ, stack)
        log_start(run, loop)
        signals.arm()
        end = train(run.state, loop)
        log_end(run, loop, end)
        if code := exit_code(end):
            raise SystemExit(code)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run whose settings, data and checkpoint fit together."""

    config: PretrainConfig
    world: int
    inputs: Inputs
    start: Start
    check: Callable[..., None]
    """check_start of this run's config and data."""


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
    check = partial(check_start, config, identity=inputs.corpus.identity)
    if start.folders:
        newest, _ = newest_readable(start.folders)
        check(newest.path, newest.manifest, finetune=start.finetune)
    return Plan(config=config, world=world, inputs=inputs, start=start, check=check)


@dataclass(frozen=True, kw_only=True)
class Run:
    plan: Plan
    state: TrainState
    facts: dict[str, Any]
    """Of the run, for the manifest of each checkpoint."""
    messages: list[str]
    """What the user should know of its start."""
    evaluate_first: bool
    """A signal kept the checkpoint that is resumed from being evaluated when that was due."""


def build(plan: Plan, mesh: Mesh) -> Run:
    """The run at its start: from scratch, or from the newest checkpoint of `plan.start` that every
    rank finds whole, byte for byte.

    The first rank's `start` holds for all: over a network the others may see other folders. Raises
    ValueError or OSError, on every rank alike.
    """
    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.agree import refuse_alike
    from megatron.train.state import DTYPES, build_state, choose_compile, choose_precision

    config, start = plan.config, mesh.control.gather(plan.start)[0]
    found: Checkpoint | None = None
    passed_over: list[str] = []
    if start.folders:
        found, passed_over = newest_whole(start.folders, mesh)
        check = partial(plan.check, found.path, found.manifest, finetune=start.finetune)
        refuse_alike(mesh, check)
    resumed = None if found is None or start.finetune else found.manifest
    saved = None if resumed is None else resumed["precision"]
    precision = choose_precision(config.precision.name or saved, mesh, "--bf16", "--no-bf16")
    compiled, warnings = choose_compile(config.training.compile, mesh)
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
    facts = {
        "kind": config.model.kind,
        "config": asdict(config),
        "precision": precision,
        **plan.inputs.corpus.identity,
        "run": run_id(resumed),
        # The id of the run whose weights were fine-tuned, now or before.
        "weights_of": found and found.manifest.get("run" if start.finetune else "weights_of"),
    }
    messages = [f"passed over: {reason}" for reason in passed_over]
    if found is None:
        messages.append("starting from scratch")
    elif resumed is None:
        refuse_alike(mesh, partial(state.load_weights, found))
        messages.append(f"starting at step 0 from the weights of {found.path}")
    else:
        refuse_alike(mesh, partial(state.load, found))
        messages += [f"going on from {found.path}", *differences_from(found, state, facts)]
    evaluation_is_due = state.step % config.training.eval_interval == 0
    return Run(
        plan=plan,
        state=state,
        facts=facts,
        messages=[*messages, *warnings],
        evaluate_first=bool(resumed and resumed["validation_loss"] is None and evaluation_is_due),
    )


def differences_from(
    checkpoint: Checkpoint, state: TrainState, facts: Mapping[str, Any]
) -> list[str]:
    """What the user should know of a run that is resumed; facts: as its own manifests have them."""
    from megatron.train.state import environment

    saved, now = checkpoint.manifest["environment"], environment(state.mesh)
    messages = changes(facts, checkpoint.manifest, state.mesh.data.size)
    messages += [
        f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
        "the last bits may differ from those of an undisturbed run"
        for name in ("torch", "threads", "device", "layout")
        if saved[name] != now[name]
    ]
    if state.step >= (target := facts["config"]["training"]["train_iters"]):
        messages.append(
            f"nothing is trained: {checkpoint.path} is already at step {state.step} and "
            f"--train-iters is {target}; a larger one continues, such as --train-iters "
            f"{2 * state.step}"
        )
    return messages


def open_loop(run: Run, signals: StopSignals, environ: Mapping[str, str], stack: ExitStack) -> Loop:
    """What the training loop reads and writes; the stack closes it."""
    from megatron.checkpoint.save import Saver
    from megatron.optim.schedule import learning_rate
    from megatron.train.loader import prefetch
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.sinks import open_sinks

    plan, config, mesh = run.plan, run.plan.config, run.state.mesh
    file, start, steps = config.metrics_file(), run.state.step, config.training.train_iters
    sinks = open_sinks(config.logging, file, environ, start, run.facts, mesh, signals.ask)
    metrics = stack.enter_context(Metrics(file, mesh, start=start, steps=steps, sinks=sinks))
    saver = stack.enter_context(
        Saver(mesh, config.checkpoint, run.facts, attached=plan.inputs.attached, start_step=start)
    )
    size, first = config.global_batch_size(plan.world), run.state.samples
    return Loop(
        training=config.training,
        batches=prefetch(
            plan.inputs.train,
            range(first, first + (steps - start) * size, size),
            micro_batch_size=config.training.micro_batch_size,
            data_rank=mesh.data.rank,
            data_size=mesh.data.size,
        ),
        learning_rate=partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()),
        evaluate=lambda state: validate(plan, state, metrics),
        save=lambda state, loss: saver.save(state.step, state.slices(), state.facts(), loss),
        saver=saver,
        metrics=metrics,
        signals=signals,
        facts=lambda state: {"samples": state.samples},
        log_interval=config.logging.log_interval,
        save_interval=config.checkpoint.save_interval,
        evaluate_first=run.evaluate_first,
    )


def validate(plan: Plan, state: TrainState, metrics: Metrics) -> float | None:
    """Records and returns the validation loss; None without a split or with --eval-iters 0."""
    from megatron.train.evaluate import mean_losses
    from megatron.train.loop import in_words

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
        f"step {state.step} | validation loss {loss:.4f}{in_words(terms)} | "
        f"perplexity {perplexity:.2f}"
    )
    return loss


def log_start(run: Run, loop: Loop) -> None:
    """Log and record where the run starts and what it runs on."""
    plan, state = run.plan, run.state
    facts, data = state.describe(), data_fingerprint(plan.inputs.corpus.identity)
    loop.metrics.describe(facts)
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in state.mesh.axes)
    size = f"{facts['parameters']:,} parameters in {facts['dtype']}"
    lr = loop.learning_rate(state.updates + 1)
    for message in (
        f"{size} on {facts['device']}, ranks {axes}",
        *run.messages,
        *plan.config.warnings(state.mesh.device.type),
        f"step {state.step}, {state.samples} samples consumed, learning rate {lr:.3e}, data {data}",
    ):
        loop.metrics.log(message)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    loop.metrics.write({"step": state.step, "started": now, "data": data, **facts})


def log_end(run: Run, loop: Loop, end: str) -> None:
    """Log what ended the run, and whether it can go on: only a checkpoint can be resumed."""
    config, step = run.plan.config, run.state.step
    loop.metrics.write({"step": step, "ended": end, "exit_code": exit_code(end)})
    if end == "train_iters":
        message = f"done: --train-iters {config.training.train_iters}"
    elif config.checkpoint.save is None:
        message = f"ended by {end}; without --save nothing is kept"
    else:
        message = f"ended by {end}; the same command with --load goes on"
    loop.metrics.log(f"step {step} | {message}")
