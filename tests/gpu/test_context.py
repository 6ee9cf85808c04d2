"""Attention of context parallelism, whose ranks are threads that share the device, beside one rank
in fp64 on the CPU. Not yet run on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel.dropout import row_keys
from megatron.parallel.factory import layer_factory
from megatron.parallel.mesh import Mesh, serial_mesh
from tests import threads

BATCH, HEADS, LENGTH, SIZE, RANKS = 2, 8, 256, 64, 4
pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    is_causal: bool = True
    groups: int = HEADS  # heads of keys and values
    documents: bool = False
    padded: bool = False
    dropout: float = 0.0


CASES = {
    "causal": Case(),
    "causal, shared heads": Case(groups=2),
    "whole": Case(is_causal=False),
    "documents": Case(groups=2, documents=True),
    "padded": Case(is_causal=False, padded=True),
    "dropout": Case(dropout=0.2),
}


def attend(mesh: Mesh, case: Case, whole: list[Tensor]) -> list[Tensor]:
    """(result, dq, dk, dv) of this rank's tokens; whole: q, k, v, gradient of the result."""
    factory, device = layer_factory(mesh, seed=1), whole[0].device
    core, context = factory.attention_core(case.dropout, "core"), factory.context
    own = context.positions(LENGTH, device)
    *inputs, d_out = (each[:, :, own] for each in whole)
    inputs = [each.requires_grad_() for each in inputs]
    mask: Any = None
    if case.documents:
        places = torch.arange(LENGTH, device=device).expand(BATCH, -1)
        mask = context.document_mask(places - places % 48)
    if case.padded:
        lengths = torch.tensor([LENGTH, 70], device=device)
        mask = context.padding_mask(torch.arange(LENGTH, device=device) < lengths[:, None])
    keys = row_keys(torch.arange(BATCH), own.cpu()).to(device) if case.dropout else None
    keys = context.attention_keys(keys, BATCH)
    out = core(*inputs, mask, case.is_causal and mask is None, keys)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def on_ranks(kind: str, case: Case, whole: list[Tensor]) -> list[Tensor]:
    """The same, of the tokens of all ranks."""

    def run(mesh: Mesh) -> tuple[Tensor, list[Tensor]]:
        mesh = replace(mesh, cp_comm_type=kind)
        own = layer_factory(mesh).context.positions(LENGTH, torch.device("cpu"))
        return own, attend(mesh, case, whole)

    order, parts = zip(*threads.run("1d", {"context": RANKS}, run), strict=True)
    back = torch.cat(order).argsort().to(whole[0].device)
    return [torch.cat(each, 2)[:, :, back] for each in zip(*parts, strict=True)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative, of norms."""
    pairs = zip(found, expected, strict=True)
    return [float((own.cpu().double() - its).norm() / its.norm()) for own, its in pairs]


@pytest.mark.parametrize("kind", ["a2a", "p2p"])
@pytest.mark.parametrize("name", CASES)
def test_attention_over_ranks_is_as_near_to_fp64(
    device: torch.device, name: str, kind: str
) -> None:
    """In bf16 the error is at most 1.3 x that of one rank."""
    case, numbers = CASES[name], torch.Generator().manual_seed(1)
    heads = HEADS, case.groups, case.groups, HEADS
    whole = [torch.randn(BATCH, n, LENGTH, SIZE, generator=numbers) for n in heads]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        drawn = [each.to(device, dtype) for each in whole]
        expected = attend(serial_mesh(), case, [each.cpu().double() for each in drawn])
        found = errors(on_ranks(kind, case, drawn), expected)
        if dtype == torch.bfloat16:
            alone = errors(attend(serial_mesh(device), case, drawn), expected)
            assert all(own <= 1.3 * its for own, its in zip(found, alone, strict=True))
            assert max(alone) < 2e-2
        else:
            assert max(found) < (1e-5 if dtype == torch.float32 else 1e-13)
