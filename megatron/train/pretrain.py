"""Pretraining from the command line to the last checkpoint: parse, launch, build, train.

Settings are parsed and checked before torch is imported, which takes seconds. Data and checkpoint
are opened once, after launch, and the pipeline is planned: so all ranks refuse them alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import exp, inf
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.resume import (
    Start,
    changes,
    check_start,
    data_fingerprint,
    find_start,
    run_id,
    saved_model,
)
from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig, epochs_of
from megatron.data.files import DataError
from megatron.errors import OutOfMemoryError, UsageError
from megatron.models.registry import ModelKind, find_kind, take_kind
from megatron.parallel.schedules import PipelinePlan
from megatron.train.inputs import Inputs, mock_inputs
from megatron.train.signals import StopSignals, exit_code
from megatron.train.trained import files_beside, saved_settings

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.state import TrainState


def pretrain(arguments: Sequence[str], environ: Mapping[str, str], kind: str | None = None) -> None:
    """kind: of model, see `find_kind`; by default that of --model.

    Raises SystemExit with status 75 after SIGTERM or SIGUSR1: the same command with --load resumes
    the run (without --save nothing is kept).
    """

    def report_data(_: object, error: BaseException | None, __: object) -> None:
        kinds = DataError, OutOfMemoryError
        if isinstance(error, kinds):  # for one process; `launch` ends several
            with user_errors(environ, kinds=kinds):
                raise error

    with ExitStack() as stack:
        stack.push(report_data)
        signals = stack.enter_context(StopSignals())
        with user_errors(environ):
            world = world_size(environ)
            if kind is None:
                kind, arguments = take_kind(arguments, environ)
            entry = find_kind(kind)
            if entry.program is None or entry.inputs is None:
                raise UsageError("--model", kind, "a kind of model that is pretrained")
            program, saved = resolve_name(entry.program), partial(saved_settings, kind, environ)
            config: PretrainConfig = parse(program, arguments, environ, saved=saved)
            if config.model.kind != kind:
                raise UsageError("--model", kind, f"the kind of its config, {config.model.kind}")
            model = config.model.completed(partial(saved_model, config.checkpoint))
            config = replace(config, model=model)
            config.check(world)

        from megatron.checkpoint.retention import claim
        from megatron.parallel.agree import on_all_ranks
        from megatron.train.launch import launch
        from megatron.train.loop import train
        from megatron.train.memory import memory_errors
        from megatron.train.watch import note, without_limit

        with user_errors(environ):
            is_exact = config.training.deterministic
            mesh = stack.enter_context(launch(config.parallel, environ, deterministic=is_exact))
        stack.enter_context(memory_errors(config, mesh))
        with user_errors(environ, agreed=True):
            with without_limit("opening data"):
                inputs = on_all_ranks(mesh, lambda: open_inputs(config, entry))
            # Until here the tokenizers library may use all cores (--too-long refuse). From here on
            # the loader's threads, and ranks, tokenise in parallel; the library's own threads would
            # slow them down. It also warns if a process that used them forks, as for a compiler.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            stack.enter_context(claim(config.checkpoint.save, mesh))
            # Not before the claim: until then a previous run may save there.
            start = on_all_ranks(
                mesh, lambda: find_start(config.checkpoint) if mesh.is_first else Start()
            )
            note("building the model")
            run = build(config, inputs, start, mesh)
            loop = open_loop(run, signals, environ, stack)
        log_start(run, loop)
        signals.arm()
        first_step = run.state.step
        end = train(run.state, loop)
        log_end(run, loop, first_step, end)
        if code := exit_code(end):
            raise SystemExit(code)


def open_inputs(config: PretrainConfig, entry: ModelKind) -> Inputs:
    """The data that the run reads. Raises ValueError or OSError, naming the flag, if it is damaged
    or does not fit."""
    if config.data.mock_data:
        return mock_inputs(config, resolve_name(entry.samples))
    inputs: Inputs = resolve_name(str(entry.inputs))(config)
    return inputs


def plan_on_all_ranks(config: PretrainConfig, inputs: Inputs, mesh: Mesh) -> PipelinePlan:
    """The pipeline of the run.

    Raises UsageError, the same on every rank, if two ranks would read different samples, train for
    different numbers of steps or have different pipelines: the loss would be that of no data set or
    of no model, or one rank would wait for the other.
    """
    from megatron.parallel.agree import on_all_ranks
    from megatron.train.pipelining import plan_of_run

    def require_equal(flag: str, value: object, description: str, cure: str) -> None:
        descriptions = mesh.control.gather(description)
        for rank, other in enumerate(descriptions):
            if other != descriptions[0]:
                both = f"rank 0 has {descriptions[0]}, and rank {rank} {other}"
                raise UsageError(flag, value, f"the same for all ranks: {both}; {cure}")

    training, name = config.training, getattr(config.data, "dataset_name", None)
    length = f"{training.train_iters} steps"
    if training.epochs is not None:
        length = f"{inputs.samples_in(training.epochs)} to be trained"
    require_equal(
        "--data-path" if name is None else "--dataset-name",
        name or " ".join(config.data.data_path) or None,
        f"data {data_fingerprint(inputs.corpus.identity)} of {inputs.train.samples_per_epoch} "
        f"samples, {length}",
        "a folder that all of them see works",
    )
    pipeline = on_all_ranks(mesh, lambda: plan_of_run(config, inputs.corpus.vocab_size))
    require_equal(
        "--pipeline-model-parallel-size",
        config.parallel.pipeline_model_parallel_size,
        pipeline.describe(),
        "a preset that all of them see works",
    )
    return pipeline


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run starts: at a checkpoint, or else at weights of another program, or else from
    scratch; the same on all ranks."""

    checkpoint: Checkpoint | None
    finetune: bool
    """Only the checkpoint's weights are taken."""
    weights: str | None
    """See `KindConfig.starts_from`."""
    messages: list[str]

    @property
    def resumed(self) -> Mapping[str, Any] | None:
        """The manifest of the checkpoint whose run continues; None for a new run."""
        return None if self.checkpoint is None or self.finetune else self.checkpoint.manifest


