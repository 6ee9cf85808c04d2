"""The checkpoint and the tokenizer of a trained model, checked against each other without torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.resume import find_start, newest_readable
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer


def open_trained(
    section: TrainedConfig, parallel: ParallelConfig, world_size: int
) -> tuple[Sequence[Path], Tokenizer, dict[str, Any]]:
    """The checkpoints of --load from the newest readable one on, its tokenizer and its manifest.

    Warns of those it passes over. Raises FileNotFoundError without a checkpoint, ValueError where
    none is whole, where the model cannot be cut over the processes, and where the tokenizer is
    another one.
    """
    start = find_start(CheckpointConfig(load=section.load))
    path, manifest, passed_over = newest_readable(start.folders)
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    parallel.check(manifest["config"]["model"]["num_attention_heads"], world_size)
    tokenizer = build_tokenizer(section.tokenizer_type, section.vocab_file, section.merge_file)
    trained_with = manifest["tokenizer"]
    if trained_with != tokenizer.fingerprint:
        raise ValueError(
            f"--vocab-file {section.vocab_file} and --merge-file {section.merge_file} are not the "
            f"tokenizer that {path} was trained with: fingerprint {tokenizer.fingerprint[:12]}, "
            f"not {trained_with[:12]}; the files the training data was made with would work"
        )
    return start.folders[start.folders.index(path) :], tokenizer, manifest
