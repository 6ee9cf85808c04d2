"""A fine-tuning command: settings, models and input, checked without torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import one_step
from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import at_most
from megatron.config.model import BertConfig, FinetunedConfig
from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError, flag
from megatron.models.registry import config_of
from megatron.train.trained import open_trained
from tasks import paper
from tasks.protocol import SEARCHED, TABLE_6, FinetuneSettings, Finetuning
from tasks.record import identify

RESULT = "result.json"  # exists once a seed is finished
# Without effect where nothing is trained.
TRAINING = (*SEARCHED, "recompute_granularity", "seed", "seeds", "search", "save")
ROUNDING = ("micro_batch_size", "dtype")  # change an evaluation only by rounding


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """Everything that a run needs except the mesh."""

    name: str
    settings: FinetuneSettings
    task: Finetuning
    tokenizer: Tokenizer
    models: Sequence[Sequence[Path]]
    """One list per given model: its checkpoint, then older ones to use if that is damaged."""
    dtypes: Sequence[str]
    """Dtype in which each of these models is evaluated."""
    facts: Mapping[str, Any]
    """For the record: input, command, hyper-parameters, limits of the input checks."""

    @property
    def seeds(self) -> range:
        settings = self.settings
        # Five, as in the paper: it searched on one seed and reports the median of five.
        count = settings.seeds or (5 if settings.search else 1)
        return range(settings.seed, settings.seed + count)

    def using(self, **changes: Any) -> FinetuneJob:
        """The job with other settings."""
        settings = replace(self.settings, **changes)
        facts = {**self.facts, "hyper_parameters": hyper_parameters(settings)}
        return replace(self, settings=settings, facts=facts)

    def tries(self) -> list[tuple[dict[str, Any], FinetuneJob]]:
        """(values, job) of every combination of --search; each keeps its seeds in a folder of its
        own."""
        save, found = self.settings.save, {}
        for values in self.settings.combinations():
            name = ",".join(f"{key}={value}" for key, value in values.items())
            folder = None if save is None else save / name
            found[name] = (values, self.using(save=folder, **values))
        return list(found.values())


def make_job(
    name: str, module: Any, settings: FinetuneSettings, command: Sequence[str], world: int
) -> FinetuneJob:
    """Read and check all input; raises ValueError or OSError that names the flag."""
    known = {each.name for each in fields(FinetuneSettings)}
    known |= {*settings.hyper_parameters, *settings.other_settings}
    for each in sorted({each.name for each in fields(settings)} - known):
        # Otherwise a finished seed would be reused although this setting has changed.
        raise ValueError(
            f"the setting {each} of the task {name} must be named in its hyper_parameters, or in "
            "other_settings if it decides no result"
        )
    check_models(settings)
    opened = open_models(settings, world)
    for folders, tokenizer, manifest in opened:
        check_kind(settings, folders[0], manifest)
        if tokenizer.fingerprint != opened[0][1].fingerprint:
            raise UsageError(
                "--ensemble", folders[0], f"a model of the same tokenizer as {opened[0][0][0]}"
            )
    _, tokenizer, manifest = opened[0]
    settings.parallel.check(world, config_of(manifest).widths, settings.seq_length)
    settings.parallel.check_model(settings)
    task = module.prepare(settings, manifest, tokenizer)
    if settings.evaluation.compare_paper:
        paper.check_figures(task.paper or name, task.conventions)
    for given, files, sets in (
        ("--train-data", settings.train_data, [task.train]),
        ("--valid-data", settings.valid_data, task.evaluations.values()),
    ):
        if files and not all(map(len, sets)):
            raise UsageError(given, " ".join(map(str, files)), "data of which an example is left")
    for folders, _, manifest in opened if not settings.train_data else ():
        check_head(task, folders[0], manifest)
        warn_of_changes(settings, folders[0], manifest.get("finetuned", {}))
    if settings.train_data and settings.save is None:
        warnings.warn(
            "nothing of the models is kept, and no seed if a later one fails; --save DIRECTORY "
            "would keep them",
            stacklevel=2,
        )
    checks = getattr(settings, "checks", None)
    return FinetuneJob(
        name=name,
        settings=settings,
        task=task,
        tokenizer=tokenizer,
        models=[folders for folders, _, _ in opened],
        dtypes=[settings.dtype or dtype_of(manifest) for _, _, manifest in opened],
        facts={
            "data": [identify(each) for each in settings.files],
            "hyper_parameters": hyper_parameters(settings),
            "checks": {} if checks is None else asdict(checks),
            "command": command,
        },
    )


def hyper_parameters(settings: FinetuneSettings) -> dict[str, Any]:
    """Settings that decide a result besides data, model and seed, as JSON. Those of training are
    included only in training, and so is the dtype: an evaluation uses that of each model."""
    left_out = () if settings.train_data else (*TRAINING, "dtype")
    names = (name for name in settings.hyper_parameters if name not in left_out)
    return {name: getattr(settings, name) for name in names}


def check_models(settings: FinetuneSettings) -> None:
    """Raise UsageError where no model is given, or a setting would be ignored."""
    given, trains = settings.ensemble, bool(settings.train_data)
    if given and settings.load is not None:
        raise UsageError("--load", settings.load, "left out beside {}", "--ensemble")
    if not given and settings.load is None:
        answers = f", or {flag(settings.judged)} FILE" if settings.judged and not trains else ""
        raise UsageError("--load", None, f"given, or {{}}{answers}", "--ensemble")
    if given and trains:
        raise UsageError(
            "--ensemble",
            " ".join(given),
            "left out beside {}, which trains one model",
            "--train-data",
        )
    if len(given) == 1:
        warnings.warn(
            f"--ensemble {given[0]} is a single model, whose figures --load would give; several, "
            "such as the seeds of one --save, would work as an ensemble",
            stacklevel=2,
        )
    if not trains:
        refuse_changed(settings, TRAINING, "--train-data")
        if settings.parallel.sequence_parallel:
            raise UsageError("--sequence-parallel", None, "left out without {}", "--train-data")
        if stage := settings.parallel.stage_of_zero:
            name = "--zero-stage" if settings.parallel.zero_stage else "--use-distributed-optimizer"
            value = stage if settings.parallel.zero_stage else None
            raise UsageError(name, value, "left out without {}", "--train-data")


def check_judged(settings: FinetuneSettings) -> None:
    """Raise UsageError for model settings where answers in a file are scored without a model."""
    if settings.evaluation.compare_paper:
        raise UsageError(
            "--compare-paper",
            None,
            "left out where answers in a file are judged: it compares models",
            works=("--no-compare-paper",),
        )
    of_models = (*settings.hyper_parameters, *TRAINING, "load", "ensemble", "vocab_file")
    refuse_changed(settings, (*of_models, "train_data"), "a model")
    checks = getattr(settings, "checks", None)
    if checks is not None:
        refuse_changed(checks, [each.name for each in fields(checks)], "a model")


def refuse_changed(settings: Any, names: Sequence[str], needed: str) -> None:
    """Raise UsageError for the first of these settings that is not at its default: it has no effect
    without `needed`. For settings of the table 6 presets, only warn."""
    values = {each.name: (getattr(settings, each.name), each.default) for each in fields(settings)}
    changed = [name for name in dict.fromkeys(names) if values[name][0] != values[name][1]]
    for name in changed:
        if name not in TABLE_6:
            value = values[name][0]
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(flag(name), shown, f"left out without {needed}")
    if changed:
        shown = " and ".join(map(flag, changed))
        does = "does" if len(changed) == 1 else "do"
        warnings.warn(f"{shown} {does} nothing here, where nothing is trained", stacklevel=4)


def open_models(
    settings: FinetuneSettings, world: int
) -> list[tuple[Sequence[Path], Tokenizer, dict[str, Any]]]:
    """The result of `open_trained` for each given model; warns where one is given twice."""
    name, loads = "--ensemble", settings.ensemble
    if settings.load is not None:
        name, loads = "--load", (settings.load,)
    opened, known = [], set()
    for load in loads:
        config = TrainedConfig(load=load, vocab_file=settings.vocab_file)
        kinds = (BertConfig.kind, FinetunedConfig.kind)
        opened.append(open_trained(config, settings.parallel, world, kinds, given=name))
        folders, _, manifest = opened[-1]
        warn_unfinished(name, load, folders[0], manifest.get("finetuned", {}))
        if manifest["checksum"] in known:
            warnings.warn(
                f"{name} {load} is the same model as one before it, so that it counts twice",
                stacklevel=2,
            )
        known.add(manifest["checksum"])
    return opened


def dtype_of(manifest: Mapping[str, Any]) -> str:
    """Dtype in which a model was fine-tuned; fp32 for an imported one, where it is unknown."""
    precision: str = manifest["precision"]
    return "fp32" if "imported_from" in manifest else precision


def check_kind(settings: FinetuneSettings, path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise UsageError where the checkpoint's kind cannot be trained or evaluated."""
    is_finetuned = manifest["kind"] == FinetunedConfig.kind
    if is_finetuned and settings.train_data:
        raise UsageError(
            "--load", path, "not fine-tuned yet; without {}, it is evaluated", "--train-data"
        )
    if not is_finetuned and not settings.train_data:
        name = "--ensemble" if settings.ensemble else "--load"
        allowed = "fine-tuned, or given with {}: its head is random"
        raise UsageError(name, path, allowed, "--train-data")
    positions = manifest["config"]["model"]["max_position_embeddings"]
    at_most(settings, "seq_length", positions, f"the positions of {path},")


