"""Ring attention beside block_attention of the whole sequence, in fp64 on threads and processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel import ring
from megatron.parallel.dropout import block_attention, head_keys, layer_key, row_keys
from megatron.parallel.mesh import ALONE, Axis, Mesh, build_mesh
from megatron.parallel.ring import Visible, ring_attention
from tests import threads
from tests.dist import on_ranks
from tests.refusals import refusal
from tests.tiny import Watch, assert_exact

BATCH, HEADS, SIZE = 3, 4, 5
RANKS = (1, 2, 3, 4)
# Lengths of documents; chunks of 3, 4, 6 and 12 tokens begin at some of their boundaries.
DOCUMENTS = ((1, 2, 3, 6, 12), (24,), (2, 9, 1, 1, 10, 1))


@dataclass(frozen=True)
class Case:
    is_causal: bool
    groups: int = HEADS
    documents: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] | None = None
    dropout: float = 0.0
    length: int = 24

    @property
    def starts(self) -> Tensor | None:
        """[b, s]"""
        if not self.documents:
            return None
        lengths = [torch.tensor(each) for each in self.documents]
        starts = [(each.cumsum(0) - each).repeat_interleave(each) for each in lengths]
        return torch.stack(starts)

    @property
    def mask(self) -> Tensor | None:
        """[b, 1, s, s], True where a query may look; None if nothing but causality hides keys."""
        if self.starts is None and self.lengths is None:
            return None
        places = torch.arange(self.length)
        mask = torch.ones(BATCH, 1, self.length, self.length, dtype=torch.bool)
        if self.starts is not None or self.is_causal:
            mask &= places <= places[:, None]
        if self.starts is not None:
            mask &= (places >= self.starts[:, :, None])[:, None]
        if self.lengths is not None:
            mask &= (places < torch.tensor(self.lengths)[:, None])[:, None, None]
        return mask


CASES = {
    "causal": Case(True),
    "causal-shared": Case(True, groups=2),
    "whole": Case(False),
    "whole-shared": Case(False, groups=1),
    "documents": Case(True, groups=2, documents=DOCUMENTS),
    "documents-imply-causal": Case(False, documents=DOCUMENTS),
    # At c = 4 rank 3, whose chunks begin at 9 and 12, has only padding.
    "padded": Case(False, groups=2, lengths=(9, 2, 7)),
    "padded-causal": Case(True, lengths=(24, 2, 13)),
    "padded-documents": Case(True, documents=DOCUMENTS, lengths=(24, 2, 13)),
    "dropout": Case(False, groups=2, dropout=0.3),
    "dropout-causal": Case(True, dropout=0.3),
    "dropout-documents": Case(
        True, groups=2, documents=DOCUMENTS, lengths=(22, 2, 13), dropout=0.5
    ),
}


def draw(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """(q, k, v, gradient of the result) of the whole samples; 0 for queries that look nowhere."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, heads, case.length, SIZE) for heads in (HEADS, case.groups, case.groups, HEADS)
    ]
    q, k, v, d_out = (torch.randn(each, generator=generator).double() for each in shapes)
    if case.mask is not None:
        d_out *= case.mask.any(-1, keepdim=True)
    return [each.to(dtype) for each in (q, k, v, d_out)]


def keys_of_rows(case: Case) -> Tensor:
    rows = row_keys(torch.arange(BATCH), torch.arange(case.length))
    return head_keys(rows, layer_key(0, "core"), range(HEADS), BATCH)


