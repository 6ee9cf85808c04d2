"""Pretraining, a story in order: parse, launch, build, train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig
from megatron.config.resume import check_start, find_start, newest_readable, run_id
from megatron.train.inputs import Inputs
from megatron.train.signals import StopSignals, exit_code

Program = TypeVar("Program", bound=PretrainConfig)


def pretrain(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    program: type[Program],
    open_inputs: Callable[[Program], Inputs],
) -> None:
    """program: its settings. open_inputs: its data, opened and checked without torch.

    All input is checked before torch is imported, and so before anything slow starts. Raises
    SystemExit with status 75 where SIGTERM or SIGUSR1 asked for it: the same command with --load
    goes on.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        with user_errors(environ):
            world = world_size(environ)
            config = parse(program, arguments, environ)
            config.check(world)
            inputs = open_inputs(config)
            identity, start, saved = inputs.corpus.identity, find_start(config.checkpoint), None
            check = partial(check_start, config, identity=identity, finetune=start.finetune)
            if start.folders:
                path, manifest, _ = newest_readable(start.folders)
                check(path, manifest)
                saved = None if start.finetune else manifest["precision"]

        from megatron.optim.schedule import learning_rate
        from megatron.train.claim import claim
        from megatron.train.launch import launch
        from megatron.train.loop import Loop, tell_start, train
        from megatron.train.metrics import Metrics
        from megatron.train.saver import Saver
        from megatron.train.sinks import open_sinks
        from megatron.train.start import begin, choose_precision
        from megatron.train.state import DTYPES, build_state

        with user_errors(environ):
            mesh = stack.enter_context(launch(config.parallel, environ))
        with user_errors(environ, agreed=True):
            stack.enter_context(claim(config.checkpoint.save, mesh))
            precision = choose_precision(config.precision.name, saved, mesh)
            state = build_state(
                config.model,
                config.optimizer,
                config.precision,
                mesh,
                inputs.corpus.vocab_size,
                seed=config.training.seed,
                dtype=DTYPES[precision],
            )
            facts = {
                "kind": config.model.kind,
                "config": asdict(config),
                "precision": precision,
                **identity,
            }
            began = begin(state, start, check, facts)
        facts |= {"run": run_id(began.manifest), "weights_of": began.weights_of}
        file, at, steps = config.metrics_file(), state.step, config.training.train_iters
        sinks = open_sinks(config.logging, file, environ, at, facts, mesh, signals.ask)
        metrics = stack.enter_context(Metrics(file, mesh, start=at, steps=steps, sinks=sinks))
        rate = partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters())
        saver = Saver(mesh, config.checkpoint, facts, attached=inputs.attached, start_step=at)
        loop = Loop(
            training=config.training,
            log_interval=config.logging.log_interval,
            global_batch_size=config.global_batch_size(world),
            learning_rate=rate,
            train_data=inputs.train,
            validation_data=inputs.validation,
            metrics=metrics,
            signals=signals,
            saver=stack.enter_context(saver),
            save_interval=config.checkpoint.save_interval,
            owes_evaluation=began.owes_evaluation,
        )
        news = [*began.news, *config.checkpoint.warnings()]
        tell_start(state, loop, news, identity)
        if code := exit_code(train(state, loop)):
            raise SystemExit(code)
