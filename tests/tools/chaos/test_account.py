"""The account of hand-written events: spans, their sums, and the row of each fault."""

from pathlib import Path
from typing import Any

import pytest

from tools.chaos.account import account
from tools.chaos.supervise import History, Ranks, Row
from tools.chaos.weights import compare


def event(time: float, name: str, step: int | None = None, at: str | None = None) -> dict[str, Any]:
    facts = {"step": step, "at": at}
    return {"time": time, "pid": 1, "event": name} | {
        k: v for k, v in facts.items() if v is not None
    }


def started(time: float, step: int) -> list[dict[str, Any]]:
    """Built at this time, loaded 1 s later."""
    return [event(time, "start"), event(time + 1, "loaded", step)]


def killed_and_stopped() -> History:
    """Steps 1 to 3 of 2 s with a save at 2, killed 1 s later; from 2 to 5, stopped for 3 s in step
    4; the scheduler ends it in step 5, which it saves; step 6."""
    events = [
        *started(104, 0),  # first start: 100 to 105
        event(107, "step", 1), event(109, "step", 2),
        event(109.5, "save", 2, "begin"), event(111, "save", 2, "end"),
        event(113, "step", 3),  # lost
        # killed at 114, ended at 119
        *started(124, 2),
        event(127, "step", 3), event(132, "step", 4),  # stopped from 128 to 131
        event(132, "evaluation", 4, "begin"), event(134, "evaluation", 4, "end"),
        # SIGTERM at 135
        event(136, "step", 5), event(136, "save", 5, "begin"), event(137, "save", 5, "end"),
        event(137, "end", 5),
        # ended at 138
        *started(142, 5),
        event(145, "step", 6), event(145, "save", 6, "begin"), event(146, "save", 6, "end"),
        event(146, "end", 6),
    ]  # fmt: skip
    return History(
        generations=[Ranks(100, 119, 114), Ranks(119, 138, 135), Ranks(138, 147)],
        rows=[
            Row(1, "kill", "kill", 1, 114, 114, 119, True, "rank 1 vanished"),
            Row(2, "stop", "stop 3 s", 0, 128, 131, 132, False),
            Row(3, "terminate", "terminate", 0, 135, 135, 138, True),
        ],
        events=events,
    )


def test_spans_add_up_and_each_update_counts_once() -> None:
    history = killed_and_stopped()
    history.rows.insert(0, Row(0, "stop", "stop 1 s", 1, 110, 111, 111, False))  # in a save
    report = account(history)
    assert report["wall_seconds"] == 47
    assert report["seconds"] == {
        "first start": 5,
        "steps": (2 + 2 + 0.5) + 2 + (5 - 3) + 2 + 2,
        "evaluation": 2,
        "save": (1.5 - 1) + 1 + 1,
        "repeated": 2 + 1,  # step 3, and the second that the kill cut off
        "stopped": 1 + 3,
        "detection": 5 + 1,
        "restart": 5 + 4,
        "load": 2,
        "end": 1,
    }
    assert sum(report["seconds"].values()) == report["wall_seconds"]
    assert report["useful_share"] == pytest.approx(14.5 / 47)
    ends = [end for _, _, end in report["spans"]]
    assert [0, *ends[:-1]] == [begin for _, begin, _ in report["spans"]]


def test_rows_of_faults() -> None:
    report = account(killed_and_stopped())
    kill, stop, terminate = report["faults"]
    assert (kill["phase"], kill["step"], kill["seconds"]) == ("train", 3, 14)
    assert (kill["detection_seconds"], kill["restart_seconds"]) == (5, 6)
    assert (kill["steps_repeated"], kill["first_step_seconds"]) == (1, 8)
    assert stop["steps_repeated"] is stop["restart_seconds"] is None
    assert (terminate["steps_repeated"], terminate["detection_seconds"]) == (0, 3)
    assert report["unnamed"] == [3]
    of_kill = report["by_kind"][0]
    assert (of_kill["label"], of_kill["count"], of_kill["ended"]) == ("kill", 1, 1)
    assert of_kill["detection_seconds"] == {"mean": 5, "largest": 5}
    assert of_kill["restart_over_cold_start"] == pytest.approx(8 / 7)


