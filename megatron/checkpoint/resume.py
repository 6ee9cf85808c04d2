"""What a run starts from, and whether it may: known before anything slow starts. No torch."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import (
    examine,
    no_whole_one,
    one_step,
    save_directory,
    step_folders,
    step_of,
)
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import UsageError, flag, switch
from megatron.config.data import sample_settings
from megatron.config.model import ModelConfig
from megatron.config.pretrain import PretrainConfig

# A resumed run is compared with its checkpoint by the settings of these parts of its config; what
# the others hold (where files are, how fast it runs, what it logs) changes no result.
COMPARED = ("model", "data", "optimizer", "training", "precision")
# Of those, what makes another model may not change. What decides which sample comes when (the seed
# and `sample_settings`) changes only with --override-data. The rest may change, and is said.
MODEL = {
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "layernorm_epsilon",
    "residual_order",
}
OVERRIDE = "unless --override-data is given"
PRECISIONS = {"fp32": "--no-bf16", "bf16": "--bf16", "fp16": "--fp16"}
# What the directories of other programs have, and what makes a checkpoint of them.
FOREIGN = {
    "config.json": "convert_hf.py import",
    "latest_checkpointed_iteration.txt": "import_megatron.py",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoints a run may start from, the furthest first; none for a start from scratch."""

    folders: tuple[Path, ...] = ()
    finetune: bool = False
    """Take the weights alone and begin at step 0."""


def find_start(config: CheckpointConfig, given: str = "--load") -> Start:
    """Where --load, --save and --finetune say to begin.

    --load and --save of the same directory is how a job is queued that restarts itself: its first
    start finds nothing to load, and that is no error. given: the flag that --load is of, for
    messages. Raises FileNotFoundError where --load holds no checkpoint, UsageError where --save
    holds those of another run than --load, or fine-tuning would save into --load.
    """
    saved = step_folders(config.save) if config.save is not None else []
    if config.load is None:
        if saved:
            raise UsageError(
                "--save",
                config.save,
                f"a directory without checkpoints (it has {saved[0].name}) or that of --load",
                works=("--save", str(config.save), "--load", str(config.save)),
            )
        return Start()
    one = one_step(config.load)
    is_same = config.save is not None and save_directory(config.load) == Path(config.save).resolve()
    if config.finetune and is_same:
        raise UsageError(
            "--save",
            config.save,
            f"another directory than --load {config.load}, whose weights --finetune takes",
            works=("--save", f"{config.save}_finetuned"),
        )
    if is_same and one is not None:
        saved = []  # going back on purpose, in the same directory
    folders = [one] if one is not None and one.is_dir() else step_folders(config.load)
    if not folders and not saved and (one is not None or not is_same):
        cure = _what_would_work(config.load, given)
        raise FileNotFoundError(f"{given} {config.load}: no checkpoint there; {cure}")
    if not is_same:
        _check_one_run(config, saved, folders)
    if config.finetune and saved:
        return Start(folders=tuple(saved))
    both = {folder.resolve(): folder for folder in (*saved, *folders)}.values()
    ordered = sorted(both, key=step_of, reverse=True)
    return Start(folders=tuple(ordered), finetune=config.finetune)


def _what_would_work(load: str, given: str) -> str:
    """Instead of a --load without a checkpoint of this project."""
    for file, program in FOREIGN.items():
        if Path(load, file).is_file():
            new = f"then {given} NEW"
            return f"it has a {file}: `python tools/{program} --from {load} --to NEW`, {new}"
    if seeds := sorted(each.name for each in Path(load).glob("seed_*") if step_folders(each)):
        return f"it holds {', '.join(seeds)}: {given} {Path(load, seeds[0])} works"
    return "the directory given to an earlier --save works"


def _check_one_run(
    config: CheckpointConfig, saved: Sequence[Path], folders: Sequence[Path]
) -> None:
    """What --save holds has to continue the run of --load, or to be fine-tuned from it."""
    readable = [[m for m, _ in map(examine, each) if m][:1] for each in (saved, folders)]
    if not all(readable):
        return
    ((ours,), (theirs,)) = readable
    if ours.get("weights_of" if config.finetune else "run") != theirs.get("run"):
        kind = "that was fine-tuned from" if config.finetune else "of the run of"
        raise UsageError(
            "--save",
            config.save,
            f"a directory whose checkpoints (here up to {saved[0].name}) are {kind} --load "
            f"{config.load}, or one without",
            works=("--save", f"{config.save}_2"),
        )


def newest_readable(folders: Sequence[Path]) -> tuple[Path, dict[str, Any], list[str]]:
    """(folder, manifest, what is wrong with each folder passed over) of the first whose files are
    all there, at their sizes. Raises ValueError with every reason where there is none."""
    reasons: list[str] = []
    for folder in folders:
        manifest, reason = examine(folder)
        if manifest:
            return folder, manifest, reasons
        reasons.append(reason)
    raise ValueError(no_whole_one(folders, reasons))


def run_id(manifest: Mapping[str, Any] | None) -> str:
    """Of the run that the checkpoint continues, else a new one: `run` in every manifest.

    A new one is random, so that ranks draw different ones; that of the first rank is saved.
    """
    return (manifest or {}).get("run") or secrets.token_hex(8)


def kind_of(manifest: Mapping[str, Any]) -> str:
    """The kind of model that a checkpoint holds; the first ones held GPT-2 and did not say so."""
    kind: str = manifest.get("kind", ModelConfig.kind)
    return kind


def check_kind(path: Path, manifest: Mapping[str, Any], *wanted: str) -> None:
    """Raise ValueError where the checkpoint's model is of none of the kinds that are wanted."""
    if (kind := kind_of(manifest)) not in wanted:
        raise ValueError(
            f"{path} holds a model of the kind {kind}; a checkpoint of the kind "
            f"{' or '.join(wanted)} works"
        )


