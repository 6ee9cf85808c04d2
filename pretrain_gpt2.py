"""Pretrain GPT-2 (paper, section 5.1): parse, launch, build, train.

    torchrun --nproc-per-node 2 pretrain_gpt2.py --preset scripts/presets/quickstart.toml \\
        --tensor-model-parallel-size 2 --data-path P_text_document --save checkpoints

All input is checked before torch is imported, and so before anything slow starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron.config.launch import world_size
from megatron.config.parse import parse, user_errors
from megatron.config.pretrain import PretrainConfig
from megatron.config.resume import check_resume, resume_point
from megatron.data.gpt2 import open_splits
from megatron.data.sources import open_corpus
from megatron.data.tokenizer import build_tokenizer


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        world = world_size(environ)
        config = parse(PretrainConfig, arguments, environ)
        config.check(world)
        data, training, checkpoint = config.data, config.training, config.checkpoint
        tokenizer = None
        if data.vocab_file or data.merge_file:
            tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        corpus = open_corpus(data.data_path, tokenizer, config.model.vocab_size)
        train_data, validation_data, _ = open_splits(
            corpus,
            split=data.split,
            seq_length=data.seq_length,
            seed=training.seed,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
        if train_data is None:
            raise ValueError(
                f"--split {data.split} keeps nothing for training; --split 29,1,0 would work"
            )
        resume = resume_point(checkpoint)
        if resume is not None:
            check_resume(config, resume, corpus.identity)

    from megatron.optim.schedule import learning_rate
    from megatron.train.launch import launch
    from megatron.train.loop import Loop, train
    from megatron.train.metrics import Metrics
    from megatron.train.state import build_state, training_dtype

    facts = {"config": asdict(config), **corpus.identity}
    metrics_file = training.metrics_file
    if metrics_file is None and checkpoint.save is not None:
        metrics_file = str(Path(checkpoint.save) / "metrics.jsonl")
    with launch(config.parallel.tensor_model_parallel_size, environ) as mesh:
        state = build_state(
            config.model,
            config.optimizer,
            mesh,
            corpus.vocab_size,
            seed=training.seed,
            dtype=training_dtype(training),
        )
        if resume is not None:
            state.load(resume)
        with Metrics(
            metrics_file, is_first=mesh.is_first, start=state.step, steps=training.train_iters
        ) as metrics:
            metrics.say(f"loaded {resume}" if resume else "starting from scratch")
            metrics.describe(state.describe())
            loop = Loop(
                training=training,
                global_batch_size=config.global_batch_size(world),
                learning_rate=partial(
                    learning_rate, config.optimizer, decay_iters=config.lr_decay_iters()
                ),
                train_data=train_data,
                validation_data=validation_data,
                metrics=metrics,
                save=partial(state.save, checkpoint.save, facts) if checkpoint.save else None,
                save_interval=checkpoint.save_interval,
            )
            train(state, loop)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
