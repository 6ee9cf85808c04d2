"""Pipeline schedules as data: which rank runs which action, in which order. No torch.

Unusually, a schedule is not code. `check` proves it from the lists of all ranks; tools/plan.py
draws it. Virtual stages are numbered as in the model; stage s is on rank s % p of the p ranks.

| kind | source | idle / ideal time | micro-batches in flight at m >= p |
|---|---|---|---|
| gpipe | Huang et al., arXiv 1811.06965 | (p-1)/m | m |
| 1f1b | Narayanan et al., arXiv 2104.04473, 2.2.1 | (p-1)/m | p - rank |
| interleaved | the same, 2.2.2 | (p-1)/(v m) | 2(p - rank - 1) + (v-1)g + 1, at most v m |
| zb-h1 | Qi et al., arXiv 2401.10241, 2.3 | (p-1)/(3m) | p |

A micro-batch is in flight once for each virtual stage that keeps its activations. g is the size of
the largest group, which is p if p divides m. For m < p, gpipe and 1f1b idle as above, interleaved
idles (v-1)(p-m)/(v m) more, zb-h1 (p-m)/(3m) more; at most v m are in flight.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1")

DURATIONS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Duration of an action on the common clock, the same for all virtual stages."""
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""Letter of a direction in torch.distributed.pipelining: 2F0 is F of stage 2, micro-batch 0."""


class Action(NamedTuple):
    """direction: forward, backward (the whole) or one of its halves, backward_input and
    backward_weight. stage: number of the virtual stage in the model."""

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
    # Lists of blocks; a block is a list of (stage, micro-batch n) that run directly in sequence.
    if kind == "interleaved":
        groups = _groups(ranks, micro_batches)
        forwards = [[(stage, n)] for group in groups for stage in stages for n in group]
        backwards = [[(stage, n)] for group in groups for stage in stages[::-1] for n in group]
        warm_up = 2 * (ranks - rank - 1) + (virtual - 1) * len(groups[0])
    else:  # several stages only if one rank has the whole model
        forwards = [[(stage, n) for stage in stages] for n in range(micro_batches)]
        backwards = [[(stage, n) for stage in stages[::-1]] for n in range(micro_batches)]
        warm_up = micro_batches if kind == "gpipe" else ranks - rank - 1
    zero_bubble, actions = kind == "zb-h1", list[Action]()

    def run(direction: str, blocks: list[list[tuple[int, int]]]) -> None:
        actions.extend(Action(direction, *each) for block in blocks for each in block)

    run("forward", forwards[:warm_up])
    for number in range(len(backwards)):
        # Steady state: one forward, one backward. In the cool-down no forward is left.
        run("forward", forwards[warm_up + number : warm_up + number + 1])
        run("backward_input" if zero_bubble else "backward", backwards[number : number + 1])
        if zero_bubble and number >= rank:  # they lag by `rank`, so that every rank keeps p
            run("backward_weight", backwards[number - rank : number - rank + 1])
    if zero_bubble:
        run("backward_weight", backwards[max(0, len(backwards) - rank) :])
    return tuple(actions)


def _groups(ranks: int, micro_batches: int) -> tuple[range, ...]:
    """Groups of micro-batches that each virtual stage of a rank runs in turn: as many groups as can
    have `ranks` micro-batches each, of nearly equal size, larger ones first."""
    count = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, count)
    return consecutive([small + (number < larger) for number in range(count)])


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(*each) for each in pairwise(accumulate(sizes, initial=0)))


@cache
def forward_only(ranks: int, micro_batches: int, virtual: int = 1) -> Lists:
    """The actions of an evaluation. Raises ScheduleError."""
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
    if min(ranks, micro_batches, virtual) < 1:
        sizes = f"{ranks} ranks, {micro_batches} micro-batches, {virtual} virtual stages of a rank"
        raise ScheduleError(f"{sizes}: must all be above 0; 1 works")


@cache
def start_times(lists: Lists) -> tuple[tuple[int, ...], ...]:
    """Start of each action on the common clock, by rank: when its rank is free and the actions that
    it needs have ended. Raises ScheduleError for a dead-lock."""
    ended: dict[Action, int] = {}  # by `_made`
    starts: list[list[int]] = [[] for _ in lists]
    free, last = [0] * len(lists), _last_stage(lists)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            for action in islice(actions, len(starts[rank]), None):
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


def _last_stage(programs: Sequence[Sequence[Action | Message]]) -> int:
    return max((item.stage for item in chain(*programs)), default=0)


def _made(action: Action) -> Action:
    """The action under the name by which others wait for it: backward_input counts as backward."""
    return action._replace(direction="backward") if action.direction == "backward_input" else action


def _needs(action: Action, last: int) -> list[Action]:
    """Actions that must end before this one, named as by `_made`. last: last stage of the model."""
    direction, stage, micro_batch = action
    if direction == "forward":
        return [Action("forward", stage - 1, micro_batch)] if stage else []
    if direction == "backward_weight":
        return [Action("backward", stage, micro_batch)]
    after = [Action("backward", stage + 1, micro_batch)] if stage < last else []
    return [Action("forward", stage, micro_batch), *after]


@cache
def program(lists: Lists, rank: int) -> Program:
    """A rank's actions, and the messages it sends and receives, in the order of the common clock.

    Sender and receiver both place a message at the time its action ends, before any action that
    starts at or after that time. So all ranks pass messages in one total order (time, direction,
    stage, micro-batch), and nothing hangs even if each send waits for its receive.
    """
    ranks, starts, last = len(lists), start_times(lists), _last_stage(lists)
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
    """The message that the action sends to another rank, or None."""
    direction = _made(action).direction
    stage = action.stage + {"forward": 1, "backward": -1}.get(direction, last + 1)
    receiver = stage % ranks
    if not 0 <= stage <= last or receiver == action.stage % ranks:
        return None
    return Message(direction, stage, action.micro_batch, action.stage % ranks, receiver)


@dataclass(frozen=True)
class Facts:
    """Properties of a schedule that `check` proves.

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
    ranks, done = len(lists), set(chain(*lists))
    micro_batches = 1 + max((action.micro_batch for action in done), default=-1)
    if not micro_batches:
        raise ScheduleError("a schedule without any action")
    for rank, actions in enumerate(lists):
        for action, count in Counter(actions).items():
            if count > 1:
                raise ScheduleError(f"rank {rank}: {action} is there {count} times")
            own = action.stage in range(rank, ranks * virtual, ranks) and action.micro_batch >= 0
            if not own or action.direction not in DURATIONS:
                raise ScheduleError(f"rank {rank}: {action} is no action of this rank's stages")
    trains = any(action.direction != "forward" for action in done)
    allowed, needed = (("FB", "FIW"), "F and B, or F, I and W") if trains else (("F",), "F")
    for n in range(micro_batches):
        for stage in range(ranks * virtual):
            has = "".join(LETTERS[each] for each in LETTERS if Action(each, stage, n) in done)
            if has not in allowed:
                found = f"of stage {stage}, micro-batch {n} it has {has or 'nothing'}"
                raise ScheduleError(f"rank {stage % ranks}: {found}, and needs {needed}")
    check_programs([program(lists, rank) for rank in range(ranks)])
    length = [DURATIONS[actions[-1].direction] for actions in lists]
    end = max(times[-1] + last for times, last in zip(start_times(lists), length, strict=True))
    ideal = micro_batches * virtual * (3 if trains else 1)
    kept = {"forward": int(trains), "backward": -1, "backward_input": 0, "backward_weight": -1}
    in_flight = (max(accumulate(kept[each.direction] for each in actions)) for actions in lists)
    return Facts(tuple(in_flight), (end - ideal) / ideal, micro_batches, virtual)


