"""What a run starts from, and whether it may: known before anything slow starts."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checkpoints import (
    one_step,
    read_manifest,
    save_directory,
    step_folders,
    step_of,
)
from megatron.config.checks import flag, switch
from megatron.config.model import ModelConfig
from megatron.config.pretrain import PretrainConfig
from megatron.config.training import sample_settings

# Settings that make another model.
MODEL = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "layernorm_epsilon",
    "residual_order",
)
# Settings that a resumed run may change, and is told of; others say where, and how fast.
TOLD = ("model", "data", "optimizer", "training", "precision")
SWITCHES = {"fp32": "--no-bf16", "bf16": "--bf16", "fp16": "--fp16"}
# What the directories of other programs have, and what makes a checkpoint of them.
FOREIGN = {
    "config.json": "convert_hf.py import",
    "latest_checkpointed_iteration.txt": "import_megatron.py",
}
OVERRIDE = "--override-data goes on all the same"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoints a run may start from, the furthest first; none for a start from scratch."""

    folders: tuple[Path, ...] = ()
    finetune: bool = False
    """Take the weights alone and begin at step 0."""


def find_start(section: CheckpointConfig, given: str = "--load") -> Start:
    """Where --load, --save and --finetune say to begin.

    --load and --save of the same directory is how a job is queued that restarts itself: its first
    start finds nothing to load, and that is no error. given: the flag that --load is of, for
    messages. Raises FileNotFoundError where --load holds no checkpoint, ValueError where --save
    holds those of another run than --load.
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
    one, folders = one_step(section.load), _folders(section.load)
    save = section.save and Path(section.save).resolve()
    is_same = save_directory(section.load) == save
    if is_same and one is not None:
        saved = []  # going back on purpose, in the same directory
    if not folders and not saved and (one is not None or not is_same):
        raise FileNotFoundError(
            f"{given} {section.load}: no checkpoint there; {_what_would_work(section.load, given)}"
        )
    if not is_same:
        _check_one_run(section, saved, folders)
    if section.finetune and saved:
        return Start(folders=tuple(saved))
    both = {folder.resolve(): folder for folder in (*saved, *folders)}.values()
    ordered = sorted(both, key=step_of, reverse=True)
    return Start(folders=tuple(ordered), finetune=section.finetune)


def _what_would_work(load: str, given: str) -> str:
    """Instead of a --load without a checkpoint of this project."""
    for file, program in FOREIGN.items():
        if Path(load, file).is_file():
            new = f"then {given} NEW"
            return f"it has a {file}: `python tools/{program} --from {load} --to NEW`, {new}"
    if seeds := sorted(each.name for each in Path(load).glob("seed_*") if step_folders(each)):
        return f"it holds {', '.join(seeds)}: {given} {Path(load, seeds[0])} would work"
    return "the directory given to an earlier --save would work"


def _folders(load: str | Path) -> list[Path]:
    one = one_step(load)
    return [one] if one is not None and one.is_dir() else step_folders(load)


def _check_one_run(
    section: CheckpointConfig, saved: Sequence[Path], folders: Sequence[Path]
) -> None:
    """What --save holds has to go on from the run of --load, or to be fine-tuned from it."""
    ours, theirs = _first_readable(saved), _first_readable(folders)
    if ours is None or theirs is None:
        return
    (folder, manifest), (other, pretrained) = ours, theirs
    if manifest.get("weights_of" if section.finetune else "run") != pretrained.get("run"):
        what, cure = "is not of the run of", f"--load {section.save}"
        if section.finetune:
            what, cure = "was not fine-tuned from", f"{cure} without --finetune"
        raise ValueError(
            f"--save {section.save} holds checkpoints up to {folder.name}, which {what} --load "
            f"{section.load} ({other.name}) and would be mixed with this run's; {cure} "
            "to go on from there, or another directory for --save, would work"
        )


def _first_readable(folders: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    found = ((folder, examine(folder)[0]) for folder in folders)
    return next(((folder, manifest) for folder, manifest in found if manifest), None)


def run_id(manifest: Mapping[str, Any] | None) -> str:
    """Of the run that the checkpoint continues, else a new one: `run` in every manifest.

    A new one is random, so that ranks draw different ones; that of the first rank is saved.
    """
    return (manifest or {}).get("run") or secrets.token_hex(8)


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
    raise ValueError(no_whole_one(folders, reasons))


def no_whole_one(folders: Sequence[Path], reasons: Sequence[str]) -> str:
    """The message where each of the folders is damaged, a reason a line."""
    places = list(dict.fromkeys(str(folder.parent) for folder in folders))
    cures = " and ".join(f"`python tools/checkpoint.py ls {place}`" for place in places)
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return (
        f"--load: no whole checkpoint in {' and '.join(places)}; {cures} shows what is there, and "
        f"a directory with a whole one would work{lines}"
    )


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
    if "imported_from" in manifest and not finetune:
        raise ValueError(
            f"{path} holds weights alone, imported from {manifest['imported_from']}: there is no "
            "run to go on with; --finetune, which starts at step 0 from them, would work, with a "
            "--save of its own"
        )
    check_kind(path, manifest, config.model.kind)
    given = asdict(config.model)
    _check_settings(config, path, manifest, {"model": [each for each in MODEL if each in given]})
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
        samples = {"data": sample_settings(config.data), "training": ["seed"]}
        _check_settings(config, path, manifest, samples, OVERRIDE)
        _check_data_sets(path, identity["data"], manifest, config.data.data_path)


def kind_of(manifest: Mapping[str, Any]) -> str:
    """The kind of model that a checkpoint holds; the first ones held GPT-2 and did not say so."""
    kind: str = manifest.get("kind", ModelConfig.kind)
    return kind


def check_kind(path: Path, manifest: Mapping[str, Any], *wanted: str) -> None:
    """Raise ValueError where the checkpoint's model is of none of the kinds that are wanted."""
    if (kind := kind_of(manifest)) not in wanted:
        raise ValueError(
            f"{path} holds a model of the kind {kind}; a checkpoint of the kind "
            f"{' or '.join(wanted)} would work"
        )


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
            f"{SWITCHES[saved]} would work, or --finetune, which takes its weights alone"
        )


