"""Which axis communicates, told by a trace: one made by hand, and those of gloo's ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.scaling_axes import AXIS, STEP, by_axis, profile_steps
from benchmarks.turns import Stopwatch
from megatron.parallel.mesh import build_mesh
from tests.dist import Pool

GROUPS = {"5": "tensor", "6": "data"}


def event(name: str, start: float, stop: float, thread: int, **more: Any) -> dict[str, Any]:
    cat = "cpu_op" if name.startswith("aten") else "user_annotation"
    times = {"ts": 1e6 * start, "dur": 1e6 * (stop - start)}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, **times, **more}


def test_threads_tell_the_axis_on_a_cpu() -> None:
    events = [
        event(f"{AXIS}tensor", 0, 1, 1),
        event("gloo:all_reduce", 0.2, 0.4, 11),
        event("gloo:all_reduce", 0.3, 0.5, 12),
        event(f"{AXIS}data", 1, 2, 1),
        event("gloo:all_reduce", 1.2, 1.4, 21),
        event(STEP, 10, 20, 1),
        event("aten::mm", 10, 13, 1),
        event("gloo:all_reduce", 12, 15, 12),  # two of these seconds beside nothing
        event("gloo:all_reduce", 14, 18, 21),
        event("aten::mm", 17, 20, 2),
        event("gloo:barrier", 18, 19, 11),
        event("gloo:all_reduce", 30, 40, 11),  # in no step
        {"ph": "M", "name": "process_name"},
    ]
    found = by_axis(events, GROUPS)
    assert found == {
        "step_seconds": pytest.approx(10),
        "tensor": {"seconds": pytest.approx(3), "exposed_seconds": pytest.approx(2)},
        "data": {"seconds": pytest.approx(4), "exposed_seconds": pytest.approx(3)},
    }


def test_kernels_name_their_group_on_a_gpu() -> None:
    def kernel(name: str, start: float, stop: float, group: str | None = None) -> dict[str, Any]:
        more = {} if group is None else {"args": {"Process Group Name": group}}
        return {**event(name, start, stop, 7), "cat": "kernel", **more}

    events = [
        event(STEP, 0, 10, 1),
        event(STEP, 10, 20, 1),
        event("aten::mm", 0, 9, 1),  # on the host: only kernels count
        kernel("nvjet", 0, 4),
        kernel("ncclDevKernel_AllReduce", 2, 6, "5"),
        kernel("ncclDevKernel_AllReduce", 12, 16, "6"),
    ]
    found = by_axis(events, GROUPS)
    assert found["tensor"] == {"seconds": pytest.approx(2), "exposed_seconds": pytest.approx(1)}
    assert found["data"] == {"seconds": pytest.approx(2), "exposed_seconds": pytest.approx(2)}


def one_axis_alone(name: str) -> dict[str, Any]:
    """Of steps on 2 x 2 ranks that communicate along one axis, from one of which much."""
    mesh = build_mesh({"tensor": 2}, torch.device("cpu"))
    numbers = torch.ones(2**20)

    def step(_: int) -> float:
        for _ in range(6):
            dist.all_reduce(numbers, group=getattr(mesh, name).group)
        return 0.0

    return profile_steps(mesh, Stopwatch(step, dist.barrier), 2)


@pytest.mark.parametrize(("name", "other"), [("tensor", "data"), ("data", "tensor")])
def test_gloo_along_one_axis_is_not_taken_for_the_other(gloo: Pool, name: str, other: str) -> None:
    for found in gloo.run(4, one_axis_alone, name):
        assert 0 < found[name]["seconds"] < found["step_seconds"]
        assert found[other]["seconds"] == 0