def check_programs(programs: Sequence[Sequence[Action | Message]]) -> None:
    """Simulate the ranks' programs. Each send waits for its receive, and each receive for its send.

    Raises ScheduleError if ranks wait for ever, or an action comes before one that it needs.
    """
    at, last = [0] * len(programs), _last_stage(programs)
    held = [set[Action]() for _ in programs]  # run by the rank, or its result received

    def next_of(rank: int) -> Action | Message | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            while (item := next_of(rank)) is not None:
                if isinstance(item, Message):
                    ends = [item.sender, item.receiver]
                    if any(next_of(end) != item for end in ends):
                        break
                    maker = item.stage + (1 if item.direction == "backward" else -1)
                    made = Action(item.direction, maker, item.micro_batch)
                    needed = [made]
                else:
                    ends, made, needed = [rank], _made(item), _needs(item, last)
                for each in needed:
                    if each not in held[ends[0]]:
                        raise ScheduleError(f"rank {ends[0]}: {item} comes before {each}")
                held[ends[-1]].add(made)
                for end in ends:
                    at[end] += 1
                progress = True
    for rank in range(len(programs)):
        if (item := next_of(rank)) is not None:
            raise ScheduleError(f"dead-lock: rank {rank} waits for ever at {item}")


def to_json(lists: Lists) -> dict[str, list[list[str]]]:
    """{"actions": [["0F0", "0B0"], ...]} by rank: stage, letter (LETTERS), micro-batch."""
    return {"actions": [[str(action) for action in actions] for actions in lists]}


def from_json(content: Any) -> Lists:
    """The inverse of `to_json`; other keys are ignored. Raises ScheduleError, naming the
    malformed entry. `check` says whether the schedule works."""
    directions = dict(zip(LETTERS.values(), LETTERS, strict=True))
    ranks = content.get("actions") if isinstance(content, dict) else None
    if not isinstance(ranks, list) or {type(each) for each in ranks} != {list}:
        allowed = '{"actions": [["0F0", "0B0"], ...]}, a list for each rank'
        raise ScheduleError(f"it must be {allowed}")
    lists = []
    for rank, entries in enumerate(ranks):
        actions = []
        for number, entry in enumerate(entries):
            match = re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", str(entry))
            if match is None:
                allowed = "must be stage, F, B, I or W, and micro-batch; 0F0 works"
                raise ScheduleError(f"actions[{rank}][{number}] {entry!r}: {allowed}")
            actions.append(Action(directions[match[2]], int(match[1]), int(match[3])))
        lists.append(tuple(actions))
    return tuple(lists)


def read_schedule(path: Path) -> Lists:
    """A user's schedule from a JSON file. Raises ScheduleError, also if the file is not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScheduleError(f"it must be a file of JSON ({error})") from error
    return from_json(content)
