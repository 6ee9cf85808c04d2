"""Pipeline schedules as data: which rank runs which action, in which order. No torch.

A schedule is a list of actions for each rank. The executor (train/executor.py) runs any list;
`check` proves that a list works, and tools/plan.py draws it. Virtual stages are numbered as in the
model: of p ranks and v virtual stages per rank, rank r has the stages r, r + p, r + 2p, .. A step
has m micro-batches; g is the size of the largest group of them, which is p if p divides m.

| kind | source | idle / ideal time | micro-batches in flight at m >= p |
|---|---|---|---|
| gpipe | Huang et al., arXiv 1811.06965 | (p-1)/m | m |
| 1f1b | Narayanan et al., arXiv 2104.04473, 2.2.1 | (p-1)/m | p - rank |
| interleaved | the same, 2.2.2 | (p-1)/(v m) | 2(p - rank - 1) + (v-1)g + 1, at most v m |
| zb-h1 | Qi et al., arXiv 2401.10241, 2.3 | (p-1)/(3m) | p |

Each pair of virtual stage and micro-batch whose activations are kept counts as one in flight: at
p = 4, m = 8, from the first rank to the last, gpipe 8 8 8 8, 1f1b 4 3 2 1, zb-h1 4 4 4 4, and
interleaved with v = 2 11 9 7 5, of half as many layers each. For m < p, gpipe and 1f1b idle as
above, interleaved idles (v-1)(p-m)/(v m) more, zb-h1 (p-m)/(3m) more; at most v m are in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1")

# Time of an action on the common clock. A backward has two matmuls for each one of the forward.
DURATIONS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
# Letters of torch.distributed.pipelining: 2F0 is F of stage 2, micro-batch 0.
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
# The name under which others wait for an action's result: half a backward sends the gradient, too.
RESULTS = {**{each: each for each in DURATIONS}, "backward_input": "backward"}


class Action(NamedTuple):
    """direction: forward, backward (the whole) or one of its halves, backward_input (the gradient
    for the previous stage) and backward_weight. stage: number of the virtual stage in the model.
    """

    direction: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS.get(self.direction, self.direction)}{self.micro_batch}"


class Message(NamedTuple):
    """direction: forward, activations to the next stage, or backward, their gradient to the
    previous stage. stage: the receiving one. sender, receiver: ranks along the pipeline axis."""

    direction: str
    stage: int
    micro_batch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        what = "the input" if self.direction == "forward" else "the gradient"
        return f"{what} of stage {self.stage}, micro-batch {self.micro_batch}"


Lists = tuple[tuple[Action, ...], ...]  # by rank along the pipeline axis
Program = tuple[Action | Message, ...]  # one rank's actions, with its sends and receives


class ScheduleError(ValueError):
    """A schedule does not work. The message says what works, or names rank and action."""


@cache
def schedule(kind: str, ranks: int, micro_batches: int, virtual: int = 1) -> Lists:
    """The actions of one training step.

    kind: one of KINDS. ranks: size of the pipeline axis. virtual: virtual stages per rank.
    Raises ScheduleError, with the nearest size that works, for sizes that the kind cannot run.
    """
    groups = _groups(ranks, micro_batches, virtual)
    if kind not in KINDS:
        raise ScheduleError(f"schedule {kind}: must be one of {', '.join(KINDS)}")
    if kind == "interleaved" and virtual == 1:
        raise ScheduleError("interleaved: needs 2 or more virtual stages of each rank; 2 works")
    if kind != "interleaved" and virtual > 1 and ranks > 1:
        raise ScheduleError(f"{kind}: takes 1 virtual stage of each rank, not {virtual}; 1 works")
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        # A block is a list of (stage, micro-batch n) that run without a break.
        if kind == "interleaved":
            forwards = [[(stage, n)] for group in groups for stage in stages for n in group]
            backwards = [[(stage, n)] for group in groups for stage in stages[::-1] for n in group]
            warm_up = 2 * (ranks - rank - 1) + (virtual - 1) * len(groups[0])
        else:  # several stages only if one rank has the whole model
            forwards = [[(stage, n) for stage in stages] for n in range(micro_batches)]
            backwards = [[(stage, n) for stage in stages[::-1]] for n in range(micro_batches)]
            warm_up = micro_batches if kind == "gpipe" else ranks - rank - 1
        blocks = [("forward", block) for block in forwards[:warm_up]]
        for number, block in enumerate(backwards):
            # Steady state: the next forward, if one is left, then a backward.
            ahead = warm_up + number
            blocks += [("forward", each) for each in forwards[ahead : ahead + 1]]
            if kind != "zb-h1":
                blocks.append(("backward", block))
                continue
            blocks.append(("backward_input", block))
            if number >= rank:  # W(n) follows I(n + rank): every rank keeps p micro-batches
                blocks.append(("backward_weight", backwards[number - rank]))
        if kind == "zb-h1":
            rest = backwards[max(0, micro_batches - rank) :]
            blocks += [("backward_weight", block) for block in rest]
        lists.append(tuple(Action(way, *each) for way, block in blocks for each in block))
    return tuple(lists)


# Parts of --pipeline-schedule, in the order of KINDS.
gpipe, one_f_one_b, interleaved, zb_h1 = (partial(schedule, kind) for kind in KINDS)


@cache
def forward_only(ranks: int, micro_batches: int, virtual: int = 1) -> Lists:
    """The actions of an evaluation. Raises ScheduleError."""
    groups, lists = _groups(ranks, micro_batches, virtual), []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        order = [(stage, n) for group in groups for stage in stages for n in group]
        lists.append(tuple(Action("forward", *each) for each in order))
    return tuple(lists)


def _groups(ranks: int, micro_batches: int, virtual: int) -> tuple[range, ...]:
    """Groups of micro-batches that each virtual stage of a rank runs in turn: as many groups as can
    have `ranks` micro-batches each, of nearly equal size, larger ones first."""
    if min(ranks, micro_batches, virtual) < 1:
        sizes = f"{ranks} ranks, {micro_batches} micro-batches, {virtual} virtual stages of a rank"
        raise ScheduleError(f"{sizes}: must all be above 0; 1 works")
    # Nearly equal sizes, because a short last group hung in 85 uneven cases of interleaved.
    count = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, count)
    return consecutive([small + (number < larger) for number in range(count)])


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(*each) for each in pairwise(accumulate(sizes, initial=0)))


@cache
def simulate(
    programs: tuple[Program, ...], *, by_message: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Start of each item on the common clock, by rank: when its ranks are free and the results that
    it needs are there.

    by_message: a rank has its own results and those that it received; a message takes no time, and
    its sender and receiver wait for each other. Otherwise every rank has each result when it ends.
    Raises ScheduleError for a dead-lock.
    """
    last_stage = max((item.stage for item in chain(*programs)), default=0)
    results = [dict[Action, int]() for _ in programs]  # by rank: since when it has which results
    if not by_message:
        results = results[:1] * len(programs)
    starts = [list[int]() for _ in programs]
    free = [0] * len(programs)

    def next_item(rank: int) -> Action | Message | None:
        done = len(starts[rank])
        return programs[rank][done] if done < len(programs[rank]) else None

    def missing(item: Action | Message, rank: int) -> list[Action]:
        return [each for each in _needed(item, last_stage) if each not in results[rank]]

    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            while (item := next_item(rank)) is not None:
                if isinstance(item, Message):
                    ranks, duration = [item.sender, item.receiver], 0
                    result = _needed(item, last_stage)[0]
                else:
                    ranks, duration = [rank], DURATIONS[item.direction]
                    result = item._replace(direction=RESULTS[item.direction])
                if missing(item, ranks[0]) or any(next_item(each) != item for each in ranks):
                    break
                times = [results[ranks[0]][each] for each in _needed(item, last_stage)]
                start = max([*times, *(free[each] for each in ranks)])
                for each in ranks:
                    starts[each].append(start)
                    free[each] = start + duration
                results[ranks[-1]][result] = start + duration
                progress = True
    for rank in range(len(programs)):
        if (item := next_item(rank)) is not None:
            cause = next(iter(missing(item, rank)), "the other rank")
            raise ScheduleError(f"dead-lock: rank {rank} waits at {item} for ever for {cause}")
    return tuple(map(tuple, starts))


