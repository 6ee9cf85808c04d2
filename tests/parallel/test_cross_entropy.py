"""The vocabulary-parallel loss, with the output layer and without, against torch's in fp64."""

import re
import shutil
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_leaves

from megatron.parallel import cross_entropy
from megatron.parallel import fused_softmax as fused
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import Cut, gather_from
from megatron.parallel.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron.parallel.fused_softmax import fused_softmax
from megatron.parallel.initialize import materialize
from megatron.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megatron.parallel.mesh import Axis, Mesh
from megatron.train.evaluate import most_probable
from tests.dist import on_ranks
from tests.tiny import (
    Communication,
    Watch,
    assert_relative,
    leave_to_autograd,
    mesh_of_ranks,
    whole_gradients,
)

TOKENS, HIDDEN, VOCABULARY = 35, 6, 13
PADDING = 50.0  # far above every real logit: it would rule the softmax
NOT_COMPILED = patch.object(fused, "_compiled", lambda function: function)
SMALL_CHUNKS = patch.object(cross_entropy, "CHUNK_BYTES", 3 * 4 * 16)


def axis_of_all() -> Axis:
    return mesh_of_ranks(dist.get_world_size() if dist.is_initialized() else 1).tensor


def check_logits(vocab_size: int, divisible_by: int, dtype: torch.dtype, tolerance: float) -> None:
    """Loss and gradient equal torch's, which sees the real columns alone."""
    axis = axis_of_all()
    multiple = divisible_by * axis.size
    padded = -(-vocab_size // multiple) * multiple
    numbers = torch.Generator().manual_seed(vocab_size)
    labels = torch.tensor([0, 1, vocab_size // 3, vocab_size // 2, vocab_size - 1])
    whole = 5 * torch.randn(len(labels), padded, generator=numbers, dtype=torch.float64)
    whole[:, vocab_size:] = PADDING
    whole, wide = whole.to(dtype), torch.promote_types(dtype, torch.float32)
    d_loss = torch.randn(len(labels), generator=numbers, dtype=wide)

    real = whole[:, :vocab_size].to(wide).requires_grad_()
    expected = F.cross_entropy(real, labels, reduction="none")
    expected.backward(d_loss)

    own = whole.chunk(axis.size, 1)[axis.rank].clone().requires_grad_()
    with Communication() as communication:
        losses = vocab_parallel_cross_entropy(own, labels, axis, vocab_size)
        losses.backward(d_loss)
    assert (losses.dtype, own.grad.dtype) == (wide, dtype)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    gradient = gather_from(own.grad, 1, axis)
    assert not gradient[:, vocab_size:].any(), "padding gets a gradient"
    rounding = 2e-2 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(
        gradient[:, :vocab_size].to(wide), real.grad, rtol=rounding, atol=tolerance
    )
    with NOT_COMPILED:
        parts = fused_softmax(whole.chunk(axis.size, 1)[axis.rank], labels, axis, vocab_size)
        torch.testing.assert_close(parts.losses, losses, rtol=tolerance, atol=tolerance)
        gradient = parts.gradient(d_loss)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, own.grad, rtol=rounding, atol=tolerance)
    n, is_cut = len(labels), axis.size > 1  # what is sent has the size of the tokens
    assert communication.calls == [("allreduce_", (n,)), ("allreduce_", (2, n))] * is_cut


def check_infinite_logits() -> None:
    """Minus infinity in the first column of each rank, as fp16 may overflow."""
    axis, labels = axis_of_all(), torch.tensor([1, 7, 11])
    whole = torch.arange(36.0).view(3, 12) % 5
    whole[:, [0, 3, 4, 6, 8, 9]] = -torch.inf
    own = whole.chunk(axis.size, 1)[axis.rank].clone()
    expected = F.cross_entropy(whole, labels, reduction="none")
    with NOT_COMPILED:
        torch.testing.assert_close(fused_softmax(own, labels, axis, 12).losses, expected)
    torch.testing.assert_close(vocab_parallel_cross_entropy(own, labels, axis, 12), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_the_loss_of_logits_equals_torchs(size: int) -> None:
    check_infinite_logits()
    check_logits(50_257, 128, torch.float32, 1e-5)
    check_logits(50_257, 128, torch.float64, 1e-12)
    check_logits(101, 1, torch.float64, 1e-12)
    check_logits(5, 128, torch.float64, 1e-12)  # all but the first rank hold padding only
    check_logits(101, 128, torch.bfloat16, 1e-5)  # the logits are rounded, the loss is not


@pytest.mark.parametrize(
    ("world", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.float32)]
)
@on_ranks("world")
def test_the_lowest_of_the_most_probable_tokens_is_taken(world: int, dtype: torch.dtype) -> None:
    """The logits have ties within a rank's columns and between ranks, and padding above all."""
    axis = axis_of_all()
    whole = torch.zeros(7, 12, dtype=dtype)
    whole[:, 10:] = PADDING
    for row, equals in enumerate([(3, 4), (2, 9), (), (9,)]):
        whole[row, list(equals)] = 1
    whole[2] = -torch.inf
    whole[2, 7] = -3
    whole[4, 1] = whole[5, 8] = whole[6, 1] = torch.nan
    whole[6, 8] = torch.inf
    found = most_probable(whole.chunk(world, 1)[axis.rank], axis, 10)
    assert found.tolist() == [3, 2, 7, 9, 10, 10, 10]


# With the output layer


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x [n, h], weight [v, h], bias [v], labels [n], scales [n]), the first three to be
    differentiated."""
    numbers = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    x, weight, bias = (torch.randn(*s, generator=numbers, dtype=torch.float64) for s in shapes)
    labels = torch.tensor([0, 12, 6, 3, 12, 7, 1] * 5)
    scales = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 0.25, 1.0] * 5, dtype=torch.float64)
    return *(each.to(dtype).requires_grad_() for each in (x, weight, bias)), labels, scales


def own_rows(whole: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of a weight or bias, with padding, to be differentiated."""
    rows = -(-VOCABULARY // axis.size)
    padded = torch.full((rows * axis.size, *whole.shape[1:]), PADDING, dtype=whole.dtype)
    padded[:VOCABULARY] = whole.detach()
    return padded.chunk(axis.size)[axis.rank].clone().requires_grad_()


def check_with_layer(dtype: torch.dtype, tolerance: float, is_fused: bool) -> None:
    """Loss and gradients, times a factor of autograd's, equal those of plain torch in fp64."""
    axis = axis_of_all()
    x, weight, bias, labels, scales = example(dtype)
    for with_bias in (False, True):
        wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
        logits = F.linear(wide[0], wide[1], wide[2] if with_bias else None)
        expected = F.cross_entropy(logits, labels, reduction="none") @ scales
        (3 * expected).backward()

        x.grad = None
        own = own_rows(weight, axis), own_rows(bias, axis) if with_bias else None
        loss_of = partial(linear_cross_entropy, x_cut=Cut(terms=axis), is_fused=is_fused)
        total = loss_of(x, *own, labels, scales, VOCABULARY)
        (3 * total).backward()
        assert total.dtype == torch.promote_types(dtype, torch.float32)
        close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
        close(total.double(), expected)
        close(x.grad.double(), wide[0].grad)
        for part, whole in zip(own, wide[1:], strict=True):
            if part is not None:
                gradient = gather_from(part.grad.double(), 0, axis)
                assert not gradient[VOCABULARY:].any(), "padding gets a gradient"
                close(gradient[:VOCABULARY], whole.grad)
        with torch.no_grad():
            close(loss_of(x, *own, labels, scales, VOCABULARY), total)


def check_rows_of_the_stream() -> None:
    """Where each rank holds rows of x, of which a chunk of all ranks is filled up."""
    axis = axis_of_all()
    x, weight, bias, labels, scales = (each[:24] for each in example(torch.float64))
    found = []
    for is_fused in (False, True):
        own = x.detach().chunk(axis.size)[axis.rank].clone().requires_grad_()
        weights = own_rows(weight, axis), own_rows(bias, axis)
        by = {"x_cut": Cut(0, axis, axis), "is_fused": is_fused}
        total = linear_cross_entropy(own, *weights, labels, scales, VOCABULARY, **by)
        total.backward()
        found.append((total, own.grad, *(each.grad for each in weights)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_no_chunk_is_longer_than_memory_allows() -> None:
    for tokens, most in product(range(1, 30), range(1, 9)):
        parts = [*cross_entropy.chunks(tokens, most, int)]
        assert [i for part in parts for i in range(tokens)[part]] == [*range(tokens)]
        assert max(part.stop - part.start for part in parts) <= most


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_the_loss_with_its_layer_equals_torchs(size: int) -> None:
    with patch.object(cross_entropy, "CHUNK_BYTES", 5 * 8 * 13), NOT_COMPILED:
        check_rows_of_the_stream()
    for chunk_bytes, is_fused in product((1, 2 * 8 * 13, 2**28), (False, True)):
        with patch.object(cross_entropy, "CHUNK_BYTES", chunk_bytes), NOT_COMPILED:
            check_with_layer(torch.float64, 1e-12, is_fused)
            check_with_layer(torch.float32, 1e-5, is_fused)
            check_with_layer(torch.bfloat16, 0.06, is_fused)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_fused_softmax_keeps_nothing_wide_of_the_size_of_logits() -> None:
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 320, generator=numbers).bfloat16()
    labels, d_loss = torch.arange(24), torch.ones(24)

    def both() -> tuple[Tensor, Tensor]:
        parts = fused_softmax(logits, labels, axis_of_all(), 300)
        return parts.losses, parts.gradient(d_loss)

    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        (losses, gradient), code = run_and_get_code(both)
    real = logits[:, :300].float().requires_grad_()
    expected = F.cross_entropy(real, labels, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradient[:, :300].float(), real.grad, rtol=1e-2, atol=1e-3)
    made = re.findall(r"empty_strided_cpu\(\((.*?)\), .*?, torch\.(\w+)\)", "".join(code))
    assert ("24, 320", "bfloat16") in made
    assert not {("24, 320", "float32"), ("24, 300", "float32")} & {*made}


class Tied(nn.Module):
    """A loss that uses one weight twice: as embedding and as output layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=1, std=1.0)
        self.head = VocabParallelHead(mesh, VOCABULARY, HIDDEN, divisible_by=1, bias=True)

    def forward(self, tokens: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        total: Tensor = self.head(self.embedding(tokens), self.embedding, labels, scales)
        return total


def gradients_of_two_micro_batches(dtype: torch.dtype, factor: float, direct: bool) -> Any:
    """Whole gradients of factor x the sum of both losses."""
    model = Tied(mesh_of_ranks(dist.get_world_size() if dist.is_initialized() else 1))
    materialize(model, device=torch.device("cpu"), dtype=dtype, seed=1)
    buckets = GradientBuckets(model)
    if not direct:
        leave_to_autograd(model)
    for bucket in buckets.buckets:
        assert bucket.gradients.dtype == torch.promote_types(dtype, torch.float32)
        bucket.gradients.fill_(torch.nan)  # what an earlier step left must not be seen
    buckets.start()
    _, _, _, labels, scales = example(dtype)
    for number in range(2):
        tokens = (labels + 5 * number) % VOCABULARY
        with buckets.accumulate(is_last=number == 1):
            (model(tokens, labels, scales) * factor).backward()
    return whole_gradients(buckets)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
@SMALL_CHUNKS
def test_the_incoming_gradient_may_be_any_number(size: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.03)):
        one = gradients_of_two_micro_batches(dtype, 1.0, direct=False)
        for factor in (1.0, 0.5, 3.0):
            for direct in (False, True):
                found = gradients_of_two_micro_batches(dtype, factor, direct)
                for name, gradient in found.items():
                    assert_relative(gradient, factor * one[name], tolerance, f"{name} x {factor}")


@SMALL_CHUNKS
def test_logits_never_exist_whole() -> None:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=numbers).requires_grad_()
    weight = torch.randn(16, 4, generator=numbers).requires_grad_()
    labels, scales, axis = torch.arange(64) % 16, torch.ones(64), axis_of_all()
    returned: list[int] = []

    def see(function: object, args: object, result: object) -> None:
        returned.extend(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))

    with Watch(see):
        linear_cross_entropy(x, weight, None, labels, scales, 16, x_cut=Cut(terms=axis)).backward()
    assert max(returned) == x.numel()
    returned.clear()
    with Watch(see), torch.no_grad():
        linear_cross_entropy(x, weight, None, labels, scales, 16, x_cut=Cut(terms=axis))
    assert max(returned) <= x.numel()


def test_the_loss_of_no_tokens_is_zero() -> None:
    x, weight, bias, labels, scales = example(torch.float32)
    arguments = x[:0], weight, bias, labels[:0], scales[:0]
    total = linear_cross_entropy(*arguments, VOCABULARY)
    total.backward()
    assert total == 0
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_real_logits_may_lie_far_below_padding() -> None:
    """With the maximum of padding all their exponentials would be zero."""
    labels = torch.tensor([0, 2, 3])
    real = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) - 1000
    padded = F.pad(real, (0, 4))
    losses = vocab_parallel_cross_entropy(padded, labels, axis_of_all(), 4)
    torch.testing.assert_close(losses, F.cross_entropy(real, labels, reduction="none"))
