"""Schedules: their formulas, their proofs, and what is refused."""

import itertools
import random
import re
from collections.abc import Iterator
from functools import partial
from graphlib import CycleError, TopologicalSorter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.parallel.partition import head_weight, partition, partition_uniform
from megatron.parallel.schedules import (
    KINDS,
    LETTERS,
    Action,
    Lists,
    Message,
    PipelinePlan,
    Program,
    ScheduleError,
    check,
    forward_only,
    program,
    schedule,
    simulate,
)
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def _no_schedule_stays() -> Iterator[None]:
    yield
    for cached in (schedule, forward_only, simulate, program, check):
        cached.cache_clear()


def written(lists: Lists) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in lists]


def read(actions: list[list[str]]) -> Lists:
    """The inverse of `written`."""
    directions = {letter: direction for direction, letter in LETTERS.items()}
    matches = ([re.fullmatch(r"(\d+)(.)(-?\d+)", each) for each in own] for own in actions)
    return tuple(
        tuple(Action(directions[each[2]], int(each[1]), int(each[3])) for each in own if each)
        for own in matches
    )


def sizes(ranks: int) -> Iterator[tuple[str, int]]:
    """(kind, virtual) of what so many ranks can run."""
    for kind in KINDS:
        if kind == "interleaved":
            yield from ((kind, virtual) for virtual in (2, 3, 4))
        else:
            yield from ((kind, virtual) for virtual in ((1, 2, 4) if ranks == 1 else (1,)))


def prove(p: int, m: int) -> None:
    for kind, v in sizes(p):
        facts = check(schedule(kind, p, m, v), v)
        case = (kind, p, m, v, facts)
        assert (facts.micro_batches, facts.virtual) == (m, v), case
        missing = max(0, p - m)
        idle = {"interleaved": (p - 1 + (v - 1) * missing) / v, "zb-h1": (p - 1 + missing) / 3}
        assert facts.idle_share == pytest.approx(idle.get(kind, p - 1) / m), case
        group = -(-m // max(1, m // p))
        most = {
            "gpipe": [v * m] * p,
            "1f1b": [v * min(p - rank, m) for rank in range(p)],
            "interleaved": [
                min(2 * (p - rank - 1) + (v - 1) * group + 1, v * m) for rank in range(p)
            ],
            "zb-h1": [v * min(p, m)] * p,
        }
        assert list(facts.in_flight) == most[kind], case
    for v in (1, 2, 3, 4):
        facts = check(forward_only(p, m, v), v)
        assert facts.in_flight == (0,) * p
        assert facts.idle_share == pytest.approx((p - 1 + (v - 1) * max(0, p - m)) / (v * m))


ALL = [pytest.param(ranks, 32, marks=pytest.mark.sweep) for ranks in range(1, 9)]


@pytest.mark.parametrize(("ranks", "most"), [(1, 9), (2, 9), (4, 9), *ALL])
def test_the_check_proves_the_formulas(ranks: int, most: int) -> None:
    for micro_batches in range(1, most + 1):
        prove(ranks, micro_batches)


def test_one_rank_takes_a_micro_batch_at_a_time() -> None:
    assert written(schedule("1f1b", 1, 2)) == [["0F0", "0B0", "0F1", "0B1"]]
    whole = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]
    assert written(schedule("1f1b", 1, 2, 2)) == [whole]
    assert written(forward_only(1, 2, 2)) == [["0F0", "1F0", "0F1", "1F1"]]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 5), (4, 3), (4, 8)])
def test_programs_pass_each_message_once_in_one_order(ranks: int, micro_batches: int) -> None:
    for kind, virtual in sizes(ranks):
        lists = schedule(kind, ranks, micro_batches, virtual)
        programs = [program(lists, rank) for rank in range(ranks)]
        seen: dict[Message, list[int]] = {}
        graph = TopologicalSorter[Message]()
        for rank, items in enumerate(programs):
            assert tuple(item for item in items if isinstance(item, Action)) == lists[rank]
            own = [item for item in items if isinstance(item, Message)]
            for before, after in itertools.pairwise(own):
                graph.add(after, before)
            for message in own:
                seen.setdefault(message, []).append(rank)
        assert all(sorted(ends) == sorted(m[3:]) for m, ends in seen.items())
        boundaries = ranks * virtual - 1 if ranks > 1 else 0
        assert len(seen) == 2 * micro_batches * boundaries
        graph.prepare()  # raises for a circle


