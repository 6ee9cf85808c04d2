"""One bucket: gradients and weights of some parameters, in flat tensors.

    | attention.weight   mlp.weight      .. | norm.weight   biases   .. | ... |
      decays, cut over tensor               | does not decay, whole     | padding
    | part of rank 0      | part of rank 1      | part of rank 2      | ..     |    (ZeRO)

Each parameter starts at a multiple of ALIGNMENT elements, and the end is padded so that the ranks
that hold the bucket have equal parts of it. Padding is zero and stays zero.

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) is how a bucket is stored and reduced. A rank has
only its own part of masters and moments (stage 1), of summed gradients too (2), and of weights too,
but for the layers in use (3, see zero3.py). In stage 0 its own part is the whole bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import start_all_reduce, start_gather, start_sum
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.offload import HostPart
from megatron.parallel.sharding import (
    Deferral,
    FlatRange,
    GradientView,
    ShardingSpec,
    TensorSlice,
    absent,
)
from megatron.parallel.traced import handle_of

ALIGNMENT = 64  # elements; kernels such as torch's AdamW round differently at odd addresses

Named = tuple[str, nn.Parameter, ShardingSpec]


def nothing(*_: object) -> None:
    pass


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _kind(named: Named) -> tuple[bool, list[str]]:
    """Parameters of one segment have this in common: weight decay and the axes that cut them."""
    *_, spec = named
    return not spec.decay, sorted(axis.name for axis in spec.shard_axes)


def gradient_dtype(parameter: nn.Parameter, wide: bool) -> torch.dtype:
    """The dtype in which gradients of the parameter are accumulated."""
    return torch.promote_types(parameter.dtype, torch.float32) if wide else parameter.dtype


@dataclass(frozen=True)
class Segment:
    """Adjacent parameters of a bucket with equal decay and shard axes: elements [start, stop)."""

    start: int
    stop: int
    spec: ShardingSpec  # of one of its parameters


class Bucket:
    """Parameters of one dtype whose gradients are summed over the same axes, together.

    flat: gradients of all elements. own: summed gradients of the own part. weights: weights of all
    elements, in the parameters' dtype; the parameters are views of it. masters: weights of the own
    part in the gradients' dtype, or a view of `weights`.
    """

    def __init__(
        self,
        named: Sequence[Named],
        deferral: Deferral,
        *,
        wide: bool,
        zero_stage: int,
        shared: Axis,
    ) -> None:
        """shared: the axis whose ranks divide the bucket, if its gradients are partial over it."""
        _, first, spec = named[0]
        axes = [axis for axis in spec.partial if axis.size > 1]
        self.shared = shared if shared in axes else ALONE
        self.axes = sorted(axes, key=lambda axis: axis is not self.shared)
        self.zero_stage, self.weight_dtype = zero_stage, first.dtype
        self.dtype, self.device = gradient_dtype(first, wide), first.device
        self.views: list[GradientView] = []
        self.segments: list[Segment] = []
        end = 0
        for _, neighbours in groupby(sorted(named, key=_kind), _kind):
            start = end
            for name, parameter, its_spec in neighbours:
                flat = (self.dtype, lambda: self.flat)
                self.views.append(GradientView(name, parameter, its_spec, end, deferral, *flat))
                self.views[-1].handle = handle_of(self.views[-1])
                end = _round_up(self.views[-1].stop, ALIGNMENT)
            self.segments.append(Segment(start, end, its_spec))
        self.size = _round_up(end, ALIGNMENT * prod(axis.size for axis in self.axes))
        share = self.size // self.shared.size
        self.part = slice(self.shared.rank * share, (self.shared.rank + 1) * share)
        self.has_sum = False  # whether gradients of this step were added to `own`
        self.summed: Axis | None = None  # below ZeRO stage 2: the axis that `reduce` sums over
        if zero_stage < 2:
            self.summed = next((axis for axis in self.axes if not axis.is_of_stages), None)
            self.gradients: Tensor | None = self.zeros(self.size)
            self.own = self.gradients[self.part]
        else:
            self.gradients, self.own = None, self.zeros(share)
        self.weights: Tensor | None = None
        self.masters: Tensor | None = None
        self.is_apart = True  # whether masters are no view of the weights
        self.host: HostPart | None = None  # where masters are, if not on the device
        self.is_of_layer = False  # whether its weights are gathered with a layer (zero3.py)
        self.missing = len(self.views)
        self.pending: Callable[[], object] = nothing  # waits for sums of gradients
        self.coming: Callable[[], object] | None = None  # waits for the weights of all parts

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def flat(self) -> Tensor:
        """From ZeRO stage 2 on, allocated for the first gradient and freed by `reduce`."""
        if self.gradients is None:
            self.gradients = self.zeros(self.size)
        return self.gradients

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks that divide the bucket; below ZeRO stage 2,
        over the axis `summed`."""
        self.wait()
        flat = self.flat
        for view in self.views:
            view.is_reached |= view.is_filled
            if not view.is_filled:  # no gradient came
                view.gradient.zero_()
        if self.zero_stage < 2:
            if self.summed is not None:
                stream = self.shared if self.summed is self.shared else ALONE
                self.pending = start_sum(flat, self.summed, stream, out=self.own)
            return
        arrived = start_sum(flat, self.shared, self.shared)
        self.gradients = None
        for view in self.views:
            view.forget()
        self.pending = partial(self._add, arrived)

    def _add(self, arrived: Callable[[], Tensor]) -> None:
        """Add the own part of one micro-batch's sum to `own`."""
        if self.has_sum:
            self.own.add_(arrived())
        else:
            self.own.copy_(arrived())
        self.has_sum = True

    def add_up(self, *, is_of_stages: bool) -> None:
        """Start the sums over the other axes: those between pipeline stages, or all but those."""
        first = self.summed if self.zero_stage < 2 else self.shared
        for axis in self.axes:
            if axis is not first and axis.is_of_stages == is_of_stages:
                self.wait()
                self.pending = start_all_reduce(self.own, axis)

    def wait(self) -> None:
        """Wait for the sums that were started."""
        pending, self.pending = self.pending, nothing
        pending()

    def own_segments(self) -> Iterator[tuple[slice, Segment]]:
        """Yield (its range in the own part, segment) of each segment that the own part overlaps."""
        first = self.part.start
        for each in self.segments:
            start, stop = max(each.start, first), min(each.stop, self.part.stop)
            if start < stop:
                yield slice(start - first, stop - first), each

    def slices(self, part: Tensor, prefix: str = "") -> Iterator[TensorSlice]:
        """This rank's slice of each parameter, named prefix + its name, from `part`, a tensor laid
        out like the own part."""
        first = self.part.start
        for view in self.views:
            key = prefix + view.name
            if self.shared.size == 1:
                yield TensorSlice(key, view.spec, view.view(part))
                continue
            start = min(max(view.start, first), view.stop)
            stop = max(min(view.stop, self.part.stop), start)
            own = FlatRange(self.shared, start - view.start, stop - view.start)
            yield TensorSlice(
                key, replace(view.spec, flat=own), part[start - first :][: stop - start]
            )

    @torch.no_grad()
    def hold_weights(self, *, on_host: bool = False) -> Tensor:
        """Make the parameters views of `weights`; in ZeRO stage 3, only while these are gathered.
        Returns the masters. on_host: masters are separate tensors on the host; after changing them,
        call `round_masters`."""
        share = self.part.stop - self.part.start
        if on_host:
            self.host = HostPart(share, self.dtype, self.weight_dtype, self.device)
        if self.zero_stage < 3:
            self.weights = torch.zeros(self.size, dtype=self.weight_dtype, device=self.device)
            for view in self.views:
                own = view.view(self.weights)
                own.copy_(view.parameter)
                view.parameter.data = own
            self.masters = self.weights[self.part]
            self.is_apart = on_host or self.weight_dtype != self.dtype
            if self.host is not None:
                self.masters = self.host.masters.copy_(self.masters)
                self.round_masters()
            elif self.is_apart:
                self.masters = self.masters.to(self.dtype, copy=True)
            return self.masters
        self.masters = self.zeros(share) if self.host is None else self.host.masters
        parameters = {view.name: view.parameter for view in self.views}
        for each in self.slices(self.masters):
            if (flat := each.spec.flat) is None:
                each.local.copy_(parameters[each.key])
            else:
                each.local.copy_(parameters[each.key].flatten()[flat.start : flat.stop])
        self.round_masters()
        self.release()
        return self.masters

    def round_masters(self) -> None:
        """After a change of masters on the host: update their rounded copy for the device."""
        if self.host is not None:
            self.host.round()

    @torch.no_grad()
    def start_gather(self) -> None:
        """Round the masters into the own part of the weights, and start to gather all parts."""
        if self.coming is not None or self.masters is None:
            return
        if self.zero_stage == 3:
            if self.weights is not None:
                return
            self.weights = torch.empty(self.size, dtype=self.weight_dtype, device=self.device)
        assert self.weights is not None
        own = self.weights[self.part]
        if self.host is not None:
            own.copy_(self.host.rounded, non_blocking=True)
        elif self.is_apart:
            own.copy_(self.masters)
        self.coming = start_gather(own, self.shared, out=self.weights)

    def gather(self) -> None:
        """Gather the weights of all parts and wait for them."""
        self.start_gather()
        if self.coming is None:
            return
        self.coming()
        self.coming = None
        if self.zero_stage == 3:
            assert self.weights is not None
            for view in self.views:
                view.parameter.data = view.view(self.weights)

    def release(self) -> None:
        """In ZeRO stage 3, free the weights; reading a parameter then gives NaN."""
        if self.zero_stage < 3:
            return
        if self.coming is not None:
            self.coming()
        self.coming = self.weights = None
        for view in self.views:
            shape = view.spec.local_shape
            view.parameter.data = absent(shape, self.weight_dtype, self.device)
