"""Where the time of a training step goes, by kinds of operators."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.overlap import communication

# The first that is found in the name of an operator, or on a GPU of a kernel, says its kind.
KINDS = {
    "communication": r"all_?reduce|all_?gather|reduce_scatter|broadcast|nccl|gloo|c10d",
    "attention": r"scaled_dot_product|flash|fmha|cudnn.*sdpa",
    "optimizer": r"adam",
    "layer norm": r"layer_?norm",
    "matrix products": r"mm\b|addmm|bmm|linear|gemm|matmul|cutlass|nvjet|xmma",
    "GeLU": r"gelu",
    "loss": r"softmax|cross_entropy|nll|_exp|\bexp|log\b",
    "embedding": r"embedding|index",
    "copies": r"copy|clone|\bcat|contiguous|_to\b|fill|zero|memcpy|memset",
    "additions and products": r"\badd|\bmul|\bsum|elementwise|reduce|\bsub|\bdiv",
    "other kernels of torch.compile": r"triton|cpp_fused",
}
OTHER = "all else"
MOST_OPERATORS = 25


def kind_of(operator: str) -> str:
    name = operator.lower().removeprefix("aten::")
    return next((kind for kind, found in KINDS.items() if re.search(found, name)), OTHER)


def profiled(step: Callable[[], object], steps: int, trace: Path, device: str) -> dict[str, Any]:
    """Seconds a step by kind and by operator, each without what it calls, and of communication;
    writes a trace to look at in chrome://tracing or Perfetto. On a GPU the seconds are those of
    kernels."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(steps):
            step()
    found.export_chrome_trace(str(trace))
    kinds: dict[str, float] = defaultdict(float)
    operators = []
    for event in found.key_averages():
        is_kernel = event.device_type != torch.autograd.DeviceType.CPU
        if is_kernel != on_gpu or event.is_user_annotation:  # which holds kernels, and is none
            continue
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds = own / 1e6 / steps
        kinds[kind_of(event.key)] += seconds
        operators.append((event.key, seconds, event.count / steps))
    operators.sort(key=lambda each: -each[1])
    runs, exposed = communication(json.loads(trace.read_text())["traceEvents"])
    return {
        "kinds": dict(sorted(kinds.items(), key=lambda each: -each[1])),
        "operators": operators[:MOST_OPERATORS],
        "communication": {"seconds": runs / steps, "exposed_seconds": exposed / steps},
    }
