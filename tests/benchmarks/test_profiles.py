"""Exposed communication, and the axis that communicates."""

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.harness import Contender, Flags, Rank, Turn
from benchmarks.processes import Agents, measure
from benchmarks.profiles import AXIS, STEP, by_axis, communication, shares_by_axis
from tests.benchmarks.test_harness import question

GROUPS = {"5": "tensor", "6": "data"}


def event(name: str, start: float, stop: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    cat = "cpu_op" if name.startswith(("aten", "mkldnn", "autograd")) else "user_annotation"
    times = {"ts": 1e6 * start, "dur": 1e6 * (stop - start)}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, **times, **more}


@pytest.mark.parametrize(
    ("kind", "all_reduce", "matmul"),
    [
        ("kernel", "ncclDevKernel_AllReduce", "nvjet_hsh"),
        ("cpu_op", "gloo:all_reduce", "aten::mm"),
        ("cpu_op", "gloo:all_reduce", "mkldnn::_linear_pointwise"),
    ],
)
def test_communication_is_exposed_where_nothing_is_computed(
    kind: str, all_reduce: str, matmul: str
) -> None:
    events = [
        event(all_reduce, 1, 4, cat=kind),
        event(all_reduce, 3, 6, cat=kind),  # two at once count once
        event(matmul, 0, 2, cat=kind),
        event(matmul, 5, 9, cat=kind),
        event("autograd::engine", 0, 9),  # holds others, and computes nothing
        event("gloo:barrier", 10, 20, cat=kind),
        {"ph": "M", "name": "process_name"},
    ]
    assert communication(events) == (pytest.approx(5), pytest.approx(3))
    assert communication(events[2:]) == (0, 0)


def test_threads_tell_the_axis_on_a_cpu() -> None:
    events = [
        event(f"{AXIS}tensor", 0, 1),
        event("gloo:all_reduce", 0.2, 0.4, 11),
        event("gloo:all_reduce", 0.3, 0.5, 12),
        event(f"{AXIS}data", 1, 2),
        event("gloo:all_reduce", 1.2, 1.4, 21),
        event(STEP, 10, 20),
        event("aten::mm", 10, 13),
        event("gloo:all_reduce", 12, 15, 12),  # two of these seconds beside nothing
        event("gloo:all_reduce", 14, 18, 21),
        event("aten::mm", 17, 20, 2),
        event("gloo:barrier", 18, 19, 11),
        event("gloo:all_reduce", 30, 40, 11),  # in no turn
    ]
    found = by_axis(events, GROUPS)
    assert found == {"tensor": pytest.approx((0.3, 0.2)), "data": pytest.approx((0.4, 0.3))}


def test_kernels_name_their_group_on_a_gpu() -> None:
    def kernel(name: str, start: float, stop: float, group: str = "") -> dict[str, Any]:
        more = {"args": {"Process Group Name": group}} if group else {}
        return event(name, start, stop, 7, **more) | {"cat": "kernel"}

    events = [
        event(STEP, 0, 20),
        event("aten::mm", 0, 9),  # on the host: only kernels count
        kernel("nvjet", 0, 4),
        kernel("ncclDevKernel_AllReduce", 2, 6, "5"),
        kernel("ncclDevKernel_AllReduce", 12, 16, "6"),
    ]
    found = by_axis(events, GROUPS)
    assert found == {"tensor": pytest.approx((0.2, 0.1)), "data": pytest.approx((0.2, 0.2))}


def along_one_axis(rank: Rank, name: str) -> Turn:
    """Communicates much, on 2 x 2 ranks along one axis alone."""
    import torch

    mesh, numbers = rank.mesh({"tensor": 2}), torch.ones(2**20)

    def turn() -> None:
        for _ in range(6):
            dist.all_reduce(numbers, group=getattr(mesh, name).group)

    shares = shares_by_axis(turn, rank, mesh)
    return lambda: {key: list(value) for key, value in shares.items()}


def test_gloo_along_one_axis_is_not_taken_for_the_other() -> None:
    asked = Contender("data", along_one_axis, {"name": "data"}, ranks=4)
    ((found,),) = measure(question(warm_up=0, rounds=1), [asked], Flags(), Agents())
    assert 0 < found["rounds"][0]["data"][0] <= 1
    assert found["rounds"][0]["tensor"] == [0, 0]
