"""Pretraining from the command line to the last checkpoint: parse, launch, build, train.

Settings are parsed and checked before torch is imported, which takes seconds. Data and checkpoint
are opened once, after launch, and the pipeline is planned: so all ranks refuse them alike.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pkgutil import resolve_name
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.resume import Start, data_fingerprint, find_start, run_id
from megatron.config.launch import SIGNALS, StopSignals, world_size
from megatron.config.parse import parse, user_errors
from megatron.config.parts import PARTS
from megatron.config.pretrain import PretrainConfig, epochs_of
from megatron.errors import UsageError, flag
from megatron.models.registry import find_kind, take_kind
from megatron.train.callbacks import Callback
from megatron.train.inputs import Inputs, open_inputs, prefetch
from megatron.train.loggers import open_loggers
from megatron.train.metrics import Metrics
from megatron.train.monitors import MemorySaves, open_callbacks, usual
from megatron.train.trained import SavedRun, changes_on_resume, files_beside, find_origin

if TYPE_CHECKING:
    from megatron.checkpoint.save import Saver
    from megatron.parallel.mesh import Mesh
    from megatron.train.loop import Loop
    from megatron.train.state import TrainState


def pretrain(arguments: Sequence[str], environ: Mapping[str, str], kind: str | None = None) -> None:
    """kind: of model, see `find_kind`; by default that of --model.

    Raises SystemExit with status 75 after SIGTERM or SIGUSR1: the same command with --load resumes
    the run (without --save nothing is kept).
    """

    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        with user_errors(environ):
            world = world_size(environ)
            if kind is None:
                kind, arguments = take_kind(arguments, environ)
            entry = find_kind(kind)
            if entry.program is None or entry.inputs is None:
                raise UsageError("--model", kind, "a kind of model that is pretrained")
            program, saved = resolve_name(entry.program), SavedRun(kind, environ)
            config: PretrainConfig = parse(program, arguments, environ, saved=saved.settings)
            if config.model.kind != kind:
                raise UsageError("--model", kind, f"the kind of its config, {config.model.kind}")
            config = replace(config, model=config.model.completed(saved.model))
            config.check(world)

        gc.disable()  # its passes are a tenth of the seconds of these imports
        from megatron.checkpoint.memory import recover
        from megatron.checkpoint.retention import claim
        from megatron.parallel.agree import on_all_ranks
        from megatron.train.launch import launch
        from megatron.train.loop import train
        from megatron.train.machine import memory_errors
        from megatron.train.watch import one_message, without_limit

        gc.enable()
        stack.enter_context(one_message(environ))
        with user_errors(environ):
            is_exact = config.training.deterministic
            mesh = stack.enter_context(launch(config.parallel, environ, deterministic=is_exact))
        stack.enter_context(memory_errors(config, mesh))
        with user_errors(environ, agreed=True):
            with without_limit("opening data"):
                inputs = on_all_ranks(mesh, lambda: open_inputs(config, entry))
                if inputs.model:
                    config = replace(config, model=replace(config.model, **inputs.model))
            # The library's own threads would slow the loader's down, and it warns if they fork.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            with without_limit("reading the checkpoint"):
                stack.enter_context(claim(config.checkpoint.save, mesh))
                # Not before the claim: until then a previous run may save there.
                recovered = recover(config.checkpoint, mesh)
            start = on_all_ranks(
                mesh, lambda: find_start(config.checkpoint) if mesh.is_first else Start()
            )
            run = build(config, inputs, start, mesh)
            run.messages[:0] = recovered
            loop = open_loop(run, signals, environ, stack)
        signals.arm()
        first_step = run.state.step
        end = train(run.state, loop, partial(log_start, run, loop))
        exit_code = SIGNALS.get(end, 0)
        step, metrics = run.state.step, loop.metrics
        metrics.write({"step": step, "ended": end, "exit_code": exit_code})
        checkpoint = config.checkpoint
        load = "" if checkpoint.load == checkpoint.save else f" with --load {checkpoint.save}"
        message = f"ended by {end}; the same command{load} goes on"
        if step == first_step:
            message = "nothing was trained"
        elif end == "train_iters":
            message = f"done: --train-iters {run.config.training.steps}"
        elif checkpoint.save is None:
            message = f"ended by {end}; without --save nothing is kept"
        metrics.log(f"step {step} | {message}")
        if exit_code:
            raise SystemExit(exit_code)


OF_A_HOST = {"data_path", "dataset", "dataset_name", "vocab_file", "merge_file", "cache_dir"}
OF_A_HOST |= {"num_workers", "load", "save", "metrics_file", "tensorboard_dir", "sample_prompts"}
OF_A_HOST |= {"hf_model", "plan"}
"""Settings that may differ between hosts: paths, whose content is compared where it counts."""
READ = {"hf_config": "hf_model", "plan_text": "plan"}  # what was read there


def require_one_run(config: PretrainConfig, inputs: Inputs, mesh: Mesh) -> None:
    """Raises UsageError, the same on every rank, if two ranks have other settings, as by a preset
    that is another file on another host, or would read other samples: one would wait for the other,
    or their gradients would be summed all the same."""
    source, *values = config.data.source
    data, samples = data_fingerprint(inputs.corpus.identity), inputs.train.samples_per_epoch
    settings = {source: f"data {data} of {samples} samples"}
    for part in fields(config):
        own = getattr(config, part.name)
        for name in (each.name for each in fields(own) if each.name not in OF_A_HOST):
            settings[flag(READ.get(name, name))] = str(getattr(own, name))
    first, *others = mesh.control.gather(settings)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                one, two = (shorten(each, 80) for each in (value, other[name]))
                allowed = f"the same for all ranks: rank 0 has {one}, and rank {rank} {two}"
                given = " ".join(values) if name == source else ""
                raise UsageError(name, given or None, allowed)


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
    callbacks: Sequence[Callback]
    """Callbacks that settings ask for."""
    evaluate_first: bool
    """The resumed checkpoint was due for evaluation, but has no loss; without data none has."""


def build(flags: PretrainConfig, inputs: Inputs, start: Start, mesh: Mesh) -> Run:
    """The run at its start. Raises ValueError or OSError, the same on every rank.

    flags: the config of the command line. start: that of the first rank holds for all.
    """
    from megatron.parallel.agree import on_all_ranks
    from megatron.train.machine import choose_compile, choose_precision, require_update
    from megatron.train.pipelining import plan_of_run
    from megatron.train.state import DTYPES, build_state

    # 1. The layers of each pipeline stage, and where the run starts
    require_one_run(flags, inputs, mesh)
    size, identity = inputs.corpus.vocab_size, inputs.corpus.identity
    pipeline = on_all_ranks(mesh, lambda: plan_of_run(flags, size, mesh.size()))
    config, origin = find_origin(flags, start, mesh, identity, inputs.samples_in)
    checkpoint, resumed, messages = origin.checkpoint, origin.resumed, [*origin.messages]

    # 2. Precision and compiler
    precision = config.precision.name or (None if resumed is None else resumed["precision"])
    precision = choose_precision(precision, mesh, "--bf16", ("--no-bf16",))
    asked = config.training.compile
    if asked is None and not config.model.compiles_by_default:
        asked = False
    compiled, warnings = choose_compile(asked, mesh)
    require_update(config.optimizer.optimizer_impl, mesh)

    # 3. The callbacks that may not fit, and the state at step 0
    callbacks = on_all_ranks(mesh, lambda: open_callbacks(config, inputs))
    messages += on_all_ranks(mesh, lambda: config.model.prove(mesh))
    state = build_state(
        config.model,
        mesh,
        size,
        seed=config.training.seed,
        dtype=DTYPES[precision],
        optimizer=config.optimizer,
        precision=config.precision,
        compiled=compiled,
        pipeline=pipeline,
        draws=origin.weights is None,
        zero_stage=config.parallel.stage_of_zero,
        cuda_graph=config.training.cuda_graph,
        reduction=config.parallel.gradient_reduction,
    )

    # 4. Facts for the manifests of its checkpoints
    facts = {
        "kind": config.model.kind,
        "config": asdict(config),
        "precision": precision,
        **identity,
        "run": run_id(resumed),
        # The id of the run whose weights were fine-tuned, in this run or an earlier one.
        "weights_of": checkpoint
        and checkpoint.manifest.get("run" if origin.finetune else "weights_of"),
    }
    facts |= on_all_ranks(mesh, lambda: config.model.facts(state.model, checkpoint))

    # 5. Weights and, on resume, all else of the state
    messages += on_all_ranks(mesh, lambda: origin.load(state))
    step, steps, is_due = state.step, config.training.steps, False
    if checkpoint is not None and resumed is not None:
        messages += changes_on_resume(resumed, facts, state, config.parallel.stage_of_zero)
        # A signal prevented the evaluation, or there is nothing to evaluate.
        is_missing, every = resumed["validation_loss"] is None, config.training.eval_interval
        is_due = is_missing and (step >= steps or (every is not None and step % every == 0))
        if step >= steps:
            end = f"--train-iters is {steps}; --train-iters {2 * step}"
            if flags.training.epochs is not None:
                needed = state.samples + config.global_batch_size(mesh.size())
                more = epochs_of(needed, inputs.samples_in)
                end = f"--epochs {flags.training.epochs} ends there; --epochs {more}"
            messages.append(
                f"nothing is trained: {checkpoint.path} is already at step {step}, and {end} "
                "continues"
            )
    return Run(
        config=config,
        inputs=inputs,
        state=state,
        facts=facts,
        files=files_beside(config.model, checkpoint, identity) if mesh.is_first else {},
        messages=[*messages, *warnings, *getattr(state.model, "warnings", ())],
        callbacks=callbacks,
        evaluate_first=is_due,
    )


def open_loop(run: Run, signals: StopSignals, environ: Mapping[str, str], stack: ExitStack) -> Loop:
    """The inputs and outputs of the training loop; the stack closes them."""
    from megatron.checkpoint.save import Saver
    from megatron.optim.schedule import learning_rate
    from megatron.train.evaluate import validate
    from megatron.train.loop import Loop
    from megatron.train.utilization import flops_of

    config, inputs, mesh = run.config, run.inputs, run.state.mesh
    file, start, steps = config.metrics_file(), run.state.step, config.training.steps
    flops = flops_of(config, run.state)
    if flops is not None:
        run.messages.append(flops.about)
    loggers = open_loggers(config.logging, file, environ, start, run.facts, mesh, signals.ask)
    callbacks = [*usual("pretrain", config.logging.log_interval, flops), *run.callbacks, *loggers]
    files = dict(run.files) | ({} if inputs.tokenizer is None else dict(inputs.tokenizer.files))
    if config.checkpoint.memory_checkpoint_interval is not None:
        callbacks.append(MemorySaves(config, run.state, run.facts, files))
    metrics = stack.enter_context(Metrics(file, mesh, start=start, callbacks=callbacks))
    saver: Saver | None = None
    if config.checkpoint.save is not None:
        saver = Saver(mesh, config.checkpoint, run.facts, attached=files, start_step=start)
        stack.enter_context(saver)
    size, first = config.global_batch_size(mesh.size()), run.state.samples
    sampler = PARTS["sampler"].find(config.data.sampler)
    return Loop(
        training=config.training,
        batches=prefetch(
            inputs.train,
            range(first, first + (steps - start) * size, size),
            micro_batch_size=config.training.micro_batch_size,
            data_rank=mesh.batch.rank,
            data_size=mesh.batch.size,
            num_workers=config.data.num_workers,
            sampler=lambda number: sampler(
                number=number,
                samples_per_epoch=inputs.train.samples_per_epoch,
                seed=config.training.seed,
            ),
        ),
        learning_rate=partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()),
        evaluate=lambda state: validate(
            state,
            inputs.validation,
            samples=config.training.eval_iters * size,
            micro_batch_size=config.training.micro_batch_size,
            wants_stop=signals.is_urgent,
            write=metrics.write,
            log=metrics.log,
        ),
        save=None if saver is None else partial(save_state, saver),
        saver=saver,
        metrics=metrics,
        signals=signals,
        facts=lambda state: {"samples": state.samples},
        log_interval=config.logging.log_interval,
        save_interval=config.checkpoint.save_interval,
        evaluate_first=run.evaluate_first,
    )


def save_state(saver: Saver, state: TrainState, loss: float | None) -> None:
    saver.save(state.step, state.slices(), state.facts(), loss)


def log_start(run: Run, loop: Loop) -> None:
    """Log and record where the run starts and what it runs on."""
    from megatron.train.machine import crowded_hosts, versions

    state = run.state
    facts, data = state.describe(), data_fingerprint(run.inputs.corpus.identity)
    loop.metrics.describe(facts)
    axes, stage = state.mesh.sizes.items(), state.gradients.zero_stage
    ranks = " x ".join(f"{name} {size}" for name, size in axes) + f", ZeRO {stage}" * (stage > 0)
    size = f"{facts['parameters']:,} parameters in {facts['dtype']}"
    lr = loop.learning_rate(state.updates + 1)
    for message in (
        f"{size} on {facts['device']}, ranks {ranks}",
        *state.describe_stages(run.config.micro_batches(state.mesh.size())),
        *(state.mesh.describe_ranks() if run.config.logging.log_ranks else ()),
        *run.messages,
        *run.config.warnings(state.mesh.device.type),
        *crowded_hosts(state.mesh),
        f"step {state.step}, {state.samples} samples consumed, learning rate {lr:.3e}, data {data}",
    ):
        loop.metrics.log(message)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"step": state.step, "started": now, "data": data, "versions": versions(), **facts}
    loop.metrics.write(line | {"command": shlex.join(sys.argv), "config": run.facts["config"]})
