"""A profile of some steps: a trace of torch's profiler per rank, and a table of where time goes.

A moment of a step belongs to one part, so that the parts add up to the step:

                            on a GPU                        on a CPU
    communication, AXIS     only its kernels run            waits for the axis
    idle in the pipeline    only messages of stages run     waits for a message of another stage
    attention               kernels of attention            functions of attention
    matmul                  kernels of matmuls              operators of matmuls
    other kernels           other kernels, copies           other operators, compiled kernels
    host                    nothing runs                    no operator runs: Python, data, logs

A step lasts until the next one begins, without evaluations, replica checks and saves.
If two kernels run, attention counts before matmul, and matmul before others. In compiled layers on
a CPU, attention counts as its matmuls and other kernels, and a wait does not name its axis.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import profile, record_function

from megatron.data.batch import Batch
from megatron.parallel.mesh import Calls
from megatron.train.callbacks import PAUSE, Callback

Event = Mapping[str, Any]
"""One of a trace: name, category, start and duration in microseconds."""
Parts = dict[str, float]
"""Seconds of a step by part."""

STEP = "train step"  # name of a step in a trace
COMMUNICATION, IDLE, HOST = "communication", "idle in the pipeline", "host"
COMPUTING = ("attention", "matmul", "other kernels")
SENDING = ("nccl", "gloo:")  # beginnings of names
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories
_WAIT = re.compile(r"wait for (.+?)(?: \d+ -> \d+)?: (.+)")  # see mesh.Calls

# The compiler names a kernel after all operators that it fuses; matmuls and attention in the name
# are only views of their results.
_COPYING = (
    "to_copy|copy|clone|cat|stack|split|slice|select|(unsafe_)?view|t|transpose|permute|expand"
)
_COPYING += "|(un)?squeeze|zeros|full|constant_pad_nd"
KINDS = (  # (kind, pattern for names of kernels and operators); the first match counts
    (COMMUNICATION, rf"^({'|'.join(SENDING)})"),
    ("copies", rf"^triton_(poi|red|per)_fused_(_*({_COPYING})_+)+\d+$"),
    ("elementwise", r"^triton_(poi|red|per|spl|for)_"),
    ("attention", r"flash|fmha|sdpa|cudnn(::fusion|_generated)|scaled_dot_product|flex_(att|dec)"),
    ("optimizer", r"adam"),
    ("norm", r"lpnorm|normtwoops|foreach_norm|vector_norm"),
    (
        "matmul",
        r"gemm|gemv|nvjet|cutlass|cublas|splitk|triton_tem_|::_?(linear|addmm)|::(add|ba?dd)?b?mm\b"
        "|::add_matmul",
    ),
    ("copies", r"memcpy|memset|copy|catarray|fill|::(cat|stack|clone|zero_)\b"),
    ("elementwise", r"^aten::|elementwise|reduce|layer_?norm|rms_?norm|gamma|softmax|nll_loss"),
    ("elementwise", r"foreach|multi_tensor|indexselect|gather|scatter|embedding|gelu|silu"),
)
OTHER = "other"


class Profiler(Callback):
    """The profile of the steps `first` to `last`: a table in the log and the metrics, and in
    `folder` rank_N.json.gz for Perfetto or chrome://tracing."""

    def __init__(self, first: int, last: int, folder: Path) -> None:
        super().__init__()
        self.first, self.last, self.folder = first, last, folder
        self.profile: profile | None = None
        self.step = record_function(STEP)

    def pre_train(self) -> None:
        if self.training.state.step >= self.last or self.training.steps < self.first:
            steps = f"no step from {self.first} to {self.last} is left"
            self.training.log(f"warning: {steps} to profile")

    def pre_step(self, batches: Sequence[Batch]) -> None:
        step = self.training.state.step + 1  # a resumed run may begin between the two
        if self.profile is not None:
            self.step.__exit__(None, None, None)
            if step > self.last:
                self.write()
        if not self.first <= step <= self.last:
            return
        if self.profile is None:
            with self.training.paused():  # its start takes seconds
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own
                self.profile = profile()  # of the host, and of the GPU where there is one
                self.wait_for_gpu()
                self.profile.start()
                self.training.state.mesh.control.gather(None)  # the steps of all ranks start here
            self.training.clock.span = Calls.span = record_function
        self.step = record_function(STEP)
        self.step.__enter__()

    def post_train(self, end: str) -> None:
        if self.profile is not None:
            self.step.__exit__(None, None, None)
            self.write()

    def on_error(self, error: BaseException) -> None:
        if self.profile is not None:  # one that runs at the end of a process crashes it
            self.stop()

    def stop(self) -> profile:
        assert self.profile is not None
        stopped, self.profile = self.profile, None
        self.training.clock.span = Calls.span = nullcontext
        stopped.stop()
        return stopped

    def wait_for_gpu(self) -> None:
        """The trace then has all kernels of its steps, and none of other steps."""
        device = self.training.state.mesh.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def write(self) -> None:
        training, control = self.training, self.training.state.mesh.control
        with training.paused():
            self.wait_for_gpu()
            stopped, file = self.stop(), self.folder / f"rank_{control.rank}.json.gz"
            found: Parts | str
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stopped.export_chrome_trace(str(file))
                with gzip.open(file) as stream:
                    found = parts_of(json.load(stream)["traceEvents"])
            except (OSError, RuntimeError) as error:  # such as a full disk, which ends no run
                found = f"{file}: {error}"
            every = control.gather(found)
        step, failed = training.state.step, [each for each in every if isinstance(each, str)]
        if failed:
            training.log(f"warning: step {step} has no profile: {failed[0]}")
            return
        text = table(every)
        training.log(f"step {step} | profile of each rank in {self.folder}\n{text.rstrip()}")
        training.write({"step": step, "profile": every})


