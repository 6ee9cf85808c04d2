from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_leaves

from megatron.parallel import collectives
from megatron.parallel.collectives import (
    all_reduce,
    cut,
    gather_from,
    own_rows,
    start_all_reduce,
    start_broadcast,
    start_gather,
    start_receive,
    start_reduce,
    start_send,
    start_sum,
    sum_terms,
)
from megatron.parallel.mesh import Axis, serial_mesh
from megatron.parallel.regions import copy_to, gather_with_gradient, reduce_from
from tests.dist import on_ranks
from tests.files import before_calls
from tests.refusals import refusal
from tests.tiny import Watch, mesh_of_ranks


class Strides(NamedTuple):
    """How x [4, 6] lies in a whole tensor of this shape."""

    shape: tuple[int, ...]
    part: Callable[[Tensor], Tensor]
    shares: bool = False  # whether elements of x share memory

    def whole(self, seed: int) -> Tensor:
        """A tensor of integers, so that sums are exact."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-99, 99, self.shape, generator=generator).double()

    def beside(self, whole: Tensor) -> Tensor:
        """The elements that are not of x."""
        places = torch.arange(whole.numel())
        return whole.flatten()[~torch.isin(places, self.part(places.view(self.shape)))]


STRIDES = {
    "contiguous": Strides((4, 6), lambda whole: whole),
    "transposed": Strides((6, 4), lambda whole: whole.T),
    "columns": Strides((4, 9), lambda whole: whole[:, 2:8]),
    "rows": Strides((7, 6), lambda whole: whole.narrow(0, 1, 4)),
    "every second": Strides((8, 13), lambda whole: whole[::2, 1::2]),
    "one of three": Strides((4, 6, 3), lambda whole: whole[..., 1]),
    "expanded": Strides((6,), lambda whole: whole.expand(4, 6), shares=True),
    "a column expanded": Strides((4, 3), lambda whole: whole[:, 1:2].expand(4, 6), shares=True),
    "windows": Strides((9,), lambda whole: whole.unfold(0, 6, 1), shares=True),
}
PAIRS = [(name, other) for name in STRIDES for other in ("contiguous", "transposed", name)]
PAIRS = [*dict.fromkeys([*PAIRS, *((other, name) for name, other in PAIRS)])]  # of two ranks
Terms = Sequence[Tensor]


class Case(NamedTuple):
    """result: of both ranks' x, on a rank; None where it is undefined. in_place: whether x holds it
    then; else x stays."""

    run: Callable[[Tensor, Axis], Tensor]
    result: Callable[[Terms, int], Tensor | None]
    in_place: bool = False


def total(terms: Terms, rank: int = 0) -> Tensor:
    return terms[0] + terms[1]


def joined(dim: int) -> Callable[[Terms, int], Tensor]:
    return lambda terms, _: torch.cat([*terms], dim)


def part(dim: int) -> Callable[[Terms, int], Tensor]:
    return lambda terms, rank: total(terms).chunk(2, dim)[rank]


def message(x: Tensor, axis: Axis) -> Tensor:
    return (start_receive if axis.rank else start_send)(x, axis, 1 - axis.rank, "x")()


def gather_into(x: Tensor, axis: Axis) -> Tensor:
    table = x.new_ones(8, 9)
    own_rows(table[:, :6], axis).copy_(x)
    found = start_gather(own_rows(table[:, :6], axis), axis, out=table[:, :6])()
    return found if table[:, 6:].eq(1).all() else table


def sum_into(x: Tensor, axis: Axis) -> Tensor:
    table = x.new_ones(2, 9)
    found = start_sum(x, axis, axis, out=table[:, :6])()
    return found if table[:, 6:].eq(1).all() else table


CASES = {
    "all_reduce": Case(all_reduce, total, in_place=True),
    "all_reduce, the highest": Case(
        lambda x, axis: all_reduce(x, axis, ReduceOp.MAX),
        lambda terms, _: torch.maximum(*terms),
        in_place=True,
    ),
    "start_all_reduce": Case(lambda x, axis: start_all_reduce(x, axis)(), total, in_place=True),
    "start_reduce": Case(
        lambda x, axis: start_reduce(x, axis, 1)(),
        lambda terms, rank: total(terms) if rank == 1 else None,
        in_place=True,
    ),
    "start_broadcast": Case(
        lambda x, axis: start_broadcast(x, axis, 1)(), lambda terms, _: terms[1]
    ),
    "a message": Case(message, lambda terms, _: terms[0], in_place=True),
    "start_gather": Case(lambda x, axis: start_gather(x, axis)(), joined(0)),
    "start_gather, out": Case(gather_into, joined(0)),
    "start_gather of columns": Case(lambda x, axis: cut(1, axis).start_whole(x)(), joined(1)),
    "gather_from": Case(lambda x, axis: gather_from(x, 1, axis), joined(1)),
    "start_sum": Case(lambda x, axis: start_sum(x, axis, axis)(), part(0)),
    "start_sum, out": Case(sum_into, part(0)),
    "start_sum of columns": Case(lambda x, axis: cut(1, axis).start_part(x)(), part(1)),
}


def wrong_with_strides(only: str = "") -> list[str]:
    axis, wrong = mesh_of_ranks(2).tensor, []
    for (name, case), names in product(CASES.items(), PAIRS):
        if only not in name:
            continue
        ranks = [STRIDES[each] for each in names]
        terms = [each.part(each.whole(rank)).clone() for rank, each in enumerate(ranks)]
        own = ranks[axis.rank]
        whole = own.whole(axis.rank)
        x, expected = own.part(whole), case.result(terms, axis.rank)
        found = case.run(x, axis)
        is_right = torch.equal(own.beside(whole), own.beside(own.whole(axis.rank)))
        if expected is not None:
            is_right &= torch.equal(found, expected)
            if not case.in_place:
                is_right &= torch.equal(x, terms[axis.rank])
            elif not own.shares or names[0] == names[1]:  # else x cannot hold it
                is_right &= torch.equal(x, expected)
        wrong += [] if is_right else [f"{name} of {' and '.join(names)}, rank {axis.rank}"]
    return wrong


@on_ranks(2)
def test_strides_change_no_result() -> None:
    assert not wrong_with_strides()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@on_ranks(2)
def test_messages_that_a_backend_does_not_send_go_through_the_host(device: str) -> None:
    """Here a CPU's: gloo sends them, and nobody else's."""
    assert ("gloo", "cuda") in collectives.THROUGH_HOST
    own, crossed = torch.ones(3), []
    axis = mesh_of_ranks(2).tensor
    watched = before_calls(
        lambda _, given: crossed.append(given[0].data_ptr()),
        *("torch.distributed.isend", "torch.distributed.irecv"),
    )
    with patch.object(collectives, "THROUGH_HOST", {("gloo", device)}), watched:
        message(own, axis)
        assert (crossed != [own.data_ptr()]) == (device == "cpu")
        assert not wrong_with_strides("a message")


class Differentiable(NamedTuple):
    """value: of both ranks' x, on a rank; by autograd."""

    run: Callable[[Tensor, Axis], Tensor]
    value: Callable[[Terms, int], Tensor]
    is_shared: bool = False  # whether all ranks have one value, which the loss counts once


