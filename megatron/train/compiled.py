"""Less time of the host in a step: compiled layers, and forward and backward as one CUDA graph.

All layers of a model share graphs of the compiler; guards, conditions that each call checks, say
for which layer, input and mode each graph is valid.

In a CUDA graph kernels are recorded once, with the addresses that they read and write. Then the GPU
replays them, and the host copies only the new batches and counts. This helps small models, whose
kernels take less time than the host needs to launch them: on an H200 a step of GPT-2 124M takes
33 ms instead of 39. Norm, update and values that the host reads stay outside the graph. Python runs
once, so a step may depend only on batches, counts and weights: see `choose_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import KindConfig
from megatron.data.batch import Batch
from megatron.errors import UsageError
from megatron.parallel.layers import VocabParallelHead
from megatron.parallel.mesh import Mesh
from megatron.train.executor import on_device, to_device

Replay = Callable[[], object]
WARM_UP = 2  # steps of one shape that run before it is recorded: the first compiles the kernels


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Applies torch.compile to each transformer layer, and returns their number. All layers of one
    kind share one graph.

    Matmuls, attention and collectives run as written. Elementwise operations between
    them, dropout by coordinates included, run in a few kernels of the compiler. A layer is a module
    with `compiles`: "whole" in our models, where a graph that breaks is an error; "in parts" in
    unmodified ones, whose code may break it.
    """
    count = 0
    draws = {"fallback_random": True} if backend == "inductor" else {}  # same as uncompiled
    for module in model.modules():
        if isinstance(module, VocabParallelHead):
            module.is_fused = module.mesh.device.type == "cuda"  # in place is faster on a CPU
        if how := getattr(module, "compiles", ""):
            options, is_whole = draws | {"guard_filter_fn": keeps}, how == "whole"
            module.compile(fullgraph=is_whole, dynamic=False, backend=backend, options=options)
            count += 1
    return count


def keeps(guards: Sequence[Any]) -> list[bool]:
    """torch.compile's `guard_filter_fn`: whether each guard stays.

    A GPT-2 layer has 268, which take a third of the host's time. Guards on tensors, modes,
    settings, identities and classes of modules stay. Guards on what two layers cannot differ in are
    left out:

    - globals: functions, classes and constants of modules;
    - the class of a dict, and of a dataclass without subclasses: its fields have guards of their
      own;
    - that an instance does not hide an attribute of its class, if the class has only methods to
      hide.
    """

    def is_redundant(guard: Any) -> bool:
        value = guard.value
        if guard.is_global:
            return True
        if guard.guard_type == "TYPE_MATCH":
            is_final = is_dataclass(value) and not type.__subclasses__(type(value))
            return isinstance(value, dict) or is_final
        if guard.guard_type != "NOT_PRESENT_IN_GENERIC_DICT":
            return False
        methods = property, staticmethod, classmethod
        return is_dataclass(value) or all(
            name.startswith("__") or callable(attribute) or isinstance(attribute, methods)
            for each in takewhile(lambda each: each is not nn.Module, type(value).__mro__)
            for name, attribute in vars(each).items()
        )

    return [not is_redundant(each) for each in guards]


def record(function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """(output of the function, which each replay overwrites; the replay). Computes nothing."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # Other threads, which read data, may call CUDA during the recording.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()
    return result, graph.replay


def use_own_stream(device: torch.device) -> None:
    """Queues a GPU's work on a new stream from now on: the default stream cannot be recorded.
    Autograd accumulates a parameter's gradient on the stream of its first use, so call this before
    the model and the buckets are built."""
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)


@dataclass
class StepGraph:
    """Runs or replays step.forward_backward with its arguments, and returns its result.

    record: see the function of this name. Batches of another shape end the graph and free its
    memory, and are recorded in their turn: a graph keeps the memory of a step.
    """

    record: Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]] = record
    shapes: str = ""  # of the batches that ran last
    runs: int = 0  # steps in a row that ran with these shapes, without a graph
    inputs: list[Any] = field(default_factory=list)  # batches and counts that the graph reads
    totals: Tensor | None = None
    replay: Replay | None = None

    def __call__(
        self,
        run: Callable[..., Tensor],
        state: Any,
        micro_batches: Sequence[Batch],
        counts: Tensor,
        hidden_states: dict[int, Tensor] | None = None,
    ) -> Tensor:
        shapes = str([[(n, x.shape, x.dtype) for n, x in arrays(own)] for own in micro_batches])
        if hidden_states is not None:
            return run(state, micro_batches, counts, hidden_states)
        if shapes != self.shapes:
            self.shapes, self.runs, self.replay, self.totals = shapes, 0, None, None
        if self.runs < WARM_UP:
            self.runs += 1
            return run(state, micro_batches, counts)
        if self.replay is None:
            device = state.mesh.device
            batches = [on_device(each, device) for each in micro_batches]
            for number, each in enumerate(batches):  # on a CPU tensors share the arrays
                batches[number] = each.with_arrays(**{n: x.clone() for n, x in arrays(each)})
            self.inputs = [*batches, counts]
            self.totals, self.replay = self.record(lambda: run(state, batches, counts))
        else:
            *batches, held = self.inputs
            held.copy_(counts)
            for batch, own in zip(batches, micro_batches, strict=True):
                for name, array in arrays(own):
                    getattr(batch, name).copy_(*to_device(held.device, array))
        self.replay()
        assert self.totals is not None
        return self.totals


def arrays(batch: Batch) -> list[tuple[str, Any]]:
    found = [(each.name, getattr(batch, each.name)) for each in fields(batch)]
    return [(name, array) for name, array in found if array is not None]


def choose_graph(asked: bool | None, model: KindConfig, mesh: Mesh, dtype: torch.dtype) -> bool:
    """Whether the steps of a run are replayed.

    asked: None if no flag was given; then they are where a graph can replay them. Raises UsageError
    if --cuda-graph is given and none can. dtype: of the weights.
    """
    reasons = {
        "without a GPU": mesh.device.type != "cuda",
        "with several processes": mesh.size() > 1,
        "with --fp16, whose loss scale changes": dtype == torch.float16,
        "with --cpu-offload-activations": model.cpu_offload_activations,
        "with --model huggingface, and with apex's norm": not model.compiles_by_default,
        "where a kernel draws attention's dropout": model.draws_in_kernel(mesh.device.type),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked and reason:
        raise UsageError("--cuda-graph", None, f"left out {reason}", works=("--no-cuda-graph",))
    return asked is not False and reason is None
