"""Finds the kernel that each layer runs on, by running it.

A small layer of each kind runs forward and backward under torch's profiler, which sees torch's
operators and on a GPU the kernels. On the CPU it runs once more while oneDNN and MKL log what they
run, which the profiler does not see.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron.config.training import OptimizerConfig
from megatron.models.gpt import document_mask
from megatron.optim.adam import FlatWeights, adam_class
from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import LayerFactory, layer_factory
from megatron.parallel.initialize import materialize
from megatron.parallel.kernels import add_matmul_, squares
from megatron.parallel.mesh import serial_mesh
from tools.probes.findings import Fact, Finding

B, S, A, D, V = 2, 128, 4, 64, 512  # batch, sequence, heads, head size, vocabulary
H = A * D
LONG = 1024  # the paper's sequence length, which the CPU does not attend to in blocks
DROPOUT = 0.1
PRODUCTS = r"aten::(addmm|mm|bmm|mkldnn_linear)$|mkldnn::_linear_pointwise$"
ATTENTION = r"_scaled_dot_product_(?:attention_)?(flash|efficient|cudnn|math)|_(Block)Attention"
STORING = "math", "block"  # kernels that store all s x s probabilities
# Operators that a layer's line below names; the record has all that ran.
TELLING = (
    rf"{PRODUCTS}|{ATTENTION}|native_layer_norm|[gG]elu|embedding|LookUp|[dD]ropout|_fused_adam"
    r"|CrossEntropy|multi_tensor|FusedLayerNorm|_foreach_norm|vector_norm"
)
Action = Callable[[], object]


@dataclass(frozen=True)
class Kernels:
    """Names in the order of running: torch's operators, CPU libraries' routines, GPU kernels."""

    operators: list[str]
    libraries: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        operators = [name for name in self.operators if re.search(TELLING, name)]
        found = [re.search(ATTENTION, name) for name in operators]
        attention = [(match[1] or match[2]).lower() for match in found if match]
        told = ", ".join(name.split("::")[-1] for name in operators)
        if attention:
            stores = " (stores all s x s probabilities)" if attention[0] in STORING else ""
            told = f"{attention[0]} attention{stores}"
        for group in (self.libraries, self.kernels):
            told += f": {', '.join(group[:4])}" if group else ""
        return told or "no operator of note"


def probes(
    device: torch.device, dtype: torch.dtype, *, apex: bool
) -> dict[str, Callable[[], Iterator[Finding]]]:
    """{layer: probe} of the factory's layers and the optimizer. apex: whether to try apex, too."""
    mesh = serial_mesh(device)
    bench = Bench(layer_factory(mesh, 0), device, dtype)
    makers: dict[str, Callable[[], Action]] = {
        "column-parallel linear": lambda: bench.layer(
            lambda factory: factory.column(H, H, std=0.02)
        ),
        "row-parallel linear": lambda: bench.layer(lambda factory: factory.row(H, H, std=0.02)),
        "word embedding": bench.word_embedding,
        "position embedding": bench.position_embedding,
        "attention": lambda: bench.attention(0.0, is_masked=False),
        f"attention, {LONG} tokens": lambda: bench.attention(0.0, is_masked=False, length=LONG),
        "attention, dropout": lambda: bench.attention(DROPOUT, is_masked=False),
        "attention, documents": lambda: bench.attention(0.0, is_masked=True),
        "attention, dropout, documents": lambda: bench.attention(DROPOUT, is_masked=True),
        "LayerNorm": lambda: bench.layer(lambda factory: factory.layer_norm(H, epsilon=1e-5)),
        "GeLU": lambda: bench.run(partial(F.gelu, approximate="tanh"), bench.stream()),
        "dropout": bench.dropout,
        "output layer and loss": bench.loss,
        "gradient of a weight": bench.weight_gradient,
        "gradient norm": bench.norm,
        "AdamW": lambda: bench.adamw("torch"),
    }
    if device.type == "cuda":
        makers["output layer and loss, compiled"] = lambda: bench.loss(is_fused=True)
    if apex:
        other = Bench(layer_factory(mesh, 0, norm="apex"), device, dtype)
        makers["LayerNorm of apex"] = lambda: other.layer(
            lambda factory: factory.layer_norm(H, epsilon=1e-5)
        )
        makers["AdamW of apex"] = lambda: other.adamw("apex")
    return {name: partial(_found, name, make, device) for name, make in makers.items()}


