"""A pair of layers in 1D, and in 2D by SUMMA and gathered.

The MLP of a transformer layer, h to 4h, GELU, 4h to h, forward and backward, on four ranks with one
thread each; gradients are added to fp32 buckets, as in training. 1D shards one matrix by columns
and the other by rows. 2D shards both in blocks over 2 x 2 ranks, and multiplies block by block
(SUMMA) or after gathering. Before timing, each rank compares its part of the outputs and of all
gradients with whole layers in plain torch, on fewer tokens.

Calls and bytes are per rank, for one forward and backward, with bytes as in a ring. In the
formulas, n is the total number of tokens, q x q the ranks and w the bytes per number:

    1D    4 (q^2 - 1) / q^2 n h w                         hidden states are summed once each way
    2D    (q - 1) / q^2 ((15 n h + 16 h h) w + 32 h h)    gradients of weights are summed in fp32

Counted memory is the peak of all tensors made from forward to backward on one GPU rank, in units of
the hidden states, n h: for the pair, and for three whole layers with full recomputation. Peak
memory is that of the processes of all ranks. Ranks are processes on one machine with few cores that
communicate through gloo. Their times say nothing about NCCL, where calls are kernels that overlap
with matmuls, and where a link is much slower than memory.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from benchmarks.steps import SEED, make_mesh
from megatron.config.model import GPT2Config
from megatron.models.gpt import MLP, Sequences, Transformer
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import cut
from megatron.parallel.factory import layer_factory
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import Gathered, ParallelLinear
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.state import DTYPES
from tools.layouts.meters import counting
from tools.layouts.work import Meter, on_meta
from tools.plan.absent import absent_mesh

Q = 2
RANKS = Q * Q
META = torch.device("meta")
ONE, SUMMA, GATHERED = "1D", "2D by SUMMA", "2D, gathered"
MESHES = {  # mode, sizes of its axes
    ONE: ("1d", {"tensor": RANKS}),
    SUMMA: ("2d", {"row": Q, "column": Q}),
    GATHERED: ("2d", {"row": Q, "column": Q}),
}
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
COMPARED = 64  # tokens
LAYERS = 3
RATIO = "time / 1D"


def build(name: str, mesh: Mesh, hidden: int, layers: int = 0) -> nn.Module:
    """The pair, or `layers` transformer layers, on meta."""
    config = GPT2Config(
        num_layers=max(1, layers),
        hidden_size=hidden,
        num_attention_heads=RANKS * max(1, hidden // (64 * RANKS)),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
    )
    with META:
        factory = layer_factory(mesh, SEED)
        model = Transformer(config, factory) if layers else MLP(config, factory)
    for each in model.modules():
        if name == GATHERED and isinstance(each, ParallelLinear):
            each.division = Gathered(x=cut(1, mesh.hidden), weight=cut(1, mesh.tokens))
    return model


def own(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's shard of hidden states x [n, h]."""
    tokens, hidden = mesh.tokens, mesh.hidden
    return x.chunk(tokens.size)[tokens.rank].chunk(hidden.size, 1)[hidden.rank].contiguous()


def differences(model: nn.Module, buckets: GradientBuckets, mesh: Mesh, hidden: int) -> list[float]:
    """Relative differences of this rank's part of y, dx and each gradient from whole layers in
    plain torch, in fp32: norm of the difference over the latter's norm."""
    dtype = next(model.parameters()).dtype
    whole = build(ONE, serial_mesh(mesh.device), hidden)
    materialize(whole, device=mesh.device, dtype=dtype, seed=SEED)
    numbers = torch.Generator().manual_seed(SEED)
    x, dy = (
        torch.randn(COMPARED, hidden, generator=numbers).to(mesh.device, dtype) for _ in range(2)
    )
    weights = {n: each.detach().float() for n, each in whole.named_parameters()}
    of_torch = [each.requires_grad_() for each in (x.float(), *weights.values())]
    up = F.linear(of_torch[0], weights["up.weight"], weights["up.bias"])
    down = F.linear(F.gelu(up, approximate="tanh"), weights["down.weight"], weights["down.bias"])
    dx, *gradients = torch.autograd.grad(down, of_torch, dy.float())
    wanted = {"y": own(down.detach(), mesh), "dx": own(dx, mesh)}
    specs = sharding_specs(model)
    for name, gradient in zip(weights, gradients, strict=True):
        wanted[name] = gradient[specs[name].local_slices]
    x = own(x.detach(), mesh).requires_grad_()
    with buckets.accumulate(is_last=True):
        y = model(x)
        y.backward(own(dy, mesh))
    found = {view.name: view.gradient for view in buckets.views} | {"y": y.detach(), "dx": x.grad}
    return [float((found[n].float() - w).norm() / w.norm()) for n, w in wanted.items()]