def test_ranks_that_never_load_leave_no_gap() -> None:
    """Killed in the first start, and in the second one before its checkpoint is read."""
    history = History(
        generations=[Ranks(0, 3, 2), Ranks(3, 8, 6), Ranks(8, 15)],
        rows=[
            Row(1, "kill", "kill all", None, 2, 2, 3, True, is_named=False),
            Row(2, "kill", "kill all", None, 6, 6, 8, True, is_named=False),
        ],
        events=[event(5, "start"), *started(10, 0), event(14, "step", 1), event(14, "end", 1)],
    )
    report = account(history)
    assert sum(report["seconds"].values()) == report["wall_seconds"] == 15
    assert report["seconds"]["detection"] == 1 + 2
    assert report["seconds"]["first start"] == 2
    assert not report["unnamed"]
    assert [row["phase"] for row in report["faults"]] == ["start", "start"]
    assert [row["restart_seconds"] for row in report["faults"]] == [8, 3]


def test_steps_that_an_older_checkpoint_loses_are_repeated() -> None:
    """The second start loads step 2, does no step, and the third one goes back to step 1."""
    history = History(
        generations=[Ranks(0, 7, 6), Ranks(7, 11, 10), Ranks(11, 16)],
        rows=[
            Row(1, "kill", "kill", 0, 6, 6, 7, True),
            Row(2, "truncate", "truncate", None, 10, 10, 11, True),
        ],
        events=[
            *started(1, 0), event(3, "step", 1), event(4, "step", 2), event(5, "step", 3),
            *started(8, 2), *started(12, 1), event(14, "step", 2), event(15, "step", 3),
        ],
    )  # fmt: skip
    report = account(history)
    assert [row["steps_repeated"] for row in report["faults"]] == [1, 1]
    assert report["steps_repeated"] == 2
    assert report["seconds"]["repeated"] == 2 + 1 + 1  # step 2, too, which the second start kept


def test_an_evaluation_cut_short_and_a_slow_rank() -> None:
    """A slow rank's seconds are of its steps; SIGTERM cuts an evaluation short before a save."""
    history = History(
        generations=[Ranks(0, 13, 9), Ranks(13, 17)],
        rows=[
            Row(1, "slow", "slow 2 s", 0, 3, 5, 5, False),
            Row(2, "terminate", "terminate", 0, 9, 9, 13, True),
        ],
        events=[
            *started(1, 0), event(4, "step", 1), event(6, "step", 2),
            event(6, "evaluation", 2, "begin"), event(10, "save", 2, "begin"),
            event(11, "save", 2, "end"), event(11, "end", 2),
            *started(14, 2), event(16, "step", 3),
        ],
    )  # fmt: skip
    seconds = account(history)["seconds"]
    assert seconds["steps"] == 4 + 1
    assert (seconds["stopped"], seconds["evaluation"], seconds["repeated"]) == (0, 0, 4)
    assert seconds["save"] == 1
    assert sum(seconds.values()) == 17


def test_weights_are_compared_bit_by_bit_or_within_a_tolerance(tmp_path: Path) -> None:
    import torch

    one = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([10**6])}
    assert compare(one, {name: each.clone() for name, each in one.items()}, 0.0)["equal"]
    near = one | {"w": one["w"] * (1 + 1e-6)}
    assert compare(near, one, 0.0)["differ"] == ["w"]
    assert compare(near, one, 1e-5)["equal"]
    others = ({"n": one["n"] + 1}, {"w": one["n"]}, {"w": one["w"].view(torch.int32)})
    for other in (*(one | each for each in others), {"w": one["w"]}, {}):
        assert not compare(other, one, 1e-5)["equal"]
    nan = {"w": torch.tensor([float("nan")])}
    assert compare(nan, nan, 0.0)["equal"]
    for more in ([], [1.0]):  # the difference of 0 and -0 is 0
        zero = {"w": torch.tensor([0.0, *more])}
        assert not compare({"w": torch.tensor([-0.0, *more])}, zero, 0.0)["equal"]
        assert not compare(nan, zero, 1e-5)["equal"]
