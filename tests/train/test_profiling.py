"""The table of a profile: which part a moment belongs to, and that the parts are the step."""

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.train.callbacks import PAUSE
from megatron.train.profiling import (
    COMPUTING,
    HOST,
    IDLE,
    STEP,
    Parts,
    Profiler,
    parts_of,
    seconds,
    table,
)
from tests.dist import Pool
from tests.train.test_callbacks import run
from tests.train.test_loop import lines


def profiled(folder: Path, layout: str) -> list[Parts]:
    """The parts of each rank in a profile of two steps; only the first rank has a record."""
    run(folder, [Profiler(1, 2, folder / "profile")], layout, train_iters=3, eval_interval=1)
    found = [each["profile"] for each in lines(folder) if "profile" in each]
    return found[0] if found else []


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("serial", None),
        ("tensor=2,sequence", "communication, tensor"),
        ("pipeline=2", IDLE),
        ("context=2:p2p", "communication, context"),
    ],
)
def test_the_parts_are_the_step(layout: str, part: str | None, gloo: Pool, tmp_path: Path) -> None:
    """That is, the time from the start of the first to that of the third, without evaluations."""
    ranks = 1 if layout == "serial" else 2
    by_rank = (
        profiled(tmp_path, layout) if ranks == 1 else gloo.run(2, profiled, tmp_path, layout)[0]
    )
    assert len(by_rank) == ranks
    for rank, each in enumerate(by_rank):
        with gzip.open(tmp_path / "profile" / f"rank_{rank}.json.gz") as file:
            events = [x for x in json.load(file)["traceEvents"] if x["name"] in (STEP, PAUSE)]
        steps = [(x["ts"], x["ts"] + x["dur"]) for x in events if x["name"] == STEP]
        assert len(steps) == 2
        pauses = [x for x in events if x["name"] == PAUSE and x["ts"] < steps[-1][1]]
        assert len(pauses) >= 2
        whole = (steps[-1][1] - steps[0][0]) / 1e6 - seconds(pauses)
        assert 2 * sum(each.values()) == pytest.approx(whole)
        assert all(each[name] > 0 for name in (*COMPUTING, HOST))
        waits = [name for name in each if each[name] and (name == IDLE or "," in name)]
        assert part in waits if part else not waits


def unwritten(folder: Path) -> tuple[int, str]:
    """A run whose second rank cannot write its trace."""
    (folder / "file").touch()
    where = folder / ("file" if dist.get_rank() else "profile")
    return run(folder, [Profiler(1, 2, where)], "data=2", train_iters=3)


def test_a_trace_that_cannot_be_written_ends_no_run(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, unwritten, tmp_path) == [(3, "train_iters")] * 2
    assert not [each for each in lines(tmp_path) if "profile" in each]


def event(name: str, start: float, end: float, cat: str = "kernel", **more: Any) -> dict[str, Any]:
    """start, end: in milliseconds."""
    times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "name": name, "cat": cat, "tid": 7, "args": more} | times


def over(axis: str) -> Mapping[str, str]:
    return {"Process Group Description": axis}


GEMM = "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
SENT = "ncclDevKernel_SendRecv"
STEPS = [event(STEP, 0, 12, "user_annotation"), event(STEP, 12, 20, "user_annotation")]
PAUSED = event(PAUSE, 14, 18, "user_annotation")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], {HOST: 10}),
        # An evaluation in a step is no part of it, and neither are its kernels.
        ([PAUSED, event(GEMM, 13, 15)], {"matmul": 0.5, HOST: 7.5}),
        ([PAUSED, event(PAUSE, 30, 40, "user_annotation")], {HOST: 8}),
        ([event(GEMM, 0, 6), event("triton_poi_fused_gelu_3", 6, 8)],
         {"matmul": 3, "other kernels": 1, HOST: 6}),
        # Two streams: what computes hides what communicates.
        ([event(GEMM, 0, 6), event(NCCL, 4, 8, **over("tensor"))],
         {"matmul": 3, "communication, tensor": 1, HOST: 6}),
        ([event(NCCL, 4, 8, **over("tensor")), event(NCCL, 10, 14, **over("replicas"))],
         {"communication, tensor": 2, "communication, replicas": 2, HOST: 6}),
        ([event(NCCL, 4, 8)], {"communication, axis unknown": 2, HOST: 8}),
        ([event(SENT, 4, 8, **over("pipeline"))], {IDLE: 2, HOST: 8}),
        ([event(SENT, 4, 8, **over("context"))], {"communication, context": 2, HOST: 8}),
        # Kernels that end after the host's last step belong to it.
        ([event(FLASH, 0, 2), event("Memcpy HtoD", 18, 24, "gpu_memcpy")],
         {"attention": 1, "other kernels": 3, HOST: 8}),
        # The host's own events beside kernels do not count.
        ([event(GEMM, 0, 6), event("aten::mm", 6, 20, "cpu_op")], {"matmul": 3, HOST: 7}),
    ],
)  # fmt: skip
def test_the_part_of_a_kernel(events: list[dict[str, Any]], expected: Parts) -> None:
    check([*STEPS, *events], expected)