def naive(lists: Lists, rank: int) -> Program:
    """1F1B as one writes it first: receive before use, send after the action."""
    ranks, items = len(lists), list[Action | Message]()
    for action in lists[rank]:
        step = 1 if action.direction == "forward" else -1
        sent = Message(action.direction, rank + step, action.micro_batch, rank, rank + step)
        received = sent._replace(stage=rank, sender=rank - step, receiver=rank)
        items += [received] if 0 <= rank - step < ranks else []
        items += [action]
        items += [sent] if 0 <= rank + step < ranks else []
    return tuple(items)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_naive_order_of_messages_is_refused(ranks: int) -> None:
    lists = schedule("1f1b", ranks, 1)
    simulate(tuple(naive(lists, rank) for rank in range(ranks)), by_message=True)
    for micro_batches in range(2, 9):
        lists = schedule("1f1b", ranks, micro_batches)
        with pytest.raises(ScheduleError):
            simulate(tuple(naive(lists, rank) for rank in range(ranks)), by_message=True)


def test_a_message_before_its_action_is_refused() -> None:
    lists = schedule("1f1b", 2, 1)
    sender, receiver = (program(lists, rank) for rank in range(2))
    message = sender[1]
    assert isinstance(message, Message)

    def without(items: Program) -> Program:
        return tuple(item for item in items if item != message)

    early = (message, *without(sender)), receiver
    lost = without(sender), without(receiver)
    lost_by_one = sender, without(receiver)
    for wrong in (early, lost, lost_by_one):
        refusal(partial(simulate, wrong, by_message=True), kind=ScheduleError)


def has_an_order(lists: Lists) -> bool:
    """Whether some order of all actions keeps the ranks' own orders and all dependencies."""
    graph = TopologicalSorter[Action]()
    there = {action for actions in lists for action in actions}
    for actions in lists:
        for before, after in itertools.pairwise(actions):
            graph.add(after, before)
    for direction, stage, n in there:
        needed = {
            "forward": [("forward", stage - 1)],
            "backward_weight": [("backward_input", stage)],
        }.get(
            direction, [("forward", stage), ("backward", stage + 1), ("backward_input", stage + 1)]
        )
        before = {Action(*each, n) for each in needed}
        graph.add(Action(direction, stage, n), *(before & there))
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def test_two_actions_exchanged_are_refused_unless_still_right() -> None:
    random_numbers = random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        ranks, micro_batches = random_numbers.randint(1, 4), random_numbers.randint(2, 6)
        kind, virtual = random_numbers.choice(list(sizes(ranks)))
        lists = [list(each) for each in schedule(kind, ranks, micro_batches, virtual)]
        actions = random_numbers.choice(lists)
        one, other = random_numbers.sample(range(len(actions)), 2)
        actions[one], actions[other] = actions[other], actions[one]
        changed = tuple(map(tuple, lists))
        try:
            check(changed, virtual)
            right = True
        except ScheduleError:
            right = False
        assert right == has_an_order(changed), changed
        outcomes[right] += 1
    assert min(outcomes.values()) > 10, "both happen"


def test_torch_has_the_same_interleaved_lists() -> None:
    device = torch.device("cpu")
    for ranks, micro_batches, virtual in ((2, 4, 2), (4, 8, 3), (4, 5, 2)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            own = range(0, ranks * virtual, ranks)
            stages = [
                PipelineStage(torch.nn.Linear(1, 1), stage, ranks * virtual, device)
                for stage in own
            ]
            theirs = ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=torch.nn.MSELoss())
        finally:
            dist.destroy_process_group()
        lists = written(schedule("interleaved", ranks, micro_batches, virtual))
        for rank, actions in enumerate(lists):
            assert actions == [str(each) for each in theirs.pipeline_order[rank] if each], rank


def test_schedules_that_a_kind_cannot_run_are_refused() -> None:
    for wrong, works in (
        (("interleaved", 4, 8, 1), ("interleaved", 4, 8, 2)),
        (("1f1b", 4, 8, 2), ("1f1b", 4, 8, 1)),
        (("gpipe", 2, 8, 3), ("gpipe", 2, 8, 1)),
        (("zb-h1", 2, 8, 2), ("zb-h1", 2, 8, 1)),
        (("1f1b", 4, 0, 1), ("1f1b", 4, 1, 1)),
        (("1f1b", 0, 4, 1), ("1f1b", 1, 4, 1)),
        (("zb-v", 4, 4, 1), ("zb-h1", 4, 4, 1)),
    ):
        refusal(partial(schedule, *wrong), kind=ScheduleError)
        check(schedule(*works), works[-1])


def test_lists_that_do_not_work() -> None:
    for actions, named in (
        ([["0F0"], ["1F0", "1B0"]], "rank 0"),  # no backward of stage 0
        ([["0F0", "0B0"], ["1B0"]], "rank 1"),
        ([["0F0", "0B0", "0F0"], ["1F0", "1B0"]], "0F0"),
        ([["1F0", "0B0"], ["0F0", "1B0"]], "1F0"),  # on each other's rank
        ([["0F0", "0B0"], ["1F0", "1B0", "1W0"]], "rank 1"),  # the whole and a half
        ([["0F0", "0I0"], ["1F0", "1B0"]], "rank 0"),  # no weight
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], "0W0"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], "0B0"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "rank"),  # dead-lock
        ([["0F0", "0B0", "0F2", "0B2"], ["1F0", "1B0", "1F2", "1B2"]], "micro-batch 1"),
        ([["0F0", "0B0"], ["1F0", "1B0", "3F0"]], "3F0"),  # beyond the model
        ([["0F999999999", "0B0"], ["1F0", "1B0"]], "rank 0"),
        ([["0F-1", "0F0", "0B0"], ["1F0", "1B0"]], "0F-1"),
        ([[], []], ""),
    ):
        refusal(partial(check, read(actions), 1), named, kind=ScheduleError)


