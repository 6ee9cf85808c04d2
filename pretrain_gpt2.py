"""Pretrain GPT-2 (paper, section 5.1): parse, launch, build, train.

    torchrun --nproc-per-node 2 pretrain_gpt2.py --preset scripts/presets/quickstart.toml \\
        --tensor-model-parallel-size 2 --data-path P_text_document --save checkpoints

All input is checked before torch is imported, and so before anything slow starts. Ends with status
75 where SIGTERM or SIGUSR1 asked for it: the same command with --load goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig
from megatron.config.resume import check_start, data_fingerprint, find_start, newest_readable
from megatron.train.inputs import open_inputs


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        world = world_size(environ)
        config = parse(PretrainConfig, arguments, environ)
        config.check(world)
        corpus, train_data, validation_data = open_inputs(config)
        start = find_start(config.checkpoint)
        check = partial(check_start, config, identity=corpus.identity, finetune=start.finetune)
        precision = None
        if start.folders:
            path, manifest, _ = newest_readable(start.folders)
            check(path, manifest)
            precision = None if start.finetune else manifest["precision"]

    from megatron.optim.schedule import learning_rate
    from megatron.train.launch import default_precision, launch
    from megatron.train.loop import Loop, train
    from megatron.train.metrics import Metrics
    from megatron.train.saver import Saver
    from megatron.train.signals import StopSignals, exit_code
    from megatron.train.sinks import open_sinks
    from megatron.train.start import begin
    from megatron.train.state import DTYPES, build_state

    with launch(config.parallel, environ) as mesh, StopSignals() as signals:
        precision = config.precision.name or precision or default_precision(mesh.device)
        state = build_state(
            config.model,
            config.optimizer,
            config.precision,
            mesh,
            corpus.vocab_size,
            seed=config.training.seed,
            dtype=DTYPES[precision],
        )
        facts = {"config": asdict(config), "precision": precision, **corpus.identity}
        news = begin(state, start, check)
        file, at, steps = config.metrics_file(), state.step, config.training.train_iters
        sinks = open_sinks(config.logging, file, environ, at, facts, mesh)
        with (
            Metrics(file, mesh, start=at, steps=steps, sinks=sinks) as metrics,
            Saver(mesh, config.checkpoint, facts, start_step=at) as saver,
        ):
            rate = partial(learning_rate, config.optimizer, decay_iters=config.lr_decay_iters())
            metrics.describe(state.describe())
            for each in news:
                metrics.say(each)
            metrics.say(
                f"step {state.step}, {state.samples} samples consumed, learning rate "
                f"{rate(state.updates + 1):.3e}, data {data_fingerprint(corpus.identity)}"
            )
            loop = Loop(
                training=config.training,
                log_interval=config.logging.log_interval,
                global_batch_size=config.global_batch_size(world),
                learning_rate=rate,
                train_data=train_data,
                validation_data=validation_data,
                metrics=metrics,
                signals=signals,
                saver=saver,
                save_interval=config.checkpoint.save_interval,
            )
            code = exit_code(train(state, loop))
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