def check_head(task: Finetuning, path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the model was fine-tuned for another task than this one."""
    config = manifest["config"]["model"]
    theirs, ours = (config["head"], tuple(config["labels"])), (task.head, tuple(task.labels))
    if theirs != ours:
        then = manifest.get("finetuned", {}).get("task", "another task")
        heads = [f"{head} ({', '.join(labels) or 'no labels'})" for head, labels in (theirs, ours)]
        raise ValueError(
            f"{path} was fine-tuned on {then}: its head is a {heads[0]}, and that of this task a "
            f"{heads[1]}; a model with the same labels in the same order would work"
        )


def warn_unfinished(given: str, load: str, path: Path, finetuned: Mapping[str, Any]) -> None:
    """Warn of a checkpoint of an unfinished seed, unless `load` names that checkpoint itself.

    given: the flag of `load`. finetuned: the entry "finetuned" of the manifest at `path`. There is
    no warning for a folder that was copied elsewhere.
    """
    seed, epoch = finetuned.get("seed"), finetuned.get("epoch")
    if path.parent.resolve().name != f"seed_{seed}" or (path.parent / RESULT).exists():
        return
    epochs = finetuned["hyper_parameters"]["epochs"]
    if epoch != epochs and one_step(load) is None:
        warnings.warn(
            f"{given} {load}: seed {seed} is not finished, and this is its epoch {epoch} of "
            f"{epochs}; its command, repeated, finishes it, and {given} {path} takes that epoch as "
            "it is",
            stacklevel=3,
        )


def warn_of_changes(settings: FinetuneSettings, path: Path, finetuned: Mapping[str, Any]) -> None:
    """Warn of settings that change the figures and differ from those of the fine-tuning.

    finetuned: the entry "finetuned" of the manifest of the checkpoint at `path`.
    """
    then = finetuned.get("hyper_parameters", {})
    for name, now in hyper_parameters(settings).items():
        if name not in ROUNDING and then.get(name, now) != now:
            warnings.warn(
                f"{flag(name)} is {now}, but {path} was fine-tuned with {then[name]}; "
                f"{flag(name)} {then[name]} would give the figures of that time",
                stacklevel=2,
            )
