"""The four functions that a trainer has to offer, in a class that `--adapter module:name` names.

Each rank of torchrun makes one object and calls it with whole batches; which samples, tokens and
weights a rank takes is the trainer's own affair. `--layout tensor=2,data=2` is given as it is; the
product of its sizes is the number of ranks.

Optional: `local_tensors() -> {"parameters": [...], "gradients": [...], "optimizer": [...]}`, the
tensors of this rank after a step; without it the attributes `model` and `optimizer` are read.
`save(folder)` and `load(folder)`, with which a run resumes. `close()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from conformance.fixture import Fixture, MicroBatch


class Refused(Exception):  # noqa: N818
    """The trainer cannot run this layout, model or dtype; the message is its reason."""


class Adapter(Protocol):
    """Made on every rank: `Adapter(fixture, layout, dtype)`, which starts from `fixture.weights()`.

    Raises Refused.
    """

    def __init__(self, fixture: Fixture, layout: Mapping[str, int], dtype: torch.dtype) -> None: ...

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Takes one optimizer step on a whole global batch. Returns (loss, gradient norm before
        clipping), as fixture.Figures defines them; those of the first rank count."""

    def gradients(self) -> Mapping[str, Tensor]:
        """The last step's gradients before clipping, whole, by the fixture's names. Every rank
        calls this; the result of the first one counts."""

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, as gradients()."""
