"""Pipeline schedules as data: which rank runs which action, in which order. No torch.

Unusual here: a schedule is a list of actions per rank, not code. One executor runs every list, a
pure check proves it from the lists of all ranks, and tools/plan.py draws it. The virtual stages of
a model are numbered in its order; stage s lives on rank s % p of the p ranks of the pipeline axis.

| kind | source | idle / ideal time | micro-batches in flight at m >= p |
|---|---|---|---|
| gpipe | Huang et al., arXiv 1811.06965 | (p-1)/m | m |
| 1f1b | Narayanan et al., arXiv 2104.04473, 2.2.1 | (p-1)/m | p - rank |
| interleaved | the same, 2.2.2; p divides m | (p-1)/(v m) | 2(p - rank - 1) + (v-1)p + 1 |
| zb-h1 | Qi et al., arXiv 2401.10241, 2.3 | (p-1)/(3m) | p |

A micro-batch is in flight once for each virtual stage that keeps its activations.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1")

DURATIONS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Of an action, in units of the common clock; virtual stages are alike."""

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""Of a direction in torch.distributed.pipelining's notation: 2F0 is F of stage 2, micro-batch 0."""


class Action(NamedTuple):
    direction: str
    """forward, backward (the whole of it) or its halves: backward_input, backward_weight."""

    stage: int
    """Virtual stage, its number in the model; it lives on rank stage % ranks."""

    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS.get(self.direction, self.direction)}{self.micro_batch}"


class Message(NamedTuple):
    direction: str
    """forward: activations to the next stage; backward: their gradient to the stage before."""

    stage: int
    """The virtual stage that receives."""

    micro_batch: int

    sender: int
    """Rank along the pipeline axis."""

    receiver: int


Lists = tuple[tuple[Action, ...], ...]
"""Actions in their order, by rank along the pipeline axis."""

Program = tuple[Action | Message, ...]
"""What one rank does: its actions, and the messages that it sends or receives."""


class ScheduleError(ValueError):
    """A schedule that does not work; the message says what does, or names rank and action."""


@cache
def schedule(kind: str, ranks: int, micro_batches: int, virtual: int = 1) -> Lists:
    """The actions of one training step.

    kind: one of KINDS. ranks: of the pipeline axis. virtual: stages of each rank.
    Raises ScheduleError, with the nearest size that works, for what the kind cannot do.
    """
    _check_sizes(ranks, micro_batches, virtual)
    if kind not in KINDS:
        raise ScheduleError(f"schedule {kind}: must be one of {', '.join(KINDS)}")
    if kind == "interleaved" and virtual == 1:
        raise ScheduleError("interleaved: needs 2 or more virtual stages of each rank; 2 works")
    if kind != "interleaved" and virtual > 1 and ranks > 1:
        raise ScheduleError(f"{kind}: takes 1 virtual stage of each rank, not {virtual}; 1 works")
    return tuple(_of_rank(kind, rank, ranks, micro_batches, virtual) for rank in range(ranks))


def _of_rank(
    kind: str, rank: int, ranks: int, micro_batches: int, virtual: int
) -> tuple[Action, ...]:
    stages = range(rank, ranks * virtual, ranks)
    # Lists of blocks: of (stage, micro-batch) that follow each other at once.
    if kind == "interleaved":
        groups = _groups(ranks, micro_batches)
        forwards = [[(stage, each)] for group in groups for stage in stages for each in group]
        backwards = [
            [(stage, each)] for group in groups for stage in stages[::-1] for each in group
        ]
        warm_up = 2 * (ranks - rank - 1) + (virtual - 1) * len(groups[0])
    else:  # several stages only where one rank has the whole model
        forwards = [[(stage, each) for stage in stages] for each in range(micro_batches)]
        backwards = [[(stage, each) for stage in stages[::-1]] for each in range(micro_batches)]
        warm_up = micro_batches if kind == "gpipe" else ranks - rank - 1
    zero_bubble = kind == "zb-h1"

    actions: list[Action] = []

    def run(direction: str, blocks: list[list[tuple[int, int]]]) -> None:
        actions.extend(Action(direction, *each) for block in blocks for each in block)

    run("forward", forwards[:warm_up])
    for number in range(len(backwards)):
        # Steady state: one forward, one backward. In the cool-down no forward is left.
        run("forward", forwards[warm_up + number : warm_up + number + 1])
        run("backward_input" if zero_bubble else "backward", backwards[number : number + 1])
        if zero_bubble and number >= rank:  # owes `rank` of them, so that every rank keeps p
            run("backward_weight", backwards[number - rank : number - rank + 1])
    if zero_bubble:
        run("backward_weight", backwards[max(0, len(backwards) - rank) :])
    return tuple(actions)


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """The micro-batches that each virtual stage of a rank takes in turn: as many groups as can
    have `ranks` of them, of nearly equal size, the larger ones first."""
    count = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, count)
    ends = [small * number + min(number, larger) for number in range(count + 1)]
    return [range(*each) for each in pairwise(ends)]