DIFFERENTIABLE = {
    "reduce_from": Differentiable(reduce_from, total, is_shared=True),
    "reduce_from, rows": Differentiable(lambda x, axis: reduce_from(x, axis, axis), part(0)),
    # Each rank's x stands for one that all have.
    "copy_to": Differentiable(copy_to, lambda terms, rank: total(terms) - terms[1 - rank].detach()),
    "copy_to, rows": Differentiable(lambda x, axis: copy_to(x, axis, axis), joined(0)),
    "gather_with_gradient": Differentiable(
        lambda x, axis: gather_with_gradient(x, 1, axis), joined(1), is_shared=True
    ),
    "sum_terms of columns": Differentiable(lambda x, axis: sum_terms(x, cut(1, axis)), part(1)),
}
DY = {  # strides of a gradient [n, c]
    "transposed": lambda dy: dy.T.contiguous().T,
    "expanded": lambda dy: dy[:1].expand(dy.shape),
}


@on_ranks(2)
def test_strides_change_no_gradient() -> None:
    axis, wrong = mesh_of_ranks(2).tensor, []
    for (name, case), names, kind in product(DIFFERENTIABLE.items(), PAIRS, DY):
        ranks = [STRIDES[each] for each in names]
        wholes = [each.whole(rank).requires_grad_() for rank, each in enumerate(ranks)]
        terms = [each.part(whole) for each, whole in zip(ranks, wholes, strict=True)]
        values = [case.value(terms, rank) for rank in range(2)]
        seeds = (3, 3) if case.is_shared else (3, 4)
        dys = [DY[kind](random_like(y, seed)) for y, seed in zip(values, seeds, strict=True)]
        losses = [(y * dy).sum() for y, dy in zip(values, dys, strict=True)]
        loss = losses[0] if case.is_shared else losses[0] + losses[1]
        (expected,) = torch.autograd.grad(loss, wholes[axis.rank])

        own, leaf = ranks[axis.rank], wholes[axis.rank]
        whole = leaf * 1
        found = case.run(own.part(whole), axis)
        is_right = torch.equal(found, values[axis.rank])
        (dx,) = torch.autograd.grad(found, leaf, dys[axis.rank])
        is_right &= torch.equal(dx, expected)
        is_right &= torch.equal(own.beside(whole), own.beside(leaf))
        if not is_right:
            wrong.append(f"{name} of {' and '.join(names)}, dy {kind}, rank {axis.rank}")
    assert not wrong


def random_like(y: Tensor, seed: int) -> Tensor:
    return Strides(tuple(y.shape), lambda whole: whole).whole(seed)


def test_an_axis_of_size_one_returns_its_argument() -> None:
    axis, x = serial_mesh().tensor, torch.ones(2, 4, requires_grad=True)
    assert reduce_from(x, axis) is x
    assert copy_to(x, axis) is x
    assert gather_from(x, 1, axis) is x
    assert all_reduce(x, axis) is x


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    assert "13" in str(refusal(lambda: own_rows(torch.ones(13), Axis("tensor", 2, 1))))


@on_ranks(2)
def test_f_leaves_a_gradient_that_others_read_as_it_is() -> None:
    """The gradients of x and z in f(x) + z, which autograd passes on as one tensor."""
    axis = mesh_of_ranks(2).tensor
    x, z = (torch.zeros(3, requires_grad=True) for _ in range(2))
    beside = z.view_as(z)  # made first, so that its backward comes after that of f
    total = copy_to(x, axis) + beside
    total.backward(torch.full((3,), 1.0 + axis.rank))
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    assert z.grad is not None
    assert z.grad.tolist() == [1.0 + axis.rank] * 3


@on_ranks(2)
def test_backends_get_contiguous_tensors() -> None:
    """Others are copied by gloo and refused by NCCL."""
    axis, found = mesh_of_ranks(2).tensor, []

    def see(function: Any, args: Sequence[Any], result: object) -> None:
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if function.namespace == "c10d" and not all(each.is_contiguous() for each in tensors):
            found.append(str(function))

    with Watch(see):
        for case in CASES.values():
            case.run(STRIDES["transposed"].part(torch.ones(6, 4)), axis)
    assert not found