def operator(name: str, start: float, end: float) -> dict[str, Any]:
    return event(name, start, end, "cpu_op")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([operator("aten::linear", 0, 6), operator("aten::addmm", 1, 5)], {"matmul": 3, HOST: 7}),
        ([operator("_BlockAttention", 0, 6), operator("aten::bmm", 1, 5)],
         {"attention": 3, HOST: 7}),
        ([operator("_Dropout", 0, 6), operator("aten::mul", 1, 5)], {"other kernels": 2, HOST: 8}),
        ([PAUSED, event("wait for tensor: all_reduce", 15, 17, "x")], {HOST: 8}),
        # A ring waits inside attention.
        ([operator("_RingAttention", 0, 6), event("wait for context: all_to_all", 2, 4, "x")],
         {"attention": 2, "communication, context": 1, HOST: 7}),
        ([event("wait for pipeline 0 -> 1: receive of x", 2, 4, "x")], {IDLE: 1, HOST: 9}),
        ([event("wait for pipeline: all_reduce", 2, 4, "x")],
         {"communication, pipeline": 1, HOST: 9}),
        ([operator("## Call CompiledFxGraph f ##", 0, 8), operator("aten::mm", 1, 3),
          operator("_c10d_functional::wait_tensor", 3, 5)],
         {"matmul": 1, "other kernels": 2, "communication, in compiled layers": 1, HOST: 6}),
        # Threads of gloo and of the data, and what was before the first step.
        ([{**operator("gloo:all_reduce", 0, 6), "tid": 8}, {**operator("aten::mm", 0, 6), "tid": 9},
          operator("aten::mm", -3, -1)], {HOST: 10}),
        ([operator("autograd::engine::evaluate_function: MmBackward0", 0, 2),
          operator("c10d::allreduce_", 2, 4)], {HOST: 10}),
    ],
)  # fmt: skip
def test_the_part_of_an_operator(events: list[dict[str, Any]], expected: Parts) -> None:
    check([*STEPS, *events], expected)


def check(events: list[dict[str, Any]], expected: Parts) -> None:
    """expected: milliseconds of a step."""
    found = {part: 1e3 * each for part, each in parts_of(events).items() if each}
    assert found == pytest.approx(expected)


def test_a_profile_has_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    """Also where the run ends before the last of them, or starts after the first."""
    for first, last, steps in ((2, 2, 1), (-5, 9, 3)):
        run(tmp_path, [Profiler(first, last, tmp_path / str(last))], train_iters=3)
        with gzip.open(tmp_path / str(last) / "rank_0.json.gz") as file:
            events = json.load(file)["traceEvents"]
        names = [each["name"] for each in events if each.get("cat") == "user_annotation"]
        assert names.count(STEP) == steps
        operators = [each["name"] for each in events]
        assert operators.count("aten::embedding") == 2 * 4 * steps, "two of four micro-batches"


@pytest.mark.parametrize(
    ("first", "last", "is_left"), [(1, 4, 0), (1, 5, 1), (9, 9, 1), (10, 20, 0)]
)
def test_a_profile_without_a_step_is_said(first: int, last: int, is_left: bool) -> None:
    """The run goes on from step 4 to step 9."""
    profiler, said = Profiler(first, last, Path()), list[str]()
    state = SimpleNamespace(step=4)
    profiler.training = SimpleNamespace(state=state, steps=9, log=said.append)
    profiler.pre_train()
    assert bool(said) != is_left


def test_the_table_has_mean_and_range_of_each_part() -> None:
    text = table([{"matmul": 0.3, HOST: 0.1}, {"matmul": 0.1, IDLE: 0.4, HOST: 0.1}])
    rows = [re.split(r" {2,}", line) for line in text.splitlines()[1:]]
    assert rows == [
        ["matmul", "200.0", "40.0 %", "100.0", "300.0"],
        [IDLE, "200.0", "40.0 %", "0.0", "400.0"],
        [HOST, "100.0", "20.0 %", "100.0", "100.0"],
        ["step", "500.0", "100.0 %", "400.0", "600.0"],
    ]
