"""Ring attention beside block_attention of the whole sequence, in fp64 on threads and processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel import ring
from megatron.parallel.block_attention import block_attention
from megatron.parallel.dropout import head_keys, layer_key, row_keys
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.ring import Visible, ring_attention
from tests import threads
from tests.dist import Pool
from tests.tiny import mesh_of_ranks

BATCH, LENGTH, HEADS, SIZE = 3, 24, 4, 5
RANKS = (1, 2, 3, 4)
# Lengths of documents; chunks of 3, 4, 6 and 12 tokens begin at some of their boundaries.
DOCUMENTS = ((1, 2, 3, 6, 12), (LENGTH,), (2, 9, 1, 1, 10, 1))


@dataclass(frozen=True)
class Case:
    name: str
    is_causal: bool
    groups: int = HEADS
    documents: bool = False
    lengths: tuple[int, ...] | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        return self.name

    @property
    def starts(self) -> Tensor | None:
        """[b, s]"""
        if not self.documents:
            return None
        lengths = [torch.tensor(each) for each in DOCUMENTS]
        starts = [(each.cumsum(0) - each).repeat_interleave(each) for each in lengths]
        return torch.stack(starts)

    @property
    def mask(self) -> Tensor | None:
        """[b, 1, s, s], True where a query may look; None if nothing but causality hides keys."""
        if self.starts is None and self.lengths is None:
            return None
        places = torch.arange(LENGTH)
        mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
        if self.starts is not None or self.is_causal:
            mask &= places <= places[:, None]
        if self.starts is not None:
            mask &= (places >= self.starts[:, :, None])[:, None]
        if self.lengths is not None:
            mask &= (places < torch.tensor(self.lengths)[:, None])[:, None, None]
        return mask


CASES = [
    Case("causal", True),
    Case("causal-shared", True, groups=2),
    Case("whole", False),
    Case("whole-shared", False, groups=1),
    Case("documents", True, groups=2, documents=True),
    Case("documents-imply-causal", False, documents=True),
    # At c = 4 rank 3, whose chunks begin at 9 and 12, has only padding.
    Case("padded", False, groups=2, lengths=(9, 2, 7)),
    Case("padded-causal", True, lengths=(LENGTH, 2, 13)),
    Case("padded-documents", True, documents=True, lengths=(LENGTH, 2, 13)),
    Case("dropout", False, groups=2, dropout=0.3),
    Case("dropout-causal", True, dropout=0.3),
    Case("dropout-documents", True, groups=2, documents=True, lengths=(22, 2, 13), dropout=0.5),
]
BY_NAME = {case.name: case for case in CASES}


def draw(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """(q, k, v, gradient of the result) of the whole samples; 0 for queries that look nowhere."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, LENGTH, SIZE) for heads in (HEADS, case.groups, case.groups, HEADS)]
    q, k, v, d_out = (torch.randn(each, generator=generator).double() for each in shapes)
    if case.mask is not None:
        d_out *= case.mask.any(-1, keepdim=True)
    return [each.to(dtype) for each in (q, k, v, d_out)]


def keys_of_rows() -> Tensor:
    rows = row_keys(torch.arange(BATCH), torch.arange(LENGTH))
    return head_keys(rows, layer_key(0, "core"), range(HEADS), BATCH)


def serial(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """(result, dq, dk, dv) of the whole samples in one process."""
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    keys = keys_of_rows() if case.dropout else None
    is_causal = case.is_causal and case.mask is None
    out = block_attention(*inputs, case.mask, is_causal, case.dropout, keys)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def zigzag(ranks: int, length: int = LENGTH) -> list[Tensor]:
    """Positions of each rank's tokens."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]


def on_a_rank(axis: Axis, case: Case, whole: Sequence[Tensor], attend: Any = None) -> list[Tensor]:
    """(result, dq, dk, dv) of the rank's tokens."""
    own = zigzag(axis.size)[axis.rank]
    q, k, v, d_out = (each[:, :, own] for each in whole)
    # As a fused product of a layer gives them: views that do not lie side by side.
    inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]
    starts = None if case.starts is None else case.starts[:, own]
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    out = (attend or ring_attention)(
        *(each.requires_grad_() for each in inputs),
        axis,
        is_causal=case.is_causal,
        visible=Visible(starts, lengths),
        dropout=case.dropout,
        keys=keys_of_rows()[:, :, own] if case.dropout else None,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of all ranks, of whole samples again."""
    order = torch.cat(zigzag(len(parts))).argsort()
    return [torch.cat(each, 2)[:, :, order] for each in zip(*parts, strict=True)]


def on_threads(ranks: int, case: Case, whole: Sequence[Tensor]) -> list[Tensor]:
    if ranks == 1:
        return on_a_rank(ALONE, case, whole)

    def run(mesh: Mesh) -> list[Tensor]:
        return on_a_rank(mesh.context, case, whole)

    return joined(threads.run("1d", {"context": ranks}, run))


def assert_same(
    case: Case, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> None:
    """Where queries may look; elsewhere results are finite, and of no consequence."""
    assert all(each.isfinite().all() for each in found)
    real = torch.ones(()) if case.mask is None else case.mask.any(-1, keepdim=True)
    pairs = zip((found[0] * real, *found[1:]), (expected[0] * real, *expected[1:]), strict=True)
    for own, theirs in pairs:
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_equals_the_whole_sequence(
    case: Case, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "ROWS", 5)  # several pieces of a block, the last one shorter
    whole = draw(case)
    assert_same(case, on_threads(ranks, case, whole), serial(case, *whole), 1e-12)
