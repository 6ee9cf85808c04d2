"""Context parallelism by all-to-all and over a ring, and by gathering keys and values.

Training steps of GPT-2 on the same samples: on one rank, and on two that divide the tokens of each
sample. `all-gather` is the contender: each rank gathers the keys and values of all tokens before
attention, and the backward gathers them again and reduce-scatters their gradients. It has the
ring's order of tokens and its kernels, so that only what is sent, and when, differs. Ranks have one
thread each. CPU seconds are those of all ranks together, as other programs take some of the cores.

Calls and bytes are per rank over the context axis, for one forward and backward, with bytes as in a
ring of messages. The second table counts the scores that attention computes, those that a causal
mask hides left out, of the busiest rank of a ring: zigzag order as in training, and plain order,
where rank r has the r-th run of tokens.

With --simulated, which needs one process, it times causal attention alone, forward and backward, on
one of so many ranks. Nothing is sent: the rank's own tokens stand in for its neighbours'. If work
is divided without loss, the time by the number of ranks is that of one rank with all tokens.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import NOT_MEASURED, Results, cell
from megatron.models.gpt import Attention
from megatron.parallel import context, ring
from megatron.parallel.collectives import start_gather, start_sum
from megatron.parallel.factory import layer_factory
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import Axis
from megatron.parallel.ring_kernels import Mask, attend, attend_backward
from megatron.train.state import DTYPES
from tools.layouts.meters import measure
from tools.plan.absent import absent_mesh

ALONE, A2A, P2P, GATHERED = "one rank", "a2a", "p2p", "all-gather"
PARALLEL = "--context-parallel-size 2 --cp-comm-type"
WORDS = {ALONE: "", A2A: f"{PARALLEL} a2a", P2P: f"{PARALLEL} p2p", GATHERED: f"{PARALLEL} p2p"}
ZIGZAG, PLAIN = "zigzag order", "plain order"
STEP, RATIO, ORDER = "a step", "CPU seconds / one rank's", "scores / plain order's"
DIVIDED = "seconds x ranks / one rank's"


class GatheredCore(AttentionCore):
    """Causal attention; q, k and v [b, heads, s/c, d] have this rank's tokens in zigzag order."""

    def forward(self, *arguments: Any, **settings: Any) -> Tensor:
        q, k, v, mask, is_causal = arguments[:5]
        assert mask is None
        assert is_causal
        out: Tensor = _Gathered.apply(q, k, v, self.mesh.context)
        return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> Tensor:
        whole_k, whole_v = whole(k, v, axis)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        for rows, before, own in pieces(q, axis):
            parts = [attend(q[:, :, rows], whole_k[:, :, own], whole_v[:, :, own], Mask(True))]
            if before.stop:
                its_k, its_v = whole_k[:, :, before], whole_v[:, :, before]
                parts.append(attend(q[:, :, rows], its_k, its_v, Mask()))
            total = torch.stack([its_lse for _, its_lse in parts]).logsumexp(0)
            terms = (part * (its_lse - total).exp()[..., None] for part, its_lse in parts)
            out[:, :, rows], lse[:, :, rows] = sum(terms), total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis = axis
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        whole_k, whole_v = whole(k, v, ctx.axis)
        dq, d_kv = torch.zeros_like(q), torch.zeros_like(torch.stack([whole_k, whole_v]))
        d_out = d_out.contiguous()
        for rows, before, own in pieces(q, ctx.axis):
            for columns in (own, before) if before.stop else (own,):
                of_rows = (each[:, :, rows] for each in (d_out, q, out, lse))
                its_d_out, its_q, its_out, its_lse = of_rows
                its_k, its_v = whole_k[:, :, columns], whole_v[:, :, columns]
                its_dq, *its_d_kv = attend_backward(
                    its_d_out, its_q, its_k, its_v, its_out, its_lse, Mask(columns is own)
                )
                dq[:, :, rows] += its_dq
                d_kv[:, :, :, columns] += torch.stack(its_d_kv)
        chunks = d_kv.chunk(2 * ctx.axis.size, 3)
        pairs = [torch.stack([a, b]) for a, b in zip(chunks, chunks[::-1], strict=True)]
        terms = torch.stack(pairs[: ctx.axis.size])  # [c, 2 chunks, 2, b, heads, s/2c, d]
        first, second = start_sum(terms.flatten(0, 1), ctx.axis, ctx.axis)()
        dk, dv = torch.cat([first, second], 3)
        return dq, dk, dv, None


