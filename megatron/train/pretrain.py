"""Pretraining, a story in order: parse, launch, build, train.

Imports of torch stand inside the functions: what is wrong with the input is told before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig
from megatron.config.resume import Start, check_start, find_start, newest_readable, run_id
from megatron.train.inputs import Inputs
from megatron.train.signals import StopSignals, exit_code

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.train.loop import Loop
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

        from megatron.train.claim import claim
        from megatron.train.launch import launch
        from megatron.train.loop import tell_start, train

        with user_errors(environ):
            mesh = stack.enter_context(launch(plan.config.parallel, environ))
        with user_errors(environ, agreed=True):
            stack.enter_context(claim(plan.config.checkpoint.save, mesh))
            state, began, facts = build(plan, mesh)
        loop = open_loop(plan, state, began, facts, signals, environ, stack)
        news = [*began.news, *plan.config.warnings(mesh.device.type)]
        tell_start(state, loop, news, plan.inputs.corpus.identity)
        if code := exit_code(train(state, loop)):
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
    path, manifest, _ = newest_readable(start.folders)
    plan.check(path, manifest)
    saved = None if start.finetune else manifest["precision"]
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
    from megatron.optim.schedule import learning_rate
    from megatron.train.loop import Loop
    from megatron.train.metrics import Metrics
    from megatron.train.saver import Saver
    from megatron.train.sinks import open_sinks

    config, mesh = plan.config, state.mesh
    file, at, steps = config.metrics_file(), state.step, config.training.train_iters
    sinks = open_sinks(config.logging, file, environ, at, facts, mesh, signals.ask)
    metrics = stack.enter_context(Metrics(file, mesh, start=at, steps=steps, sinks=sinks))
    attached = plan.inputs.attached
    saver = Saver(mesh, config.checkpoint, facts, attached=attached, start_step=at)
    return Loop(
        training=config.training,
        log_interval=config.logging.log_interval,
        global_batch_size=config.global_batch_size(plan.world),
        learning_rate=partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()),
        train_data=plan.inputs.train,
        validation_data=plan.inputs.validation,
        metrics=metrics,
        signals=signals,
        saver=stack.enter_context(saver),
        save_interval=config.checkpoint.save_interval,
        owes_evaluation=began.owes_evaluation,
    )
