"""Whether weights and gradients are equal on the ranks that hold them in common: mistakes of models
and loops of one's own are found before they train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import GradientView, ShardingSpec

NAMED = 5  # tensors or ranks that a message names; of more it gives the number


def check_weights(views: Sequence[GradientView], mesh: Mesh) -> None:
    """Before the first step: weights that several ranks hold are equal on them. Raises RuntimeError
    naming the others."""
    weights, specs = [each.parameter.detach() for each in views], [each.spec for each in views]
    axes = [axis for axis in mesh.axes if not axis.is_of_stages]
    differing, _ = _compare(weights, specs, axes, mesh)
    if differing:
        raise RuntimeError(
            f"the initial weights of {listed([views[each].name for each in differing])} differ "
            "between ranks: on every rank the same torch.manual_seed() before the model is built "
            "makes them equal"
        )


def check_gradients(views: Sequence[GradientView], mesh: Mesh) -> list[GradientView]:
    """After a step: gradients that the ranks of one model hold in common are equal on them, unless
    these read other samples, draw other numbers, or a layer stands where its input is cut. Raises
    RuntimeError naming the others; returns those that are zero, of which nothing is known."""
    axes = [axis for axis in mesh.model_parallel.parts if not axis.is_of_stages]
    gradients, specs = [each.gradient for each in views], [each.spec for each in views]
    differing, zero = _compare(gradients, specs, axes, mesh)
    if differing:
        raise RuntimeError(
            f"gradients of {listed([views[each].name for each in differing])} differ between the "
            "ranks of one model: between a column and a row layer stands a layer that every rank "
            'holds whole, or these ranks read other samples (mesh.rank("batch") numbers those that '
            "may) or draw other random numbers"
        )
    return [views[number] for number in zero]


def name_unreached(views: Sequence[GradientView], mesh: Mesh) -> None:
    """The first rank prints which parameters no micro-batch of any rank has given a gradient so far
    (every rank calls this)."""
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
) -> tuple[list[int], list[int]]:
    """(those that differ on ranks that hold the same shard along these axes, those that are zero),
    by number, the same on every rank. What is noise beside the largest may differ."""
    if not tensors:  # of a pipeline stage without parameters
        return [], []
    wide = (each.double() for each in tensors)  # one at a time
    own = torch.stack([torch.stack([each.sum(), each.norm()]) for each in wide], dim=1)
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
    found = torch.stack([differs, norm]).tolist()
    of_differing = [number for number, each in enumerate(found[0]) if each]
    return of_differing, [number for number, each in enumerate(found[1]) if not each]
