"""Context parallelism: the ranks of an axis hold different tokens of the same samples.

    s tokens of a sample   c ranks of the axis   a heads   g heads of keys and values

Layers act on each token alone, so they need no change; only attention reads the others' tokens.

    a2a    Ulysses (Jacobs et al., 2023, arXiv:2309.14509). Rank r holds the r-th run of s/c tokens.
           An all-to-all gives it all tokens of a/c heads before attention, another one its own
           tokens of all heads after it. Each kernel and each mask is that of one rank.
    p2p    Ring attention (Li et al., 2021, arXiv:2105.13120; Liu et al., 2023, arXiv:2310.01889),
           see ring.py. Keys and values travel round the ring. Rank r holds r and 2c - 1 - r of
           2c chunks, so that a causal mask leaves all ranks the same work.

A batch's `take` cuts its fields per token in this order. Masks need the fields per key of all
tokens, which each rank reads, so nothing is sent for them. Sums and counts of the loss are added
over mesh.loss, and the gradient of every parameter is partial over context, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.parallel.axes import token_pieces
from megatron.parallel.collectives import Pair, gather_from, start_all_reduce, start_all_to_all
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.ring import Visible, ring_attention

AnyBatch = TypeVar("AnyBatch", bound=Any)


def token_order(size: int, ranks: int, cp_comm_type: str) -> NDArray[np.int64]:
    """Positions of each rank's tokens of a sample of `size` tokens, in their order: int64
    [ranks, size/c]. Raises ValueError if the ranks cannot have equally many."""
    pieces = token_pieces(ranks, cp_comm_type)
    if size % pieces:
        raise ValueError(f"{size} tokens of a sample are no multiple of {pieces} pieces of them")
    chunks = np.arange(size).reshape(pieces, -1)
    if pieces > ranks:  # causal chunks r and 2c - 1 - r read r + 1 and 2c - r chunks of keys
        chunks = np.concatenate([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1)
    return chunks


def local_tokens(batch: AnyBatch, mesh: Mesh) -> AnyBatch:
    """The batch with this rank's tokens of each sample. Tokens that do not count fill up samples
    that the ranks cannot divide.

    batch: of arrays, see megatron.data.batch.Batch. One without fields per token, or whose tokens
    were taken before, is returned unchanged. Raises ValueError for padding before a token under
    p2p, which masks padding at the end.
    """
    ranks, kind = mesh.context.size, mesh.cp_comm_type
    if ranks == 1 or batch.token_order is not None or batch.seq_length is None:
        return batch
    is_real = getattr(batch, "is_real", None)
    if is_real is not None and kind == "p2p" and (is_real[..., 1:] & ~is_real[..., :-1]).any():
        raise ValueError("is_real has padding before a token; with a2a that works, not with p2p")
    if count := -batch.seq_length % mesh.token_multiple:
        batch = batch.filled(count)
    return batch.take(token_order(batch.seq_length, ranks, kind)[mesh.context.rank])


def gather_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """Tokens [b, s/c, ..] of all ranks in the order of the sample, [b, s, ..]; no gradient."""
    ranks = mesh.context.size
    if ranks == 1:
        return x
    x = gather_from(x, 1, mesh.context)
    order = token_order(x.shape[1], ranks, mesh.cp_comm_type).ravel()
    return x[:, torch.from_numpy(order.argsort()).to(x.device)]


def document_mask(document_starts: Tensor) -> Tensor:
    """Maps document starts [b, s] to the bool mask [b, 1, s, s]: causal, within one document."""
    same_document = document_starts[:, :, None] == document_starts[:, None, :]
    return torch.tril(same_document)[:, None]


class Context:
    """The parts of a model that depend on the context axis; all do nothing on an axis of 1 rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis, self.cp_comm_type = mesh.context, mesh.cp_comm_type
        self.is_ring = self.axis.size > 1 and self.cp_comm_type == "p2p"
        # A term of a sample counts on one rank: that of the sample's first token.
        self.counts_samples = self.axis.rank == 0
        self._positions: dict[tuple[int, torch.device], Tensor] = {}

    def require_local(self, batch: Any) -> None:
        """Raises ValueError for a batch of whole samples, whose tokens would pass for parts."""
        if self.axis.size > 1 and batch.token_order is None:
            raise ValueError(
                f"a batch of whole samples on {self.axis.size} context ranks; local_tokens(batch, "
                "mesh) takes this rank's tokens of it"
            )

    def positions(self, size: int, device: torch.device) -> Tensor:
        """Positions of this rank's tokens of a sample of `size` tokens: int64 [size/c]."""
        if self.axis.size == 1:
            return torch.arange(size, device=device)
        if (size, device) not in self._positions:  # so that a GPU waits for them once
            order = token_order(size, self.axis.size, self.cp_comm_type)[self.axis.rank]
            self._positions[size, device] = torch.from_numpy(order).to(device)
        return self._positions[size, device]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens [b, s/c, ..] of x [b, s, ..]."""
        return x if self.axis.size == 1 else x[:, self.positions(x.shape[1], x.device)]

    def sum(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks. Each may use it in its own way: gradients are summed, too."""
        return x if self.axis.size == 1 else Pair.apply(x, self._sum, self._sum)

    def _sum(self, x: Tensor) -> Tensor:
        return start_all_reduce(x.clone(memory_format=torch.contiguous_format), self.axis)()

    def of_first(self, x: Tensor) -> Tensor:
        """x of the rank with the first token of each sample, on every rank; see `sum`."""
        return x if self.axis.size == 1 else self.sum(x * self.counts_samples)

    def whole(self, x: Tensor) -> Tensor:
        """Tokens [b, s/c, ..] of all ranks in the order of the sample, [b, s, ..]; see `sum`."""
        if self.axis.size == 1:
            return x
        size = x.shape[1] * self.axis.size
        whole = x.new_zeros(len(x), size, *x.shape[2:])
        return self.sum(whole.index_copy(1, self.positions(size, x.device), x))

    def attention_keys(self, keys: Tensor | None, count: int) -> Tensor | None:
        """Dropout keys of the queries that attention gets, of this rank's tokens [b x s/c], b =
        count: of all tokens under a2a, else these."""
        if keys is None or self.axis.size == 1 or self.is_ring:
            return keys
        return gather_from(keys.view(count, -1), 1, self.axis).flatten()

    def document_mask(self, starts: Tensor | None) -> Tensor | Visible | None:
        """The mask that attention takes. starts: document starts [b, s] of all tokens."""
        if starts is None:
            return None
        return Visible(starts=self.take(starts)) if self.is_ring else document_mask(starts)

    def padding_mask(self, is_real: Tensor) -> Tensor | Visible:
        """The mask that attention takes. is_real: bool [.., s], of all tokens, b sequences."""
        if self.is_ring:
            return Visible(lengths=is_real.flatten(0, -2).sum(-1))
        return is_real.view(-1, 1, 1, is_real.shape[-1])


