import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import all_reduce, gather_from, reduce_from
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_and_the_gradient_of_g(gloo: Pool, size: int) -> None:
    gloo.run(size, check_values)


def test_an_axis_of_size_one_returns_its_argument() -> None:
    axis, x = serial_mesh().tensor, torch.ones(2, 4, requires_grad=True)
    assert reduce_from(x, axis) is x
    assert gather_from(x, 1, axis) is x
    assert all_reduce(x, axis) is x