def whole(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """k and v of all tokens, in the order of the sample."""
    chunks = start_gather(torch.stack([*torch.stack([k, v]).chunk(2, 3)]), axis)()
    whole_k, whole_v = torch.cat([*chunks[::2], *chunks.flip(0)[::2]], 3)
    return whole_k, whole_v


def pieces(q: Tensor, axis: Axis) -> Iterator[tuple[slice, slice, slice]]:
    """(queries, keys of the chunks before, keys of the same chunk) of each of both chunks."""
    half = q.shape[2] // 2
    for number, chunk in enumerate((axis.rank, 2 * axis.size - 1 - axis.rank)):
        start = chunk * half
        yield slice(number * half, (number + 1) * half), slice(start), slice(start, start + half)


def step(rank: Rank, name: str, flags: str) -> Turn:
    run = steps.ours(rank, [*shlex.split(flags), *WORDS[name].split()])
    mesh = run.state.mesh
    for each in run.state.model.modules():
        if name == GATHERED and isinstance(each, Attention):
            each.core = GatheredCore(mesh, steps.SEED, 0.0, each.core.name)
    counts = measure(run.state, [steps.batch_of(run.config, 0)])
    figures: Figures = {"is_step": 1, "kept": counts.saved_bytes, "flops": counts.matmul_flops}
    figures |= {"calls": counts.calls["context"], "sent": counts.sent_bytes["context"]}
    return lambda: run() | figures


class Scores(TorchDispatchMode):
    """Counts scores that a kernel of attention computes in its forward."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            (b, heads, rows, _), columns = args[0].shape, args[1].shape[2]
            is_causal = any(args[4:5])  # left out where it is False
            self.count += b * heads * (rows * (rows + 1) // 2 if is_causal else rows * columns)
        return function(*args, **(kwargs or {}))


def own_tokens(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """In place of a message."""
    return lambda: x


def zigzag(rank: Rank, ranks: int, length: int) -> Turn:
    """Attention of one head on each of the ranks, with its own tokens in place of the others'."""
    axis = absent_mesh({"context": ranks}, rank.device).context
    q = torch.randn(1, 1, length // ranks, 16)

    def scores(number: int) -> int:
        with Scores() as found, patch.object(ring, "start_shift", own_tokens):
            ring.ring_attention(q, q, q, replace(axis, rank=number), is_causal=True)
        return found.count

    return lambda: {"scores": max(map(scores, range(ranks)))}


def plain(rank: Rank, ranks: int, length: int) -> Turn:
    """The rank with the last of equal runs of tokens has the most keys to look at."""
    own = length // ranks
    scores = own * (length - own) + own * (own + 1) // 2
    return lambda: {"scores": scores}


def attention(rank: Rank, kind: str, ranks: int, length: int, heads: int, dtype: str) -> Turn:
    mesh = absent_mesh({"context": ranks}, rank.device, cp_comm_type=kind)
    core = layer_factory(mesh).attention_core(0.0, "core")
    numbers = torch.Generator(rank.device).manual_seed(steps.SEED)
    shape, where = (1, heads, length // ranks, 64), {"device": rank.device, "generator": numbers}
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype], **where) for _ in range(3))
    d_out = torch.randn_like(q)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    nothing_sent = patch.object(ring, "start_shift", own_tokens)
    nothing_swapped = patch.object(context, "start_all_to_all", own_tokens)

    def turn() -> Figures:
        with nothing_sent, nothing_swapped:
            torch.autograd.grad(core(*inputs, None, True), inputs, d_out)
        return {"is_attention": 1, "ranks": ranks}

    return turn