def check_start(
    config: PretrainConfig,
    path: Path,
    manifest: Mapping[str, Any],
    *,
    identity: Mapping[str, Any],
    finetune: bool = False,
) -> None:
    """Raise UsageError naming both values where the checkpoint's run differs in what may not
    change: the model, and without --override-data what decides which sample comes when.

    identity: that of the data sets: "vocab_size", "tokenizer" and "data", one text for each.
    finetune: the run takes the weights alone; then it may have other data, but not another
    tokenizer.
    """
    check_kind(path, manifest, config.model.kind)
    if "imported_from" in manifest and not finetune:
        raise UsageError(
            "--load",
            path,
            f"a run to resume; it holds weights alone, imported from {manifest['imported_from']}, "
            "from which --finetune starts at step 0, with a --save of its own",
            works=("--load", str(path), "--finetune"),
        )
    override = config.checkpoint.override_data
    fixed, data = MODEL, {"seed", *sample_settings(config.data)}
    if finetune or override:
        data = set()
    differing = _differences(manifest, {"config": asdict(config)})
    if wrong := [name for name in differing if name in fixed | data]:
        name = min(wrong, key=lambda each: each not in fixed)  # what nothing overrides first
        saved, given = (_arguments(name, value) for value in differing[name])
        raise UsageError(
            given[0],
            " ".join(given[1:]) or None,
            f"{' '.join(saved)}, as in {path}{f', {OVERRIDE}' if name in data else ''}",
            works=tuple(word for each in wrong for word in _arguments(each, differing[each][0])),
        )
    if not finetune and config.precision.name not in (None, manifest["precision"]):
        cure = PRECISIONS[manifest["precision"]]
        allowed = f"{cure}, as in {path}, unless with --finetune"
        raise UsageError(PRECISIONS[config.precision.name], allowed=allowed, works=(cure,))
    _check_data(config, path, manifest, identity, is_same_run=not finetune)


def _arguments(name: str, value: Any) -> tuple[str, ...]:
    """A setting as it is given on the command line."""
    if isinstance(value, bool):
        return (switch(name, value),)
    return (flag(name), *map(str, value if isinstance(value, list) else [value]))


def _check_data(
    config: PretrainConfig,
    path: Path,
    manifest: Mapping[str, Any],
    identity: Mapping[str, Any],
    *,
    is_same_run: bool,
) -> None:
    """Raise UsageError where the data sets are not those of the checkpoint's run."""

    def check(what: str, values: Iterable[object], *works: str) -> None:
        saved, given = values
        if saved != given:
            allowed = f"{what} {saved} (not {given}), as in {path}"
            allowed += f", {OVERRIDE}" if works else ""
            at = " ".join(config.data.data_path) or None
            raise UsageError("--data-path", at, allowed, works=works)

    both = (manifest, identity)
    check("of a vocabulary of", [each["vocab_size"] for each in both])
    if config.checkpoint.override_data:
        return
    check("made with the tokenizer", [each["tokenizer"][:12] for each in both], "--override-data")
    sets = zip_longest(manifest["data"], identity["data"], fillvalue="none") if is_same_run else ()
    for number, pair in enumerate(sets, start=1):
        values = [each.removeprefix("1 of ") for each in pair]
        check(f"as data set {number}", values, "--override-data")


def changes(facts: Mapping[str, Any], manifest: Mapping[str, Any], data_size: int) -> list[str]:
    """A line for each setting that is not what it was when the checkpoint was saved, and one for
    other data.

    facts: of this run, as its own manifests have them. data_size: its data-parallel size.
    """
    sizes = manifest["environment"]["layout"]["data"], data_size
    differing = _differences(manifest, facts, sizes)
    lines = [
        f"changed: {flag(name)} is {_text(now)} (was {_text(saved)})"
        for name, (saved, now) in differing.items()
    ]
    ours, theirs = data_fingerprint(facts), data_fingerprint(manifest)
    if ours != theirs:
        lines.append(f"changed: tokenizer or data sets: their fingerprint is {ours} (was {theirs})")
    return lines


def _text(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _differences(
    manifest: Mapping[str, Any], facts: Mapping[str, Any], data_sizes: tuple[int, int] = (1, 1)
) -> dict[str, tuple[Any, Any]]:
    """{setting: (saved, now)} of those that both have and that differ."""
    saved, now = (
        _settings(each["config"], size)
        for each, size in zip((manifest, facts), data_sizes, strict=True)
    )
    return {
        name: (saved[name], value)
        for name, value in now.items()
        if name in saved and saved[name] != value
    }


def _settings(config: Mapping[str, Any], data_size: int) -> dict[str, Any]:
    """The settings that are compared, by field, as JSON has them; what was left open is what it
    comes to. The precision is compared by its name elsewhere."""
    parts = json.loads(json.dumps({part: config[part] for part in COMPARED if part in config}))
    settings = {name: value for part in parts.values() for name, value in part.items()}
    if "training" in parts:
        settings["global_batch_size"] = (
            settings["global_batch_size"] or settings["micro_batch_size"] * data_size
        )
        if settings["lr_decay_style"] != "constant":
            settings["lr_decay_iters"] = settings["lr_decay_iters"] or settings["train_iters"]
    return {name: value for name, value in settings.items() if name not in ("bf16", "fp16")}


def data_fingerprint(facts: Mapping[str, Any]) -> str:
    """Twelve digits for vocabulary, tokenizer and data sets together, as a manifest has them."""
    identity = {key: facts[key] for key in ("vocab_size", "tokenizer", "data")}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