def serial(case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """(result, dq, dk, dv) of the whole samples in one process."""
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    keys = keys_of_rows(case) if case.dropout else None
    is_causal = case.is_causal and case.mask is None
    out = block_attention(*inputs, case.mask, is_causal, case.dropout, keys)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def zigzag(ranks: int, length: int) -> list[Tensor]:
    """Positions of each rank's tokens."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]


def on_a_rank(axis: Axis, case: Case, whole: Sequence[Tensor], attend: Any = None) -> list[Tensor]:
    """(result, dq, dk, dv) of the rank's tokens."""
    own = zigzag(axis.size, whole[0].shape[2])[axis.rank]
    q, k, v, d_out = (each[:, :, own] for each in whole)
    # As a fused matmul of a layer gives them: views that do not lie side by side.
    inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]
    device = whole[0].device
    starts = None if case.starts is None else case.starts[:, own].to(device)
    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    out = (attend or ring_attention)(
        *(each.requires_grad_() for each in inputs),
        axis,
        is_causal=case.is_causal,
        visible=Visible(starts, lengths),
        dropout=case.dropout,
        keys=keys_of_rows(case)[:, :, own].to(device) if case.dropout else None,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of all ranks, of whole samples again."""
    order = torch.cat(zigzag(len(parts), len(parts) * parts[0][0].shape[2])).argsort()
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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of a block, the last one shorter."""
    monkeypatch.setattr(ring, "ROWS", 5)
    monkeypatch.setattr(ring, "SCORES", 200)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_a_ring_equals_the_whole_sequence(name: str, ranks: int) -> None:
    case = CASES[name]
    whole = draw(case)
    assert_same(case, on_threads(ranks, case, whole), serial(case, *whole), 1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["padded", "dropout-documents"])
def test_a_query_that_may_look_nowhere_is_0_and_has_no_gradient(name: str, ranks: int) -> None:
    case = replace(CASES[name], lengths=(24, 0, 13))
    assert case.mask is not None
    *inputs, d_out = draw(case)
    nowhere = ~case.mask.any(-1, keepdim=True)
    out, dq, *others = on_threads(ranks, case, [*inputs, d_out + 1000.0 * nowhere])
    assert nowhere.any()
    assert not (out * nowhere).any()
    assert not (dq * nowhere).any()
    assert_exact(others, on_threads(ranks, case, [*inputs, d_out])[2:])


def test_the_error_in_bf16_does_not_grow_with_the_ring() -> None:
    case = replace(CASES["causal-shared"], length=256)
    whole = draw(case, torch.bfloat16)
    exact = serial(case, *(each.double() for each in whole))

    def errors(ranks: int) -> list[float]:
        pairs = zip(on_threads(ranks, case, whole), exact, strict=True)
        return [((own - true).norm() / true.norm()).item() for own, true in pairs]

    alone = errors(1)
    assert max(alone) < 1e-2
    for ranks in (2, 32):  # in bf16, dk and dv would be 2 x as far off at 32
        assert all(own < 1.3 * one for own, one in zip(errors(ranks), alone, strict=True))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["documents", "dropout-documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_document_does_not_depend_on_the_one_before(
    name: str, dtype: torch.dtype, ranks: int
) -> None:
    """In any bit, however large the values there are."""
    cut = 11
    case = replace(CASES[name], documents=((cut, 13),) * BATCH, lengths=None)
    whole = draw(case, dtype)
    changed = [each.clone() for each in whole]
    for each in changed:
        each[:, :, :cut] = 100 * torch.randn(each[:, :, :cut].shape).to(dtype)
    before, after = (on_threads(ranks, case, each) for each in (whole, changed))
    for one, other in zip(before, after, strict=True):
        assert not torch.equal(one[:, :, :cut], other[:, :, :cut])
        assert torch.equal(one[:, :, cut:], other[:, :, cut:])


@on_ranks(2)
def test_it_is_compiled_whole_and_computes_the_same() -> None:
    context = build_mesh({"context": 2}, "cpu").context
    attend = torch.compile(ring_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    for case in (CASES["causal-shared"], CASES["documents"]):
        plain, compiled = (
            on_a_rank(context, case, draw(case), each) for each in (ring_attention, attend)
        )
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["causal", "whole", "documents"])
def test_every_rank_does_the_same_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal one at most 0.6 x that of the slowest rank in plain order; on meta."""
    monkeypatch.setattr(ring, "ROWS", 1)  # of masks in pieces, too
    case, ranks = CASES[name], 4
    whole = [each.to("meta") for each in draw(case)]

    def run(mesh: Mesh) -> tuple[int, int]:
        """Scores that kernels compute in the forward and in the backward, of a head and sample."""
        counts = [0, 0]

        def see(function: Any, args: Sequence[Any], result: object) -> None:
            if "flash_attention" not in (kernel := function.overloadpacket.__name__):
                return
            is_backward = "backward" in kernel
            n, m = (each.shape[2] for each in args[is_backward : is_backward + 2])
            names = [each.name for each in function._schema.arguments]
            is_causal = dict(zip(names, args, strict=False)).get("is_causal")
            assert n == m or not is_causal
            counts[is_backward] += n * (n + 1) // 2 if is_causal else n * m

        with Watch(see):
            out, *gradients = on_a_rank(mesh.context, case, whole)
        assert out.shape == (BATCH, HEADS, case.length // ranks, SIZE)
        assert [each.shape[1] for each in gradients] == [HEADS, case.groups, case.groups]
        return counts[0], counts[1]

    found = threads.run("1d", {"context": ranks}, run)
    assert len({count for each in found for count in each}) == 1
    last = sum(range(case.length - case.length // ranks, case.length)) + case.length // ranks
    assert 0 < found[0][0] <= (case.length**2 // ranks if name == "whole" else 0.6 * last)


def test_refusals() -> None:
    for shapes, axis, options in (
        (((2, 4, 6, 5), (2, 3, 6, 5), (2, 3, 6, 5)), ALONE, {}),
        (((2, 4, 6, 5), (2, 2, 6, 5), (2, 4, 6, 5)), ALONE, {}),
        (((2, 4, 6, 5), (2, 4, 6, 4), (2, 4, 6, 4)), ALONE, {}),
        (((2, 4, 0, 5), (2, 4, 0, 5), (2, 4, 0, 5)), ALONE, {}),
        (((2, 4, 7, 5), (2, 4, 7, 5), (2, 4, 7, 5)), Axis("context", 2), {}),
        (((2, 4, 6, 5),) * 3, ALONE, {"visible": Visible(torch.zeros(2, 12).long())}),
        (((2, 4, 6, 5),) * 3, ALONE, {"visible": Visible(None, torch.zeros(1).long())}),
        (((2, 4, 6, 5),) * 3, ALONE, {"dropout": 0.1}),
        (((2, 4, 6, 5),) * 3, ALONE, {"dropout": 0.1, "keys": torch.zeros(8, 6).long()}),
    ):
        inputs = (torch.zeros(*shape) for shape in shapes)
        refusal(partial(ring_attention, *inputs, axis, is_causal=True, **options), kind=ValueError)
