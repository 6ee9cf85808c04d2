"""Where the time of a turn goes: kinds of operators, and when communication is exposed."""

from typing import Any

import pytest

from benchmarks.profiles import by_axis, communication, kind_of


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "matmuls"),
        ("aten::addmm", "matmuls"),
        ("mkldnn::_linear_pointwise", "matmuls"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm_backward", "layer norm"),
        ("aten::_fused_adamw_", "optimizer"),
        ("c10d::allreduce_", "communication"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("aten::copy_", "copies"),
        ("aten::randn", "all else"),
    ],
)
def test_every_operator_has_one_kind(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def event(name: str, start: float, stop: float, kind: str, **more: Any) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (stop - start)}
    return {"ph": "X", "cat": kind, "name": name, "tid": 1, **times, **more}


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
        event(all_reduce, 1, 4, kind),
        event(all_reduce, 3, 6, kind),  # two at once count once
        event(matmul, 0, 2, kind),
        event(matmul, 5, 9, kind),
        event("autograd::engine", 0, 9, "cpu_op"),  # holds others, and computes nothing
        event("gloo:barrier", 10, 20, kind),
        {"ph": "M", "name": "process_name"},
    ]
    assert communication(events) == (pytest.approx(5), pytest.approx(3))
    assert communication(events[2:]) == (0, 0)


def test_communication_of_an_axis_is_known_by_its_threads_or_its_group() -> None:
    on_cpu = [
        event("the axis tensor", 0, 1, "user_annotation"),
        event("gloo:all_reduce", 0.2, 0.3, "cpu_op", tid=7),
        event("the axis data", 1, 2, "user_annotation"),
        event("gloo:all_reduce", 1.2, 1.3, "cpu_op", tid=8),
        event("one turn", 10, 20, "user_annotation"),
        event("gloo:all_reduce", 11, 13, "cpu_op", tid=7),
        event("gloo:all_reduce", 12, 16, "cpu_op", tid=8),
        event("aten::mm", 12, 14, "cpu_op"),
    ]
    groups = {"1": "tensor", "2": "data"}
    expected = {"tensor": pytest.approx((0.2, 0.1)), "data": pytest.approx((0.4, 0.2))}
    assert by_axis(on_cpu, groups) == expected
    on_gpu = [
        event("one turn", 10, 20, "user_annotation"),
        event("nccl:all_reduce", 11, 13, "kernel", args={"Process Group Name": "1"}),
        event("nccl:all_reduce", 12, 16, "kernel", args={"Process Group Name": "2"}),
        event("nvjet", 12, 14, "kernel"),
    ]
    assert by_axis(on_gpu, groups) == expected
