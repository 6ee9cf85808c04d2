"""Checks that weights and gradients are equal on all ranks that hold them, so that mistakes in
custom models and loops are found before they train. Also finds comparisons that prove nothing: two
gradients that are zero agree, whatever computes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import GradientView, ShardingSpec

NAMED = 5  # tensors or ranks that a message names; it counts the others
SEEN = 1e-12  # times the gradient's norm: elements below this are zero or rounding


def unseen(largest: Mapping[str, float], norm: float, losses: Sequence[float]) -> list[str]:
    """Phrases that name what a comparison with this reference cannot see; empty if it sees all.

    largest: largest magnitude in each parameter's gradient, except those that are zero in theory
    (ShardingSpec.zero_gradient). norm: norm of the whole gradient. losses: losses of the steps; not
    finite for a skipped step.
    """
    found, still = [], [name for name, each in largest.items() if not SEEN * norm < each < inf]
    if len({each for each in losses if isfinite(each)}) < min(2, len(losses)):
        found.append("the loss, which is not finite or does not move")
    if not 0 < norm < inf:
        found.append(f"gradients, whose norm is {norm:g}")
    elif still:
        found.append(f"gradients that are zero or not finite, of {listed(still)}")
    return found


def check_weights(model: nn.Module, specs: Mapping[str, ShardingSpec], mesh: Mesh) -> None:
    """Before the first step: check that trained weights that several ranks hold are equal on them.
    Raises RuntimeError, naming those that differ."""
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names, axes = list(weights), [axis for axis in mesh.axes if not axis.is_of_stages]
    tensors = [each.detach() for each in weights.values()]
    numbers, *_ = _compare(tensors, [specs[name] for name in names], axes, mesh)
    if differing := [names[number] for number in numbers]:
        raise RuntimeError(
            f"the initial weights of {listed(differing)} differ between ranks: on every "
            "rank the same torch.manual_seed() before the model is built makes them equal"
        )


def check_gradients(views: Sequence[GradientView], mesh: Mesh) -> list[GradientView]:
    """After a step: check that gradients that several ranks of one model hold are equal on them.
    They differ if these ranks read other samples, draw other numbers, or hold a whole layer whose
    input is cut. Raises RuntimeError, naming those that differ. Returns the gradients that are
    zero, which prove nothing, and the largest one, by which the next step tells them from noise."""
    axes = [axis for axis in mesh.model_parallel.parts if not axis.is_of_stages]
    gradients, specs = [each.gradient for each in views], [each.spec for each in views]
    numbers, zero, largest = _compare(gradients, specs, axes, mesh)
    if differing := [views[number].name for number in numbers]:
        raise RuntimeError(
            f"gradients of {listed(differing)} differ between the ranks of one model: "
            "between a column and a row layer stands a layer that every rank holds whole, or these "
            'ranks read other samples (mesh.rank("batch") numbers those that may) or draw other '
            "random numbers"
        )
    return [views[number] for number in dict.fromkeys([*zero, largest])] if zero else []


def name_unreached(views: Sequence[GradientView], mesh: Mesh) -> None:
    """The first rank prints which parameters have no gradient so far from any micro-batch of any
    rank (every rank calls this)."""
    own = {each.name: each.is_reached for each in views if each.parameter.requires_grad}
    found = mesh.control.gather(own)
    reached = {name for each in found for name in each if each[name]}
    unreached = list(dict.fromkeys(name for each in found for name in each if name not in reached))
    if unreached and mesh.is_first:
        print(
            f"warning: no gradient reaches {listed(unreached)} in the first step: the loss does "
            "not depend on them, and weight decay alone changes them; requires_grad=False keeps "
            "them as they are",
            file=sys.stderr,
            flush=True,
        )


def listed(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _compare(
    tensors: Sequence[Tensor], specs: Sequence[ShardingSpec], axes: Sequence[Axis], mesh: Mesh
) -> tuple[list[int], list[int], int]:
    """Numbers of (tensors that differ between ranks with the same shard along these axes, tensors
    that are zero or finite on no rank, the largest tensor), the same on every rank. Noise, relative
    to the largest tensor, is no difference."""
    if not tensors:  # a pipeline stage without parameters
        return [], [], 0
    wide = (each.double() for each in tensors)  # one at a time
    own = torch.stack([torch.stack([each.sum(), each.norm()]) for each in wide], dim=1)
    own = own.nan_to_num(0, 0, 0)  # a maximum over non-finite values says nothing
    differs, norm = torch.zeros_like(own[0]), own[1].clone()
    for axis in (axis for axis in axes if axis.size > 1):
        highest, lowest = all_reduce(torch.stack([own, -own]), axis, ReduceOp.MAX)
        most = 1e-4 * highest[1] + 1e-7 * highest[1].max()
        apart = (highest + lowest > most).any(dim=0)
        held = [axis in spec.copied_over(axis) for spec in specs]
        differs += apart & torch.tensor(held, device=apart.device)
    # The ranks of other pipeline stages have other parameters.
    for axis in (each for each in mesh.axes if each.size > 1 and not each.is_of_stages):
        all_reduce(differs, axis, ReduceOp.MAX)
        all_reduce(norm, axis, ReduceOp.MAX)
    found = torch.stack([differs, norm <= SEEN * norm.max()]).tolist()
    of_differing, zero = ([number for number, each in enumerate(row) if each] for row in found)
    return of_differing, zero, int(norm.argmax())
