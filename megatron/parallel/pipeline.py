"""How a run uses its pipeline ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from megatron.parallel.schedules import (
    Lists,
    Program,
    ScheduleError,
    forward_only,
    program,
    schedule,
)


@dataclass(frozen=True)
class PipelinePlan:
    """Which layers the virtual stages of a model have, and the schedule in which they run.

    ranks: of the pipeline axis. virtual: stages of each rank. layers: numbers of the layers of each
    virtual stage; none of a model that is not cut. kind: one of schedules.KINDS. own: the lists of
    a schedule of the user's, in place of the kind's.
    """

    ranks: int = 1
    virtual: int = 1
    kind: str = "1f1b"
    layers: tuple[range, ...] = ()
    own: Lists | None = None

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def has_halves(self) -> bool:
        """Whether some backward runs in two halves, of activations and of weights."""
        lists = self.own or schedule(self.kind, self.ranks, 1, self.virtual)
        return any(each.direction == "backward_weight" for each in chain.from_iterable(lists))

    def numbers(self, rank: int) -> tuple[int, ...] | None:
        """The layers of one rank along the pipeline axis; None for all."""
        if self.stages == 1:
            return None
        return tuple(chain.from_iterable(self.layers[rank :: self.ranks]))

    def program(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of a training step. Raises ScheduleError for a number of micro-batches
        that the schedule does not have."""
        lists = self.own or schedule(self.kind, self.ranks, micro_batches, self.virtual)
        if self.own and micro_batches != (found := 1 + max(each.micro_batch for each in lists[0])):
            raise ScheduleError(f"a schedule of {found} micro-batches, not of {micro_batches}")
        return program(lists, rank)

    def evaluation(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of forwards alone."""
        return program(forward_only(self.ranks, micro_batches, self.virtual), rank)


UNCUT = PipelinePlan()
"""Of a model that every rank holds whole."""