def parts_of(events: Iterable[Event]) -> Parts:
    """Seconds of a step by part, mean of the steps; `host` is last.

    events: those of a Chrome trace by torch's profiler, with an event STEP for each step, and PAUSE
    for what does not count.
    """
    timed = [each for each in events if each.get("ph") == "X"]
    spans = [each for each in timed if each["cat"] == "user_annotation"]
    steps = [each for each in spans if each["name"] == STEP]
    start = min(float(each["ts"]) for each in steps)
    on_gpu = [each for each in timed if each["cat"] in ON_GPU]
    end = max(float(each["ts"]) + float(each["dur"]) for each in [*steps, *on_gpu])
    thread = steps[0]["tid"]  # of a CPU's forward and backward
    part_of = _part_of_kernel if on_gpu else _part_of_operator
    by_part = defaultdict[str, list[Event]](list)
    for each in on_gpu or timed:
        if (on_gpu or each["tid"] == thread) and start <= float(each["ts"]) < end:
            by_part[part_of(each)].append(each)
    waiting = sorted(by_part.keys() - {"", *COMPUTING})
    covered = [e for e in spans if e["name"] == PAUSE and start <= float(e["ts"]) < end]
    before, found = seconds(covered), Parts()
    for part in (*COMPUTING, *waiting) if on_gpu else (*waiting, *COMPUTING):
        covered += by_part[part]
        now = seconds(covered)
        found[part], before = (now - before) / len(steps), now
    return {**found, HOST: ((end - start) / 1e6 - before) / len(steps)}


def _part_of_kernel(event: Event) -> str:
    if (kind := kind_of(event["name"])) == COMMUNICATION:
        axis = event.get("args", {}).get("Process Group Description") or "axis unknown"
        is_message = axis == "pipeline" and "SendRecv" in event["name"]
        return IDLE if is_message else f"{COMMUNICATION}, {axis}"
    return kind if kind in COMPUTING else "other kernels"


def _part_of_operator(event: Event) -> str:
    """Empty for Python, and for autograd around operators."""
    name = event["name"]
    if wait := _WAIT.fullmatch(name):
        is_message = wait[2].startswith(("send", "receive"))
        return IDLE if is_message else f"{COMMUNICATION}, {wait[1]}"
    if name == "_c10d_functional::wait_tensor":
        return f"{COMMUNICATION}, in compiled layers"
    if "::" not in name:  # autograd's functions and compiled graphs; their operators follow
        is_graph = name.startswith("## Call CompiledFxGraph")
        return "attention" if "Attention" in name else "other kernels" if is_graph else ""
    if name.startswith(("autograd::", "torch::", "c10d::", "_c10d_functional::")):
        return ""
    return kind if (kind := kind_of(name)) in COMPUTING else "other kernels"


def kind_of(name: str) -> str:
    """Kind of a kernel or an operator."""
    lower = name.lower()
    return next((kind for kind, words in KINDS if re.search(words, lower)), OTHER)


def seconds(events: Iterable[Event]) -> float:
    """Seconds in which at least one of these events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def table(by_rank: Sequence[Parts]) -> str:
    """A line for each part with its mean over the ranks, the largest first; then the step."""
    found = {part: [each.get(part, 0.0) for each in by_rank] for each in by_rank for part in each}
    rows = sorted(found.items(), key=lambda row: -sum(row[1]))
    step = [sum(each.values()) for each in by_rank]
    lines = [f"{'ms of a step, by rank':<36}{'mean':>10}{'':>9}{'least':>10}{'most':>10}"]
    for part, ranks in [*rows, ("step", step)]:
        mean, least, most = (1000 * each for each in (fmean(ranks), min(ranks), max(ranks)))
        share = f"{100 * sum(ranks) / sum(step):.1f} %"
        lines.append(f"{part:<36}{mean:>10,.1f}{share:>9}{least:>10,.1f}{most:>10,.1f}")
    return "\n".join(lines) + "\n"