@cache
def forward_only(ranks: int, micro_batches: int, virtual: int = 1) -> Lists:
    """The actions of an evaluation."""
    _check_sizes(ranks, micro_batches, virtual)
    return tuple(
        tuple(
            Action("forward", stage, micro_batch)
            for group in _groups(ranks, micro_batches)
            for stage in range(rank, ranks * virtual, ranks)
            for micro_batch in group
        )
        for rank in range(ranks)
    )


def _check_sizes(ranks: int, micro_batches: int, virtual: int) -> None:
    sizes = {"ranks": ranks, "micro-batches": micro_batches, "virtual stages": virtual}
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"a pipeline of {size} {name}: must be above 0; 1 works")


@cache
def start_times(lists: Lists) -> tuple[tuple[int, ...], ...]:
    """When each action starts on the common clock, by rank: its rank is free, and what it needs of
    other stages has ended. Raises ScheduleError for a dead-lock."""
    ended: dict[Action, int] = {}  # by what an action makes: either kind of backward is "backward"
    starts: list[list[int]] = [[] for _ in lists]
    free = [0] * len(lists)
    last = max((action.stage for actions in lists for action in actions), default=0)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            for action in actions[len(starts[rank]) :]:
                needed = _needs(action, last)
                if not all(each in ended for each in needed):
                    break
                starts[rank].append(max([free[rank], *(ended[each] for each in needed)]))
                free[rank] = starts[rank][-1] + DURATIONS[action.direction]
                ended[_made(action)] = free[rank]
                progress = True
    for rank, actions in enumerate(lists):
        if len(starts[rank]) < len(actions):
            action = actions[len(starts[rank])]
            missing = next(each for each in _needs(action, last) if each not in ended)
            raise ScheduleError(f"dead-lock: rank {rank} waits at {action} for ever for {missing}")
    return tuple(map(tuple, starts))


def _made(action: Action) -> Action:
    """What others wait for when they wait for this action."""
    return action._replace(direction="backward") if action.direction == "backward_input" else action


def _needs(action: Action, last: int) -> list[Action]:
    """What must have ended before it, as `_made` says it. last: the last stage of the model."""
    direction, stage, micro_batch = action
    if direction == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    if direction == "backward_weight":
        return [Action("backward", stage, micro_batch)]
    after = [Action("backward", stage + 1, micro_batch)] if stage < last else []
    return [Action("forward", stage, micro_batch), *after]


@cache
def program(lists: Lists, rank: int) -> Program:
    """The rank's actions and its own messages, sent and received, in the order of the common clock.

    A message stands, on both ends, at the end of the action that makes it; what starts then or
    later comes behind it. So all ranks pass their messages in one total order (time, direction,
    stage, micro-batch), and nothing hangs even where each send waits for its receive.
    """
    ranks, starts = len(lists), start_times(lists)
    last = max((action.stage for actions in lists for action in actions), default=0)
    placed: list[tuple[int, bool, Action | Message]] = []
    for sender, actions in enumerate(lists):
        for start, action in zip(starts[sender], actions, strict=True):
            if sender == rank:
                placed.append((start, True, action))
            message = _message(action, ranks, last)
            if message is not None and rank in (sender, message.receiver):
                placed.append((start + DURATIONS[action.direction], False, message))
    return tuple(item for _, _, item in sorted(placed))


def _message(action: Action, ranks: int, last: int) -> Message | None:
    """What the action sends to another rank."""
    direction = _made(action).direction
    stage = action.stage + {"forward": 1, "backward": -1}.get(direction, last + 1)
    receiver = stage % ranks
    if not 0 <= stage <= last or receiver == action.stage % ranks:
        return None
    return Message(direction, stage, action.micro_batch, action.stage % ranks, receiver)


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
