"""Where a run starts, and whether that is allowed: checked before the model is built. No
torch."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from math import prod
from os.path import realpath
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint import format as files
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.pretrain import PretrainConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig, TrainingConfig
from megatron.data.files import SAMPLE
from megatron.errors import UsageError, flag, spelling
from megatron.models.registry import config_of, find_kind
from megatron.parallel.axes import BATCH_AXES

# Parts of the config that are compared when a run resumes. `resume` of its class is the rule for a
# setting that has changed; "resume" in the metadata of its field overrides it.
# fixed: it is refused. state: the same, unless the run takes only the weights. data: it is refused
# without --override-data. free: a message lists it. effect: its result is compared instead: the
# precision, the vocabulary ...
PARTS = ("model", "data", "optimizer", "training", "precision")
# The effective value of a setting that is not given, from all settings and the number of ranks that
# read different samples.
UNSET: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
    "global_batch_size": lambda given, ranks: given["micro_batch_size"] * ranks,
    "lr_decay_iters": lambda given, _: (
        None if given.get("lr_decay_style") == "constant" else given.get("train_iters")
    ),
    "ffn_hidden_size": lambda given, _: 4 * given["hidden_size"],
    "embedding_dropout": lambda given, _: given["hidden_dropout"],
}
DROPOUTS = ("attention_dropout", "hidden_dropout", "embedding_dropout")
OF_IMPORTS = {"shuffle", "pad"}  # settings of an imported run's data that its checkpoint has
CONFIG_JSON = "config.json: "  # prefix of each of its keys
# Keys of config.json that say nothing about the model.
NO_MODEL = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
NO_MODEL |= {"_name_or_path", "_attn_implementation_autoset"}
PRECISIONS = {name: f"--{name}" for name in ("bf16", "fp16", "pure-bf16")} | {"fp32": "--no-bf16"}
# Files in the directories of other programs, and the tools that make a checkpoint from them.
FOREIGN = {
    "config.json": "convert_hf.py import",
    "latest_checkpointed_iteration.txt": "import_megatron.py",
    ".metadata": "convert_dcp.py import",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoints a run may start from, highest step first; none for a start from scratch."""

    folders: tuple[Path, ...] = ()
    finetune: bool = False
    """Take only the weights and start at step 0."""


def find_start(config: CheckpointConfig, option: str = "--load") -> Start:
    """The start that --load, --save and --finetune ask for.

    A job that restarts itself is queued with the same directory as --load and --save: its first
    start finds nothing to load, and that is no error. option: the flag that set `load`, for
    messages. Raises UsageError if --load holds no checkpoint, --save holds those of another run
    than --load, or fine-tuning would save into --load.
    """
    saved = files.step_folders(config.save) if config.save is not None else []
    if config.load is None:
        if saved:
            allowed = f"without checkpoints (there is {saved[0].name}), or that of {{}}"
            cure = ("--save", str(config.save), "--load", str(config.save))
            raise UsageError("--save", config.save, allowed, "--load", works=cure)
        return Start()
    load = Path(config.load)
    one = files.one_step(load)
    real = Path(realpath(load))  # resolve() raises for a ring of links
    directory = real if one is None else real.parent
    is_same = config.save is not None and str(directory) == realpath(config.save)
    if config.finetune and is_same:
        allowed, flags = "another directory than {}, where {} starts", ("--load", "--finetune")
        raise UsageError("--save", config.save, allowed, *flags, works=f"{config.save}_finetuned")
    if is_same and one is not None:
        saved = []  # going back on purpose, in the same directory
    folders = [one] if one is not None and one.is_dir() else files.step_folders(load)
    if not folders and not saved and (one is not None or not is_same):
        for folder in sorted(load.glob("seed_*")):
            if files.step_folders(folder):
                raise UsageError(option, config.load, "one of its folders", works=folder)
        allowed = "a directory with a checkpoint, such as that of an earlier --save"
        for file, program in FOREIGN.items():
            if (load / file).is_file():
                command = f"python tools/{program} --from {load} --output NEW"
                allowed = f"a checkpoint; `{command}` makes one"
                if file == "config.json":  # for any architecture
                    allowed += f", and pretrain.py --model huggingface --hf-model {load} needs none"
        raise UsageError(option, config.load, allowed)
    if not is_same:
        ours, theirs = _newest_manifest(saved), _newest_manifest(folders)
        key = "weights_of" if config.finetune else "run"
        if ours and theirs and ours.get(key) != theirs.get("run"):
            kind = "fine-tuned from" if config.finetune else "of the run of"
            allowed = f"without checkpoints, or with ones {kind} {{}} {{}}, which {saved[0].name} "
            allowed += "is not ({} {} resumes that run)"
            others = "--load", str(load), "--load", str(config.save)
            raise UsageError("--save", config.save, allowed, *others, works=f"{config.save}_2")
    if config.finetune and saved:
        return Start(folders=tuple(saved))
    both = {folder.resolve(): folder for folder in (*saved, *folders)}.values()
    ordered = sorted(both, key=files.step_of, reverse=True)
    return Start(folders=tuple(ordered), finetune=config.finetune)


