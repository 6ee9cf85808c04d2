"""One bucket: gradients and weights of some parameters, in flat tensors.

    | attention.weight   mlp.weight      .. | norm.weight   biases   .. | ... |
      decays, cut over tensor               | does not decay, whole     | padding
    | part of rank 0      | part of rank 1      | part of rank 2      | ..     |    (ZeRO)

Each parameter starts at a multiple of ALIGNMENT elements, and the end is padded so that the ranks
that hold the bucket have equal parts of it. Padding is zero and stays zero.

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) is how a bucket is stored. A rank has only its
own part of masters and moments (stage 1), of summed gradients too (2), and of weights too, but for
the layers in use (3). There is a class for each storage:

    Bucket           whole gradients, whole weights      stages 0 (the own part is all) and 1
    ShardedBucket    own gradients, whole weights        stage 2
    GatheredBucket   own gradients, weights in use       stage 3, see zero3.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import start_all_reduce, start_gather, start_sum
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.sharding import Deferral, FlatRange, GradientView, ShardingSpec, TensorSlice
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
    """Parameters of one dtype whose gradients are summed over the same axes, together; all of its
    gradients and weights last in memory.

    flat: gradients of all elements. own: summed gradients of the own part. weights: weights of all
    elements, in the parameters' dtype; the parameters are views of it. local: the own part as the
    optimizer updates it.
    """

    sums_each_micro_batch: ClassVar[bool] = False  # whether no rank keeps whole gradients
    keeps_weights: ClassVar[bool] = True  # whether whole weights last between the steps

    def __init__(
        self, named: Sequence[Named], deferral: Deferral, *, wide: bool, shared: Axis
    ) -> None:
        """shared: the axis whose ranks divide the bucket, if its gradients are partial over it."""
        _, first, spec = named[0]
        axes = [axis for axis in spec.partial if axis.size > 1]
        self.shared = shared if shared in axes else ALONE
        self.axes = sorted(axes, key=lambda axis: axis is not self.shared)
        self.weight_dtype, self.device = first.dtype, first.device
        self.dtype = gradient_dtype(first, wide)
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
        self.gradients: Tensor | None = None
        self.own = self.make_own()
        self.summed = self.first_axis()
        self.weights: Tensor | None = None
        self.local: LocalPart | None = None
        self.is_of_layer = False  # whether its weights are gathered with a layer (zero3.py)
        self.missing = len(self.views)
        self.pending: Callable[[], object] = nothing  # waits for sums of gradients
        self.coming: Callable[[], object] | None = None  # waits for the weights of all parts

    def make_own(self) -> Tensor:
        return self.flat[self.part]

    def first_axis(self) -> Axis | None:
        """The axis that `reduce` sums over."""
        return next((axis for axis in self.axes if not axis.is_of_stages), None)

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def flat(self) -> Tensor:
        """Gradients of all elements; allocates them if need be."""
        if self.gradients is None:
            self.gradients = self.zeros(self.size)
        return self.gradients

    def start(self) -> None:
        """Start a step: discard all gradients so far."""
        self.wait()  # of an aborted step
        self.missing = len(self.views)
        for view in self.views:
            view.is_filled = False

    def reduce(self) -> None:
        """Start to sum the gradients over the axis `summed`."""
        flat = self.fill_missing()
        if self.summed is not None:
            stream = self.shared if self.summed is self.shared else ALONE
            self.pending = start_sum(flat, self.summed, stream, out=self.own)

    def fill_missing(self) -> Tensor:
        """`flat`, with zeros for parameters without a gradient."""
        self.wait()
        flat = self.flat
        for view in self.views:
            view.is_reached |= view.is_filled
            if not view.is_filled:
                view.gradient.zero_()
        return flat

    def add_up(self, *, is_of_stages: bool) -> None:
        """Start the sums over the other axes: those between pipeline stages, or all but those."""
        for axis in self.axes:
            if axis is not self.summed and axis.is_of_stages == is_of_stages:
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
    def hold_weights(self, kind: type[LocalPart]) -> LocalPart:
        """Make the parameters views of `weights`. Returns the own part for the optimizer, which
        calls `start_publish` and `end_publish` after a change of its masters."""
        self.weights = torch.zeros(self.size, dtype=self.weight_dtype, device=self.device)
        for view in self.views:
            own = view.view(self.weights)
            own.copy_(view.parameter)
            view.parameter.data = own
        self.local = kind(self)
        return self.local

    @torch.no_grad()
    def start_gather(self) -> None:
        """Round the masters into the own part of the weights, and start to gather all parts."""
        if self.coming is None and self.local is not None and self.weights is not None:
            own = self.weights[self.part]
            self.local.write(own)
            self.coming = start_gather(own, self.shared, out=self.weights)

    def start_publish(self) -> None:
        """After a change of the masters: start to bring the parameters of all ranks up to date."""
        if self.local is not None:
            self.local.round()
        self.start_gather()

    def end_publish(self) -> None:
        if self.coming is not None:
            self.coming()
            self.coming = None


class ShardedBucket(Bucket):
    """ZeRO stage 2: each rank keeps the summed gradients of its own part. Gradients of all elements
    exist from the first one of a micro-batch until they are summed."""

    sums_each_micro_batch = True
    has_sum = False  # whether gradients of this step were added to `own`

    def make_own(self) -> Tensor:
        return self.zeros(self.part.stop - self.part.start)

    def first_axis(self) -> Axis:
        return self.shared

    def start(self) -> None:
        super().start()
        self.has_sum = False

    def reduce(self) -> None:
        """Start to sum the gradients of one micro-batch over the ranks that divide the bucket."""
        flat = self.fill_missing()
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


class LocalPart:
    """A rank's part of a bucket, as an optimizer updates it.

    gradients: to read. masters: weights in the gradients' dtype, or a view of the bucket's weights
    if these have that dtype and last. See HostPart for a part that is on the host.
    """

    def __init__(self, bucket: Bucket) -> None:
        """Masters are zero if the bucket has no weights now."""
        self.gradients = bucket.own
        if bucket.weights is None:
            self.masters, self.is_view = torch.zeros_like(bucket.own), False
        else:
            own = bucket.weights[bucket.part]
            self.masters, self.is_view = own.to(bucket.dtype), own.dtype == bucket.dtype

    def zeros(self) -> Tensor:
        """A tensor for a moment."""
        return torch.zeros_like(self.masters)

    def start(self) -> Callable[[], object]:
        """Start to bring `gradients` up to date. Returns a function that waits for it."""
        return nothing

    def round(self) -> None:
        """After a change of the masters, before `write`."""

    def write(self, own: Tensor) -> None:
        """Round the masters into the own part of the weights."""
        if not self.is_view:
            own.copy_(self.masters)


class OfUnit(nn.Module):
    """A base class added to that of a module whose calls go through a Unit of zero3.py."""

    unit: Any

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.unit.run(super().__call__, *arguments, **named)


def is_gathered(model: nn.Module) -> bool:
    """Whether a forward gathers weights (ZeRO stage 3); then ranks that share them run equally many
    forwards."""
    return isinstance(model, OfUnit) and bool(model.unit.is_root)


def gathered(model: Any) -> AbstractContextManager[None]:
    """Context in which the root's weights of a model of ZeRO stage 3 are gathered; other models
    have theirs anyway. A nested one does nothing."""
    if not is_gathered(model):
        return nullcontext()
    whole: AbstractContextManager[None] = model.unit.gathered()
    return whole


def require_whole(model: nn.Module, reader: str) -> None:
    """Raise ValueError, naming the reader, for a model whose parameters no rank has whole."""
    if is_gathered(model):
        raise ValueError(
            f"{reader}: in ZeRO stage 3 no rank has the parameters; a checkpoint of the "
            "optimizer's slices() loads whole"
        )
