"""Gradients of one step, in buckets: flat tensors of fp32 (or the parameters' wider dtype; of
their own dtype where that is asked for).

Our layers add the gradients of large weights to the buckets themselves (layers.py); a hook adds the
`.grad` of all other parameters and sets it to None. So all accumulate in fp32, whatever the
parameters' dtype, a tied weight's two uses too. In the last micro-batch a bucket that has all its
gradients starts its reduction while the backward goes on. The same buckets serve accumulation,
reduction, the norm and the optimizer: our own, or one of torch's, which reads `.grad`.

    one bucket:   | attention.weight   mlp.weight      .. | norm.weight   biases   .. | ... |
                    decays, cut over tensor               | does not decay, whole     | padding

Each parameter starts at a multiple of ALIGNMENT elements, and the end is padded so that the ranks
that hold the bucket could have equal parts of it. Padding is zero and stays zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import ReduceOp
from torch.linalg import vector_norm

from megatron.parallel.collectives import all_reduce, start_all_reduce
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.sharding import (
    Deferral,
    GradientView,
    GradientViews,
    ShardedModule,
    ShardingSpec,
    mesh_of,
    sharding_specs,
)

BUCKET_BYTES = 64 * 2**20
NAMED = 5  # parameters that a message names; of more it gives the number
ALIGNMENT = 64  # elements; kernels such as torch's AdamW round differently at odd addresses

# Elements whose norm torch computes at a time; the squares of these norms are added up in fp64. On
# the CPU torch adds squares one by one in fp32: the norm of 10^5 elements is wrong by 1e-6, of 10^8
# by 1e-2.
NORM_CHUNK = 2**12

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
    """Parameters of one dtype whose gradients are summed over the same axes, at once."""

    def __init__(self, named: Sequence[Named], deferral: Deferral, wide: bool) -> None:
        _, first, spec = named[0]
        self.axes = [axis for axis in spec.partial if axis.size > 1]
        self.views: list[GradientView] = []
        self.segments: list[Segment] = []
        end = 0
        for _, neighbours in groupby(sorted(named, key=_kind), _kind):
            start = end
            for name, parameter, its_spec in neighbours:
                self.views.append(GradientView(name, parameter, its_spec, end, deferral))
                end = _round_up(self.views[-1].stop, ALIGNMENT)
            self.segments.append(Segment(start, end, its_spec))
        end = _round_up(end, ALIGNMENT * prod(axis.size for axis in self.axes))
        self.flat = torch.zeros(end, dtype=_dtype(first, wide), device=first.device)
        for view in self.views:
            view.gradient = view.view(self.flat)
        self.missing = len(self.views)
        self.wait: Callable[[], object] = _nothing

    def reduce(self) -> None:
        """Start the sum over the partial axes within a pipeline stage; `wait` waits for it."""
        for view in self.views:
            if not view.is_filled:  # no gradient came
                view.gradient.zero_()
        self.add_up(is_of_stages=False)

    def add_up(self, *, is_of_stages: bool) -> None:
        """Start the sum over those of the partial axes that join pipeline stages, or the others."""
        for axis in self.axes:
            if axis.is_of_stages == is_of_stages:
                self.wait()
                self.wait = start_all_reduce(self.flat, axis)


def _assemble(
    model: nn.Module, table: Mapping[str, ShardingSpec], most: int, deferral: Deferral, wide: bool
) -> list[Bucket]:
    """Buckets of at most `most` bytes, or one parameter where it is larger, in the order in which
    the backward fills them: it reaches the last layers first."""
    found: list[list[Named]] = []
    open_buckets: dict[object, list[Named]] = {}
    free: dict[object, int] = defaultdict(int)
    trained = [each for each in model.named_parameters() if each[1].requires_grad]
    for name, parameter in reversed(trained):
        spec = table[name]
        key = parameter.dtype, tuple(axis.name for axis in spec.partial if axis.size > 1)
        if free[key] < (size := parameter.numel() * _dtype(parameter, wide).itemsize):
            open_buckets[key], free[key] = [], most
            found.append(open_buckets[key])
        open_buckets[key].append((name, parameter, spec))
        free[key] -= size
    return [Bucket(named, deferral, wide) for named in found]


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
        """
        mesh = mesh or mesh_of(model)
        if mesh is None:
            raise ValueError("a model without layers of megatron.api needs mesh=")
        table = sharding_specs(model, specs, mesh=mesh)
        self.mesh = mesh
        self.deferral = Deferral()
        self.buckets = _assemble(model, table, bucket_bytes, self.deferral, wide)
        # Every rank of a tie adds up its copies in one order.
        tied = [each for each in self.buckets if any(axis.is_of_stages for axis in each.axes)]
        self.tied = sorted(tied, key=lambda each: min(view.name for view in each.views))
        self.is_last: bool | None = None  # None: outside of a backward
        self.stage: int | None = None  # of the backward, where this rank has several
        self.lowest: dict[str, int] = {}  # stage that a parameter had a gradient of, in this step
        self.in_step = self.is_complete = False
        self.next = 0  # the first bucket whose reduction has not started
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
            bucket.wait = _nothing
            bucket.missing = len(bucket.views)
            for view in bucket.views:
                view.is_filled = False

    def _collect(self, bucket: Bucket, view: GradientView, *_: object) -> None:
        """Runs when the backward has passed all uses of a parameter."""
        if self.is_last is None:
            raise RuntimeError(
                "backward() outside of accumulate(), or after other GradientBuckets were made of "
                "this model: no rank would see the gradients of the others"
            )
        if self.is_last and not bucket.missing:
            raise RuntimeError(
                f"{view.name} has a second gradient in the last accumulate(): each backward() "
                "takes an accumulate() of its own, and torch's checkpoint use_reentrant=False"
            )
        if view.parameter.grad is not None:
            view.add(view.parameter.grad)
            view.parameter.grad = None
        if view.is_filled:
            self.on_gradient(view)
        if self.is_last and view.stage == self.stage:
            self._complete([(bucket, view)])
        if self.stage is not None:
            self.lowest[view.name] = min(self.stage, self.lowest.get(view.name, self.stage))

    def _complete(self, found: Iterable[tuple[Bucket, GradientView]]) -> None:
        """These have their gradient of all micro-batches: reduce the buckets that are full."""
        for bucket, _ in found:
            bucket.missing -= 1
        # In one order on all ranks, whichever layers their samples take.
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.buckets[self.next].reduce()
            self.next += 1

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
        deferred: list[Deferred] = []
        self.is_last, self.stage = is_last and not is_deferred, stage
        self.deferral.works = deferred if is_deferred else None
        try:
            yield deferred
        finally:
            self.is_last = self.stage = self.deferral.works = None

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

    def finish(self) -> None:
        """End a step: reduce what is left and wait for all reductions; the last backward may not
        have reached every parameter."""
        for bucket in self.buckets[self.next :]:
            bucket.reduce()
        for bucket in self.tied:  # behind all messages between stages
            bucket.add_up(is_of_stages=True)
        for bucket in self.buckets:
            bucket.wait()
            bucket.wait = _nothing
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
        finite.
        """
        device = self.buckets[0].flat.device if self.buckets else self.mesh.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            for segment in bucket.segments:
                flat = bucket.flat[segment.start : segment.stop]
                rows, rest = flat.tensor_split([len(flat) // NORM_CHUNK * NORM_CHUNK])
                dtype = torch.promote_types(flat.dtype, torch.float32)
                norms = vector_norm(rows.view(-1, NORM_CHUNK), dim=1, dtype=dtype)
                norms = torch.cat([norms, vector_norm(rest, dtype=dtype)[None]])
                is_owner = segment.spec.is_owner(self.mesh.model_parallel)
                total += float(is_owner) * norms.double().square().sum()
        return total


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
        bucket.flat.mul_(factor)
    for view in gradients.views:
        if view.parameter.grad is not None and view.parameter.dtype != view.gradient.dtype:
            view.parameter.grad.copy_(view.gradient)
    return norm
