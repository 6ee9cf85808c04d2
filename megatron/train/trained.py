"""The checkpoint and the tokenizer of a trained model, checked against each other without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config.parallel import ParallelConfig
from megatron.config.resume import latest_checkpoint, read_settings
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer


def open_trained(
    section: TrainedConfig, parallel: ParallelConfig, world_size: int
) -> tuple[Path, Tokenizer, dict[str, Any]]:
    """The newest checkpoint of --load, the tokenizer it was trained with, and its manifest.

    Raises FileNotFoundError without a checkpoint, ValueError where its manifest is damaged, where
    the model cannot be cut over the processes, and where the tokenizer is another one.
    """
    path = latest_checkpoint(section.load)
    manifest = read_settings(path)
    parallel.check(manifest["config"]["model"]["num_attention_heads"], world_size)
    tokenizer = build_tokenizer(section.tokenizer_type, section.vocab_file, section.merge_file)
    trained_with = manifest["tokenizer"]
    if trained_with != tokenizer.fingerprint:
        raise ValueError(
            f"--vocab-file {section.vocab_file} and --merge-file {section.merge_file} are not the "
            f"tokenizer that {path} was trained with: fingerprint {tokenizer.fingerprint[:12]}, "
            f"not {trained_with[:12]}; the files the training data was made with would work"
        )
    return path, tokenizer, manifest
