import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import (
    all_reduce,
    copy_to,
    gather_from,
    gather_with_gradient,
    own_rows,
    reduce_from,
)
from megatron.parallel.mesh import serial_mesh
from tests.dist import Pool
from tests.tiny import mesh_of_ranks


def random(name: int) -> Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randn(4, 12, dtype=torch.float64, generator=generator)


def check_values() -> None:
    axis = mesh_of_ranks(torch.distributed.get_world_size()).tensor
    shards = [random(rank) for rank in range(axis.size)]
    own, dy = shards[axis.rank], random(99)

    x = own.clone().requires_grad_()
    y = reduce_from(x * 1.0, axis)
    torch.testing.assert_close(y, torch.stack(shards).sum(0))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy)

    for dim in (0, 1):
        assert torch.equal(gather_from(own, dim, axis), torch.cat(shards, dim))
        assert torch.equal(gather_from(own.T, dim, axis), torch.cat([s.T for s in shards], dim))
    most = all_reduce(torch.tensor(float(axis.rank)), axis, ReduceOp.MAX)
    assert most.item() == axis.size - 1


def check_rows() -> None:
    """f and g where each rank holds rows of the stream."""
    mesh = mesh_of_ranks(torch.distributed.get_world_size(), sequence_parallel=True)
    axis = mesh.tensor
    assert mesh.stream is axis
    shards, rows = [random(rank) for rank in range(axis.size)], 12 // axis.size
    whole, own = torch.cat(shards), slice(rows * axis.rank, rows * (axis.rank + 1))

    x = shards[axis.rank].clone().requires_grad_()
    y = copy_to(x, axis, mesh.stream)
    assert torch.equal(y, whole)
    (dx,) = torch.autograd.grad(y, x, (axis.rank + 1) * whole)
    times = sum(range(1, axis.size + 1))
    torch.testing.assert_close(dx, times * shards[axis.rank])

    x = random(axis.rank).T.contiguous().requires_grad_()  # [12, 4]
    y = reduce_from(x * 1.0, axis, mesh.stream)
    torch.testing.assert_close(y, torch.stack(shards).sum(0).T[own])
    (dx,) = torch.autograd.grad(y, x, random(99).T[own])
    assert torch.equal(dx, random(99).T)

    x = own_rows(random(99).T, axis).clone().requires_grad_()
    y = gather_with_gradient(x, 0, axis)
    assert torch.equal(y, random(99).T)
    (dx,) = torch.autograd.grad(y, x, random(98).T)  # the same on every rank, and no sum
    assert torch.equal(dx, random(98).T[own])
    with pytest.raises(ValueError, match="13 rows"):
        own_rows(torch.ones(13), axis)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_the_stream(gloo: Pool, size: int) -> None:
    gloo.run(size, check_rows)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_and_the_gradient_of_g(gloo: Pool, size: int) -> None:
    gloo.run(size, check_values)


def test_an_axis_of_size_one_returns_its_argument() -> None:
    axis, x = serial_mesh().tensor, torch.ones(2, 4, requires_grad=True)
    assert reduce_from(x, axis) is x
    assert copy_to(x, axis) is x
    assert gather_from(x, 1, axis) is x
    assert all_reduce(x, axis) is x