def find_origin(
    config: PretrainConfig, inputs: Inputs, start: Start, mesh: Mesh
) -> tuple[PretrainConfig, Origin]:
    """(the config with --epochs converted to steps from the checkpoint on, and with its --pure-bf16
    if no precision is given; the origin). The checkpoint is the newest of the first rank's `start`
    that every rank finds whole, byte for byte: over a network ranks may see other folders.

    Raises UsageError, the same on every rank, if the checkpoint is of another run.
    """
    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.agree import on_all_ranks

    start = mesh.control.gather(start)[0]
    checkpoint, passed_over = newest_whole(start.folders, mesh) if start.folders else (None, [])

    def resolve() -> tuple[PretrainConfig, str | None]:
        if checkpoint is None:
            return config.with_steps(inputs.samples_in, mesh.size()), config.model.starts_from()
        manifest, precision = checkpoint.manifest, config.precision
        if precision.name is None and not start.finetune:
            is_pure = manifest["config"].get("precision", {}).get("pure_bf16", False)
            precision = replace(precision, pure_bf16=is_pure)
        resolved, identity = replace(config, precision=precision), inputs.corpus.identity
        check_start(resolved, checkpoint.path, manifest, identity=identity, finetune=start.finetune)
        done = {"step": 0, "samples": 0} if start.finetune else manifest["counters"]
        resolved = resolved.with_steps(
            inputs.samples_in, mesh.size(), steps_done=done["step"], samples_done=done["samples"]
        )
        return resolved, None

    resolved, weights = on_all_ranks(mesh, resolve)
    return resolved, Origin(
        checkpoint=checkpoint,
        finetune=start.finetune,
        weights=mesh.control.gather(weights)[0],
        messages=[f"passed over: {reason}" for reason in passed_over],
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    config: PretrainConfig
    inputs: Inputs
    state: TrainState
    facts: dict[str, Any]
    """Facts about the run, for the manifest of each checkpoint."""
    files: Mapping[str, bytes]
    """Files of the model, for each checkpoint; only on the first rank."""
    messages: list[str]
    """Messages to the user about the start of the run."""
    evaluate_first: bool
    """The resumed checkpoint was due for evaluation, but a signal prevented it."""


def build(given: PretrainConfig, inputs: Inputs, start: Start, mesh: Mesh) -> Run:
    """The run at its start. Raises ValueError or OSError, the same on every rank.

    given: the config of the command line. start: that of the first rank holds for all.
    """
    from megatron.parallel.agree import on_all_ranks
    from megatron.train.machine import choose_compile, choose_precision
    from megatron.train.state import DTYPES, build_state

    # 1. The layers of each pipeline stage, and where the run starts
    pipeline = plan_on_all_ranks(given, inputs, mesh)
    config, origin = find_origin(given, inputs, start, mesh)
    found, resumed, messages = origin.checkpoint, origin.resumed, [*origin.messages]

    # 2. Precision and compiler
    precision = config.precision.name or (None if resumed is None else resumed["precision"])
    precision = choose_precision(precision, mesh, "--bf16", ("--no-bf16",))
    asked = config.training.compile if config.model.can_compile else False
    compiled, warnings = choose_compile(asked, mesh)

    # 3. The state at step 0
    messages += on_all_ranks(mesh, lambda: config.model.prove(mesh))
    state = build_state(
        config.model,
        mesh,
        inputs.corpus.vocab_size,
        seed=config.training.seed,
        dtype=DTYPES[precision],
        optimizer=config.optimizer,
        precision=config.precision,
        compiled=compiled,
        pipeline=pipeline,
        draws=origin.weights is None,
        zero_stage=config.parallel.stage_of_zero,
        cuda_graph=config.training.cuda_graph,
    )

    # 4. Facts for the manifests of its checkpoints
    facts = {
        "kind": config.model.kind,
        "config": asdict(config),
        "precision": precision,
        **inputs.corpus.identity,
        "run": run_id(resumed),
        # The id of the run whose weights were fine-tuned, in this run or an earlier one.
        "weights_of": found and found.manifest.get("run" if origin.finetune else "weights_of"),
    }
    facts |= on_all_ranks(mesh, lambda: config.model.facts(state.model, found))

    # 5. Weights and, on resume, all else of the state
    messages += on_all_ranks(mesh, lambda: load(state, origin))
    if found is not None and resumed is not None:
        messages += changes_on_resume(config, inputs, state, facts, found, given.training.epochs)
    step, training = state.step, config.training
    is_due = step % training.eval_interval == 0 or step >= training.steps
    return Run(
        config=config,
        inputs=inputs,
        state=state,
        facts=facts,
        files=files_beside(config.model, found, inputs.corpus.identity) if mesh.is_first else {},
        messages=[*messages, *warnings, *getattr(state.model, "warnings", ())],
        evaluate_first=bool(resumed and resumed["validation_loss"] is None and is_due),
    )


def load(state: TrainState, origin: Origin) -> list[str]:
    """Takes weights or all from the origin; returns messages that say which."""
    if origin.weights is not None:
        return state.load_folder(origin.weights)
    if origin.checkpoint is None:
        return ["starting from scratch"]
    if origin.finetune:
        state.load_weights(origin.checkpoint)
        return [f"starting at step 0 from the weights of {origin.checkpoint.path}"]
    state.load(origin.checkpoint)
    return [f"going on from {origin.checkpoint.path}"]


def changes_on_resume(
    config: PretrainConfig,
    inputs: Inputs,
    state: TrainState,
    facts: Mapping[str, Any],
    checkpoint: Checkpoint,
    epochs: int | None,
) -> list[str]:
    """Messages: differences from the run that saved the checkpoint, and whether steps are left.

    epochs: the value of --epochs; the config has steps in its place.
    """
    from megatron.train.machine import environment

    manifest, now = checkpoint.manifest, environment(state.mesh)
    saved = manifest["environment"]
    messages = changes({**facts, "environment": now}, manifest, state.mesh.batch.size)
    affected = "the last bits may"
    if state.kernel_seed is not None:
        affected = "what the kernel of attention drops, and so every loss, will"
    messages += [
        f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
        f"{affected} differ from those of an undisturbed run"
        for name in ("torch", "threads", "device", "layout")
        if saved[name] != now[name]
    ]
    parallel, stage = manifest["config"].get("parallel", {}), config.parallel.stage_of_zero
    # The first checkpoints have a switch for ZeRO stage 1.
    saved_stage = int(parallel.get("use_distributed_optimizer", False))
    saved_stage = max(saved_stage, parallel.get("zero_stage", 0))
    if (saved_stage > 1) != (stage > 1):
        messages.append(
            f"warning: --zero-stage is {stage}, and was {saved_stage} when the checkpoint was "
            "saved: from 2 on micro-batches are summed in another order, so that last bits "
            "differ from those of an undisturbed run"
        )
    if state.step >= config.training.steps:
        end = f"--train-iters is {config.training.steps}; --train-iters {2 * state.step}"
        if epochs is not None:
            needed = state.samples + config.global_batch_size(state.mesh.size())
            more = epochs_of(needed, inputs.samples_in)
            end = f"--epochs {epochs} ends there; --epochs {more}"
        messages.append(
            f"nothing is trained: {checkpoint.path} is already at step {state.step}, and {end} "
            "continues"
        )
    return messages


def open_loop(run: Run, signals: StopSignals, environ: Mapping[str, str], stack: ExitStack) -> Loop:
    """The inputs and outputs of the training loop; the stack closes them."""
    from megatron.checkpoint.save import Saver
    from megatron.optim.schedule import learning_rate
    from megatron.train.loader import prefetch
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.sinks import open_sinks

    config, inputs, mesh = run.config, run.inputs, run.state.mesh
    file, start, steps = config.metrics_file(), run.state.step, config.training.steps
    sinks = open_sinks(config.logging, file, environ, start, run.facts, mesh, signals.ask)
    metrics = stack.enter_context(Metrics(file, mesh, start=start, steps=steps, sinks=sinks))
    files = dict(run.files) | ({} if inputs.tokenizer is None else dict(inputs.tokenizer.files))
    saver = stack.enter_context(
        Saver(mesh, config.checkpoint, run.facts, attached=files, start_step=start)
    )
    size, first = config.global_batch_size(mesh.size()), run.state.samples
    return Loop(
        training=config.training,
        batches=prefetch(
            inputs.train,
            range(first, first + (steps - start) * size, size),
            micro_batch_size=config.training.micro_batch_size,
            data_rank=mesh.batch.rank,
            data_size=mesh.batch.size,
            num_workers=config.data.num_workers,
        ),
        learning_rate=partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()),
        evaluate=lambda state: validate(run, metrics, signals),
        save=lambda state, loss: saver.save(state.step, state.slices(), state.facts(), loss),
        saver=saver,
        metrics=metrics,
        signals=signals,
        facts=lambda state: {"samples": state.samples},
        log_interval=config.logging.log_interval,
        save_interval=config.checkpoint.save_interval,
        evaluate_first=run.evaluate_first,
    )


