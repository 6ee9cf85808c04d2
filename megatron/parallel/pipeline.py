"""How a run uses its pipeline ranks: the layers of each stage, and the schedule. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain

from megatron.parallel.schedules import (
    Lists,
    Program,
    ScheduleError,
    consecutive,
    forward_only,
    program,
    schedule,
)


@dataclass(frozen=True)
class PipelinePlan:
    """The layers of each virtual stage of a model, and the schedule in which the stages run.

    ranks: size of the pipeline axis. virtual: virtual stages per rank. layers: numbers of the
    layers of each virtual stage; empty if the model is not cut. kind: one of schedules.KINDS. own:
    the action lists of a user's schedule, which replaces that of `kind`.
    """

    ranks: int = 1
    virtual: int = 1
    kind: str = "1f1b"
    layers: tuple[range, ...] = ()
    own: Lists | None = None

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    def describe(self) -> str:
        """The plan as a text for messages; different plans have different texts."""
        kind = self.kind
        if self.own is not None:
            kind = f"of a file, {sha256(repr(self.own).encode()).hexdigest()[:12]}"
        sizes = ", ".join(str(len(each)) for each in self.layers) or "all"
        return f"{self.stages} stages of {sizes} layers, {self.virtual} a rank, schedule {kind}"

    def numbers(self, rank: int) -> tuple[int, ...] | None:
        """The layers of one rank along the pipeline axis; None for all."""
        if self.stages == 1:
            return None
        return tuple(chain.from_iterable(self.layers[rank :: self.ranks]))

    def program(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of a training step. Raises ScheduleError for a number of micro-batches
        that the schedule does not support."""
        return _program(self, rank, micro_batches)

    def evaluation(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of an evaluation, which has only forwards."""
        return program(forward_only(self.ranks, micro_batches, self.virtual), rank)


@cache
def _program(plan: PipelinePlan, rank: int, micro_batches: int) -> Program:
    lists = plan.own or schedule(plan.kind, plan.ranks, micro_batches, plan.virtual)
    if plan.own and micro_batches != (found := 1 + max(each.micro_batch for each in lists[0])):
        raise ScheduleError(f"a schedule of {found} micro-batches, not of {micro_batches}")
    return program(lists, rank)


UNCUT = PipelinePlan()
"""The plan of a model that every rank holds whole."""


def head_weight(hidden: int, seq_length: int, vocab_size: int) -> float:
    """Cost of the head, in transformer layers: V / (12 h (1 + s/(6h))).

    The forward of a layer takes 24 s h^2 (1 + s/(6h)) floating-point operations, that of the logits
    2 s h V (arXiv 2104.04473, appendix). The backward of each takes twice as many.
    """
    return vocab_size / (12 * hidden * (1 + seq_length / (6 * hidden)))


def partition(
    layers: int, stages: int, *, head: float, first: int | None = None, last: int | None = None
) -> tuple[range, ...]:
    """Consecutive layers for each virtual stage, at least one, that minimise the largest cost of a
    stage. Layers are otherwise spread as evenly as possible; earlier stages get the remainder.

    head: cost of the last stage beyond its layers, in layers. The embedding of the first stage, a
    look-up, costs next to nothing. first, last: number of layers of these stages. Raises ValueError
    if that is not possible.
    """
    fixed = {stage: size for stage, size in ((0, first), (stages - 1, last)) if size is not None}
    sizes = [fixed.get(stage, 1) for stage in range(stages)]
    left = layers - sum(sizes)
    clash = stages == 1 and None not in (first, last) and first != last
    if stages < 1 or clash or min(sizes) < 1 or left < 0 or (left > 0 and len(fixed) == stages):
        asked = "".join(f", {size} on stage {stage}" for stage, size in fixed.items())
        raise ValueError(f"{layers} layers do not fit {stages} stages of 1 or more{asked}")
    costs = [float(size) for size in sizes]
    costs[-1] += head
    for _ in range(left):
        stage = min(range(stages), key=lambda each: (each in fixed, costs[each]))
        sizes[stage] += 1
        costs[stage] += 1
    return consecutive(sizes)


def partition_uniform(layers: int, stages: int, chunks: int = 1) -> tuple[range, ...]:
    """Colossal-AI's partition_uniform: chunks have equally many layers. Each chunk is divided over
    the ranks as evenly as possible; later ranks get the remainder.

    stages: number of virtual stages; each rank has `chunks` of them. Raises ValueError if `chunks`
    does not divide layers or stages, or there are fewer layers than stages.
    """
    if layers % chunks or stages % chunks or layers < stages:
        chunked = f"{chunks} chunks must divide both, and each stage has 1 or more"
        raise ValueError(f"{layers} layers, {stages} stages: {chunked}")
    ranks = stages // chunks
    small, larger = divmod(layers // chunks, ranks)
    return consecutive([small + (rank >= ranks - larger) for rank in range(ranks)] * chunks)
