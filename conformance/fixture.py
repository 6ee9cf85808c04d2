"""A fixture: a tiny model's first weights, its batches, and the exact figures of five steps.

A folder of fixtures/v1 is one model. It never changes under its name. `facts.json` has the model's
configuration by the names of transformers, the optimizer, and what the figures must contain.
Tensors are in safetensors: `weights` (fp64, the names of transformers, a tied weight once),
`batches` (int64) and `expected` (fp64). `faults` is no part of the fixture: it has the figures of
each known fault, and grows with their list. `python -m conformance.make` writes all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures" / "v1"
NAMES = ("gpt2", "llama", "bert")
STEPS = 5
COMPARED = (3, 5)  # steps after which weights are compared
IGNORED = -100  # a label that is not scored
AXES = ("data", "context", "ring", "pipeline", "tensor", "tensor2d", "tensor25d", "tensor3d")
NOT_RANKS = {"zero", "sequence", "virtual"}  # keys of a layout that say how, not among how many


def ranks(layout: Mapping[str, int]) -> int:
    """Number of processes of a layout: the product of its sizes, such as tensor=2 and data=2."""
    return prod(size for key, size in layout.items() if key not in NOT_RANKS)


def is_norm(name: str) -> bool:
    """Whether a parameter of such a name is a norm's."""
    return re.search(r"ln_|norm", name, re.IGNORECASE) is not None


@dataclass(frozen=True)
class MicroBatch:
    """Part of a global batch, b samples of s tokens, int64.

    labels: the token to predict at each position itself, -100 where none is scored.
    attention_mask: 1 at real tokens; padding is after them. token_type_ids and
    next_sentence_label: those of BERT.
    """

    input_ids: Tensor  # [b, s]
    attention_mask: Tensor  # [b, s]
    labels: Tensor  # [b, s]
    token_type_ids: Tensor | None = None  # [b, s]
    next_sentence_label: Tensor | None = None  # [b]

    def rows(self, first: int, last: int) -> MicroBatch:
        """The samples first to last - 1."""
        parts: dict[str, Any] = {
            name: None if each is None else each[first:last] for name, each in vars(self).items()
        }
        return MicroBatch(**parts)

    def share(self, rank: int, ranks: int) -> MicroBatch:
        """The samples of one of so many data-parallel ranks. Raises ValueError if they are no
        equal parts."""
        if len(self.input_ids) % ranks:
            raise ValueError(f"{ranks} data ranks cannot share {len(self.input_ids)} samples")
        each = len(self.input_ids) // ranks
        return self.rows(rank * each, rank * each + each)


@dataclass
class Figures:
    """The figures of a trainer. Tensors are whole and on the CPU.

    losses: for each step, the sum of the scored tokens' cross entropies over their number, both of
    the global batch; BERT adds the mean of its samples' cross entropies of the next sentence.
    grad_norms: for each step, before clipping. gradients: of the first step, before clipping.
    weights: after the steps of COMPARED.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, later: Figures) -> None:
        """The figures of the steps that follow."""
        self.losses += later.losses
        self.grad_norms += later.grad_norms
        self.gradients |= later.gradients
        self.weights |= later.weights

    def signature(self, first: Mapping[str, Tensor]) -> list[float]:
        """Numbers by which a fault is known: losses, grad_norms, then by parameter in the order of
        names the norm of its gradient, and of what all steps added to its first weights."""
        numbers = [*self.losses, *self.grad_norms]
        for name in sorted(first):
            moved = self.weights[STEPS][name].double() - first[name]
            numbers += [float(self.gradients[name].double().norm()), float(moved.norm())]
        return numbers


@dataclass(frozen=True)
class Fixture:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Its keys: model_type; config (keys of transformers); tied ([[name, its other name]]);
        optimizer (lr, betas, eps, weight_decay, decayed: names, clip); spread ({dtype: relative
        spread of the first step's gradients}); least_gradient_norm; loss_moves; zeros ({name:
        [first, last + 1]}, elements along dim 0 whose exact gradient is zero)."""
        return dict(json.loads((self.folder / "facts.json").read_text()))

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.folder / "weights.safetensors")

    def batches(self) -> list[list[MicroBatch]]:
        """[step][micro-batch]; tensors are named STEP.MICRO_BATCH.FIELD."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in load_file(self.folder / "batches.safetensors").items():
            step, number, key = name.split(".")
            found.setdefault((int(step), int(number)), {})[key] = tensor
        steps = sorted({step for step, _ in found})
        return [[MicroBatch(**found[key]) for key in sorted(found) if key[0] == s] for s in steps]

    def expected(self) -> Figures:
        return read_figures(self.folder / "expected.safetensors")

    def faults(self) -> dict[tuple[str, int], Tensor]:
        """Figures.signature, fp64, of each known fault (see faults.py) between so many ranks."""
        signatures = load_file(self.folder / "faults.safetensors")
        names = {key: key.partition(".") for key in signatures}
        return {(name, int(n)): signatures[key] for key, (name, _, n) in names.items()}


def read_fixture(name: str) -> Fixture:
    return Fixture(FOLDER / name)


def write_figures(figures: Figures, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {f"gradients.{name}": each for name, each in figures.gradients.items()}
    for step, weights in figures.weights.items():
        tensors |= {f"weights_{step}.{name}": each for name, each in weights.items()}
    tensors["losses"] = torch.tensor(figures.losses, dtype=torch.float64)
    tensors["grad_norms"] = torch.tensor(figures.grad_norms, dtype=torch.float64)
    save_file({name: each.detach().cpu().contiguous() for name, each in tensors.items()}, file)


def read_figures(file: Path) -> Figures:
    figures = Figures()
    for name, tensor in load_file(file).items():
        first, _, rest = name.partition(".")
        if first in ("losses", "grad_norms"):
            setattr(figures, first, tensor.tolist())
        elif first == "gradients":
            figures.gradients[rest] = tensor
        else:
            figures.weights.setdefault(int(first.removeprefix("weights_")), {})[rest] = tensor
    return figures
