"""Exposed communication, and the axis that communicates."""

from typing import Any

import pytest

from benchmarks.profiles import communication


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


def test_kernels_name_their_group_on_a_gpu() -> None:
    def kernel(name: str, start: float, stop: float, group: str = "") -> dict[str, Any]:
        more = {"args": {"Process Group Name": group}} if group else {}
        return event(name, start, stop, 7, cat="kernel", **more)

    events = [
        event("aten::mm", 0, 9),  # on the host: only kernels count
        kernel("nvjet", 0, 4),
        kernel("ncclDevKernel_AllReduce", 2, 6, "5"),
        kernel("ncclDevKernel_AllReduce", 12, 16, "6"),
    ]
    assert communication(events, "5") == (pytest.approx(4), pytest.approx(2))
    assert communication(events, "6") == (pytest.approx(4), pytest.approx(4))
