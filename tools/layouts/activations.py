"""One training step of two checkpoints on the same samples, and the first module that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.format import Checkpoint, step_folders, step_of
from megatron.checkpoint.load import load_weights, newest_whole
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parts import PARTS
from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Batch
from megatron.errors import UsageError
from megatron.models.build import build_model
from megatron.models.registry import config_of, find_kind
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.compare import SEEN, listed
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import TensorSlice, sharding_specs
from megatron.train.diagnose import GRADIENT, OUTPUT, OUTPUT_GRADIENT, PHRASES, observed
from megatron.train.executor import Executor
from megatron.train.inputs import open_inputs, prefetch
from megatron.train.metrics import one_line
from tools.layouts.job import of_checkpoint
from tools.report.runs import differing, ratio, setting_in_words, settings_of

Facts = dict[str, Any]
Key = tuple[str, str, int]  # what it is, the name of its module or weight, its number among these
LOSS = "loss"


def compare_step(
    a: Path, b: Path, *, step: int | None, samples: int | None, dtype: str, tolerance: float
) -> Facts:
    """Everything that `shown` shows, as JSON. a, b: folders of runs, or files in them. Raises
    UsageError for runs without a checkpoint of one step, and models that cannot be compared."""
    mesh = serial_mesh()
    ours, theirs = (newest_whole([each], mesh, name)[0] for name, each in find(a, b, step).items())
    kind = ours.manifest["kind"]
    if theirs.manifest["kind"] != kind:
        raise UsageError("B", b, f"a model of the kind {kind}, as A, not {theirs.manifest['kind']}")
    size, of_b = (each.manifest["vocab_size"] for each in (ours, theirs))
    if of_b < size:  # rows of padding would be read in place of others
        raise UsageError("B", b, f"a model with at least the vocabulary of A, {size}, not {of_b}")
    try:
        config = of_checkpoint(ours.manifest)
    except ValueError as error:
        raise UsageError("A", a, f"a run of pretraining: {error}") from error
    config = replace(config, checkpoint=CheckpointConfig(load=str(ours.path)))  # has a tokenizer
    first = ours.manifest["counters"]["samples"]
    # A batch that no flag states follows from the number of ranks.
    most = config.training.global_batch_size or first // step_of(ours.path)
    count = samples or config.training.micro_batch_size
    if count > most:
        works = ("--samples", str(most))
        raise UsageError("--samples", count, f"at most {most}, A's global batch", works=works)
    batch = read_batch(config, first, count)
    width = {"fp64": torch.float64, "fp32": torch.float32}[dtype]
    models = [{"config": {"model": each.manifest["config"]["model"]}} for each in (ours, theirs)]
    settings = differing(*map(settings_of, models))
    one, other = (load(each, mesh, width) for each in (ours, theirs))
    return {
        "step": step_of(ours.path),
        "checkpoints": [str(ours.path), str(theirs.path)],
        "samples": [first, count],
        "dtype": dtype,
        "tolerance": tolerance,
        "settings": [{"setting": n, "a": x, "b": y} for n, (x, y) in settings.items()],
        **compare_models(one, other, batch, mesh),
    }


def compare_models(a: Any, b: Any, batch: Batch, mesh: Mesh) -> Facts:
    """The differences of b from a in one step: of each weight, and of each tensor in the order of
    the step. None is an infinite one. Raises UsageError if b cannot read the batch."""
    kept: dict[Key, Tensor] = {}
    largest = Counter[str]()  # norm, of each kind of tensor
    gaps: dict[Key, float] = {}

    def keep(key: Key, value: Tensor) -> None:
        kept[key] = value.clone()  # a later layer may work in place
        norm = float(value.norm())
        largest[key[0]] = max(largest[key[0]], norm if isfinite(norm) else 0.0)

    def compare(key: Key, value: Tensor) -> None:
        if key in kept:
            gaps[key] = relative(value, kept[key], SEEN * largest[key[0]])

    losses = run_step(a, batch, mesh, keep)
    try:
        others = run_step(b, batch, mesh, compare)
    except (ValueError, RuntimeError, IndexError) as error:  # of other sizes
        allowed = f"a run whose model can read A's samples: {one_line(error)}"
        raise UsageError("B", None, allowed) from error
    weights = dict(b.named_parameters())
    return {
        "losses": [
            {"term": name, "a": as_json(value), "b": as_json(others[name])}
            for name, value in losses.items()
        ],
        "only_a": only(a, b),
        "only_b": only(b, a),
        "weights": [
            {"name": name, "difference": as_json(relative(weights[name].detach(), each.detach()))}
            for name, each in a.named_parameters()
            if name in weights
        ],
        "tensors": [
            {"what": key[0], "name": key[1], "number": key[2], "difference": as_json(gaps[key])}
            for key in kept
            if key in gaps
        ],
    }


def find(a: Path, b: Path, step: int | None) -> dict[str, Path]:
    """The checkpoints of A and B."""
    folders = {}
    for name, given in (("A", a), ("B", b)):
        save = given.parent if given.is_file() else given
        folders[name] = {step_of(each): each for each in step_folders(save)}
        if not folders[name]:
            raise UsageError(name, given, "the folder of a --save that has checkpoints")
    common = folders["A"].keys() & folders["B"].keys()
    if not common:
        steps = ", ".join(map(str, sorted(folders["A"])))
        raise UsageError("B", b, f"a run with a checkpoint of a step of A's: {steps}")
    newest = max(common)
    if step is not None and step not in common:
        allowed = f"a checkpoint of both: {', '.join(map(str, sorted(common)))}"
        raise UsageError("--step", step, allowed, works=("--step", str(newest)))
    return {name: each[newest if step is None else step] for name, each in folders.items()}


def read_batch(config: PretrainConfig, first: int, count: int) -> Batch:
    """The samples of the run from number `first` on."""
    train = open_inputs(config, find_kind(config.model.kind)).train
    sampler = PARTS["sampler"].find(config.data.sampler)
    ((batch,),) = prefetch(
        train,
        range(first, first + count, count),
        micro_batch_size=count,
        data_rank=0,
        data_size=1,
        sampler=lambda number: sampler(
            number=number,
            samples_per_epoch=train.samples_per_epoch,
            seed=config.training.seed,
        ),
    )
    return batch


def load(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype) -> Any:
    """The checkpoint's model with its fp32 weights, without dropout, recomputation or padding."""
    config, size = config_of(checkpoint.manifest), checkpoint.manifest["vocab_size"]
    plain: Facts = {
        "recompute_granularity": "none",
        "layernorm_impl": "torch",
        "make_vocab_size_divisible_by": 1,
    }
    config = replace(config, **{x.name: plain[x.name] for x in fields(config) if x.name in plain})
    model = build_model(config, mesh, size, seed=None, dtype=dtype)
    specs, weights = sharding_specs(model), dict(model.named_parameters())
    load_weights(
        checkpoint, [TensorSlice(n, specs[n], each.detach()) for n, each in weights.items()]
    )
    return model.eval()