def _needed(item: Action | Message, last_stage: int) -> list[Action]:
    """The results that must be there first, under the names of RESULTS."""
    direction, stage, micro_batch = item[:3]
    if isinstance(item, Message):
        sender_stage = stage + (1 if direction == "backward" else -1)
        return [Action(direction, sender_stage, micro_batch)]
    if direction == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    if direction == "backward_weight":
        return [Action("backward", stage, micro_batch)]
    after = [Action("backward", stage + 1, micro_batch)] if stage < last_stage else []
    return [Action("forward", stage, micro_batch), *after]


@cache
def program(lists: Lists, rank: int) -> Program:
    """A rank's actions, and the messages it sends and receives, in the order of the common clock.

    Sender and receiver both place a message at the time at which the action that makes it ends,
    before any action that starts at or after that time. So all ranks pass messages in one total
    order (time, direction, stage, micro-batch), and nothing hangs even if each send waits for its
    receive.
    """
    # The naive order, receive before use and send after, hangs in 60 of 64 1F1B schedules.
    last_stage = max((action.stage for action in chain(*lists)), default=0)
    placed: list[tuple[int, bool, Action | Message]] = []
    for sender, (actions, starts) in enumerate(zip(lists, simulate(lists), strict=True)):
        for start, action in zip(starts, actions, strict=True):
            if sender == rank:
                placed.append((start, True, action))
            direction = RESULTS[action.direction]
            if direction == "backward_weight":  # its result stays on the rank
                continue
            stage = action.stage + (1 if direction == "forward" else -1)
            receiver = stage % len(lists)
            if 0 <= stage <= last_stage and sender != receiver and rank in (sender, receiver):
                message = Message(direction, stage, action.micro_batch, sender, receiver)
                placed.append((start + DURATIONS[action.direction], False, message))
    # At one time messages come first, by direction (backward, forward), stage and micro-batch.
    return tuple(item for _, _, item in sorted(placed))


