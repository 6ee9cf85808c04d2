"""One bucket: gradients and weights of some parameters, in flat tensors.

    | attention.weight   mlp.weight      .. | norm.weight   biases   .. | ... |
      decays, cut over tensor               | does not decay, whole     | padding
    | part of rank 0      | part of rank 1      | part of rank 2      | ..     |    (ZeRO)

Each parameter starts at a multiple of ALIGNMENT elements, and the end is padded so that the ranks
that hold the bucket have equal parts of it. Padding is zero and stays zero.

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) is how a bucket is stored. A rank has only its
own part of masters and moments (stage 1), of summed gradients too (2), and of weights too, but for
the layers in use (3). There is a class for each storage, with lasting bytes per parameter in bf16
on 2 ranks:

    Bucket           whole gradients, whole weights   18 in stage 0 (the own part is all), 12 in 1
    ShardedBucket    own gradients, whole weights     10 in stage 2
    GatheredBucket   own gradients, weights in use     8 in stage 3, see zero3.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron.parallel import kernels
from megatron.parallel.collectives import own_rows, start_gather, start_sum
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.sharding import FlatRange, ShardingSpec, TensorSlice

# Elements. Kernels such as torch's AdamW on a CPU round differently at odd addresses.
ALIGNMENT = 64

Named = tuple[str, nn.Parameter, ShardingSpec]


def nothing(*_: object) -> None:
    pass


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Deferral:
    """Collects the matmuls of layers' weight gradients in the half of a backward that computes only
    the gradients of activations (zero-bubble pipelines)."""

    works: list[Deferred] | None = None

    @property
    def is_on(self) -> bool:
        return self.works is not None

    def add(self, view: GradientView, work: Callable[[], object]) -> None:
        """work: adds the gradient to the view."""
        assert self.works is not None
        self.works.append((view, work))


@dataclass(eq=False)
class GradientView:
    """The elements [start, stop) of a bucket that belong to one parameter."""

    bucket: Bucket
    name: str
    parameter: nn.Parameter
    spec: ShardingSpec
    start: int
    deferral: Deferral
    dtype: torch.dtype  # of the gradient
    is_filled: bool = False  # whether a gradient came in this step (ZeRO 2, 3: this micro-batch)
    is_reached: bool = False  # whether one came in any step
    # If this rank has several stages: the lowest that gave it a gradient in the previous step.
    stage: int | None = None
    handle: Tensor | None = None  # stands for it in a compiled backward, see traced.py

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    @cached_property  # making a view takes as long as a small matmul
    def gradient(self) -> Tensor:
        """The sum so far, in the parameter's shape."""
        return self.of_bucket(self.bucket.gradients)

    @property
    def is_fp32(self) -> bool:
        """Whether the gradient is in fp32 or wider, so that many terms may be summed in place."""
        return self.dtype.itemsize >= torch.float32.itemsize

    def of_bucket(self, whole: Tensor) -> Tensor:
        """The parameter's elements of any flat tensor with the bucket's layout, in its shape."""
        return whole.narrow(0, self.start, self.parameter.numel()).view(self.parameter.shape)

    # A first gradient overwrites the old elements: no pass over the bucket sets them to zero.

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape, or with its leading dims flattened to one."""
        total = self.gradient.view(gradient.shape)
        if self.is_filled:
            total.add_(gradient)
        else:
            total.copy_(gradient)
        self.is_filled = True

    def add_matmul(self, dy: Tensor, x: Tensor) -> None:
        """Add dy' x, with dy [n, out] and x [n, in]."""
        total = self.gradient.view(-1, x.shape[1])
        kernels.add_matmul_(total, dy, x, accumulate=self.is_filled)
        self.is_filled = True

    def add_rows(self, index: Tensor, dy: Tensor) -> None:
        """Add dy [n, h] to the rows at `index` [n]."""
        if not self.is_filled:
            self.gradient.zero_()
        kernels.add_rows_(self.gradient, index, dy)
        self.is_filled = True


