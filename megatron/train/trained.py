"""The checkpoint and the tokenizer of a trained model, checked against each other without torch."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.config.resume import latest_checkpoint
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import Tokenizer, build_tokenizer


def open_trained(section: TrainedConfig) -> tuple[Path, Tokenizer]:
    """The newest checkpoint of --load, and the tokenizer it was trained with.

    Raises FileNotFoundError without a checkpoint, ValueError where the tokenizer is another one.
    """
    path = latest_checkpoint(section.load)
    tokenizer = build_tokenizer(section.tokenizer_type, section.vocab_file, section.merge_file)
    trained_with = json.loads((path / "manifest.json").read_text())["tokenizer"]
    if trained_with != tokenizer.fingerprint:
        raise ValueError(
            f"--vocab-file {section.vocab_file} and --merge-file {section.merge_file} are not the "
            f"tokenizer that {path} was trained with: fingerprint {tokenizer.fingerprint[:12]}, "
            f"not {trained_with[:12]}; the files the training data was made with would work"
        )
    return path, tokenizer