@dataclass(frozen=True)
class PipelinePlan:
    """The layers of each virtual stage of a model, and the schedule in which the stages run.

    ranks: size of the pipeline axis. virtual: virtual stages per rank. layers: numbers of the
    layers of each virtual stage; empty if the model is not cut. kind: one of KINDS, or the name of
    a part. custom_schedule: a user's sequence of `Action`s for each rank, which replaces that of
    `kind`. Raises ScheduleError if it does not work.
    """

    ranks: int = 1
    virtual: int = 1
    kind: str = "1f1b"
    layers: tuple[range, ...] = ()
    custom_schedule: Lists | None = None

    def __post_init__(self) -> None:
        if self.custom_schedule is None:
            return
        object.__setattr__(self, "custom_schedule", tuple(map(tuple, self.custom_schedule)))
        if (ranks := len(self.custom_schedule)) != self.ranks:
            raise ScheduleError(f"custom_schedule: of {ranks} ranks, not {self.ranks} as the mesh")
        if not any(check(self.custom_schedule, self.virtual).in_flight):
            raise ScheduleError("custom_schedule: it has no backward")

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def is_halved(self) -> bool:
        """Whether it runs the halves of a backward apart."""
        actions = chain(*self.custom_schedule or ())
        return self.kind == "zb-h1" or any(x.direction == "backward_weight" for x in actions)

    def describe(self) -> str:
        """The plan as a text for messages. Different settings have different texts."""
        kind = self.kind if self.custom_schedule is None else "custom"
        sizes = ", ".join(str(len(each)) for each in self.layers) or "all"
        return f"{self.stages} stages of {sizes} layers, {self.virtual} a rank, schedule {kind}"

    def numbers(self, rank: int) -> tuple[int, ...] | None:
        """The layers of one rank along the pipeline axis; None for all."""
        if self.stages == 1:
            return None
        return tuple(chain.from_iterable(self.layers[rank :: self.ranks]))

    def lists(self, micro_batches: int) -> Lists:
        """The actions of a training step, by rank. Raises ScheduleError for a number of
        micro-batches that the schedule does not support."""
        if self.custom_schedule is None:
            return schedule(self.kind, self.ranks, micro_batches, self.virtual)
        supported = check(self.custom_schedule, self.virtual).micro_batches
        if micro_batches != supported:
            raise ScheduleError(f"a schedule of {supported} micro-batches, not of {micro_batches}")
        return self.custom_schedule

    def program(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of a training step. Raises ScheduleError as `lists` does."""
        return program(self.lists(micro_batches), rank)

    def evaluation(self, rank: int, micro_batches: int) -> Program:
        """One rank's part of an evaluation, which has only forwards."""
        return program(forward_only(self.ranks, micro_batches, self.virtual), rank)


WHOLE_MODEL = PipelinePlan()
"""The plan of a model that every rank holds whole."""


@dataclass(frozen=True)
class Facts:
    """Properties of a schedule, see `measure`.

    in_flight: by rank, the largest number of micro-batches, each counted for each virtual stage,
    whose activations wait for the end of their backward; 0 in an evaluation. idle_share: (time
    until the last action ends - work of one rank) / work of one rank. virtual: stages per rank.
    """

    in_flight: tuple[int, ...]
    idle_share: float
    micro_batches: int
    virtual: int


@cache
def check(lists: Lists, virtual: int) -> Facts:
    """Prove that the schedule computes each stage of each micro-batch once and cannot hang.

    Lists without any backward are an evaluation. Raises ScheduleError, naming rank and action, if
    an action is missing, is there twice or on a wrong rank, if a dependency is never met, or if
    sends and receives dead-lock when each waits for its partner.
    """
    ranks, work_of = len(lists), defaultdict[tuple[int, int], list[Action]](list)
    for rank, actions in enumerate(lists):
        for action in actions:
            is_here = action.stage in range(rank, ranks * virtual, ranks)
            if not is_here or action.micro_batch < 0 or action.direction not in DURATIONS:
                raise ScheduleError(f"rank {rank}: {action} is no action of this rank's stages")
            work_of[action.stage, action.micro_batch].append(action)
    if not work_of:
        raise ScheduleError("a schedule without any action")
    micro_batches = 1 + max(micro_batch for _, micro_batch in work_of)
    trains = any(action.direction != "forward" for action in chain(*lists))
    allowed, needed = (("BF", "FIW"), "F and B, or F, I and W") if trains else (("F",), "F")
    for n in range(micro_batches):
        for stage in range(ranks * virtual):
            work = work_of[stage, n]
            if "".join(sorted(LETTERS[each.direction] for each in work)) not in allowed:
                has = ", ".join(map(str, work)) or "nothing"
                where = f"rank {stage % ranks}: of stage {stage}, micro-batch {n}"
                raise ScheduleError(f"{where} it has {has}, and needs {needed}")
    simulate(tuple(program(lists, rank) for rank in range(ranks)), by_message=True)
    return measure(lists, virtual)


@cache
def measure(lists: Lists, virtual: int) -> Facts:
    """Properties of a schedule that works."""
    micro_batches = 1 + max(action.micro_batch for action in chain(*lists))
    trains = any(action.direction != "forward" for action in chain(*lists))
    in_flight, end = [], 0  # activations stay until B or W; an I frees none
    change = {"forward": int(trains), "backward": -1, "backward_input": 0, "backward_weight": -1}
    for starts, actions in zip(simulate(lists), lists, strict=True):
        in_flight.append(max(accumulate(change[each.direction] for each in actions)))
        end = max(end, starts[-1] + DURATIONS[actions[-1].direction])
    ideal = micro_batches * virtual * (3 if trains else 1)
    return Facts(tuple(in_flight), (end - ideal) / ideal, micro_batches, virtual)
