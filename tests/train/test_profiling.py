"""The table of a profile: which part a moment belongs to, and that the parts are the step."""

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.data.batch import Batch
from megatron.train.callbacks import Callback
from megatron.train.profiling import COMPUTING, HOST, IDLE, STEP, Parts, Profiler, parts_of, table
from megatron.train.step import StepResult
from tests.dist import Pool
from tests.train.test_callbacks import run
from tests.train.test_loop import lines


class Watch(Callback):
    """The time from its first pre_step to its last post_step."""

    def pre_train(self) -> None:
        self.times: list[float] = []

    def pre_step(self, batches: Sequence[Batch]) -> None:
        self.times.append(time.perf_counter())

    def post_step(self, result: StepResult) -> None:
        self.end = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.end - self.times[0]


def profiled(folder: Path, layout: str) -> tuple[list[Parts], float, float]:
    """(parts of each rank, seconds of both steps on this rank: at least, at most)."""
    inside, outside = Watch(), Watch()

    class Surrounded(Profiler):
        """Its span of a step begins after `outside` and ends after `inside`, and so on."""

        def pre_step(self, batches: Sequence[Batch]) -> None:
            outside.pre_step(batches)
            super().pre_step(batches)
            inside.pre_step(batches)

        def post_step(self, result: StepResult) -> None:
            inside.post_step(result)
            super().post_step(result)
            outside.post_step(result)

    for each in (inside, outside):
        each.pre_train()
    run(folder, [Surrounded(1, 2, folder / "profile")], layout, train_iters=2, log_interval=1)
    # Only the first rank has a file of metrics; its line has all ranks.
    found = [each["profile"] for each in lines(folder) if "profile" in each]
    return found[0] if found else [], inside.seconds, outside.seconds


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("serial", None),
        ("tensor=2", "communication, tensor"),
        ("tensor=2,sequence", "communication, tensor"),
        ("pipeline=2", IDLE),
        ("context=2:p2p", "communication, context"),
    ],
)
def test_the_parts_are_the_step(layout: str, part: str | None, gloo: Pool, tmp_path: Path) -> None:
    ranks = 1 if layout == "serial" else 2
    found = [profiled(tmp_path, layout)] if ranks == 1 else gloo.run(2, profiled, tmp_path, layout)
    (by_rank, least, most) = found[0]
    assert len(by_rank) == ranks
    # Not by a share of the time: a busy machine may run something else between two clocks.
    assert least <= 2 * sum(by_rank[0].values()) <= most
    for each in by_rank:
        assert all(each[name] > 0 for name in (*COMPUTING, HOST))
        waits = [name for name in each if each[name] and (name == IDLE or "," in name)]
        assert part in waits if part else not waits
    text = (tmp_path / "profile" / "table.txt").read_text()
    assert text == table(by_rank)
    names = {f"rank_{rank}.json.gz" for rank in range(ranks)}
    assert {each.name for each in (tmp_path / "profile").iterdir()} == {*names, "table.txt"}


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
STEPS = [event(STEP, 0, 10, "user_annotation"), event(STEP, 12, 20, "user_annotation")]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], {HOST: 10}),  # half of it between the steps and in them
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