def require_kind(path: Path, manifest: Mapping[str, Any], kind: str) -> None:
    """Raise UsageError if the checkpoint at `path` holds another kind of model."""
    if manifest["kind"] != kind:
        allowed = f"a model of the kind {kind}, not {manifest['kind']}"
        raise UsageError("--load", path, allowed)


def _newest_manifest(folders: Sequence[Path]) -> dict[str, Any] | None:
    for folder in folders:
        with suppress(ValueError, OSError):
            return files.read_manifest(folder)
    return None


def newest_readable(
    folders: Sequence[Path],
    option: str = "--load",
    read: Callable[[Path], files.Checkpoint] = files.read_checkpoint,
    *,
    any_loop: bool = False,
) -> tuple[files.Checkpoint, list[str]]:
    """(the first checkpoint that `read` accepts, why each previous one was passed over). By default
    it accepts one whose files are all there at their sizes.

    option: the flag of these folders, for messages. any_loop: also take a checkpoint of a user's
    own training loop, from which no program can build a model. Raises UsageError for such a
    checkpoint otherwise, and, with every reason, if none is accepted.
    """
    reasons: list[str] = []
    for folder in folders:
        try:
            checkpoint = read(folder)
        except (ValueError, OSError) as error:
            reasons.append(str(error))
            continue
        config = checkpoint.manifest.get("config")
        model = config.get("model") if isinstance(config, dict) else None
        has_model = isinstance(model, dict) and "vocab_size" in checkpoint.manifest
        if not any_loop and not has_model:
            allowed = "a checkpoint of one of the programs: this is of a training loop of one's own"
            allowed += " and does not say which model it has; the script that saved it reads it"
            raise UsageError(option, folder, allowed)
        return checkpoint, reasons
    directories = " and ".join(dict.fromkeys(str(folder.parent) for folder in folders))
    lines = "".join(f"\n  {reason}" for reason in reasons)
    see = f"`python tools/checkpoint.py ls {folders[0].parent}` shows what is there"
    raise UsageError(option, directories, f"a directory with a whole checkpoint; {see}{lines}")


def run_id(manifest: Mapping[str, Any] | None) -> str:
    """Id of the run that the checkpoint continues, else a new one: `run` in every manifest.

    A new id is random, and ranks draw different ones; the first rank's is saved.
    """
    return (manifest or {}).get("run") or secrets.token_hex(8)


