"""Pretraining from the command line to the last checkpoint: parse, launch, build, train.

torch is imported in the functions: this takes seconds, and wrong input is reported before it.
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
    newest_readable,
    run_id,
    saved_model,
)
from megatron.config.launch import is_first, world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig, epochs_of
from megatron.data.files import DataError
from megatron.errors import OutOfMemoryError, UsageError
from megatron.models.registry import KINDS, find_kind
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
                kind, arguments = take_model(arguments, environ)
            entry = find_kind(kind)
            if entry.program is None or entry.inputs is None:
                raise UsageError("--model", kind, "a kind of model that is pretrained")
            program, saved = resolve_name(entry.program), partial(saved_settings, kind, environ)
            config: PretrainConfig = parse(program, arguments, environ, saved=saved)
            if config.model.kind != kind:
                raise UsageError("--model", kind, f"the kind of its config, {config.model.kind}")
            config = replace(
                config, model=config.model.completed(partial(saved_model, config.checkpoint))
            )
            config.check(world)
            inputs: Inputs
            if config.data.mock_data:
                inputs = mock_inputs(config, resolve_name(entry.samples))
            else:
                inputs = resolve_name(entry.inputs)(config)
            # Until here the tokenizers library may use all cores (--too-long refuse). From here on
            # the loader's threads, and ranks, tokenise in parallel; the library's own threads would
            # slow them down. It also warns if a process that used them forks, as for a compiler.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            start = find_start(config.checkpoint)
            newest = newest_readable(start.folders)[0] if start.folders else None
            # To raise errors early; `build` finds the checkpoint that is really resumed.
            resolve(config, inputs, start, newest, world)
            if newest is None:
                config.model.starts_from()

        from megatron.checkpoint.retention import claim
        from megatron.train.launch import launch
        from megatron.train.loop import train
        from megatron.train.memory import memory_errors

        with user_errors(environ):
            is_exact = config.training.deterministic
            mesh = stack.enter_context(launch(config.parallel, environ, deterministic=is_exact))
        stack.enter_context(memory_errors(config, mesh))
        with user_errors(environ, agreed=True):
            stack.enter_context(claim(config.checkpoint.save, mesh))
            run = build(config, inputs, find_again(config, start, mesh), mesh)
            loop = open_loop(run, signals, environ, stack)
        log_start(run, loop)
        signals.arm()
        first_step = run.state.step
        end = train(run.state, loop)
        log_end(run, loop, first_step, end)
        if code := exit_code(end):
            raise SystemExit(code)


DISTRIBUTED = "use_distributed_optimizer"  # ZeRO stage 1, in the config of a checkpoint
MODEL_HELP = """\
usage: pretrain.py --model KIND [flags]

Pretrain a model. --model KIND --help lists the flags of a kind.

    KIND    {kinds}
            or module:NAME, a megatron.models.registry.ModelKind of one's own
