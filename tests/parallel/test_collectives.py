import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import (
    all_reduce,
    copy_to,
    gather_from,
    reduce_from,
    scatter_to,
)
from megatron.parallel.mesh import serial_mesh
from tests.dist import Pool
from tests.tiny import mesh_of_ranks


def random(name: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def pull_back(function: object, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(function(x), the gradient of <function(x), dy>); works on a copy, since g is in place."""
    x = x.clone().requires_grad_()
    y = function(x * 1.0)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def check_values() -> None:
    axis = mesh_of_ranks(torch.distributed.get_world_size()).tensor
    parts = [random(rank, 4, 12) for rank in range(axis.size)]
    dy = random(99, 4, 12)
    own, total = parts[axis.rank], torch.stack(parts).sum(0)

    y, dx = pull_back(lambda x: copy_to(x, axis), parts[0], parts[axis.rank])
    torch.testing.assert_close(y, parts[0], rtol=0, atol=0)
    torch.testing.assert_close(dx, total)

    y, dx = pull_back(lambda x: reduce_from(x, axis), own, dy)
    torch.testing.assert_close(y, total)
    torch.testing.assert_close(dx, dy, rtol=0, atol=0)

    for dim in (0, 1):
        whole = torch.cat(parts, dim)
        y, dx = pull_back(lambda x, dim=dim: scatter_to(x, dim, axis), whole, own)
        torch.testing.assert_close(y, own, rtol=0, atol=0)
        torch.testing.assert_close(dx, whole, rtol=0, atol=0)
        y, dx = pull_back(lambda x, dim=dim: gather_from(x, dim, axis), own, whole)
        torch.testing.assert_close(y, whole, rtol=0, atol=0)
        torch.testing.assert_close(dx, own, rtol=0, atol=0)


def check_laws() -> None:
    """<A x, y> over all ranks = <x, B y>, for each pair (A, B) of a replicated x and a cut y."""
    axis = mesh_of_ranks(torch.distributed.get_world_size()).tensor
    x, y = random(1, 4, 12), random(2 + axis.rank, 4, 12)
    left = all_reduce((copy_to(x, axis) * y).sum(), axis)
    right = (x * reduce_from(y.clone(), axis)).sum()
    torch.testing.assert_close(left, right)

    part = random(2 + axis.rank, 4, 12 // axis.size)
    left = all_reduce((scatter_to(x, 1, axis) * part).sum(), axis)
    right = (x * gather_from(part, 1, axis)).sum()
    torch.testing.assert_close(left, right)


def check_the_residual_keeps_its_gradient() -> None:
    """f reduces a copy: x + f(x) hands one and the same gradient to both branches."""
    axis = mesh_of_ranks(torch.distributed.get_world_size()).tensor
    x = random(1, 3).requires_grad_()
    (x + copy_to(x, axis)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.0 + axis.size))


def check_operations() -> None:
    axis = mesh_of_ranks(torch.distributed.get_world_size()).tensor
    most = all_reduce(torch.tensor(float(axis.rank)), axis, ReduceOp.MAX)
    assert most.item() == axis.size - 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_conjugate_pairs(gloo: Pool, size: int) -> None:
    for check in (
        check_values,
        check_laws,
        check_the_residual_keeps_its_gradient,
        check_operations,
    ):
        gloo.run(size, check)


def test_an_axis_of_size_one_returns_its_argument() -> None:
    axis, x = serial_mesh().tensor, torch.ones(2, 4, requires_grad=True)
    assert copy_to(x, axis) is x
    assert reduce_from(x, axis) is x
    assert scatter_to(x, 1, axis) is x
    assert gather_from(x, 1, axis) is x
    assert all_reduce(x, axis) is x