def check_start(
    config: PretrainConfig,
    path: Path,
    manifest: Mapping[str, Any],
    *,
    identity: Mapping[str, Any],
    finetune: bool = False,
) -> None:
    """Raise UsageError naming both values if the checkpoint's run differs where it must not: in the
    model or, without --override-data, in settings that decide which sample comes when.

    identity: of the data sets: "vocab_size", "tokenizer" and "data", one text for each data set.
    finetune: the run takes only the weights; then it may have other data, but not another
    tokenizer.
    """
    require_kind(path, manifest, config.model.kind)
    if "imported_from" in manifest and not finetune and not _has_moments(manifest):
        allowed = f"a run to resume, not weights imported from {manifest['imported_from']}"
        raise UsageError("--load", path, allowed, works=("--load", str(path), "--finetune"))
    rules = _rules(manifest["kind"])
    if finetune:
        rules = {name: rule for name, rule in rules.items() if rule == "fixed"}
        rules |= dict.fromkeys(map(flag, config.model.adaptable), "free") | {"tokenizer": "data"}
    precision = config.precision.name or manifest["precision"]
    facts = {"config": asdict(config), **identity, "precision": precision}
    differing = differences(manifest, facts)
    names: dict[str, list[str]] = {"fixed": [], "data": [], "free": []}
    for name in differing:
        rule = rules.get(name.partition(":")[0], "free")
        is_dropout = name.startswith(CONFIG_JSON) and "drop" in name
        names["free" if is_dropout else "fixed" if rule == "state" else rule].append(name)
    wrong = names["fixed"] + ([] if config.checkpoint.override_data else names["data"])
    if not wrong:
        return
    name = wrong[0]
    saved, now = differing[name]
    unless = "" if name in names["fixed"] else ", unless --override-data is given"
    works: tuple[str, ...] = ("--override-data",) if unless else ()
    of_classes = hasattr(config.model, "num_classes")
    if config.data.mock_data and any(each.startswith("data sets") for each in wrong):
        words: tuple[str, ...] = ("--mock-data",)
        works = ("--mock-data", "--override-data") if unless else ("--no-mock-data",)
        allowed = "left out"
    elif name == "vocabulary" and (
        of_classes or config.data.mock_data or now == vars(config.model).get("vocab_size")
    ):
        name, allowed = "--num-classes" if of_classes else "--vocab-size", str(saved)
        words, works = (name, str(now)), (name, allowed)
    elif name.startswith(CONFIG_JSON):
        words = ("--hf-model", vars(config.model)["hf_model"])
        allowed = f"with {name.removeprefix(CONFIG_JSON)} {_text(saved)} in config.json (not "
        allowed += f"{_text(now)})"
    elif name == "precision" or name.startswith("--"):
        words = arguments_of(name, now) or (name,)
        allowed = " ".join(arguments_of(name, saved)) or "left out"
        works = tuple(word for each in wrong for word in arguments_of(each, differing[each][0]))
    else:  # it is no setting, but what is at --data-path
        words = config.data.source
        vocab_file = getattr(config.data, "vocab_file", None)
        if name == "tokenizer" and vocab_file is not None:
            words = ("--vocab-file", vocab_file)
        allowed = f"of {name} {saved} (not {now})"
    value = " ".join(words[1:]) or None
    raise UsageError(words[0], value, f"{allowed}, as in {path}{unless}", works=works)


def _has_moments(manifest: Mapping[str, Any]) -> bool:
    """Whether the checkpoint comes from a training run, of this or of another program."""
    return any(key.startswith("exp_avg.") for key in manifest.get("tensors", ()))


def arguments_of(name: str, value: Any) -> tuple[str, ...]:
    """A setting as it is given on the command line; () if it is left out, or is no setting."""
    if name == "precision":
        return (PRECISIONS[value],)
    return () if value is None or not name.startswith("--") else spelling(name[2:], value)


def changes(facts: Mapping[str, Any], manifest: Mapping[str, Any], data_size: int) -> list[str]:
    """A line for each setting and data set that has changed since the checkpoint was saved.

    facts: of this run, as in its own manifests. data_size: the number of its ranks that read
    different samples.
    """
    layout = manifest["environment"]["layout"]
    sizes = prod(size for axis, size in layout.items() if axis in BATCH_AXES), data_size
    return [
        f"changed: {name} is {_text(now)} (was {_text(saved)})"
        for name, (saved, now) in differences(manifest, facts, sizes).items()
    ]


def _text(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], data_sizes: tuple[int, int] = (1, 1)
) -> dict[str, tuple[Any, Any]]:
    """{name: (saved, now)} of settings that both runs have and that differ. A run is given by the
    facts of its manifests and the number of its ranks that read different samples."""
    rules = _rules(saved["kind"])
    ours, theirs = _settings(saved, data_sizes[0], rules), _settings(now, data_sizes[1], rules)
    for name in ours.keys() | theirs.keys():
        if name.startswith(CONFIG_JSON):  # a key that only one of them has differs, too
            ours.setdefault(name, None)
            theirs.setdefault(name, None)
    return {
        name: (ours[name], value)
        for name, value in theirs.items()
        if name in ours and ours[name] != value
    }