StartSum = Callable[..., Callable[[], Tensor]]
Reduction = Callable[..., Tensor]
"""The part of --gradient-reduction: takes gradients x [n] and the axis over which they are partial,
and returns their sum [n], the same on every rank of the axis."""


def sum_by(reduction: Reduction) -> StartSum:
    """`collectives.start_sum` by a reduction of one's own, which is over when it returns."""

    def start(x: Tensor, axis: Axis, owners: Axis, out: Tensor | None) -> Callable[[], Tensor]:
        total = reduction(x=x, axis=axis)
        if total.shape != x.shape:
            shapes = f"{list(x.shape)} in, {list(total.shape)} out"
            raise ValueError(
                f"--gradient-reduction: must return a sum of its input's shape: {shapes}"
            )
        own = total if owners.size == 1 else own_rows(total, axis)
        out = x if owners.size == 1 else torch.empty_like(own) if out is None else out
        out.copy_(own)
        return lambda: out

    return start


Deferred = tuple[GradientView, Callable[[], object]]
"""A gradient, and the work that adds it later."""


class Bucket:
    """Parameters of one dtype whose gradients are summed over the same axes, together; all of its
    gradients and weights last in memory.

    gradients: of all elements, in `dtype`. own_gradients: sums of the own part. weights: of all
    elements, in the parameters' dtype; the parameters are views of it. local: the own part as the
    optimizer updates it. own_segments: (range in the own part, spec of one of its parameters) of
    adjacent parameters with equal weight decay and shard axes.
    """

    custom_sum: StartSum | None = None  # in place of start_sum
    sums_each_micro_batch: ClassVar[bool] = False  # whether no rank keeps whole gradients
    keeps_weights: ClassVar[bool] = True  # whether whole weights last between the steps

    def __init__(
        self, named: Sequence[Named], dtype: torch.dtype, deferral: Deferral, shared: Axis
    ) -> None:
        """shared: the axis whose ranks divide the bucket, if its gradients are partial over it."""
        _, parameter, spec = named[0]
        self.dtype, self.weight_dtype, self.device = dtype, parameter.dtype, parameter.device
        axes = [axis for axis in spec.partial if axis.size > 1]
        self.shared = shared if shared in axes else ALONE
        # The shared axis first: then the other axes sum only the own part.
        self.axes = sorted(axes, key=lambda axis: axis is not self.shared)
        first = next((axis for axis in self.axes if not axis.is_of_stages), None)
        self.early_axis = self.shared if self.sums_each_micro_batch else first
        """The axis that `reduce` sums over, during the backward; `add_up` sums over the others.
        ZeRO stage 0: an all-reduce over the first axis; 1 and 2: a reduce-scatter over `shared`.
        None: no axis but those of stages. ALONE (stage 2): not partial over `shared`."""

        def kind(each: Named) -> tuple[bool, list[str]]:
            _, _, spec = each
            return not spec.decay, sorted(axis.name for axis in spec.shard_axes)

        self.views: list[GradientView] = []
        segments: list[tuple[int, int, ShardingSpec]] = []
        end = 0
        # Norm and AdamW take a segment as one tensor, not one for each parameter.
        for _, neighbours in groupby(sorted(named, key=kind), kind):
            start = end
            for name, parameter, spec in neighbours:
                view = GradientView(self, name, parameter, spec, end, deferral, dtype)
                self.views.append(view)
                end = _round_up(view.stop, ALIGNMENT)
            segments.append((start, end, spec))
        # A reduce-scatter of gloo takes equal parts only.
        self.size = _round_up(end, ALIGNMENT * prod(axis.size for axis in self.axes))
        share = self.size // self.shared.size
        self.part = slice(self.shared.rank * share, (self.shared.rank + 1) * share)
        self.own_segments: list[tuple[slice, ShardingSpec]] = []
        for start, stop, spec in segments:
            start, stop = max(start, self.part.start), min(stop, self.part.stop)
            if start < stop:
                local = slice(start - self.part.start, stop - self.part.start)
                self.own_segments.append((local, spec))

        self._gradients: Tensor | None = None
        self.own_gradients = (
            self.zeros(share) if self.sums_each_micro_batch else self.gradients[self.part]
        )
        self.weights: Tensor | None = None
        self.local: LocalShard | None = None
        self.is_of_layer = False  # whether its weights are gathered with a layer (zero3.py)
        self.missing_gradients = len(self.views)
        self.pending_sum: Callable[[], object] = nothing  # waits for it
        self.pending_weights: Callable[[], object] | None = None  # waits for those of all parts

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def gradients(self) -> Tensor:
        """Gradients of all elements; allocates them if need be."""
        # The head adds its gradient in the forward, so its bucket has memory from then on.
        if self._gradients is None:
            self._gradients = self.zeros(self.size)
        return self._gradients

    def start(self) -> None:
        """Start a step: discard all gradients so far."""
        self.wait()  # of an aborted step
        self.missing_gradients = len(self.views)
        for view in self.views:
            view.is_filled = False

    def reduce(self) -> None:
        """Start to sum the gradients over the axis `early_axis`."""
        gradients = self.fill_missing()
        if self.early_axis is not None:
            # In stage 1 a reduce-scatter into the own part, which leaves the rest undefined. Else
            # the own part is all: an all-reduce works in place, and ignores `out`.
            owners = self.shared if self.early_axis is self.shared else ALONE
            out = self.own_gradients
            self.pending_sum = self._start_sum(gradients, self.early_axis, owners, out)

    def _start_sum(
        self, x: Tensor, axis: Axis, owners: Axis, out: Tensor | None
    ) -> Callable[[], Tensor]:
        return (self.custom_sum or start_sum)(x, axis, owners, out=out)

    def fill_missing(self) -> Tensor:
        """`gradients`, with zeros for parameters without a gradient."""
        self.wait()
        gradients = self.gradients
        for view in self.views:
            view.is_reached |= view.is_filled
            if not view.is_filled:
                view.gradient.zero_()
        return gradients

    def add_up(self, *, is_of_stages: bool) -> None:
        """Start the sums over the other axes: those between pipeline stages, or all but those."""
        for axis in self.axes:
            if axis is not self.early_axis and axis.is_of_stages == is_of_stages:
                self.wait()
                gradients = self.own_gradients
                self.pending_sum = self._start_sum(gradients, axis, ALONE, gradients)

    def wait(self) -> None:
        """Wait for the sums that were started."""
        pending, self.pending_sum = self.pending_sum, nothing
        pending()

    def slices(self, part: Tensor, prefix: str = "") -> Iterator[TensorSlice]:
        """This rank's slice of each parameter, named prefix + its name, from `part`, a tensor laid
        out like the own part."""
        first = self.part.start
        for view in self.views:
            key = prefix + view.name
            if self.shared.size == 1:
                yield TensorSlice(key, view.spec, view.of_bucket(part))
                continue
            start = min(max(view.start, first), view.stop)
            stop = max(min(view.stop, self.part.stop), start)
            own_range = FlatRange(self.shared, start - view.start, stop - view.start)
            local = part[start - first :][: stop - start]
            yield TensorSlice(key, replace(view.spec, flat=own_range), local)

    @torch.no_grad()
    def hold_weights(self, kind: type[LocalShard]) -> LocalShard:
        """Make the parameters views of `weights`. Returns the own part for the optimizer, which
        calls `start_publish` and `end_publish` after a change of its masters."""
        self.weights = torch.zeros(self.size, dtype=self.weight_dtype, device=self.device)
        for view in self.views:
            weight = view.of_bucket(self.weights)
            weight.copy_(view.parameter)
            view.parameter.data = weight
        self.local = kind(self)
        return self.local

    @torch.no_grad()
    def start_gather_weights(self, *, is_rounded: bool = False) -> None:
        """Round the masters into the own part of the weights, and start to gather all parts."""
        self.end_publish()  # of an aborted step: its gather reads these weights
        assert self.local is not None
        assert self.weights is not None
        own_weights = self.weights[self.part]
        if not is_rounded:
            self.local.write(own_weights)
        self.pending_weights = start_gather(own_weights, self.shared, out=self.weights)

    def start_publish(self, *, is_rounded: bool = False) -> None:
        """After a change of the masters: start to bring the parameters of all ranks up to date.
        is_rounded: the optimizer has filled `local.half`."""
        assert self.local is not None
        self.local.round()
        self.start_gather_weights(is_rounded=is_rounded)

    def end_publish(self) -> None:
        if self.pending_weights is not None:
            self.pending_weights()
            self.pending_weights = None


