"""Gradients and weights in buckets: flat tensors of fp32 (or the parameters' wider dtype; of their
own dtype where that is asked for).

Our layers add the gradients of large weights to the buckets themselves (layers.py); a hook adds the
`.grad` of all other parameters and sets it to None. So all accumulate in fp32, whatever the
parameters' dtype, a tied weight's two uses too. In the last micro-batch a bucket that has all its
gradients starts its reduction while the backward goes on. The same buckets serve accumulation,
reduction, the norm and the optimizer: our own, or one of torch's, which reads `.grad`.

    one bucket:   | attention.weight   mlp.weight      .. | norm.weight   biases   .. | ... |
                    decays, cut over tensor               | does not decay, whole     | padding
    ZeRO:         | part of rank 0      | part of rank 1      | part of rank 2      | ..      |

Each parameter starts at a multiple of ALIGNMENT elements, and the end is padded so that the ranks
that hold the bucket have equal parts of it. Padding is zero and stays zero.

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) is how a bucket is stored and reduced: a rank has
masters and moments of its own part alone (stage 1), the summed gradients too (2), and the weights
but for those of the layers in use (3, see zero3.py). Below stage 1 the own part is all of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import ReduceOp
from torch.linalg import vector_norm

from megatron.parallel.collectives import (
    all_reduce,
    start_all_reduce,
    start_gather,
    start_sum,
)
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.sharding import (
    Deferral,
    FlatRange,
    GradientView,
    GradientViews,
    ShardedModule,
    ShardingSpec,
    TensorSlice,
    absent,
    mesh_of,
    sharding_specs,
)
from megatron.parallel.zero3 import Units

BUCKET_BYTES = 64 * 2**20
NAMED = 5  # parameters that a message names; of more it gives the number
ALIGNMENT = 64  # elements; kernels such as torch's AdamW round differently at odd addresses
IN_FLIGHT = 2  # reductions from ZeRO stage 2 on, whose buckets are in memory

Named = tuple[str, nn.Parameter, ShardingSpec]
Deferred = tuple[GradientView, Callable[[], object]]


def _nothing(*_: object) -> None:
    pass


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _kind(named: Named) -> tuple[bool, list[str]]:
    """What parameters of one segment have in common: weight decay and the axes that cut them."""
    *_, spec = named
    return not spec.decay, sorted(axis.name for axis in spec.shard_axes)


def _dtype(parameter: nn.Parameter, wide: bool) -> torch.dtype:
    """That its gradient is added up in."""
    return torch.promote_types(parameter.dtype, torch.float32) if wide else parameter.dtype


@dataclass(frozen=True)
class Segment:
    """Neighbours in a bucket that decay alike and are cut along the same axes: [start, stop)."""

    start: int
    stop: int
    spec: ShardingSpec  # of one of them


class Bucket:
    """Parameters of one dtype whose gradients are summed over the same axes, at once.

    flat: gradients of all elements. own: those of the own part, summed. weights: of all elements,
    in the parameters' dtype, which are views of them. masters: weights of the own part in the
    gradients' dtype, or the same memory.
    """

    def __init__(
        self, named: Sequence[Named], deferral: Deferral, *, wide: bool, stage: int, shared: Axis
    ) -> None:
        """stage: of ZeRO. shared: the axis whose ranks share the bucket out, if the gradients are
        partial over it."""
        _, first, spec = named[0]
        axes = [axis for axis in spec.partial if axis.size > 1]
        self.shared = shared if shared in axes else ALONE
        self.axes = sorted(axes, key=lambda axis: axis is not self.shared)
        self.stage, self.weight_dtype = stage, first.dtype
        self.dtype, self.device = _dtype(first, wide), first.device
        self.views: list[GradientView] = []
        self.segments: list[Segment] = []
        end = 0
        for _, neighbours in groupby(sorted(named, key=_kind), _kind):
            start = end
            for name, parameter, its_spec in neighbours:
                flat = (self.dtype, lambda: self.flat)
                self.views.append(GradientView(name, parameter, its_spec, end, deferral, *flat))
                end = _round_up(self.views[-1].stop, ALIGNMENT)
            self.segments.append(Segment(start, end, its_spec))
        self.size = _round_up(end, ALIGNMENT * prod(axis.size for axis in self.axes))
        share = self.size // self.shared.size
        self.part = slice(self.shared.rank * share, (self.shared.rank + 1) * share)
        self.has_part = False  # whether gradients of this step were added to `own`
        self.summed: Axis | None = None  # of a step before ZeRO 2 the axis that `reduce` sums over
        if stage < 2:
            self.summed = next((axis for axis in self.axes if not axis.is_of_stages), None)
            self.gradients: Tensor | None = self.zeros(self.size)
            self.own = self.gradients[self.part]
        else:
            self.gradients, self.own = None, self.zeros(share)
        self.weights: Tensor | None = None
        self.masters: Tensor | None = None
        self.is_apart = True  # masters, from weights
        self.is_of_layer = False  # whether its weights are gathered with a layer (zero3.py)
        self.missing = len(self.views)
        self.pending: Callable[[], object] = _nothing  # of gradients
        self.coming: Callable[[], object] | None = None  # weights

    def zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def flat(self) -> Tensor:
        """From ZeRO stage 2 on its memory comes with the first gradient, and goes with `reduce`."""
        if self.gradients is None:
            self.gradients = self.zeros(self.size)
        return self.gradients

    def reduce(self) -> None:
        """Start the sum of this rank's gradients over the ranks that share the bucket out; before
        ZeRO stage 2 over the first of the axes."""
        self.wait()
        flat = self.flat
        for view in self.views:
            if not view.is_filled:  # no gradient came
                view.gradient.zero_()
        if self.stage < 2:
            if self.summed is not None:
                stream = self.shared if self.summed is self.shared else ALONE
                self.pending = start_sum(flat, self.summed, stream, out=self.own)
            return
        arrived = start_sum(flat, self.shared, self.shared)
        self.gradients = None
        for view in self.views:
            view.is_filled = False
        self.pending = partial(self._add, arrived)

    def _add(self, arrived: Callable[[], Tensor]) -> None:
        """The sum of one micro-batch, of the own part."""
        if self.has_part:
            self.own.add_(arrived())
        else:
            self.own.copy_(arrived())
        self.has_part = True

    def add_up(self, *, is_of_stages: bool) -> None:
        """Start the sums over the other axes: those that join pipeline stages, or the others."""
        first = self.summed if self.stage < 2 else self.shared
        for axis in self.axes:
            if axis is not first and axis.is_of_stages == is_of_stages:
                self.wait()
                self.pending = start_all_reduce(self.own, axis)

    def wait(self) -> None:
        """For the sums that were started."""
        pending, self.pending = self.pending, _nothing
        pending()

    def own_segments(self) -> Iterator[tuple[slice, Segment]]:
        """(where it is in the own part, segment) of those that are there."""
        first = self.part.start
        for each in self.segments:
            start, stop = max(each.start, first), min(each.stop, self.part.stop)
            if start < stop:
                yield slice(start - first, stop - first), each

    def slices(self, part: Tensor, prefix: str = "") -> Iterator[TensorSlice]:
        """What this rank has of each parameter, by its name behind the prefix, of a tensor that is
        laid out like the own part."""
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
    def hold_weights(self, device: torch.device | None = None) -> Tensor:
        """From now on the parameters are views of `weights`; from ZeRO stage 3 on, while these are
        there. Returns the masters. device: of the masters, where they lie apart."""
        if self.stage < 3:
            self.weights = torch.zeros(self.size, dtype=self.weight_dtype, device=self.device)
            for view in self.views:
                own = view.view(self.weights)
                own.copy_(view.parameter)
                view.parameter.data = own
            self.masters = self.weights[self.part]
            self.is_apart = device is not None or self.weight_dtype != self.dtype
            if self.is_apart:
                self.masters = self.masters.to(device or self.device, self.dtype, copy=True)
            return self.masters
        self.masters = self.zeros(self.part.stop - self.part.start).to(device or self.device)
        parameters = {view.name: view.parameter for view in self.views}
        for each in self.slices(self.masters):
            if (flat := each.spec.flat) is None:
                each.local.copy_(parameters[each.key])
            else:
                each.local.copy_(parameters[each.key].flatten()[flat.start : flat.stop])
        self.release()
        return self.masters

    @torch.no_grad()
    def start_gather(self) -> None:
        """Round the masters to the own part of the weights, and start to gather those of all."""
        if self.coming is not None or self.masters is None:
            return
        if self.stage == 3:
            if self.weights is not None:
                return
            self.weights = torch.empty(self.size, dtype=self.weight_dtype, device=self.device)
        assert self.weights is not None
        own = self.weights[self.part]
        if self.is_apart:
            own.copy_(self.masters)
        self.coming = start_gather(own, self.shared, out=self.weights)

    def gather(self) -> None:
        """Wait until the weights of all are there."""
        self.start_gather()
        if self.coming is None:
            return
        self.coming()
        self.coming = None
        if self.stage == 3:
            assert self.weights is not None
            for view in self.views:
                view.parameter.data = view.view(self.weights)

    def release(self) -> None:
        """From ZeRO stage 3 on: the weights go; who reads a parameter sees NaN."""
        if self.stage < 3:
            return
        if self.coming is not None:
            self.coming()
        self.coming = self.weights = None
        for view in self.views:
            shape = view.spec.local_shape
            view.parameter.data = absent(shape, self.weight_dtype, self.device)


def _assemble(
    model: nn.Module,
    table: Mapping[str, ShardingSpec],
    most: int,
    wide: bool,
    unit_of: Mapping[str, int],
    **settings: Any,
) -> list[Bucket]:
    """Buckets of at most `most` bytes, or one parameter where it is larger, in the order in which
    the backward fills them: it reaches the last layers first. unit_of: parameters whose numbers
    differ share no bucket."""
    found: list[list[Named]] = []
    open_buckets: dict[object, list[Named]] = {}
    free: dict[object, int] = defaultdict(int)
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    for name, parameter in reversed(trained):
        spec = table[name]
        axes = tuple(axis.name for axis in spec.partial if axis.size > 1)
        key = unit_of.get(name), parameter.dtype, axes
        if free[key] < (size := parameter.numel() * _dtype(parameter, wide).itemsize):
            open_buckets[key], free[key] = [], most
            found.append(open_buckets[key])
        open_buckets[key].append((name, parameter, spec))
        free[key] -= size
    return [Bucket(named, wide=wide, **settings) for named in found]


class GradientBuckets:
    """All gradients of a model. One step:

    forward and backward of each micro-batch inside accumulate(), or after start() the backward
    alone; then every bucket's `flat` holds the sum over micro-batches and partial axes, and so does
    `.grad` of each parameter, in its dtype, for an optimizer of torch: zeros where no micro-batch
    reached it. Nothing is divided: a loss that is a mean over the global batch has to be the sum
    over this rank's samples / the number of all.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        specs: Mapping[str, ShardingSpec] | None = None,
        mesh: Mesh | None = None,
        direct: bool = True,
        sets_grad: bool = True,
        wide: bool = True,
        zero_stage: int = 0,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        """specs: of parameters that no layer of ours owns, as `others` of sharding_specs. mesh: by
        default that of our layers in the model; a model without them needs it.

        direct: True: our layers add the gradients of their weights to the buckets, as soon as they
        have them. False, and in layers that torch.compile has compiled: all gradients go through
        autograd and `.grad`, in the parameters' dtype. In fp32 or wider the numbers are the same;
        in a narrow dtype both round the gradient of a micro-batch to it, the head's by its chunks.

        sets_grad: False for an optimizer that reads the buckets themselves, as ours: there is no
        `.grad`, and what ranks hold in common is not compared here but by check_replicas.

        wide: False adds gradients of micro-batches and ranks up in the parameters' own dtype: in
        bf16 half the memory and traffic, and a sum of 8 bits.

        zero_stage: of ZeRO; from 1 on there is no `.grad`, and MasterWeights is the optimizer.
        units: the modules whose weights are gathered together in stage 3; by default the elements
        of the outermost lists of modules of one class. With them buckets hold one unit each.
        """
        mesh = mesh or mesh_of(model)
        if mesh is None:
            raise ValueError("a model without layers of megatron.api needs mesh=")
        if zero_stage and sets_grad:
            raise ValueError(f"zero_stage={zero_stage} takes sets_grad=False: .grad is in parts")
        table = sharding_specs(model, specs, mesh=mesh)
        self.mesh, self.zero_stage = mesh, zero_stage
        self.deferral = Deferral()
        self.units = Units(model, units) if units is not None or zero_stage == 3 else None
        self.buckets = _assemble(
            model,
            table,
            bucket_bytes,
            wide,
            self.units.of_parameters if self.units is not None else {},
            deferral=self.deferral,
            stage=zero_stage,
            shared=mesh.replicas if zero_stage else ALONE,
        )
        if self.units is not None and zero_stage == 3:
            self.units.take(self.buckets)
        # Every rank of a tie adds up its copies in one order.
        tied = [each for each in self.buckets if any(axis.is_of_stages for axis in each.axes)]
        self.tied = sorted(tied, key=lambda each: min(view.name for view in each.views))
        self.is_last: bool | None = None  # None: outside of a backward
        self.stage: int | None = None  # of the backward, where this rank has several
        self.lowest: dict[str, int] = {}  # stage that a parameter had a gradient of, in this step
        self.in_step = self.is_complete = False
        self.next = 0  # the first bucket whose reduction has not started
        self.reducing = deque[Bucket]()  # from ZeRO stage 2 on
        self.sets_grad = sets_grad
        self.on_gradient: Callable[[GradientView], object] = _nothing  # after one was added to
        views = {id(view.parameter): view for view in self.views}
        for module in model.modules():
            if isinstance(module, ShardedModule):
                own = {name: views.get(id(module.shard_of(name))) for name in module.specs}
                known = {name: view for name, view in own.items() if direct and view is not None}
                module.gradient_views = GradientViews(known)
        self.to_compare = list(self.views)  # those whose gradient was zero so far
        self.checked_weights = False
        self.nodes: list[Node] = []  # kept alive, since hooks go with the nodes that they hang on
        for bucket in self.buckets:
            for view in bucket.views:
                # A hook of the node runs also where a layer returned None, as its gradient is in
                # the bucket already; one of the parameter would not.
                node = get_gradient_edge(view.parameter).node
                node.register_hook(partial(self._collect, bucket, view))
                self.nodes.append(node)

    @property
    def views(self) -> Iterator[GradientView]:
        return (view for bucket in self.buckets for view in bucket.views)

    def start(self) -> None:
        """Begin a step before its first forward: gradients so far are forgotten."""
        if self.sets_grad:
            if not self.checked_weights:
                self._check_weights()
            for view in self.views:
                view.parameter.grad = None  # of the step before
        self.in_step, self.is_complete, self.next = True, False, 0
        for bucket in self.buckets:
            bucket.wait()  # of a step that was given up
            bucket.missing, bucket.has_part = len(bucket.views), False
            for view in bucket.views:
                view.is_filled = False

    def _collect(self, bucket: Bucket, view: GradientView, *_: object) -> None:
        """Runs when the backward has passed all uses of a parameter."""
        if self.is_last is None:
            raise RuntimeError(
                "backward() outside of accumulate(), or after other GradientBuckets were made of "
                "this model: no rank would see the gradients of the others"
            )
        if self.completes and not bucket.missing:
            raise RuntimeError(
                f"{view.name} has a second gradient in the last accumulate(): each backward() "
                "takes an accumulate() of its own, and torch's checkpoint use_reentrant=False"
            )
        if view.parameter.grad is not None:
            view.add(view.parameter.grad)
            view.parameter.grad = None
        if view.is_filled:
            self.on_gradient(view)
        if self.completes and view.stage == self.stage:
            self._complete([(bucket, view)])
        if self.stage is not None:
            self.lowest[view.name] = min(self.stage, self.lowest.get(view.name, self.stage))

    @property
    def completes(self) -> bool:
        """Whether the backward at hand is the last before a reduction: from ZeRO stage 2 on, where
        no rank keeps whole gradients, each one."""
        return bool(self.is_last) or self.zero_stage >= 2

    def _complete(self, found: Iterable[tuple[Bucket, GradientView]]) -> None:
        """These have their gradient of all micro-batches: reduce the buckets that are full."""
        for bucket, _ in found:
            bucket.missing -= 1
            if not bucket.missing and bucket.is_of_layer:
                bucket.release()
        # In one order on all ranks, whichever layers their samples take.
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self.next]
        bucket.reduce()
        self.next += 1
        if self.zero_stage >= 2:
            self.reducing.append(bucket)
            if len(self.reducing) > IN_FLIGHT:
                self.reducing.popleft().wait()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        """The backward of one micro-batch runs inside, and without start() its forward too, in
        which the output layer with its loss adds its gradient; with is_last each bucket is reduced
        as it fills, and on leaving the gradients are complete."""
        if not self.in_step:
            if any(view.is_filled for view in self.views):
                raise RuntimeError(
                    "a forward outside of GradientBuckets.accumulate has added gradients: run it "
                    "inside, or under torch.no_grad() where it has no backward"
                )
            self.start()
        with self.backward(is_last=is_last):
            yield
        if is_last:
            self.finish()

    @contextmanager
    def backward(
        self, *, is_last: bool, stage: int | None = None, is_deferred: bool = False
    ) -> Iterator[list[Deferred]]:
        """One backward runs inside, between start() and finish().

        is_last: it is the last one, or the last of its stage. stage: the number of the virtual
        pipeline stage, where this rank has several. is_deferred: our layers leave the gradients of
        their weights to `add_deferred`, which gets what this returns, once the `with` has ended.
        """
        if self.zero_stage >= 2 and (stage is not None or is_deferred):
            raise ValueError("from ZeRO stage 2 on a micro-batch has one backward, and no halves")
        deferred: list[Deferred] = []
        self.is_last, self.stage = is_last and not is_deferred, stage
        self.deferral.works = deferred if is_deferred else None
        try:
            yield deferred
        finally:
            self.is_last = self.stage = self.deferral.works = None
        if self.zero_stage >= 2:
            self._reduce_all()
            self.next = 0
            for bucket in self.buckets:
                bucket.missing = len(bucket.views)

    @torch.no_grad()
    def add_deferred(
        self, deferred: Sequence[Deferred], *, is_last: bool, stage: int | None = None
    ) -> None:
        """The other half of a backward: as of `backward`."""
        for view, work in deferred:
            work()
            self.on_gradient(view)
        # Of several stages, any may be the last to add to what they share: `finish` reduces it.
        if is_last and stage is None:
            self._complete((bucket, view) for bucket in self.buckets for view in bucket.views)

    def _reduce_all(self) -> None:
        """What is left: a backward may not have reached every parameter."""
        while self.next < len(self.buckets):
            self._reduce_next()

    def finish(self) -> None:
        """End a step: reduce what is left and wait for all reductions."""
        if self.zero_stage < 2:
            self._reduce_all()
        self.reducing.clear()
        for bucket in self.buckets:
            bucket.add_up(is_of_stages=False)
        for bucket in self.tied:  # behind all messages between stages
            bucket.add_up(is_of_stages=True)
        for bucket in self.buckets:
            bucket.wait()
            bucket.release()
        for view in self.views:
            view.is_filled = False
            view.stage = self.lowest.get(view.name, view.stage)
        self.lowest.clear()
        self.in_step, self.is_complete = False, True
        if not self.sets_grad:
            return
        if self.to_compare:
            self._check_gradients()
        for view in self.views:
            if view.parameter.requires_grad:
                view.parameter.grad = view.gradient.to(view.parameter.dtype)

    def _check_weights(self) -> None:
        """Before the first step: weights that several ranks hold are equal on them."""
        self.checked_weights = True
        views = list(self.views)
        weights, specs = [each.parameter.detach() for each in views], [each.spec for each in views]
        axes = [axis for axis in self.mesh.axes if not axis.is_of_stages]
        differing, _ = self._compare(weights, specs, axes)
        if names := [views[number].name for number in differing]:
            raise RuntimeError(
                f"the initial weights of {_listed(names)} differ between ranks: on every rank the "
                "same torch.manual_seed() before the model is built makes them equal"
            )

    def _check_gradients(self) -> None:
        """After a step: gradients that the ranks of one model hold in common are equal on them,
        unless these read other samples, draw other numbers, or a layer stands where its input is
        cut."""
        views = self.to_compare
        axes = [axis for axis in self.mesh.model_parallel.parts if not axis.is_of_stages]
        gradients, specs = [each.gradient for each in views], [each.spec for each in views]
        differing, zero = self._compare(gradients, specs, axes)
        self.to_compare = [views[number] for number in zero]
        if names := [views[number].name for number in differing]:
            raise RuntimeError(
                f"gradients of {_listed(names)} differ between the ranks of one model: between a "
                "column and a row layer stands a layer that every rank holds whole, or these ranks "
                'read other samples (mesh.rank("batch") numbers those that may) or draw other '
                "random numbers"
            )

    def _compare(
        self, tensors: Sequence[Tensor], specs: Sequence[ShardingSpec], axes: Sequence[Axis]
    ) -> tuple[list[int], list[int]]:
        """(those that differ on ranks that hold the same shard along these axes, those that are
        zero), by number, the same on every rank. What is noise beside the largest may differ."""
        if not tensors:  # of a pipeline stage without parameters
            return [], []
        wide = [each.double() for each in tensors]
        own = torch.stack([torch.stack([each.sum(), each.norm()]) for each in wide], dim=1)
        differs, norm = torch.zeros_like(own[0]), own[1].clone()
        for axis in (axis for axis in axes if axis.size > 1):
            highest, lowest = all_reduce(torch.stack([own, -own]), axis, ReduceOp.MAX)
            most = 1e-4 * highest[1] + 1e-7 * highest[1].max()
            apart = (highest + lowest > most).any(dim=0)
            held = [axis in spec.copied_over(axis) for spec in specs]
            differs += apart & torch.tensor(held, device=apart.device)
        # The ranks of other pipeline stages have other parameters.
        for axis in (each for each in self.mesh.axes if each.size > 1 and not each.is_of_stages):
            all_reduce(differs, axis, ReduceOp.MAX)
            all_reduce(norm, axis, ReduceOp.MAX)
        found = torch.stack([differs, norm]).tolist()
        of_differing = [number for number, each in enumerate(found[0]) if each]
        return of_differing, [number for number, each in enumerate(found[1]) if not each]

    def squares(self) -> Tensor:
        """This rank's term of the squared global L2 norm, an fp64 scalar.

        The terms add up over the mesh's `model_parallel`; what several of its ranks hold counts on
        the owner. On the others its weight is 0, which still makes the sum NaN where it is not
        finite. Under ZeRO every rank calls this: parts are added up here.
        """
        device = self.buckets[0].device if self.buckets else self.mesh.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        shared = self.mesh.replicas if self.zero_stage else ALONE
        for bucket in self.buckets:
            for own, segment in bucket.own_segments():
                # Of few elements at a time, as a CPU adds squares one by one in fp32: the norm of
                # 10^5 is wrong by 1e-6, of 10^8 by 1e-2. No part cuts these.
                rows = bucket.own[own].view(-1, ALIGNMENT)
                norms = vector_norm(
                    rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)
                )
                is_owner = segment.spec.is_owner(self.mesh.model_parallel)
                is_owner = is_owner and (bucket.shared is shared or shared.rank == 0)
                total += float(is_owner) * norms.double().square().sum()
        return all_reduce(total, shared)

    def slices(self) -> Iterator[TensorSlice]:
        """What this rank has of each gradient behind a step, by the parameter's name."""
        return (each for bucket in self.buckets for each in bucket.slices(bucket.own))


@torch.no_grad()
def clip_grad_norm(gradients: GradientBuckets, max_norm: float) -> Tensor:
    """Scale all gradients such that their global L2 norm is at most `max_norm`; returns the norm
    before, an fp64 scalar, the same on every rank (every rank calls this).

    The buckets are scaled, of which `.grad` is a view, or in a narrower dtype set anew: change
    `.grad` after this, not before.

    torch.nn.utils.clip_grad_norm_ takes the norm of this rank's shards alone, which is another one
    on every rank.
    """
    if not isinstance(gradients, GradientBuckets) or not gradients.is_complete:
        raise ValueError(
            "clip_grad_norm takes the GradientBuckets of a model, behind accumulate(is_last=True)"
        )
    norm = all_reduce(gradients.squares(), gradients.mesh.model_parallel).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for bucket in gradients.buckets:
        bucket.own.mul_(factor)
    for view in gradients.views:
        if view.parameter.grad is not None and view.parameter.dtype != view.gradient.dtype:
            view.parameter.grad.copy_(view.gradient)
    return norm