def contenders(
    flags: Flags,
    preset: str = "quickstart",
    seq_length: int = 2048,
    program_flags: str = "--vocab-size 2048",
    order_ranks: int = 4,
    simulated: tuple[int, ...] = (),
    heads: int = 12,
    dtype: Literal["fp32", "bf16"] = "bf16",
) -> Iterator[Contender]:
    """Compare ways to divide the tokens of a sample between two ranks.

    Args:
        preset: model of the steps.
        seq_length: tokens of a sample.
        program_flags: more flags of pretrain_gpt2.py.
        order_ranks: ranks of the ring whose scores are counted.
        simulated: numbers of ranks; only attention of one of them, in one process.
        heads: attention heads of 64, with --simulated.
        dtype: dtype of attention, with --simulated.
    """
    if simulated:
        own = {"length": seq_length, "heads": heads, "dtype": dtype}
        for kind, ranks in ((A2A, 1), *product((A2A, P2P), simulated)):
            name = f"{kind}, {ranks} ranks" if ranks > 1 else ALONE
            if ranks == 1 or kind == P2P or not heads % ranks:
                arguments = {"kind": kind, "ranks": ranks, **own}
                yield Contender(name, attention, arguments, group=f"attention of {seq_length:,}")
        return
    words = f"--preset {preset} --micro-batch-size 1 --seq-length {seq_length} "
    words += f"--max-position-embeddings {seq_length} {program_flags}"
    for name in WORDS:
        yield Contender(
            name,
            step,
            {"name": name, "flags": words},
            group=STEP,
            ranks=1 if name == ALONE else 2,
            same={"loss": 1e-5},
        )
    for name, function in ((PLAIN, plain), (ZIGZAG, zigzag)):
        yield Contender(
            name,
            function,
            {"ranks": order_ranks, "length": seq_length},
            group=f"the busiest of {order_ranks} ranks",
        )


COLUMNS = (
    Column("CPU seconds", "cpu", "{:.2f}", per="is_step"),
    Column(RATIO, "cpu", "{:.3f}", "its / first", per="is_step"),
    Column("seconds", "wall", "{:.2f}", per="is_step"),
    Column("matmul GFLOP of a rank", "flops", "{:.1f}", unit=1e9),
    Column("kept MiB of a rank", "kept", "{:.1f}", unit=2**20),
    Column("calls", "calls", "{:g}"),
    Column("MB sent", "sent", "{:.2f}", unit=1e6),
    Column("seconds of attention", "wall", "{:.4f}", per="is_attention"),
    Column(DIVIDED, lambda own, first: own["wall"] * own["ranks"] / first["wall"], "{:.2f}"),
    Column("scores", "scores", "{:,.0f}"),
    Column(ORDER, "scores", "{:.3f}", "its / first"),
)


def over(found: Results, name: str, base: str) -> str:
    """CPU seconds of a contender over those of another, within rounds."""
    ours, theirs = (found.rounds[STEP, each] for each in (name, base))
    if not all("cpu" in each for each in (*ours, *theirs)):
        return NOT_MEASURED
    ratios = [its["cpu"] / other["cpu"] for its, other in zip(ours, theirs, strict=True)]
    return cell(ratios).text("{:.2f}", is_ratio=True)


def result(found: Results) -> str:
    if DIVIDED in found.columns:
        return f"Time of attention x ranks, over that of one rank: {found.ratios(DIVIDED)}."
    texts = [
        f"CPU seconds of a step over those of {base}: "
        + "; ".join(f"{name} {over(found, name, base)}" for name in names if name != base)
        for base, names in ((ALONE, (A2A, P2P, GATHERED)), (GATHERED, (A2A, P2P)))
        if (STEP, base) in found.rounds
    ]
    order = found.ratios(ORDER, {PLAIN})
    return ". ".join([*texts, f"Scores of the busiest rank over those in plain order: {order}."])


SMALL = "--seq-length 128 --heads 2"
QUESTION = Question(contenders, COLUMNS, result, turns=2, drawn=[RATIO], small=SMALL)

if __name__ == "__main__":
    QUESTION.run()
