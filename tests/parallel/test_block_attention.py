"""Attention in blocks beside torch's own in fp64, with and without dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel import kernels
from megatron.parallel.block_attention import BLOCK, block_attention
from megatron.parallel.dropout import dropout, head_keys, layer_key, row_keys
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import serial_mesh

BATCH, HEADS, SIZE = 2, 3, 8


def draw(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v as a fused product gives them: views that do not lie side by side."""
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


@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_it_equals_torchs(length: int, mask: str) -> None:
    is_causal = mask == "causal"
    visible = None if is_causal else MASKS[mask](length)
    inputs = draw(length)
    d_out = torch.randn(BATCH, HEADS, length, SIZE, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*inputs, visible, is_causal=is_causal)
    gradients = torch.autograd.grad(expected, inputs, d_out)
    found = block_attention(*inputs, visible, is_causal)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    own = torch.autograd.grad(found, inputs, d_out)
    torch.testing.assert_close(own, gradients, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    inputs = draw(BLOCK + 1)
    seen = torch.zeros(BATCH, 1, 1, BLOCK + 1, dtype=torch.bool)
    found = block_attention(*inputs, seen, False)
    assert torch.stack(torch.autograd.grad(found.sum(), inputs)).isfinite().all()


def keys_of(length: int) -> Tensor:
    rows = row_keys(torch.arange(BATCH), torch.arange(length))
    return head_keys(rows, layer_key(0, "core"), range(HEADS), BATCH)


@pytest.mark.parametrize("length", [7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_with_dropout_it_equals_the_formula(length: int, mask: str) -> None:
    is_causal = mask == "causal"
    visible = None if is_causal else MASKS[mask](length)
    q, k, v = inputs = draw(length)
    keys = keys_of(length)
    ones = torch.ones(keys.numel(), length, dtype=torch.float64)
    kept = dropout(ones, keys.flatten(), 0.3).view(*keys.shape, length)
    scores = q @ k.mT / SIZE**0.5
    seen = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else visible
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) * kept) @ v
    d_out = torch.randn(BATCH, HEADS, length, SIZE, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, d_out)
    found = block_attention(q, k, v, visible, is_causal, 0.3, keys)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    own = torch.autograd.grad(found, inputs, d_out)
    torch.testing.assert_close(own, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_keys_need_not_be_as_many_as_queries(p: float) -> None:
    q, (_, k, v) = draw(BLOCK + 3)[0], draw(9)
    keys, mask = keys_of(BLOCK + 3), key_mask(9)
    ones = torch.ones(keys.numel(), 9, dtype=torch.float64)
    kept = dropout(ones, keys.flatten(), p).view(*keys.shape, 9)
    scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask, -torch.inf)
    expected, found = (
        (scores.softmax(-1) * kept) @ v,
        block_attention(q, k, v, mask, False, p, keys),
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients, own = (torch.autograd.grad(y.sum(), (q, k, v)) for y in (expected, found))
    torch.testing.assert_close(own, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2 * BLOCK + 5])
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_queries_that_share_keys_equal_those_with_copies(length: int, mask: str) -> None:
    is_causal, others = mask == "causal", draw(length)
    visible = None if is_causal else MASKS[mask](length)
    q = torch.cat([others[0], others[2]], 1).detach().requires_grad_()  # 6 heads on 3
    _, k, v = draw(length)
    rows = row_keys(torch.arange(BATCH), torch.arange(length))
    keys = head_keys(rows, layer_key(0, "core"), range(2 * HEADS), BATCH)
    d_out = torch.randn(q.shape, dtype=torch.float64)

    def outcome(p: float | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        if p is None:
            out = kernels.attention(*inputs, visible, 0.0, is_causal)
        else:
            out = block_attention(*inputs, visible, is_causal, p, keys if p else None)
        return out, *torch.autograd.grad(out, (q, k, v), d_out)

    for p in (None, 0.0, 0.3):
        copies = (each.repeat_interleave(2, 1) for each in (k, v))
        expected, found = outcome(p, q, *copies), outcome(p, q, k, v)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_in_bf16_it_is_about_as_exact_as_torchs() -> None:
    exact = [each.detach().requires_grad_() for each in draw(256, torch.bfloat16)]
    wide = [each.detach().double().requires_grad_() for each in exact]
    d_out = torch.randn(BATCH, HEADS, 256, SIZE).bfloat16()
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


@pytest.mark.skipif(not kernels.use_cpu_kernels, reason="blocks are for dropout alone")
@pytest.mark.parametrize(
    ("dtype", "length", "dropout", "is_causal", "is_used"),
    [
        (torch.float32, 64, 0.0, True, True),
        (torch.float32, 64, 0.0, False, False),
        (torch.bfloat16, 64, 0.0, False, True),
        (torch.bfloat16, 520, 0.0, True, False),
        (torch.float32, 520, 0.1, False, True),
    ],
)
def test_training_uses_it_where_it_takes_less_time_and_for_dropout(
    dtype: torch.dtype, length: int, dropout: float, is_causal: bool, is_used: bool
) -> None:
    core = AttentionCore(serial_mesh(), 0, dropout, "core")
    q, k, v = draw(length, dtype)
    mask = None if is_causal else key_mask(length)
    rows = row_keys(torch.arange(BATCH), torch.arange(length))
    trained = core(q, k, v, mask, is_causal, rows)
    before = trained.grad_fn.next_functions[0][0]  # the result is unfolded
    assert ("BlockAttention" in before.name()) == is_used
    with torch.no_grad():
        assert core.eval()(q, k, v, mask, is_causal).shape == trained.shape
