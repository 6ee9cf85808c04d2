"""Attention in blocks beside torch's own in fp64, with and without dropout."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel import kernels
from megatron.parallel.dropout import (
    BLOCK,
    block_attention,
    dropout,
    head_keys,
    layer_key,
    row_keys,
)

BATCH, HEADS, SIZE = 2, 3, 8


def draw(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v as a fused matmul gives them: views that do not lie side by side."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, length, 3, HEADS, SIZE)
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [each.transpose(1, 2).detach().requires_grad_() for each in qkv.unbind(2)]


def key_mask(length: int) -> Tensor:
    real = torch.tensor([length, 1 + length // 2])
    return (torch.arange(length) < real[:, None])[:, None, None, :]


def document_mask(length: int) -> Tensor:
    document = torch.arange(length) // 30
    return (document[:, None] == document).tril()[None, None]


MASKS = {"none": lambda length: None, "keys": key_mask, "documents": document_mask}


def keys_of(length: int, heads: int = HEADS) -> Tensor:
    rows = row_keys(torch.arange(BATCH), torch.arange(length))
    return head_keys(rows, layer_key(0, "core"), range(heads), BATCH)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, p: float) -> Tensor:
    """The formula, on whole tensors; seen: None for a causal mask."""
    keys = keys_of(q.shape[2], q.shape[1])
    ones = torch.ones(keys.numel(), k.shape[2], dtype=torch.float64)
    kept = dropout(ones, keys.flatten(), p).view(*keys.shape, k.shape[2])
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if seen is None else seen
    return ((q @ k.mT / SIZE**0.5).masked_fill(~seen, -torch.inf).softmax(-1) * kept) @ v


def assert_same(found: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> None:
    """Values, and the gradients of the inputs."""
    d_out = torch.randn(found.shape, dtype=torch.float64)
    own, wanted = (torch.autograd.grad(each, inputs, d_out) for each in (found, expected))
    torch.testing.assert_close((found, *own), (expected, *wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [None, 0.0, 0.3])
@pytest.mark.parametrize("queries", [HEADS, 2 * HEADS])
@pytest.mark.parametrize("length", [1, 7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_blocks_equal_the_formula(length: int, mask: str, queries: int, p: float | None) -> None:
    """queries: heads, of which two may share keys and values. p: None for the kernel without
    dropout."""
    is_causal = mask == "causal"
    visible = None if is_causal else MASKS[mask](length)
    q, k, v = draw(length)
    if queries > HEADS:
        q = torch.cat([q, draw(length)[2]], 1).detach().requires_grad_()
    if p is None:
        found = kernels.attention(q, k, v, visible, 0.0, is_causal)
    else:
        keys = keys_of(length, queries) if p else None
        found = block_attention(q, k, v, visible, is_causal, p, keys)
    seen = visible if visible is not None or is_causal else torch.ones(1, dtype=torch.bool)
    assert_same(found, formula(q, k, v, seen, p or 0.0), (q, k, v))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_keys_need_not_be_as_many_as_queries(p: float) -> None:
    q, (_, k, v) = draw(BLOCK + 3)[0], draw(9)
    found = block_attention(q, k, v, key_mask(9), False, p, keys_of(BLOCK + 3))
    assert_same(found, formula(q, k, v, key_mask(9), p), (q, k, v))


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    inputs = draw(BLOCK + 1)
    seen = torch.zeros(BATCH, 1, 1, BLOCK + 1, dtype=torch.bool)
    found = block_attention(*inputs, seen, False)
    assert torch.stack(torch.autograd.grad(found.sum(), inputs)).isfinite().all()


def test_in_bf16_it_is_about_as_exact_as_torchs() -> None:
    exact = [each.detach().requires_grad_() for each in draw(1024, torch.bfloat16)]
    wide = [each.detach().double().requires_grad_() for each in exact]
    d_out = torch.randn(BATCH, HEADS, 1024, SIZE).bfloat16()
    truth = F.scaled_dot_product_attention(*wide, is_causal=True)
    true_gradients = torch.cat(torch.autograd.grad(truth, wide, d_out.double()))

    def error(out: Tensor) -> tuple[float, float]:
        gradients = torch.cat(torch.autograd.grad(out, exact, d_out)).double()
        of_gradients = (gradients - true_gradients).norm() / true_gradients.norm()
        return ((out - truth).norm() / truth.norm()).item(), of_gradients.item()

    theirs = error(F.scaled_dot_product_attention(*exact, is_causal=True))
    ours = error(block_attention(*exact, None, True))
    assert ours[0] < 1.2 * theirs[0]
    assert ours[1] < 1.2 * theirs[1]