def test_one_backward_may_be_whole_and_another_in_halves() -> None:
    actions = [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1B1", "1W0"]]
    assert check(read(actions), 1).in_flight == (2, 2)


def test_a_schedule_of_ones_own() -> None:
    lists = schedule("1f1b", 2, 4)
    custom = (lists[0], tuple(each._replace(micro_batch=3 - each[2]) for each in lists[1]))
    for actions, virtual in ((lists, 1), (schedule("interleaved", 2, 3, 2), 2)):
        micro_batches = check(actions, virtual).micro_batches
        plan = PipelinePlan(2, virtual, custom_schedule=[*map(list, actions)])
        assert plan.lists(micro_batches) == actions
        assert [plan.program(rank, micro_batches) for rank in (0, 1)] == [
            program(actions, rank) for rank in (0, 1)
        ]
        for other in (micro_batches - 1, micro_batches + 1):
            refusal(partial(plan.program, 1, other), kind=ScheduleError)
    refusal(lambda: PipelinePlan(2, custom_schedule=custom), kind=ScheduleError)


def test_a_schedule_of_ones_own_that_does_not_work_is_refused() -> None:
    good = schedule("1f1b", 2, 2)
    wrong: list[tuple[Lists, int]] = [
        ((good[0][::-1], good[1]), 1),  # a dead-lock
        (schedule("1f1b", 4, 2), 1),  # of other ranks
        (schedule("interleaved", 2, 2, 2), 1),  # of other stages
        (good, 2),
        (((), ()), 1),
    ]
    for lists, virtual in wrong:
        refusal(partial(PipelinePlan, 2, virtual, custom_schedule=lists), kind=ValueError)


def counts(ranges: tuple[range, ...]) -> list[int]:
    """Sizes of ranges that follow each other."""
    assert all(before.stop == after.start for before, after in itertools.pairwise(ranges))
    assert ranges[0].start == 0
    return [len(each) for each in ranges]


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 3.5, 9.0])
@pytest.mark.parametrize(("first", "last"), [(None, None), (1, None), (None, 2), (2, 1)])
def test_a_partition_is_the_best_of_all(head: float, first: int | None, last: int | None) -> None:
    for stages, layers in itertools.product((1, 2, 3, 4), range(3, 11)):
        best: tuple[list[float], list[int]] | None = None
        for sizes_but_last in itertools.product(range(1, layers + 1), repeat=stages - 1):
            found = [*sizes_but_last, layers - sum(sizes_but_last)]
            fixed = first in (None, found[0]) and last in (None, found[-1])
            if found[-1] >= 1 and fixed:
                costs = list(map(float, found))
                costs[-1] += head
                rank = (sorted(costs, reverse=True), [-size for size in found])
                best = rank if best is None else min(best, rank)
        if best is None:
            error = refusal(partial(partition, layers, stages, head=head, first=first, last=last))
            assert isinstance(error, ValueError)
        else:
            found = counts(partition(layers, stages, head=head, first=first, last=last))
            assert found == [-size for size in best[1]], (layers, stages)


def test_the_head_of_355m_weighs_three_layers_and_a_half() -> None:
    head = head_weight(1024, 1024, 50304)
    assert head == pytest.approx(3.51, abs=0.01)
    assert counts(partition(24, 4, head=head)) == [7, 7, 7, 3]


def test_uniform_partition_gives_later_ranks_more_in_every_chunk() -> None:
    assert counts(partition_uniform(10, 4)) == [2, 2, 3, 3]
    assert counts(partition_uniform(48, 2)) == [24, 24]
    assert counts(partition_uniform(12, 8, chunks=2)) == [1, 1, 2, 2, 1, 1, 2, 2]


def test_uniform_partitions_that_cannot_be() -> None:
    for wrong in ((3, 4, 1), (9, 4, 2), (8, 3, 2)):
        assert isinstance(refusal(partial(partition_uniform, *wrong)), ValueError)


def test_plans_that_differ_have_other_texts() -> None:
    plans = [PipelinePlan(2), PipelinePlan(2, kind="gpipe"), PipelinePlan(2, 2, "interleaved")]
    plans += [PipelinePlan(2, layers=(range(3), range(3, 4)))]
    plans += [PipelinePlan(2, custom_schedule=schedule("gpipe", 2, 4))]
    assert len({each.describe() for each in plans}) == len(plans)