def validate(run: Run, metrics: Metrics, signals: StopSignals) -> float | None:
    """Records and returns the validation loss; None without a split or with --eval-iters 0. Raises
    Stopped, on every rank, if a signal comes meanwhile."""
    from megatron.train.evaluate import mean_losses
    from megatron.train.loop import in_words

    state, data, training = run.state, run.inputs.validation, run.config.training
    if data is None or training.eval_iters == 0:
        return None
    samples = training.eval_iters * run.config.global_batch_size(state.mesh.size())
    samples = min(samples, data.samples_per_epoch)  # a smaller split is evaluated whole
    terms = mean_losses(
        state.model,
        state.objective,
        data,
        samples,
        training.micro_batch_size,
        state.mesh,
        state.pipeline,
        signals.is_urgent,
    )
    loss, of_tokens = sum(terms.values()), next(iter(terms.values()))
    perplexity = inf if of_tokens > 700 else exp(of_tokens)  # above, the run diverges
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
    state = run.state
    facts, data = state.describe(), data_fingerprint(run.inputs.corpus.identity)
    loop.metrics.describe(facts)
    axes = " x ".join(f"{name} {size}" for name, size in state.mesh.sizes.items())
    if (stage := state.gradients.zero_stage) > 0:
        axes += f", ZeRO {stage}"
    size = f"{facts['parameters']:,} parameters in {facts['dtype']}"
    lr = loop.learning_rate(state.updates + 1)
    for message in (
        f"{size} on {facts['device']}, ranks {axes}",
        *state.describe_stages(),
        *(state.mesh.describe_ranks() if run.config.logging.log_ranks else ()),
        *run.messages,
        *run.config.warnings(state.mesh.device.type),
        f"step {state.step}, {state.samples} samples consumed, learning rate {lr:.3e}, data {data}",
    ):
        loop.metrics.log(message)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    loop.metrics.write({"step": state.step, "started": now, "data": data, **facts})


def log_end(run: Run, loop: Loop, first_step: int, end: str) -> None:
    """Log what ended the run that started at step `first_step`, and whether it can be resumed: that
    takes a checkpoint."""
    config, step = run.config, run.state.step
    loop.metrics.write({"step": step, "ended": end, "exit_code": exit_code(end)})
    if step == first_step:
        message = "nothing was trained"
    elif end == "train_iters":
        message = f"done: --train-iters {config.training.steps}"
    elif config.checkpoint.save is None:
        message = f"ended by {end}; without --save nothing is kept"
    else:
        message = f"ended by {end}; the same command with --load goes on"
    loop.metrics.log(f"step {step} | {message}")
