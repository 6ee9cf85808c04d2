"""The fused output layer and loss against the loss of materialised logits."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import cross_entropy as fused
from megatron.parallel.collectives import gather_from
from megatron.parallel.gradients import GradientBuffers
from megatron.parallel.kernels import padded_rows
from megatron.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megatron.parallel.mesh import Axis, Mesh, serial_mesh
from megatron.parallel.sharding import materialize
from tests.dist import Pool
from tests.tiny import Communication, assert_relative, mesh_of_ranks, whole_gradients

TOKENS, HIDDEN, VOCABULARY = 35, 6, 13


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what runs in this process."""
    monkeypatch.setattr(fused, "CHUNK_BYTES", 3 * 4 * 16)


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
    padded = torch.full((rows * axis.size, *whole.shape[1:]), 50.0, dtype=whole.dtype)
    padded[:VOCABULARY] = whole.detach()
    return padded.chunk(axis.size)[axis.rank].clone().requires_grad_()


def check(dtype: torch.dtype, tolerance: float) -> None:
    """Loss and gradients, times a factor of autograd's, equal those of plain torch in fp64."""
    axis = mesh_of_ranks(dist.get_world_size()).tensor
    x, weight, bias, labels, scales = example(dtype)
    for with_bias in (False, True):
        wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
        logits = F.linear(wide[0], wide[1], wide[2] if with_bias else None)
        expected = F.cross_entropy(logits, labels, reduction="none") @ scales
        (3 * expected).backward()

        x.grad = None
        own = own_rows(weight, axis), own_rows(bias, axis) if with_bias else None
        total = fused.linear_cross_entropy(x, *own, labels, scales, axis, VOCABULARY)
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
            again = fused.linear_cross_entropy(x, *own, labels, scales, axis, VOCABULARY)
        close(again, total)


def check_all() -> None:
    for chunk_bytes in (1, 2 * 8 * 13, 2**28):
        with patch.object(fused, "CHUNK_BYTES", chunk_bytes):
            check(torch.float64, 1e-12)
            check(torch.float32, 1e-5)
            check(torch.bfloat16, 0.06)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_torch(gloo: Pool, size: int) -> None:
    gloo.run(size, check_all)


class Tied(nn.Module):
    """A loss that uses one weight twice: as embedding and as output layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=1, std=1.0)
        self.head = VocabParallelHead(mesh, VOCABULARY, bias_divisible_by=1)

    def forward(self, tokens: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        total: Tensor = self.head(self.embedding(tokens), self.embedding, labels, scales)
        return total


def gradients_of_two_micro_batches(dtype: torch.dtype, factor: float, direct: bool) -> Any:
    """Whole gradients of factor x the sum of both losses."""
    model = Tied(mesh_of_ranks(dist.get_world_size() if dist.is_initialized() else 1))
    materialize(model, device=torch.device("cpu"), dtype=dtype, seed=1)
    buffers = GradientBuffers(model, direct=direct)
    assert {view.gradient.dtype for buffer in buffers.buffers for view in buffer.views} == {
        torch.promote_types(dtype, torch.float32)
    }
    for buffer in buffers.buffers:
        buffer.flat.fill_(torch.nan)  # what an earlier step left must not be seen
    buffers.start()
    _, _, _, labels, scales = example(dtype)
    for number in range(2):
        tokens = (labels + 5 * number) % VOCABULARY
        with buffers.accumulate(is_last=number == 1):
            (model(tokens, labels, scales) * factor).backward()
    return whole_gradients(buffers)


@patch.object(fused, "CHUNK_BYTES", 3 * 4 * 16)
def check_incoming_gradients() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.03)):
        one = gradients_of_two_micro_batches(dtype, 1.0, direct=False)
        for factor in (1.0, 0.5, 3.0):
            for direct in (False, True):
                found = gradients_of_two_micro_batches(dtype, factor, direct)
                for name, gradient in found.items():
                    assert_relative(gradient, factor * one[name], tolerance, f"{name} x {factor}")


@pytest.mark.parametrize("size", [1, 2])
def test_the_incoming_gradient_may_be_any_number(gloo: Pool, size: int) -> None:
    gloo.run(size, check_incoming_gradients)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_logits_never_exist_whole() -> None:
    mesh, numbers = serial_mesh(), torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=numbers).requires_grad_()
    weight = torch.randn(16, 4, generator=numbers).requires_grad_()
    labels, scales = torch.arange(64) % 16, torch.ones(64)
    with Largest() as largest:
        fused.linear_cross_entropy(x, weight, None, labels, scales, mesh.tensor, 16).backward()
    assert largest.elements == x.numel()
    with Largest() as largest, torch.no_grad():
        fused.linear_cross_entropy(x, weight, None, labels, scales, mesh.tensor, 16)
    assert largest.elements <= x.numel()


def traffic(chunk_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    mesh: Mesh = mesh_of_ranks(dist.get_world_size())
    x, weight, _, labels, scales = example(torch.float32)
    own = own_rows(weight, mesh.tensor)
    _ = mesh.tensor.group
    with Communication() as communication, patch.object(fused, "CHUNK_BYTES", chunk_bytes):
        fused.linear_cross_entropy(x, own, None, labels, scales, mesh.tensor, VOCABULARY).backward()
    return communication.calls


def test_what_is_communicated_has_the_size_of_the_tokens(gloo: Pool) -> None:
    """Of the softmax, and of x what the backward of any layer cut by columns sums."""
    for calls in gloo.run(2, traffic, 4 * 7 * 18):
        assert calls == [
            ("allreduce_", shape)
            for rows in (padded_rows(18), TOKENS - padded_rows(18))
            for shape in ((rows,), (2, rows), (rows, HIDDEN))
        ]


def test_no_tokens_are_no_loss() -> None:
    x, weight, bias, labels, scales = example(torch.float32)
    axis = serial_mesh().tensor
    total = fused.linear_cross_entropy(
        x[:0], weight, bias, labels[:0], scales[:0], axis, VOCABULARY
    )
    total.backward()
    assert total == 0
    assert not weight.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize(("tokens", "pieces"), [(1, 1), (4096, 7), (4099, 7), (5000, 8)])
def test_chunks_are_of_few_sizes(tokens: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK_BYTES", 2**27)
    found = list(fused.chunks(tokens, 50304, torch.float32))
    assert len(found) == pieces
    assert [number for rows in found for number in range(tokens)[rows]] == list(range(tokens))
    lengths = [rows.stop - rows.start for rows in found]
    assert set(lengths[:-1]) <= {padded_rows(lengths[0])}
    assert max(lengths) <= padded_rows(2**27 // (4 * 50304))
