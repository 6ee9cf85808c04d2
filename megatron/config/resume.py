"""Which checkpoint a run goes on from, and whether it may: known before anything slow starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import flag, switch
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


def read_settings(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; its settings that are FIXED and its data's identity are there.

    Raises FileNotFoundError without a manifest, ValueError for a damaged one.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"--load {path.parent}: {file} is not there, so that {path} is no whole checkpoint; "
            "the directory given to an earlier --save would work"
        )
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        # Read here all that is read later, so that what is missing is found here.
        _ = [manifest[key] for key in ("vocab_size", "tokenizer", "data")]
        _ = [manifest["config"][section][field] for section in FIXED for field in FIXED[section]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--load {path.parent}: {file} is damaged ({error!r}); another checkpoint would work"
        ) from error
    return manifest


def check_resume(config: PretrainConfig, path: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError naming both values where the checkpoint's run differs in what is FIXED.

    identity: that of the data sets: "vocab_size", "tokenizer" and "data", one text for each.
    """
    manifest, now = read_settings(path), asdict(config)
    for section, fields in FIXED.items():
        for field in fields:
            given, saved = now[section][field], manifest["config"][section][field]
            if given != saved:
                cure = switch(field, saved) if isinstance(saved, bool) else f"{flag(field)} {saved}"
                raise ValueError(
                    f"{flag(field)} is {given}, but {path} was trained with {saved}; "
                    f"{cure} would work"
                )
    if manifest["vocab_size"] != identity["vocab_size"]:
        raise ValueError(
            f"--data-path has a vocabulary of {identity['vocab_size']}, but {path} was trained "
            f"with {manifest['vocab_size']}; preprocess with that vocabulary"
        )
    if manifest["tokenizer"] != identity["tokenizer"]:
        raise ValueError(
            f"--data-path was made with the tokenizer {identity['tokenizer'][:12]}, but {path} was "
            f"trained with {manifest['tokenizer'][:12]}; preprocess with that vocabulary"
        )
    _check_data_sets(path, identity["data"], manifest["data"])


def _check_data_sets(path: Path, given: Sequence[str], saved: Sequence[str]) -> None:
    pairs = zip_longest(given, saved, fillvalue="none")
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            raise ValueError(
                f"data set {number} of --data-path is {ours}, but {path} was trained with "
                f"{theirs}; the data sets of that run, wherever they are now, would work"
            )