def _configs(kind: str) -> dict[str, Any]:
    """The class of each part of the config of runs of this kind of model."""
    entry = find_kind(kind, "kind")
    return {
        "model": resolve_name(entry.config),
        "data": entry.data_config,
        "optimizer": OptimizerConfig,
        "training": TrainingConfig,
        "precision": PrecisionConfig,
    }


def _rules(kind: str) -> dict[str, str]:
    """{"--num-layers": "fixed", "--seed": "data", ...} of runs of this kind of model: see PARTS."""
    rules = {"vocabulary": "fixed", "precision": "state", "tokenizer": "data", "data sets": "data"}
    rules[CONFIG_JSON.partition(":")[0]] = "fixed"
    for config in _configs(kind).values():
        rules |= {flag(each.name): config.resume for each in fields(config)}
        for owner in reversed(config.__mro__):  # a subclass may change the default alone
            for each in vars(owner).get("__dataclass_fields__", {}).values():
                if "resume" in each.metadata:
                    rules[flag(each.name)] = each.metadata["resume"]
    return rules


def _settings(facts: Mapping[str, Any], data_size: int, rules: Mapping[str, str]) -> dict[str, Any]:
    """{"--seed": 1234, ..., "precision": "fp32", "vocabulary": 50257, "tokenizer": its fingerprint,
    "data sets": their number, "data sets: 1": its SHA-256, ...}, as in JSON. Unset options are
    replaced by their effective values."""
    parts: Any = {part: dict(facts["config"].get(part, {})) for part in PARTS}
    if "kind" in facts:  # a checkpoint older than a setting has its default
        for part, config in _configs(facts["kind"]).items():
            for each in fields(config) if parts[part] else ():
                is_compared = config.resume != "free" or rules.get(flag(each.name)) == "state"
                if is_compared and each.default is not MISSING:
                    parts[part].setdefault(each.name, each.default)
    parts = json.loads(json.dumps(parts))  # tuples are lists in both
    is_imported = "imported_from" in facts
    if is_imported:
        names = OF_IMPORTS if _has_moments(facts) else ()
        parts["data"] = {name: value for name, value in parts["data"].items() if name in names}
    given = {name: value for part in parts.values() for name, value in part.items()}
    for name, effective in UNSET.items():
        if name in given and given[name] is None:
            given[name] = effective(given, data_size)
    values = {flag(name): value for name, value in given.items()}
    if (text := given.get("hf_config")) is not None:
        keys = json.loads(text)
        for name in sorted(keys.keys() - NO_MODEL, key=lambda name: name != "model_type"):
            values[f"{CONFIG_JSON}{name}"] = keys[name]
    if "kind" in facts and any(map(given.get, DROPOUTS)):
        device = "cpu" if facts["environment"]["device"] == "cpu" else "cuda"
        if "attention_dropout_rng" not in facts["config"]["model"]:
            masks = "drawn by each rank"
        elif config_of(facts).draws_in_kernel(device):
            masks = "a function of coordinates, but drawn by the kernel of attention"
        else:
            masks = "a function of coordinates"
        values["dropout masks"] = masks
    if "precision" in facts:
        values["precision"] = "pure-bf16" if given.get("pure_bf16") else facts["precision"]
    if facts["tokenizer"]:  # weights may be imported without one
        values["tokenizer"] = facts["tokenizer"][:12]
    values["vocabulary"] = facts["vocab_size"]
    if not is_imported:
        values["data sets"] = len(facts["data"])
    for number, text in enumerate(facts["data"], start=1):
        content, _, sample = text.removeprefix("1 of ").partition(SAMPLE)
        values[f"data sets: {number}"] = content
        if sample:  # separate, since an older checkpoint has none
            values[f"data sets: {number}, sample"] = sample
    return {name: value for name, value in values.items() if rules.get(name) != "effect"}


def data_fingerprint(facts: Mapping[str, Any]) -> str:
    """Twelve digits for vocabulary, tokenizer and data sets together, as a manifest lists them."""
    identity = {key: facts[key] for key in ("vocab_size", "tokenizer", "data")}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