def pair(rank: Rank, name: str, dtype: str, hidden: int, tokens: int) -> Turn:
    mode, sizes = MESHES[name]
    is_stubbed = rank.size == 1
    mesh = make_mesh(rank, sizes, RANKS if is_stubbed else 1, tensor_parallel_mode=mode)
    model = build(name, mesh, hidden)
    materialize(model, device=mesh.device, dtype=DTYPES[dtype], seed=SEED)
    buckets = GradientBuckets.for_master_weights(model)
    figures: Figures = {}
    if not is_stubbed:
        own_differences = differences(model, buckets, mesh, hidden)
        figures["difference"] = difference = max(mesh.control.gather(max(own_differences)))
        if not difference < TOLERANCES[dtype]:
            raise RuntimeError(f"{name}, {dtype}: {difference:.1e} off from plain torch")
    numbers = torch.Generator().manual_seed(SEED)
    x, dy = (
        own(torch.randn(tokens, hidden, generator=numbers), mesh).to(mesh.device, DTYPES[dtype])
        for _ in range(2)
    )

    def step() -> None:
        with buckets.accumulate(is_last=False):  # biases are not summed
            model(x.detach().requires_grad_()).backward(dy)

    with counting(mesh) as counts:
        step()
    figures |= {"calls": counts.calls.total(), "sent": counts.sent_bytes.total()}

    def turn() -> Figures:
        step()
        return figures.copy()

    return turn


def peak(name: str, dtype: str, hidden: int, tokens: int, layers: int = 0) -> float:
    """Peak memory of the pair or of `layers` layers on a GPU, counted on meta, in n h."""
    mode, sizes = MESHES[name]
    mesh = absent_mesh(sizes, META, tensor_parallel_mode=mode)
    model = build(name, mesh, hidden, layers)
    materialize(model, device=META, dtype=DTYPES[dtype], seed=None)
    buckets = GradientBuckets.for_master_weights(model)
    whole = torch.empty(tokens, hidden, dtype=DTYPES[dtype], device=META)
    x, dy = own(whole, mesh).requires_grad_(), own(whole, mesh)
    meter = Meter(mesh, [*model.parameters(), *(each.gradients for each in buckets.buckets)])
    at = [Sequences(count=1, mask=None, is_causal=True)] if layers else []
    with on_meta(meter, "cuda"), buckets.accumulate(is_last=False):
        model(x, *at).backward(dy)
    return meter.peak / whole.nbytes


def formula(name: str, hidden: int, tokens: int, width: int) -> float:
    """Bytes that a rank sends."""
    stream, weight = tokens * hidden, hidden**2
    if name == ONE:
        return 4 * (RANKS - 1) / RANKS * stream * width
    return (Q - 1) / RANKS * ((15 * stream + 16 * weight) * width + 8 * weight * 4)


def contenders(
    flags: Flags,
    hidden_sizes: tuple[int, ...] = (768, 1536),
    tokens: int = 2048,
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    stub_communication: bool = False,
) -> Iterator[Contender]:
    """Compare a pair of layers on four ranks.

    Args:
        hidden_sizes: hidden sizes, h.
        tokens: tokens of all ranks together, n.
        dtypes: dtypes of weights and activations.
        stub_communication: run one rank of each with collectives that move nothing, and without
            comparison.
    """
    for dtype, hidden, name in product(dtypes, hidden_sizes, MESHES):
        sizes = {"hidden": hidden, "tokens": tokens}
        yield Contender(
            name,
            pair,
            {"name": name, "dtype": dtype, **sizes},
            group=f"{dtype}, hidden {hidden}",
            ranks=1 if stub_communication else RANKS,
            memory_of_turns=True,
            facts={
                "formula": formula(name, **sizes, width=DTYPES[dtype].itemsize),
                "pair": peak(name, dtype, **sizes),
                "layers": peak(name, dtype, **sizes, layers=LAYERS),
            },
        )


COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column(RATIO, "wall", "{:.3f}", "its / first"),
    Column("CPU seconds", "cpu", "{:.2f}"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column("calls", "calls", "{:g}"),
    Column("MB sent", "sent", "{:.2f}", unit=1e6),
    Column("sent / formula", "sent", "{:.3f}", per="formula"),
    Column("counted memory of the pair, n h", "pair", "{:.2f}"),
    Column(f"of {LAYERS} layers, n h", "layers", "{:.2f}"),
    Column("difference from plain torch", "difference", "{:.0e}"),
)


def result(found: Results) -> str:
    return f"Time over that of 1D: {found.ratios(RATIO, {ONE})}."


SMALL = "--hidden-sizes 64 --tokens 128 --dtypes fp32"
QUESTION = Question(contenders, COLUMNS, result, drawn=[RATIO], small=SMALL)

if __name__ == "__main__":
    QUESTION.run()
