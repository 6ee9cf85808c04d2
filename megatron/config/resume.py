"""What a run starts from, and whether it may: known before anything slow starts."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checkpoints import STEP_FOLDER, read_manifest, step_folders, step_of
from megatron.config.checks import flag, switch
from megatron.config.pretrain import PretrainConfig

# Settings that make another model, and settings with which a resumed run would see some samples
# twice and others never (or draw other dropout).
MODEL = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
    )
}
DATA = {
    "data": ("split", "seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    "training": ("seed",),
}
SWITCHES = {"fp32": "--no-bf16", "bf16": "--bf16", "fp16": "--fp16"}
OVERRIDE = "--override-data goes on all the same"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoints a run may start from, the furthest first; none for a start from scratch."""

    folders: tuple[Path, ...] = ()
    finetune: bool = False
    """Take the weights alone and begin at step 0."""


def find_start(section: CheckpointConfig) -> Start:
    """Where --load, --save and --finetune say to begin.

    --load and --save of the same directory is how a job is queued that restarts itself: its first
    start finds nothing to load, and that is no error. Raises FileNotFoundError where --load holds
    no checkpoint, ValueError where --save holds those of another run.
    """
    saved = step_folders(section.save) if section.save is not None else []
    if section.load is None:
        if saved:
            raise ValueError(
                f"--save {section.save} holds checkpoints up to {saved[0].name}, which a run from "
                f"scratch would mix with its own; --load {section.save} to go on, or another "
                "directory for --save, would work"
            )
        return Start()
    if section.finetune and saved:
        return Start(folders=tuple(saved))
    folders = _folders(section.load)
    if not folders and not saved and section.load != section.save:
        raise FileNotFoundError(
            f"--load {section.load}: no checkpoint there; "
            "the directory given to an earlier --save would work"
        )
    if is_one_step(section.load) and Path(section.load).resolve().parent == _resolved(section.save):
        saved = []  # going back on purpose, in the same directory
    both = {folder.resolve(): folder for folder in (*saved, *folders)}.values()
    ordered = sorted(both, key=step_of, reverse=True)
    return Start(folders=tuple(ordered), finetune=section.finetune)


def is_one_step(load: str | Path) -> bool:
    """Whether --load names one checkpoint, and not a directory of them."""
    return re.fullmatch(STEP_FOLDER, Path(load).name) is not None


def _folders(load: str | Path) -> list[Path]:
    return [Path(load)] if is_one_step(load) and Path(load).is_dir() else step_folders(load)


def _resolved(directory: str | None) -> Path | None:
    return None if directory is None else Path(directory).resolve()


def examine(folder: Path) -> tuple[dict[str, Any], str]:
    """(manifest, "") of a checkpoint whose files are all there at their sizes, else ({}, what is
    wrong). What the files hold is not read here."""
    try:
        return read_manifest(folder), ""
    except (ValueError, OSError) as error:
        return {}, str(error)


def newest_readable(folders: Sequence[Path]) -> tuple[Path, dict[str, Any], list[str]]:
    """(folder, manifest, what is wrong with each that was passed over) of the first sound one.

    Raises ValueError with every reason where there is none.
    """
    reasons: list[str] = []
    for folder in folders:
        manifest, reason = examine(folder)
        if manifest:
            return folder, manifest, reasons
        reasons.append(reason)
    raise ValueError(no_whole_one(reasons))


def no_whole_one(passed_over: Sequence[str]) -> str:
    reasons = "; ".join(passed_over)
    return f"--load: no whole checkpoint; an older one in another directory would work ({reasons})"


def check_start(
    config: PretrainConfig,
    path: Path,
    manifest: Mapping[str, Any],
    *,
    identity: Mapping[str, Any],
    finetune: bool = False,
) -> None:
    """Raise ValueError naming both values where the checkpoint's run differs in what may not
    change: the model, and without --override-data what decides which sample comes when.

    identity: that of the data sets: "vocab_size", "tokenizer" and "data", one text for each.
    finetune: the run takes the weights alone; then it may have other data, but not another
    tokenizer.
    """
    section = config.checkpoint
    _check_settings(config, path, manifest, MODEL)
    if manifest["vocab_size"] != identity["vocab_size"]:
        raise ValueError(
            f"--data-path has a vocabulary of {identity['vocab_size']}, but {path} was trained "
            f"with {manifest['vocab_size']}; preprocess with that vocabulary"
        )
    if not section.override_data and manifest["tokenizer"] != identity["tokenizer"]:
        raise ValueError(
            f"--data-path was made with the tokenizer {identity['tokenizer'][:12]}, but {path} was "
            f"trained with {manifest['tokenizer'][:12]}; preprocess with that vocabulary, or "
            f"{OVERRIDE}"
        )
    if finetune:
        return
    _check_precision(config, path, manifest)
    if not section.override_data:
        _check_settings(config, path, manifest, DATA, OVERRIDE)
        _check_data_sets(path, identity["data"], manifest["data"])


def _check_settings(
    config: PretrainConfig,
    path: Path,
    manifest: Mapping[str, Any],
    fixed: Mapping[str, Sequence[str]],
    way_out: str = "",
) -> None:
    now = asdict(config)
    for section, field in ((owner, each) for owner in fixed for each in fixed[owner]):
        given, saved = now[section][field], manifest["config"][section][field]
        if given != saved:
            cure = switch(field, saved) if isinstance(saved, bool) else f"{flag(field)} {saved}"
            raise ValueError(
                f"{flag(field)} is {given}, but {path} was trained with {saved}; {cure} would work"
                + (f", or {way_out}" if way_out else "")
            )


def _check_precision(config: PretrainConfig, path: Path, manifest: Mapping[str, Any]) -> None:
    given, saved = config.precision.name, manifest["precision"]
    if given not in (None, saved):
        raise ValueError(
            f"{SWITCHES[given]} is given, but {path} was trained in {saved}; "
            f"{SWITCHES[saved]} would work"
        )


def _check_data_sets(path: Path, given: Sequence[str], saved: Sequence[str]) -> None:
    pairs = zip_longest(given, saved, fillvalue="none")
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            raise ValueError(
                f"data set {number} of --data-path is {ours}, but {path} was trained with "
                f"{theirs}; the data sets of that run, wherever they are now, would work, or "
                f"{OVERRIDE}"
            )


def data_fingerprint(identity: Mapping[str, Any]) -> str:
    """Twelve digits for tokenizer, vocabulary and data sets together."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
