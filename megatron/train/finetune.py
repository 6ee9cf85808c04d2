"""Fine-tuning: a pretrained BERT with the head of a task, trained on examples (paper, section 5.2).

The order of an epoch's examples is a function of (seed, epoch). A step takes the next ones of the
global batch size, and the last step of an epoch those that are left: every example is seen once an
epoch, and weighs as much as the others of its step. Within a step examples of similar length go
together, so that there is little padding; the gradient is that of the mean over all of them,
whatever the micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatron.config.model import FinetunedConfig, Head, ModelConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.examples import Example, ExampleBatch, make_batch
from megatron.data.order import permute
from megatron.optim.schedule import learning_rate
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Mesh
from megatron.train.checkpoint import Piece, load, read_manifest, save
from megatron.train.deal import deal
from megatron.train.diagnose import NonFiniteError
from megatron.train.finetuning_objectives import answer_scores
from megatron.train.replicas import check_replicas
from megatron.train.start import environment
from megatron.train.state import DTYPES, TrainState, build_state, model_pieces
from megatron.train.step import StepResult, train_step

HEAD = "head"  # what no pretrained checkpoint has
PRETRAINING = ("mlm", "sop")  # and what only a pretrained one needs


class DivergedError(ValueError):
    """Loss, gradients or logits are not numbers; every rank raises the same message."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a model is fine-tuned on, and how."""

    examples: Sequence[Example]
    epochs: int
    seed: int
    global_batch_size: int
    micro_batch_size: int
    lr: float
    lr_warmup_fraction: float
    weight_decay: float
    clip_grad: float
    dtype: Literal["fp32", "bf16", "fp16"]

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.global_batch_size)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr,
            min_lr=0.0,
            lr_decay_style="linear",
            lr_warmup_iters=round(self.lr_warmup_fraction * self.steps),
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )

    def rate(self, update: int) -> float:
        """Learning rate of an update, counted from 1: it reaches 0 after the last one."""
        return learning_rate(self.optimizer, update, self.steps + 1)


def finetuned_section(
    pretrained: ModelConfig, head: Head, labels: Sequence[str], **changes: Any
) -> FinetunedConfig:
    """The section of a pretrained BERT with this head in place of its own; changes: of dropout
    and the like, which belong to the run and not to the weights."""
    # Other kernels compute the same model, and need not be installed where it is fine-tuned.
    settings = {**asdict(pretrained), "layernorm_impl": "torch", **changes}
    return FinetunedConfig(head=head, labels=tuple(labels), **settings)


def begin(path: Path, section: FinetunedConfig, course: Course, mesh: Mesh) -> TrainState:
    """A run at step 0 with the weights of the pretrained BERT at `path`, which has been verified,
    and a head drawn from the seed. Raises ValueError as `load_pretrained` does."""
    state = build_state(
        section,
        course.optimizer,
        PrecisionConfig(fp16=course.dtype == "fp16"),
        mesh,
        read_manifest(path)["vocab_size"],
        seed=course.seed,
        dtype=DTYPES[course.dtype],
    )
    load_pretrained(state, path)
    return state


def load_pretrained(state: TrainState, path: Path) -> None:
    """Take up all weights but those of the head from the checkpoint at `path`.

    Raises ValueError, naming the first one, where the checkpoint lacks one of them, or has another
    one than those of the pretraining heads; a span's model leaves out the pooler, too.
    """
    saved = read_manifest(path)["tensors"]
    weights = {
        slot.name: (slot, slot.view(master.detach()))
        for slot, master in state.optimizer.slots()
        if _part_of(slot.name) != HEAD
    }
    found = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    if missing := weights.keys() - found:
        raise ValueError(
            f"{path} has no {min(missing)}, which this model needs; a checkpoint of a whole "
            "pretrained BERT would work"
        )
    has_pooler = any(_part_of(name) == "pooler" for name in weights)
    unused = PRETRAINING if has_pooler else (*PRETRAINING, "pooler")
    if surplus := {each for each in found - weights.keys() if _part_of(each) not in unused}:
        raise ValueError(
            f"{path} has {min(surplus)}, for which this model has no use; a checkpoint of a "
            "pretrained BERT of the same shape would work"
        )
    pieces = [
        # Masters are more exact than the weights that were rounded from them.
        Piece(key if (key := f"master.{name}") in saved else f"model.{name}", slot.spec, own)
        for name, (slot, own) in weights.items()
    ]
    load(path, pieces, state.mesh, verified=True)
    state.optimizer.publish()


def _part_of(name: str) -> str:
    return name.partition(".")[0]


def train_epoch(
    state: TrainState,
    course: Course,
    epoch: int,
    tell: Callable[[StepResult, float], None] = lambda result, lr: None,
) -> float:
    """Train on every example once; return their mean loss on the way,
    those of steps that fp16 skipped left out.

    epoch: counted from 0. tell: called after every step with its result and learning rate. Raises
    DivergedError where a step is not finite and may not be skipped.
    """
    total = seen = 0.0
    for numbers in steps_of(course, epoch):
        batches = micro_batches(course, numbers, state.mesh)
        lr = course.rate(state.updates + 1)
        try:
            result = train_step(state, batches, lr)
        except NonFiniteError as error:
            raise DivergedError(_told(error, state, course, epoch)) from error
        if not result.skipped:
            total, seen = total + result.loss * len(numbers), seen + len(numbers)
        tell(result, lr)
    check_replicas(state, batches)
    return total / seen if seen else nan