class ShardedBucket(Bucket):
    """ZeRO stage 2: each rank keeps the summed gradients of its own part. Gradients of all elements
    exist from the first one of a micro-batch until they are summed."""

    sums_each_micro_batch = True
    has_sum = False  # whether gradients of this step were added to `own_gradients`

    def start(self) -> None:
        super().start()
        self.has_sum = False

    def reduce(self) -> None:
        """Start to sum the gradients of one micro-batch over the ranks that divide the bucket."""
        gradients = self.fill_missing()
        # Sums of several micro-batches are added in another order than in stages 0 and 1: results
        # differ by 1e-6 in fp32.
        arrived = self._start_sum(gradients, self.shared, self.shared, None)
        self._gradients = None
        for view in self.views:
            view.is_filled = False
            vars(view).pop("gradient", None)  # its memory is released
        self.pending_sum = partial(self._add, arrived)

    def _add(self, arrived: Callable[[], Tensor]) -> None:
        """Add the own part of one micro-batch's sum to `own_gradients`."""
        if self.has_sum:
            self.own_gradients.add_(arrived())
        else:
            self.own_gradients.copy_(arrived())
        self.has_sum = True


class LocalShard:
    """A rank's part of a bucket, as an optimizer updates it.

    gradients: to read. masters: weights in the gradients' dtype, or a view of the bucket's weights
    if these have that dtype and last. half: else these, if they last. See HostShard for a part that
    is on the host.
    """

    half: Tensor | None = None

    def __init__(self, bucket: Bucket) -> None:
        assert bucket.weights is not None
        self.gradients = bucket.own_gradients
        self.masters = bucket.weights[bucket.part]
        self.is_view = bucket.keeps_weights and bucket.weight_dtype == bucket.dtype
        if not self.is_view:
            self.half = self.masters if bucket.keeps_weights else None
            self.masters = self.masters.to(bucket.dtype, copy=True)

    def zeros(self) -> Tensor:
        """A tensor for a moment."""
        return torch.zeros_like(self.masters)

    def start(self) -> Callable[[], object]:
        """Start to bring `gradients` up to date. Returns a function that waits for it."""
        return nothing

    def round(self) -> None:
        """After a change of the masters, before `write`."""

    def write(self, own_weights: Tensor) -> None:
        """Round the masters into the own part of the weights."""
        if not self.is_view:
            own_weights.copy_(self.masters)


UNITS = "units_of_zero3"
"""The attribute of a model in ZeRO stage 3 with its Units (zero3.py). Its forward gathers weights:
ranks that share them run equally many."""


def gathered(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which the root's weights of a model of ZeRO stage 3 are gathered; other models
    have theirs anyway. A nested one does nothing."""
    return vars(model)[UNITS].gathered() if UNITS in vars(model) else nullcontext()


def require_whole(model: nn.Module, reader: str) -> None:
    """Raise ValueError, naming the reader, for a model whose parameters no rank has whole."""
    if UNITS in vars(model):
        raise ValueError(
            f"{reader}: in ZeRO stage 3 no rank has the parameters; a checkpoint of the "
            "optimizer's slices() loads whole"
        )