def _check_data_sets(
    path: Path, given: Sequence[str], manifest: Mapping[str, Any], data_path: Sequence[str]
) -> None:
    then = manifest["config"]["data"]["data_path"]
    cure = f"the data sets of that run, then at {' '.join(then)}, would work"
    if list(then) == list(data_path):
        cure = f"what is at {' '.join(then)} has been replaced since, and what was there would work"
    for number, pair in enumerate(zip_longest(given, manifest["data"], fillvalue="none"), start=1):
        ours, theirs = (each.removeprefix("1 of ") for each in pair)
        if ours != theirs:
            raise ValueError(
                f"data set {number} of --data-path is {ours}, but {path} was trained with "
                f"{theirs}; {cure}, or {OVERRIDE}"
            )


def changes(facts: Mapping[str, Any], manifest: Mapping[str, Any], data_size: int) -> list[str]:
    """A line for each setting that is not what it was when the checkpoint was saved, and one for
    other data.

    facts: of this run, as its own manifests have them. data_size: its data-parallel size.
    """
    now = _told(facts["config"], data_size)
    then = _told(manifest["config"], manifest["environment"]["layout"]["data"])
    changed = [name for name in now if name in then and now[name] != then[name]]
    lines = {
        name: f"changed: {flag(name)} is {_text(now[name])} (was {_text(then[name])})"
        for name in changed
    }
    follows = now["lr_decay_iters"] is None and now["lr_decay_style"] != "constant"
    if "train_iters" in lines and follows:
        lines["train_iters"] += (
            ": without --lr-decay-iters this moves the decay of the learning rate"
        )
    return [*lines.values(), *_data_changes(facts, manifest)]


def _told(config: Mapping[str, Any], data_size: int) -> dict[str, Any]:
    """The settings that are compared, by field, as JSON has them; a global batch that was left
    open is what it comes to at this layout, and the precision is checked elsewhere."""
    plain = json.loads(json.dumps({section: config[section] for section in TOLD}))
    settings = {name: value for section in plain.values() for name, value in section.items()}
    settings["global_batch_size"] = (
        settings["global_batch_size"] or settings["micro_batch_size"] * data_size
    )
    return {name: value for name, value in settings.items() if name not in ("bf16", "fp16")}


def _text(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _data_changes(facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    ours, theirs = data_fingerprint(facts), data_fingerprint(manifest)
    if ours == theirs:
        return []
    return [f"changed: tokenizer or data sets: their fingerprint is {ours} (was {theirs})"]


def data_fingerprint(facts: Mapping[str, Any]) -> str:
    """Twelve digits for vocabulary, tokenizer and data sets together, as a manifest has them."""
    identity = {key: facts[key] for key in ("vocab_size", "tokenizer", "data")}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
