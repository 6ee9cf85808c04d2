"""Fine-tune a pretrained BERT, or evaluate models that were fine-tuned: checks, figures, record."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.checks import UsageError, flag
from megatron.config.launch import world_size
from megatron.config.model import BertConfig, FinetunedConfig
from megatron.config.parse import user_errors
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import Tokenizer
from megatron.train.trained import open_trained
from tasks import paper
from tasks.finetuning import FinetuneSettings, Finetuning
from tasks.finished import warn_unfinished
from tasks.hyper_parameters import (
    check_judged,
    check_trained,
    checks_of,
    hyper_parameters,
    warn_of_changes,
)
from tasks.judging import ask, divergence_told, judge, mean_logits
from tasks.record import arrange, describe, identify, publish, version

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh

KINDS = (BertConfig.kind, FinetunedConfig.kind)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a run needs beside the mesh."""

    name: str
    settings: FinetuneSettings
    task: Finetuning
    tokenizer: Tokenizer
    models: Sequence[Sequence[Path]]
    """Of each model that was given, its checkpoint and older ones, should that be damaged."""
    dtypes: Sequence[str]
    """What each of these is evaluated in."""
    facts: Mapping[str, Any]
    """For the record: input, command, hyper-parameters, what the checks of the input allowed."""


def run(
    name: str,
    module: Any,
    settings: FinetuneSettings,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Train, evaluate or judge what a file holds; the record is published."""
    with user_errors(environ):
        score_only = getattr(module, "score_only", None)
        figures = score_only(settings) if score_only is not None else None
        if figures is not None:
            check_judged(settings)
            publish_judged(name, figures, settings, command, environ)
            return
        plan = prepare(name, module, settings, command, world_size(environ))

    from megatron.train.launch import launch
    from tasks.seeds import fine_tune

    with launch(settings.parallel, environ) as mesh:
        act = fine_tune if settings.train_data else evaluate_models
        record, here = act(plan, mesh, environ)
        if mesh.is_first:
            comparison = None
            if settings.evaluation.compare_paper:
                parameters = record["model"]["parameters"]
                comparison = paper.compare(plan.task.paper or name, here, parameters)
            with user_errors(environ, agreed=True):
                publish(record, settings.evaluation, comparison)


def publish_judged(
    name: str,
    figures: Mapping[str, Any],
    settings: FinetuneSettings,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """The record of figures that no model was asked for."""
    if settings.evaluation.compare_paper:
        raise UsageError(
            "--compare-paper compares models, and none is asked; --no-compare-paper would work"
        )
    facts = {**version(), "data": [identify(each) for each in settings.files], "command": command}
    if environ.get("RANK", "0") == "0":
        publish(arrange(name, figures, facts), settings.evaluation)


def prepare(
    name: str, module: Any, settings: FinetuneSettings, command: Sequence[str], world: int
) -> Plan:
    """Read and check all input, without torch; raises ValueError or OSError that names the flag."""
    check_settings(settings)
    opened = open_models(settings, world)
    for folders, tokenizer, manifest in opened:
        check_model(settings, folders[0], manifest)
        if tokenizer.fingerprint != opened[0][1].fingerprint:
            raise ValueError(
                f"--ensemble: {folders[0]} was trained with another tokenizer than "
                f"{opened[0][0][0]}; models of one vocabulary would work"
            )
    _, tokenizer, manifest = opened[0]
    task = module.prepare(settings, manifest, tokenizer)
    if settings.evaluation.compare_paper:
        paper.check_figures(task.paper or name, task.conventions)
    check_examples(settings, task)
    for folders, _, manifest in opened if not settings.train_data else ():
        check_head(task, folders[0], manifest)
        warn_of_changes(settings, folders[0], facts_of(manifest))
    if settings.train_data and settings.save is None:
        warnings.warn(
            "nothing of the models is kept, and no seed if a later one fails; --save DIRECTORY "
            "would keep them",
            stacklevel=2,
        )
    facts = {
        "data": [identify(each) for each in settings.files],
        "hyper_parameters": hyper_parameters(settings),
        "checks": checks_of(settings),
        "command": command,
    }
    return Plan(
        name=name,
        settings=settings,
        task=task,
        tokenizer=tokenizer,
        models=[folders for folders, _, _ in opened],
        dtypes=[settings.dtype or dtype_of(manifest) for _, _, manifest in opened],
        facts=facts,
    )


def open_models(
    settings: FinetuneSettings, world: int
) -> list[tuple[Sequence[Path], Tokenizer, dict[str, Any]]]:
    """Of each model that is given what `open_trained` says; warns where one is given twice."""
    name, loads = "--ensemble", settings.ensemble
    if settings.load is not None:
        name, loads = "--load", (settings.load,)
    opened, known = [], set()
    for load in loads:
        section = TrainedConfig(load=load, vocab_file=settings.vocab_file)
        opened.append(open_trained(section, settings.parallel, world, KINDS, given=name))
        folders, _, manifest = opened[-1]
        warn_unfinished(name, load, folders[0], facts_of(manifest))
        checksum = manifest["checksum"]
        if checksum in known:
            warnings.warn(
                f"{name} {load} is the same model as one before it, so that it counts twice",
                stacklevel=2,
            )
        known.add(checksum)
    return opened


def dtype_of(manifest: Mapping[str, Any]) -> str:
    """What a model was fine-tuned in; fp32 for one that was imported, where it is not known."""
    precision: str = manifest["precision"]
    return "fp32" if "imported_from" in manifest else precision


def check_settings(settings: FinetuneSettings) -> None:
    """Raise UsageError for what is missing, or would be ignored."""
    trains = bool(settings.train_data)
    if settings.ensemble and settings.load is not None:
        raise UsageError(
            "--load, one checkpoint, and --ensemble, several of fine-tuned models, are both given; "
            "one of them, not both, would work"
        )
    if not settings.ensemble and settings.load is None:
        judges = settings.judged and not trains
        instead = f", or {flag(settings.judged)}, answers in a file" if judges else ""
        raise UsageError(
            "either --load, one checkpoint, or --ensemble, several of fine-tuned models, is needed"
            f"{instead}"
        )
    if len(settings.ensemble) == 1:
        warnings.warn(
            f"--ensemble {settings.ensemble[0]} is a single model, whose figures --load would "
            "give; several, such as the seeds of one --save, would work as an ensemble",
            stacklevel=2,
        )
    if settings.ensemble and trains:
        raise UsageError(
            "--ensemble evaluates fine-tuned models and --train-data fine-tunes one; leaving one "
            "of them out would work"
        )
    check_trained(settings)


def check_model(settings: FinetuneSettings, path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the checkpoint is not of the kind that is trained or evaluated."""
    is_finetuned = manifest["kind"] == FinetunedConfig.kind
    if is_finetuned and settings.train_data:
        raise ValueError(
            f"--load {path} is fine-tuned already; without --train-data it is evaluated, and a "
            "checkpoint of pretraining would work for training"
        )
    if not is_finetuned and not settings.train_data:
        raise ValueError(
            f"{path} is pretrained alone, so its head would be random; --train-data to fine-tune "
            "it would work"
        )
    positions = manifest["config"]["model"]["max_position_embeddings"]
    if settings.seq_length > positions:
        raise UsageError(
            f"--seq-length {settings.seq_length} is more than the {positions} positions of {path}; "
            f"--seq-length {positions} would work"
        )


def check_examples(settings: FinetuneSettings, task: Finetuning) -> None:
    """Raise ValueError where nothing is left of the data of a flag."""
    for name, files, sets in (
        ("--train-data", settings.train_data, [task.train]),
        ("--valid-data", settings.valid_data, task.evaluations.values()),
    ):
        if files and not all(map(len, sets)):
            given = " ".join(map(str, files))
            raise ValueError(f"{name} {given} leaves no example; data that has some would work")
    assert settings.train_data or not len(task.train)


def check_head(task: Finetuning, path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where the model was fine-tuned for another task than this one."""
    section = manifest["config"]["model"]
    theirs, ours = (section["head"], tuple(section["labels"])), (task.head, tuple(task.labels))
    if theirs != ours:
        raise ValueError(
            f"{path} was fine-tuned on {facts_of(manifest).get('task', 'another task')}: its head "
            f"is a {_head(*theirs)}, and that of this task a {_head(*ours)}; a model that was "
            "fine-tuned on this task, with the same labels in the same order, would work"
        )


def facts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """How the model of a checkpoint was fine-tuned; nothing is known of an imported one."""
    facts: dict[str, Any] = manifest.get("finetuned", {})
    return facts


def _head(head: str, labels: Sequence[str]) -> str:
    return f"{head} ({', '.join(labels)})" if labels else head


def evaluate_models(
    plan: Plan, mesh: Mesh, environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(record, figures for the paper's table) of each model, and of the mean of their logits."""
    from megatron.train.checkpoint import read_manifest
    from megatron.train.evaluate import load_newest
    from megatron.train.models import section_of
    from megatron.train.state import DTYPES

    rows, every = [], []
    for folders, dtype in zip(plan.models, plan.dtypes, strict=True):
        with user_errors(environ, agreed=True):
            path, model = load_newest(folders, mesh, DTYPES[dtype])
        manifest, size = read_manifest(path), plan.settings.micro_batch_size
        with divergence_told(environ):
            every.append(ask(plan.task, model, section_of(manifest), mesh, size, plan.name))
        facts = describe(path, model, mesh, dtype)
        rows.append({**facts, "finetuned": facts_of(manifest)})
    if not mesh.is_first:
        return {}, {}
    each, first = [judge(plan.task, logits) for logits in every], rows[0]
    if not plan.settings.ensemble:
        return assemble(plan, first, each[0]), {"this_model": each[0]}
    figures = judge(plan.task, mean_logits(every))
    models = [
        {**{key: row[key] for key in MEMBER}, "figures": own}
        for row, own in zip(rows, each, strict=True)
    ]
    facts = {key: value for key, value in first.items() if key not in MEMBER}
    return assemble(plan, {**facts, "models": models}, figures), {"ensemble": figures}


# What each model of an ensemble has.
MEMBER = ("checkpoint", "checkpoint_hash", "step", "dtype", "finetuned")


def assemble(plan: Plan, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The record; figures may have a "protocol"."""
    words = {"labels": list(plan.task.labels), "notes": dict(plan.task.notes)}
    conventions = {"conventions": dict(plan.task.conventions)}
    return arrange(plan.name, {**conventions, **figures}, {**words, **facts, **plan.facts})