class UlyssesCore(AttentionCore):
    """Attention between two all-to-alls; arguments as those of AttentionCore, but q, k and v have
    this rank's tokens, [b, heads, s/c, d]. Masks and dropout keys are of all tokens."""

    def __init__(self, mesh: Mesh, *arguments: Any, **settings: Any) -> None:
        super().__init__(mesh, *arguments, **settings)
        self.head_rank = self.head_rank * mesh.context.size + mesh.context.rank

    def attend_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        axis, heads, shared = self.mesh.context, q.shape[1], k.shape[1]
        if heads % axis.size:
            raise ValueError(
                f"{heads} heads of a rank are no multiple of {axis.size} context ranks"
            )
        # The fewest repetitions of key/value heads that give each rank whole heads for its queries.
        times = next(
            n
            for n in range(1, heads + 1)
            if not (heads // shared) % n and not shared * n % axis.size
        )
        if times > 1:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        q, k, v = _Swap.apply(axis, 1, 2, q, k, v)
        out = self.attend(q, k, v, *how)
        return _Swap.apply(axis, 2, 1, out)[0]


def swap(tensors: Sequence[Tensor], axis: Axis, cut: int, joined: int) -> tuple[Tensor, ...]:
    """Cuts dim `cut` of tensors [b, heads, tokens, d] into c parts, one for each rank, and joins
    those that it gets along dim `joined`; both are 1 or 2."""
    # All tensors travel in one message: as one they have heads along dim 2 of [c, b, heads, ..].
    parts = [x.unflatten(cut, (axis.size, -1)).movedim(cut, 0) for x in tensors]
    sizes = [part.shape[2] for part in parts]
    arrived = start_all_to_all(torch.cat(parts, 2), axis)().split(sizes, 2)
    return tuple(part.movedim(0, joined).flatten(joined, joined + 1) for part in arrived)


class _Swap(torch.autograd.Function):
    """`swap`; its backward is the opposite one."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, cut: int, joined: int, *tensors: Tensor) -> Any:
        ctx.settings = axis, joined, cut
        return swap(tensors, axis, cut, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *swap(gradients, *ctx.settings)


class RingCore(AttentionCore):
    """Ring attention; q, k and v as those of UlyssesCore. Dropout is by coordinates."""

    def attend_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        mask, is_causal, dropout_keys = how
        if isinstance(mask, Tensor):
            raise ValueError("cp_comm_type p2p takes the masks that the factory's `context` makes")
        p = self.dropout if self.training else 0.0
        keys = None if p == 0.0 else self.keys(q, dropout_keys)
        visible = Visible() if mask is None else mask
        return ring_attention(
            q, k, v, self.mesh.context, is_causal=is_causal, visible=visible, dropout=p, keys=keys
        )


def core_of(mesh: Mesh) -> type[AttentionCore]:
    """The attention core of this mesh."""
    if mesh.context.size == 1:
        return AttentionCore
    return RingCore if mesh.cp_comm_type == "p2p" else UlyssesCore