"""


def take_model(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """(the kind of --model, the other arguments). Prints the kinds for --help without --model."""
    rest, given = list[str](), None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--model":
            given = value if equals else next(words, "")
        else:
            rest.append(word)
    kinds = [name for name, each in KINDS.items() if each.program is not None]
    if given is None and {"-h", "--help"} & set(rest):
        if is_first(environ):
            print(MODEL_HELP.format(kinds=", ".join(kinds)))
        raise SystemExit(0)
    if given is None:
        raise UsageError("--model", None, "given", works=("--model", kinds[0]))
    return given, rest


def find_again(config: PretrainConfig, start: Start, mesh: Mesh) -> Start:
    """The start found again on the first rank, now that --save belongs to this run: a previous run
    may have saved there until then. On the other ranks `start`."""
    from megatron.parallel.agree import on_all_ranks

    return on_all_ranks(mesh, lambda: find_start(config.checkpoint) if mesh.is_first else start)


def resolve(
    config: PretrainConfig,
    inputs: Inputs,
    start: Start,
    checkpoint: Checkpoint | None,
    world: int,
) -> PretrainConfig:
    """The config with --epochs converted to steps from this checkpoint on, and with its --pure-bf16
    if no precision is given. Raises UsageError if the checkpoint is of another run."""
    steps_done = samples_done = 0
    if checkpoint is not None:
        path, manifest, finetune = checkpoint.path, checkpoint.manifest, start.finetune
        if config.precision.name is None and not finetune:
            is_pure = manifest["config"].get("precision", {}).get("pure_bf16", False)
            config = replace(config, precision=replace(config.precision, pure_bf16=is_pure))
        check_start(config, path, manifest, identity=inputs.corpus.identity, finetune=finetune)
        if not finetune:
            counters = manifest["counters"]
            steps_done, samples_done = counters["step"], counters["samples"]
    return config.with_steps(
        inputs.samples_in, world, steps_done=steps_done, samples_done=samples_done
    )


def refuse_differing(
    config: PretrainConfig, inputs: Inputs, pipeline: PipelinePlan, mesh: Mesh
) -> None:
    """Raises UsageError, the same on every rank, if two ranks would read different samples, train
    for different numbers of steps or have different pipelines: the loss would be that of no data
    set or of no model, or one rank would wait for the other.
    """

    def refuse(name: str, value: object, own: str, cure: str) -> None:
        found = mesh.control.gather(own)
        for rank, other in enumerate(found):
            if other != found[0]:
                allowed = f"the same for all ranks: rank 0 has {found[0]}, and rank {rank} {other}"
                raise UsageError(name, value, f"{allowed}; {cure}")

    training, name = config.training, getattr(config.data, "dataset_name", None)
    length = training.train_iters
    if training.epochs is not None:
        length = inputs.samples_in(training.epochs)
    own = (
        f"data {data_fingerprint(inputs.corpus.identity)} of {inputs.train.samples_per_epoch} "
        f"samples, {length} {'steps' if training.epochs is None else 'to be trained'}"
    )
    flag = "--data-path" if name is None else "--dataset-name"
    value = name or " ".join(config.data.data_path) or None
    refuse(flag, value, own, "a folder that all of them see works")
    stages = config.parallel.pipeline_model_parallel_size
    cure = "a preset that all of them see works"
    refuse("--pipeline-model-parallel-size", stages, pipeline.describe(), cure)


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
    """The run at its start: from scratch, or from the newest checkpoint of `start` that every rank
    finds whole, byte for byte.

    All ranks use the first rank's `start`: over a network the others may see other folders. Raises
    ValueError or OSError, the same on every rank.
    """
    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.agree import on_all_ranks
    from megatron.train.machine import choose_compile, choose_precision, environment
    from megatron.train.pipelining import plan_of_run
    from megatron.train.state import DTYPES, build_state

    pipeline = plan_of_run(given, inputs.corpus.vocab_size)
    refuse_differing(given, inputs, pipeline, mesh)
    start = mesh.control.gather(start)[0]
    found: Checkpoint | None = None
    messages: list[str] = []
    if start.folders:
        found, passed_over = newest_whole(start.folders, mesh)
        messages += [f"passed over: {reason}" for reason in passed_over]
    config = on_all_ranks(mesh, lambda: resolve(given, inputs, start, found, mesh.size()))
    resumed = None if found is None or start.finetune else found.manifest
    precision = config.precision.name or (None if resumed is None else resumed["precision"])
    precision = choose_precision(precision, mesh, "--bf16", ("--no-bf16",))
    asked = config.training.compile if config.model.can_compile else False
    compiled, warnings = choose_compile(asked, mesh)
    weights: str | None = None
    if found is None:
        weights = mesh.control.gather(on_all_ranks(mesh, config.model.starts_from))[0]
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
        draws=weights is None,
        zero_stage=config.parallel.stage_of_zero,
        cuda_graph=config.training.cuda_graph,
    )
    facts = {
        "kind": config.model.kind,
        "config": asdict(config),
        "precision": precision,
        **inputs.corpus.identity,
        "run": run_id(resumed),
        # The id of the run whose weights were fine-tuned, in this run or an earlier one.
        "weights_of": found and found.manifest.get("run" if start.finetune else "weights_of"),
    }
    facts |= on_all_ranks(mesh, lambda: config.model.facts(state.model, found))
    evaluate_first = False
    if weights is not None:
        messages += on_all_ranks(mesh, lambda: state.load_folder(weights))
    elif found is None:
        messages.append("starting from scratch")
    elif resumed is None:
        on_all_ranks(mesh, partial(state.load_weights, found))
        messages.append(f"starting at step 0 from the weights of {found.path}")
    else:
        on_all_ranks(mesh, partial(state.load, found))
        messages.append(f"going on from {found.path}")
        saved, now = resumed["environment"], environment(mesh)
        messages += changes(facts | {"environment": now}, resumed, mesh.batch.size)
        what = "the last bits may"
        if state.kernel_seed is not None:
            what = "what the kernel of attention drops, and so every loss, will"
        messages += [
            f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
            f"{what} differ from those of an undisturbed run"
            for name in ("torch", "threads", "device", "layout")
            if saved[name] != now[name]
        ]
        parallel = resumed["config"].get("parallel", {})
        stages = max(parallel.get("zero_stage", 0), int(parallel.get(DISTRIBUTED, False)))
        if (stages > 1) != ((own_stage := config.parallel.stage_of_zero) > 1):
            messages.append(
                f"warning: --zero-stage is {own_stage}, and was {stages} when the checkpoint was "
                "saved: from 2 on micro-batches are summed in another order, so that last bits "
                "differ from those of an undisturbed run"
            )
        step, target = state.step, config.training.steps
        if step >= target:
            end = f"--train-iters is {target}; --train-iters {2 * step}"
            if (epochs := given.training.epochs) is not None:
                needed = state.samples + config.global_batch_size(mesh.size())
                end = f"--epochs {epochs} ends there; --epochs "
                end += str(epochs_of(needed, inputs.samples_in))
            messages.append(
                f"nothing is trained: {found.path} is already at step {step}, and {end} continues"
            )
        evaluation_is_due = step % config.training.eval_interval == 0 or step >= target
        evaluate_first = resumed["validation_loss"] is None and evaluation_is_due
    return Run(
        config=config,
        inputs=inputs,
        state=state,
        facts=facts,
        files=files_beside(config.model, found, inputs.corpus.identity) if mesh.is_first else {},
        messages=[*messages, *warnings, *getattr(state.model, "warnings", ())],
        evaluate_first=evaluate_first,
    )


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
    wanted = training.eval_iters * run.config.global_batch_size(state.mesh.size())
    samples = min(wanted, data.samples_per_epoch)  # a smaller split is evaluated whole
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