@dataclass(frozen=True)
class Bench:
    """Makes the actions: each runs a forward and a backward of one small layer."""

    factory: LayerFactory
    device: torch.device
    dtype: torch.dtype

    def stream(self, *shape: int) -> Tensor:
        shape = shape or (B * S, H)
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def numbers(self, limit: int) -> Tensor:
        return torch.arange(B * S, device=self.device) % limit

    def build(self, make: Callable[[LayerFactory], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            module = make(self.factory)
        return materialize(module, device=self.device, dtype=self.dtype, seed=0)

    def run(self, function: Callable[..., Tensor], *arguments: object) -> Action:
        return lambda: function(*arguments).sum().backward()

    def layer(self, make: Callable[[LayerFactory], nn.Module]) -> Action:
        return self.run(self.build(make), self.stream())

    def word_embedding(self) -> Action:
        module = self.build(
            lambda factory: factory.word_embedding(V, H, divisible_by=128, std=0.02)
        )
        return self.run(module, self.numbers(V))

    def position_embedding(self) -> Action:
        module = self.build(lambda factory: factory.position_embedding(S, H, std=0.02))
        return self.run(module, self.numbers(S))

    def dropout(self) -> Action:
        module = self.build(lambda factory: factory.dropout(DROPOUT, "dropout"))
        return self.run(module, self.stream(), self.rows(S))

    def rows(self, length: int) -> Tensor:
        """Dropout keys of the samples (row_keys)."""
        ranges = (torch.arange(size, device=self.device) for size in (B, length))
        return row_keys(*ranges)

    def attention(self, dropout: float, *, is_masked: bool, length: int = S) -> Action:
        starts = torch.zeros(B, length, dtype=torch.int64, device=self.device)
        starts[:, length // 2 :] = length // 2
        mask = document_mask(starts) if is_masked else None
        core = self.build(lambda factory: factory.attention_core(dropout, "core"))
        return self.run(
            core,
            *(self.stream(B, A, length, D) for _ in range(3)),
            mask,
            not is_masked,
            self.rows(length),
        )

    def loss(self, *, is_fused: bool = False) -> Action:
        head: Any = self.build(lambda factory: factory.head(V, H, divisible_by=1))
        head.is_fused = is_fused
        embedding = self.build(
            lambda factory: factory.word_embedding(V, H, divisible_by=1, std=0.02)
        )
        factors = torch.ones(B * S, device=self.device)
        return self.run(head, self.stream(), embedding, self.numbers(V), factors)

    def weight_gradient(self) -> Action:
        """Adds a weight gradient to a bucket, which is in fp32."""
        dy, x = (self.stream().detach() for _ in range(2))
        out = torch.zeros(H, H, dtype=torch.promote_types(self.dtype, torch.float32)).to(dy.device)
        return lambda: add_matmul_(out, dy, x, accumulate=True)

    def norm(self) -> Action:
        gradients = [torch.randn(H, device=self.device) for _ in range(2)]
        return lambda: squares(gradients).sqrt()

    def adamw(self, impl: str) -> Action:
        master, gradient = (torch.randn(H, H, device=self.device) for _ in range(2))
        moments = torch.zeros_like(master), torch.zeros_like(master)
        segment = FlatWeights(0.1, master, gradient, *moments)
        adam = adam_class(impl)([segment], OptimizerConfig())
        return lambda: adam.step(1e-3, 0.5)


def _found(name: str, make: Callable[[], Action], device: torch.device) -> Iterator[Finding]:
    action = make()
    action()  # the first run makes what later ones use again
    ran = _profiled(action, device)
    if device.type == "cpu":
        ran = Kernels(ran.operators, _told_by_libraries(action))
    record = {"operators": ran.operators, "libraries": ran.libraries, "kernels": ran.kernels}
    yield Fact(name, record, str(ran))


def _profiled(action: Action, device: torch.device) -> Kernels:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = profiler.events()
    assert events is not None
    operators = [
        event.name
        for event in events
        if event.device_type == DeviceType.CPU and not event.name.startswith("autograd::engine")
    ]
    kernels = [_short(event.name) for event in events if event.device_type == DeviceType.CUDA]
    return Kernels(list(dict.fromkeys(operators)), kernels=list(dict.fromkeys(kernels)))


def _short(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template and arguments."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name)[0].split("::")[-1]


def _told_by_libraries(action: Action) -> list[str]:
    """Routines of oneDNN ("oneDNN matmul brg_matmul:avx512_core_bf16") and MKL ("MKL SGEMM")."""
    with tempfile.TemporaryFile("w+") as file:
        with ExitStack() as stack:
            stack.enter_context(_standard_output_to(file.fileno()))
            if torch.backends.mkldnn.is_available():
                level = torch.backends.mkldnn.VERBOSE_ON
                stack.enter_context(torch.backends.mkldnn.verbose(level))
            if torch.backends.mkl.is_available():
                stack.enter_context(torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON))
            action()
        file.seek(0)
        routines = [_routine(line) for line in file]
    return list(dict.fromkeys(each for each in routines if each))


def _routine(line: str) -> str | None:
    if match := re.match(r"MKL_VERBOSE (\w+)\(", line):
        return f"MKL {match[1]}"
    if match := re.match(r"onednn_verbose,(?:v1,)?primitive,exec,cpu,(\w+),([^,]+)", line):
        return f"oneDNN {match[1]} {match[2]}"
    return None


@contextmanager
def _standard_output_to(descriptor: int) -> Iterator[None]:
    """Redirects what C libraries print to an open file."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    own = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(own, 1)
        os.close(own)