def _told(error: NonFiniteError, state: TrainState, course: Course, epoch: int) -> str:
    """Where it began, and what may help here."""
    scaler, found = state.scaler, error.found
    scale = f" at loss scale {scaler.scale:g}" if scaler.is_scaling else ""
    seen = f"; first seen in {found.what}, on the rank at {found.place}" if found else ""
    cures = ["a lower --lr", "a larger --lr-warmup-fraction"]
    cures += ["--dtype bf16"] if scaler.is_scaling else []
    return (
        f"seed {course.seed}, epoch {epoch + 1}, step {state.step + 1}: the {error.what} is not "
        f"finite{scale}{seen}; {' or '.join(cures)} may help"
    )


def steps_of(course: Course, epoch: int) -> Iterator[NDArray[np.int64]]:
    """The numbers of the examples of each step of an epoch."""
    size = len(course.examples)
    places, epochs = np.arange(size), np.full(size, epoch)
    order = permute(places, size, seed=course.seed, epochs=epochs)
    for start in range(0, size, course.global_batch_size):
        yield order[start : start + course.global_batch_size]


def micro_batches(course: Course, numbers: NDArray[np.int64], mesh: Mesh) -> list[ExampleBatch]:
    """This rank's share of a step, as many batches of one size as every rank has.

    Where the examples do not go round, what is short is filled with one that does not count.
    """
    rows = sorted((course.examples[number] for number in numbers), key=lambda each: -each.longest)
    rounds = -(-len(rows) // (course.micro_batch_size * mesh.data.size))
    shares = rounds * mesh.data.size
    size = -(-len(rows) // shares)
    cuts = [len(rows) * number // shares for number in range(shares + 1)]
    own = range(mesh.data.rank, shares, mesh.data.size)
    parts = [rows[cuts[number] : cuts[number + 1]] for number in own]
    return [make_batch([*part, *[rows[-1]] * (size - len(part))], len(part)) for part in parts]


@torch.no_grad()
def logits_of(
    model: nn.Module,
    section: FinetunedConfig,
    mesh: Mesh,
    examples: Sequence[Example],
    micro_batch_size: int,
    name: str,
) -> list[NDArray[np.float32]]:
    """The model's answer to each example: [classes], [options], or [n, 2] for the n tokens of its
    sequence; the same on every rank, with a progress bar called `name`.

    Neither batch size nor padding nor layout changes it but for rounding. Raises DivergedError
    where logits are not numbers.
    """
    was_training = model.training
    model.eval()
    shapes = [_shape_of(each, section) for each in examples]
    ends = np.cumsum([prod(shape) for shape in shapes])
    flat = torch.zeros(int(ends[-1]) if len(ends) else 0)
    for numbers in deal([each.longest for each in examples], micro_batch_size, mesh, name):
        batch = make_batch([replace(examples[number], label=()) for number in numbers])
        logits = answer_scores(model, batch, mesh.device).float().cpu()
        for number, row in zip(numbers, logits, strict=True):
            count = prod(shapes[number])
            flat[ends[number] - count : ends[number]] = row.flatten()[:count]
    model.train(was_training)
    whole = all_reduce(flat.to(mesh.device), mesh.data).cpu().numpy()
    if not np.isfinite(whole).all():
        raise DivergedError(
            f"{name}: logits are not numbers; a model that has not diverged would work, and in "
            "place of --dtype fp16 --dtype bf16 or fp32"
        )
    parts = np.split(whole, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shape_of(example: Example, section: FinetunedConfig) -> tuple[int, ...]:
    """Of the logits of this example."""
    if section.head == "span":
        return (len(example.options[0].tokens), 2)
    return (len(section.labels) if section.head == "classifier" else len(example.options),)


def save_finetuned(
    state: TrainState,
    section: FinetunedConfig,
    directory: Path,
    pretrained: Path,
    attached: Mapping[str, bytes],
    facts: Mapping[str, Any],
) -> Path:
    """Write the weights as a checkpoint of this step, without the optimizer's state: an epoch is
    not gone on from. It returns its folder; every rank calls this.

    pretrained: the checkpoint that was fine-tuned. attached: files of the tokenizer. facts: of the
    fine-tuning, for the manifest.
    """
    manifest = read_manifest(pretrained)
    every = {
        "kind": section.kind,
        "config": {"model": asdict(section), "data": manifest["config"]["data"]},
        "precision": next(
            n for n, d in DTYPES.items() if d == next(state.model.parameters()).dtype
        ),
        **{key: manifest[key] for key in ("vocab_size", "tokenizer", "data")},
        "run": None,
        "weights_of": manifest.get("run"),
        "counters": state.counters(),
        "environment": environment(state.mesh),
        "validation_loss": None,
        "finetuned": dict(facts),
    }
    pieces = model_pieces(state.model)
    return save(directory, state.step, pieces, every, state.mesh, attached)
