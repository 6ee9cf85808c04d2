"""Which checkpoint a run goes on from, and whether it may: known before anything slow starts."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import flag
from megatron.config.pretrain import PretrainConfig

# Settings that a resumed run may not change: with another value it would be another model, or would
# see some samples twice and others never.
FIXED = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
    ),
    "data": ("split", "seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    "training": ("seed", "bf16", "fp16"),
}


def latest_checkpoint(directory: str | Path) -> Path:
    """The newest complete checkpoint of a --save directory; FileNotFoundError where none is."""
    latest = Path(directory) / "latest"
    if not latest.is_file():
        raise FileNotFoundError(
            f"--load {directory}: no checkpoint there (it has no file 'latest'); "
            "the directory given to an earlier --save would work"
        )
    return Path(directory) / latest.read_text().strip()


def resume_point(section: CheckpointConfig) -> Path | None:
    """The checkpoint to go on from; None starts from scratch.

    --load and --save of the same directory is how a job is queued that restarts itself: its first
    start finds nothing to load, and that is no error.
    """
    if section.load is None:
        return None
    if section.load == section.save and not (Path(section.load) / "latest").exists():
        return None
    return latest_checkpoint(section.load)


def check_resume(config: PretrainConfig, path: Path, tokenizer: str, vocab_size: int) -> None:
    """Raise ValueError naming both values where the checkpoint's run differs in what is FIXED.

    tokenizer, vocab_size: fingerprint and true vocabulary of the data set's tokenizer.
    """
    manifest: Mapping[str, Any] = json.loads((path / "manifest.json").read_text())
    now = asdict(config)
    for section, fields in FIXED.items():
        for field in fields:
            saved = manifest["config"][section][field]
            if now[section][field] != saved:
                raise ValueError(
                    f"{flag(field)} is {now[section][field]}, but {path} was trained with {saved}; "
                    f"{flag(field)} {saved} would work"
                )
    if manifest["vocab_size"] != vocab_size:
        raise ValueError(
            f"--data-path has a vocabulary of {vocab_size}, but {path} was trained with "
            f"{manifest['vocab_size']}; preprocess with that vocabulary"
        )
    if manifest["tokenizer"] != tokenizer:
        raise ValueError(
            f"--data-path was made with the tokenizer {tokenizer[:12]}, but {path} was trained "
            f"with {manifest['tokenizer'][:12]}; preprocess with that vocabulary"
        )
