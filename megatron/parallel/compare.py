"""Checks that weights and gradients are equal on all ranks that hold them, so that mistakes in
custom models and loops are found before they train. Also finds comparisons that prove nothing: two
gradients that are zero agree, whatever computes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.overrides import TorchFunctionMode

from megatron.parallel.bucket import GradientView
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import ShardingSpec

NAMED = 5  # tensors or ranks that a message names; it counts the others
SEEN = 1e-12  # times the gradient's norm: elements below this are zero or rounding


def listed(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")


def unseen(largest: Mapping[str, float], norm: float, losses: Sequence[float]) -> list[str]:
    """Phrases that name what a comparison with this reference cannot see; empty if it sees all.

    largest: largest magnitude in each parameter's gradient, except those that are zero in theory
    (ShardingSpec.zero_gradient). norm: norm of the whole gradient. losses: losses of the steps; not
    finite for a skipped step.
    """
    phrases = []
    if len({loss for loss in losses if isfinite(loss)}) < min(2, len(losses)):
        phrases.append("the loss, which is not finite or does not move")
    still = [name for name, value in largest.items() if not SEEN * norm < value < inf]
    if not 0 < norm < inf:
        phrases.append(f"gradients, whose norm is {norm:g}")
    elif still:
        phrases.append(f"gradients that are zero or not finite, of {listed(still)}")
    return phrases


def check_weights(model: nn.Module, specs: Mapping[str, ShardingSpec], mesh: Mesh) -> None:
    """Before the first step: check that trained weights that several ranks hold are equal on them.
    Raises RuntimeError, naming those that differ."""
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names, axes = list(weights), [axis for axis in mesh.axes if not axis.is_of_stages]
    tensors = [each.detach() for each in weights.values()]
    numbers, *_ = _compare(tensors, [specs[name] for name in names], axes, mesh)
    if numbers:
        raise RuntimeError(
            f"the initial weights of {listed([names[n] for n in numbers])} differ between ranks: "
            "the same torch.manual_seed() on every rank before the model is built makes them equal"
        )


def check_gradients(views: Sequence[GradientView], mesh: Mesh) -> list[GradientView]:
    """After a step: check that gradients that several ranks of one model hold are equal on them.
    They differ if these ranks read other samples, draw other numbers, or hold a whole layer whose
    input is cut. Raises RuntimeError, naming those that differ. Returns the gradients that are
    zero, which prove nothing, and the largest one, by which the next step tells them from noise."""
    axes = [axis for axis in mesh.model_parallel.parts if not axis.is_of_stages]
    gradients, specs = [view.gradient for view in views], [view.spec for view in views]
    numbers, zero, largest = _compare(gradients, specs, axes, mesh)
    if numbers:
        raise RuntimeError(
            f"gradients of {listed([views[n].name for n in numbers])} differ between the ranks of "
            "one model: between a column and a row layer stands a layer that every rank holds "
            'whole, or these ranks read other samples (mesh.rank("batch") numbers those that may) '
            "or draw other random numbers"
        )
    return [views[number] for number in dict.fromkeys([*zero, largest])] if zero else []


def name_unreached(views: Sequence[GradientView], mesh: Mesh) -> None:
    """The first rank prints which parameters have no gradient so far from any micro-batch of any
    rank (every rank calls this)."""
    reached: dict[str, bool] = {}
    trained = [view for view in views if view.parameter.requires_grad]
    for of_rank in mesh.control.gather({view.name: view.is_reached for view in trained}):
        for name, is_reached in of_rank.items():
            reached[name] = reached.get(name, False) or is_reached
    unreached = [name for name, is_reached in reached.items() if not is_reached]
    if unreached and mesh.is_first:
        print(
            f"warning: no gradient reaches {listed(unreached)} in the first step: the loss does "
            "not depend on them, and weight decay alone changes them; requires_grad=False keeps "
            "them as they are",
            file=sys.stderr,
            flush=True,
        )


def _compare(
    tensors: Sequence[Tensor], specs: Sequence[ShardingSpec], axes: Sequence[Axis], mesh: Mesh
) -> tuple[list[int], list[int], int]:
    """Numbers of (tensors that differ between ranks with the same shard along these axes, tensors
    that are zero or finite on no rank, the largest tensor), the same on every rank. Noise, relative
    to the largest tensor, is no difference."""
    if not tensors:  # a pipeline stage without parameters
        return [], [], 0
    doubles = (each.double() for each in tensors)  # one at a time
    local = torch.stack([torch.stack([each.sum(), each.norm()]) for each in doubles], dim=1)
    local = local.nan_to_num(0, 0, 0)  # a maximum over non-finite values says nothing
    differs, norm = torch.zeros_like(local[0]), local[1].clone()
    for axis in axes:
        if axis.size > 1:
            highest, lowest = all_reduce(torch.stack([local, -local]), axis, ReduceOp.MAX)
            noise = 1e-4 * highest[1] + 1e-7 * highest[1].max()
            apart = (highest + lowest > noise).any(dim=0)
            is_copied = [axis in spec.copied_over(axis) for spec in specs]
            differs += apart & torch.tensor(is_copied, device=apart.device)
    for axis in mesh.axes:
        if axis.size > 1 and not axis.is_of_stages:  # other stages have other parameters
            all_reduce(differs, axis, ReduceOp.MAX)
            all_reduce(norm, axis, ReduceOp.MAX)
    zero = norm <= SEEN * norm.max()
    return differs.nonzero()[:, 0].tolist(), zero.nonzero()[:, 0].tolist(), int(norm.argmax())


class KeepFP64(TorchFunctionMode):
    """Keeps fp64 tensors in fp64. Models of transformers narrow them to fp32 in RMSNorm, rotary
    positions and softmax, and the results of equal models would differ by 1e-7."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_fp64 = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_fp64 and func is Tensor.float:
            return args[0]
        if is_fp64 and func in (Tensor.to, Tensor.type, Tensor.softmax, torch.softmax, F.softmax):

            def kept(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            args = tuple(map(kept, args))
            kwargs = {name: kept(value) for name, value in kwargs.items()}
        if is_fp64 and func is Tensor.matmul and len(args) == 2:
            # Rotary frequencies by positions, which are fp32.
            args = args[0], args[1].double()
        return func(*args, **kwargs)