def run_step(
    model: Any, batch: Batch, mesh: Mesh, see: Callable[[Key, Tensor], object]
) -> dict[str, float]:
    """Forward and backward of the training loss; returns its terms. `see` is called with each
    module's output, each gradient and each term, in the order in which they are known."""
    numbers = Counter[tuple[str, str]]()

    def note(what: str, name: str, value: Tensor) -> None:
        numbers[what, name] += 1  # a module may be called twice, or return several tensors
        see((what, name, numbers[what, name]), value.detach())

    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, compares_weights=False)
    counts = torch.tensor(model.denominators(batch), dtype=torch.float64)
    with observed(model, gradients, note):
        totals = Executor(
            model=model,
            objective=model,
            mesh=mesh,
            batches=[batch],
            loss_scales=1 / counts.where(counts > 0, 1),
            gradients=gradients,
        ).step()
    terms = dict(zip(model.terms, totals / counts, strict=True))
    for name, value in terms.items():
        note(LOSS, name, value)
    return {name: float(value) for name, value in terms.items()}


def relative(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The norm of the difference / that of `wanted`, or `least` if that is larger; infinite if it
    is no number, or the shapes differ."""
    if found.shape != wanted.shape:
        return inf
    if bool(((found == wanted) | (found.isnan() & wanted.isnan())).all()):
        return 0.0
    norm, gap = max(float(wanted.norm()), least), float((found - wanted).norm())
    return gap / norm if norm and isfinite(gap / norm) else inf


def as_json(value: float) -> float | None:
    return value if isfinite(value) else None


def only(one: nn.Module, other: nn.Module) -> list[str]:
    """Modules and weights that one model has and the other lacks, without what is inside them."""

    def names(model: nn.Module) -> list[str]:
        tensors = (name for name, _ in model.named_parameters())
        return [*(name for name, _ in model.named_modules()), *tensors]

    known = {*names(other)}
    return [n for n in names(one) if n not in known and n.rpartition(".")[0] in known]


def beyond(rows: Iterable[Mapping[str, Any]], tolerance: float) -> list[Mapping[str, Any]]:
    return [each for each in rows if each["difference"] is None or each["difference"] > tolerance]


def status_of(result: Facts) -> int:
    """0 all is equal, 1 something differs."""
    found = beyond([*result["weights"], *result["tensors"]], result["tolerance"])
    return int(bool(found or result["only_a"] or result["only_b"]))


def shown(result: Facts) -> str:
    """The result of compare_step as text."""
    tolerance, (first, count) = result["tolerance"], result["samples"]
    lines = [
        f"Step {result['step']}: A {result['checkpoints'][0]}, B {result['checkpoints'][1]}",
        f"{count} of A's samples, from number {first} on, in {result['dtype']} without dropout\n",
    ]
    for each in result["losses"]:
        a, b = ("no number" if each[run] is None else f"{each[run]:.6f}" for run in ("a", "b"))
        lines.append(f"{each['term']}: {a} in A, {b} in B")
    for each in result["settings"]:
        a, b = (setting_in_words(each[run]) for run in ("a", "b"))
        lines.append(f"{each['setting']}: {a} in A, {b} in B")
    for run in ("A", "B"):
        if names := result[f"only_{run.lower()}"]:
            lines.append(f"only {run} has {listed(names)}")
    weights = beyond(result["weights"], tolerance)
    said = [f"{each['name']} ({difference_of(each)})" for each in weights]
    number = len(result["weights"])
    lines.append(
        f"{len(said)} of {number} weights differ: {listed(said)}"
        if said
        else f"all {number} weights are {equal(tolerance)}"
    )
    for names, title in (((OUTPUT, LOSS), "forward"), ((OUTPUT_GRADIENT, GRADIENT), "backward")):
        rows = [each for each in result["tensors"] if each["what"] in names]
        lines.append(f"{title}: {first_of(rows, tolerance)}")
    return "\n".join(lines)


def first_of(rows: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    differ = beyond(rows, tolerance)
    if not differ:
        return f"all {len(rows)} tensors are {equal(tolerance)}"
    each = differ[0]
    phrases = PHRASES | {LOSS: "the term"}
    number = f" (number {each['number']})" if each["number"] > 1 else ""
    return (
        f"{len(differ)} of {len(rows)} tensors differ, first {phrases[each['what']]} "
        f"{each['name']}{number} ({difference_of(each)})"
    )


def equal(tolerance: float) -> str:
    return f"within {tolerance:g}" if tolerance else "the same"


def difference_of(each: Mapping[str, Any]) -> str:
    return ratio(each["difference"], "no number, or another shape")
