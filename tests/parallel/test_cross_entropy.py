from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.collectives import gather_from
from megatron.parallel.cross_entropy import most_probable, vocab_parallel_cross_entropy
from tests.dist import Pool
from tests.tiny import Communication, mesh_of_ranks

PADDING = 50.0  # far above every real logit: it would rule the softmax


def example(vocab_size: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [n, padded], labels [n], gradient of the losses [n])."""
    generator = torch.Generator().manual_seed(vocab_size)
    labels = torch.tensor([0, 1, vocab_size // 3, vocab_size // 2, vocab_size - 1])
    logits = 5 * torch.randn(len(labels), padded, generator=generator, dtype=torch.float64)
    logits[:, vocab_size:] = PADDING
    d_loss = torch.randn(len(labels), generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, d_loss


def check(vocab_size: int, divisible_by: int, dtype: torch.dtype, tolerance: float) -> None:
    """Loss and gradient equal torch's, which sees the real columns alone."""
    axis = mesh_of_ranks(dist.get_world_size()).tensor
    multiple = divisible_by * axis.size
    padded = -(-vocab_size // multiple) * multiple
    whole, labels, d_loss = example(vocab_size, padded, dtype)
    wide = torch.promote_types(dtype, torch.float32)

    real = whole[:, :vocab_size].to(wide).requires_grad_()
    expected = F.cross_entropy(real, labels, reduction="none")
    expected.backward(d_loss.to(wide))

    own = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(own, labels, axis, vocab_size)
    losses.backward(d_loss.to(wide))
    assert losses.dtype == wide
    assert own.grad is not None
    assert own.grad.dtype == dtype
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(losses, expected)
    gradient = gather_from(own.grad, 1, axis)
    assert not gradient[:, vocab_size:].any(), "padding gets a gradient"
    rounding = 2e-2 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(
        gradient[:, :vocab_size].to(wide), real.grad, rtol=rounding, atol=tolerance
    )


def check_all() -> None:
    check(50_257, 128, torch.float32, 1e-5)
    check(50_257, 128, torch.float64, 1e-12)
    check(101, 1, torch.float64, 1e-12)
    check(5, 128, torch.float64, 1e-12)  # all but the first rank hold padding only
    check(101, 128, torch.bfloat16, 1e-5)  # the logits are rounded, the loss is not


def traffic() -> list[tuple[str, tuple[int, ...]]]:
    axis = mesh_of_ranks(dist.get_world_size()).tensor
    logits, labels, d_loss = example(101, 128 * axis.size, torch.float64)
    own = logits.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    _ = axis.group
    with Communication() as communication:
        vocab_parallel_cross_entropy(own, labels, axis, 101).backward(d_loss)
    return communication.calls


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_torch(gloo: Pool, size: int) -> None:
    gloo.run(size, check_all)


def test_what_is_communicated_has_the_size_of_the_tokens(gloo: Pool) -> None:
    n = len(example(101, 128, torch.float64)[1])
    for calls in gloo.run(2, traffic):
        assert calls == [("allreduce_", (n,)), ("allreduce_", (2, n))]


def best_tokens(dtype: torch.dtype) -> list[int]:
    """Of logits with ties within a rank's columns and between ranks, and of padding above all."""
    axis = mesh_of_ranks(dist.get_world_size()).tensor
    whole = torch.zeros(6, 12, dtype=dtype)
    whole[:, 10:] = PADDING
    for row, equals in enumerate([(3, 4), (2, 9), (), (9,)]):
        whole[row, list(equals)] = 1
    whole[2] = -torch.inf
    whole[2, 7] = -3
    whole[4, 1] = whole[5, 8] = torch.nan
    return most_probable(whole.chunk(axis.size, 1)[axis.rank], axis, 10).tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_of_the_most_probable_tokens_is_taken(
    gloo: Pool, size: int, dtype: torch.dtype
) -> None:
    assert gloo.run(size, best_tokens, dtype) == [[3, 2, 7, 9, 10, 10]] * size
