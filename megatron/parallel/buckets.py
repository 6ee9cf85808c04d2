"""Gradients and weights in buckets: flat tensors of fp32, or of the parameters' dtype if it is
wider or is asked for.

Our layers add the gradients of large weights to the buckets themselves (layers.py); a hook adds the
`.grad` of all other parameters and sets it to None. So all gradients, also those of a tied weight's
two uses, accumulate in fp32 for any dtype of parameters. In the last micro-batch a bucket that has
all its gradients starts its reduction while the backward continues. The same buckets serve
accumulation, reduction, the norm and the optimizer: ours, or one of torch's that reads `.grad`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron.parallel import compare, kernels, zero3
from megatron.parallel.bucket import (
    UNITS,
    Bucket,
    Deferral,
    Deferred,
    GradientView,
    Named,
    Reduction,
    ShardedBucket,
    nothing,
    sum_by,
)
from megatron.parallel.collectives import all_reduce
from megatron.parallel.initialize import give_memory
from megatron.parallel.mesh import ALONE, Mesh
from megatron.parallel.sharding import (
    GradientViews,
    ShardedModule,
    ShardingSpec,
    TensorSlice,
    mesh_of,
    sharding_specs,
)
from megatron.parallel.traced import handle_of

# 82 buckets for 1.2 billion parameters. One, where nothing is reduced, would save 81 of the 2,700
# kernels of a step: norm and Adam take all buckets in one call each. Offload copies one at a time.
BUCKET_BYTES = 64 * 2**20
# Elements; gradients up to this size wait and are added together: each kernel takes a host 7 us.
SMALL = 2**16
IN_FLIGHT = 2  # reductions at a time from ZeRO stage 2 on; their buckets are in memory
# With torch's fully_shard norm, optimizer, checkpoint and replica check need a second path each.
STORAGES = (Bucket, Bucket, ShardedBucket, zero3.GatheredBucket)  # by ZeRO stage


class GradientBuckets:
    """All gradients of a model.

    A step is one of:

        start(), a backward() around each backward, finish()      as the executor does
        an accumulate() around forward and backward of each micro-batch
        start(), an accumulate() around the backward alone of each micro-batch

    Then every bucket's `own_gradients`, all of its `gradients` without ZeRO, hold the sum over
    micro-batches and partial axes. For torch's optimizers, `.grad` holds it too, in the parameter's
    dtype: zeros if no micro-batch reached the parameter. Nothing is divided: for a mean over the
    global batch, the loss has to be the sum over this rank's samples / the number of all samples.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        specs: Mapping[str, ShardingSpec] | None = None,
        mesh: Mesh | None = None,
        in_fp32: bool = True,
    ) -> None:
        """For an optimizer of torch, which reads `.grad`; for MasterWeights: for_master_weights.

        specs: specs of parameters that no layer of ours owns, see `others` of sharding_specs.
        mesh: by default the mesh of our layers in the model; required if it has none of them.

        in_fp32: False accumulates gradients of micro-batches and ranks in the parameters' dtype:
        bf16 takes half the memory and traffic, but sums have only 8 bits.

        The first step raises RuntimeError, naming them, if weights or gradients that several ranks
        hold differ between these.
        """
        self._set_up(model, specs, mesh)
        self._add_buckets(bucket_bytes, in_fp32, {})
        self.sets_grad = True
        self.checks_weights = not any(parameter.is_meta for parameter in model.parameters())

    @classmethod
    def for_master_weights(
        cls,
        model: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        specs: Mapping[str, ShardingSpec] | None = None,
        mesh: Mesh | None = None,
        in_fp32: bool = True,
        zero_stage: int = 0,
        units: Sequence[nn.Module] | None = None,
        compares_weights: bool = True,
        reduction: Reduction | None = None,
    ) -> Self:
        """For MasterWeights, which reads the buckets: there is no `.grad`, and gradients that
        several ranks hold are not compared. specs, mesh, in_fp32: see GradientBuckets.

        zero_stage: the ZeRO stage. units: modules, each of which stage 3 gathers as a whole; by
        default the elements of the outermost lists with two elements of one class. No bucket then
        holds two units. A model on meta, too large for any rank, takes stage 3 and
        MasterWeights.fill.

        compares_weights: check that initial weights that several ranks hold are equal on them;
        False if weights are set later. Raises RuntimeError, naming the weights that differ.

        reduction: sums gradients over the ranks in place of a collective, see `Reduction`.
        """
        gradients = cls.__new__(cls)
        gradients._set_up(model, specs, mesh)
        mesh = gradients.mesh
        if zero_stage not in range(4 if mesh.pipeline.size == 1 else 2):
            raise ValueError(
                f"zero_stage={zero_stage}: must be 0, 1, 2 or 3; 0 or 1 in a pipeline, where each "
                "micro-batch would reduce its gradients, and gather weights"
            )
        is_on_meta = any(parameter.is_meta for parameter in model.parameters())
        if is_on_meta and zero_stage == 3 and mesh.device.type != "meta":
            give_memory(model, partial(zero3.untrained_memory, device=mesh.device))
        if compares_weights and not is_on_meta:  # next, parts of them become masters
            compare.check_weights(model, gradients.specs, mesh)
        if zero_stage:
            gradients.zero_stage, gradients.shared = zero_stage, mesh.replicas
        unit_of: Mapping[str, int] = {}
        if units is not None or zero_stage == 3:
            layers = zero3.Units(model, units)
            unit_of = layers.of_parameters
        gradients._add_buckets(bucket_bytes, in_fp32, unit_of)
        if reduction is not None:
            for bucket in gradients.buckets:
                bucket.custom_sum = sum_by(reduction)
        if zero_stage == 3:
            gradients.units = layers
            layers.take(gradients.buckets)
        return gradients

    def _set_up(
        self, model: nn.Module, specs: Mapping[str, ShardingSpec] | None, mesh: Mesh | None
    ) -> None:
        mesh = mesh or mesh_of(model)
        if mesh is None:
            raise ValueError("a model without layers of megatron.api needs mesh=")
        if UNITS in vars(model):
            raise ValueError(
                "the model is in ZeRO stage 3 of other GradientBuckets, which have its weights: "
                "build it anew"
            )
        self.model, self.mesh = model, mesh
        self.specs = sharding_specs(model, specs, mesh=mesh)
        self.zero_stage = 0
        self.shared = ALONE  # the axis whose ranks divide the buckets (ZeRO)
        self.units: zero3.Units | None = None  # in ZeRO stage 3
        self.sets_grad = self.checks_weights = False
        self.checks_reach = True  # in the first step
        self.deferral = Deferral()
        # Whether buckets are reduced in this backward, as they fill; None outside of a backward.
        self.completes: bool | None = None
        self.stage: int | None = None  # stage of the current backward, if this rank has several
        self.lowest: dict[str, int] = {}  # per step: lowest stage that gave a parameter a gradient
        self.in_step = self.is_complete = False
        self.next = 0  # the first bucket whose reduction has not started
        self.arrived: dict[int, tuple[GradientView, Tensor]] = {}
        """Gradients that wait to be added, by the id of their view."""
        self.reducing = deque[Bucket]()  # buckets in reduction, from ZeRO stage 2 on
        self.on_gradient: Callable[[GradientView], object] = nothing  # called after each addition

    def _add_buckets(self, bucket_bytes: int, in_fp32: bool, unit_of: Mapping[str, int]) -> None:
        """Make buckets of at most `bucket_bytes`, or of one larger parameter, in the order in which
        the backward completes them: last layers first. unit_of: numbers of units by name of their
        parameters; parameters with different numbers share no bucket."""
        storage = STORAGES[self.zero_stage]
        alike: list[tuple[torch.dtype, list[Named]]] = []
        open_buckets: dict[object, list[Named]] = {}
        free: dict[object, int] = defaultdict(int)
        trained = [named for named in self.model.named_parameters() if named[1].requires_grad]
        for name, parameter in reversed(trained):
            spec, dtype = self.specs[name], parameter.dtype
            if in_fp32:
                dtype = torch.promote_types(dtype, torch.float32)
            axes = tuple(axis.name for axis in spec.partial if axis.size > 1)
            key = unit_of.get(name), parameter.dtype, axes
            size = parameter.numel() * dtype.itemsize
            if free[key] < size:
                open_buckets[key], free[key] = [], bucket_bytes
                alike.append((dtype, open_buckets[key]))
            open_buckets[key].append((name, parameter, spec))
            free[key] -= size
        # Sums start in this order. Under sequence parallelism all layers' norms share one bucket,
        # which, if it came first, would keep all others waiting until the end of the backward.
        numbers = {name: number for number, (name, _) in enumerate(reversed(trained))}
        alike.sort(key=lambda each: numbers[each[1][-1][0]])
        self.sums_each_micro_batch = storage.sums_each_micro_batch
        self.buckets = [storage(named, dtype, self.deferral, self.shared) for dtype, named in alike]
        # All ranks of a tie sum its copies in the same order.
        tied = [each for each in self.buckets if any(axis.is_of_stages for axis in each.axes)]
        self.tied = sorted(tied, key=lambda each: min(view.name for view in each.views))
        self.to_compare = list(self.views)  # views whose gradients were zero so far

        # An element that several ranks hold counts in the norm on its owner. All tensors are in one
        # list, as one norm for each took 5.5 ms at 1.2 billion parameters; their bytes take 1.1.
        self.counted: dict[bool, list[Tensor]] = {True: [], False: []}
        for bucket in self.buckets:
            for local, spec in bucket.own_segments:
                is_owner = spec.is_owner(self.mesh.model_parallel)
                # A bucket that ZeRO does not divide is on all ranks of `shared`, and counts once.
                is_owner = is_owner and (bucket.shared is self.shared or self.shared.rank == 0)
                self.counted[is_owner].append(bucket.own_gradients[local])

        # Our layers add gradients of matrices to the buckets, without `.grad`.
        views = {id(view.parameter): view for view in self.views if view.parameter.dim() > 1}
        for module in self.model.modules():
            if isinstance(module, ShardedModule):
                module.gradient_views = GradientViews()
                for name in module.specs:
                    if (view := views.get(id(module.shard_of(name)))) is not None:
                        module.gradient_views[name] = view
        self.nodes: list[Node] = []  # kept alive, since the hooks of a node are freed with it
        for bucket in self.buckets:
            for view in bucket.views:
                view.handle = handle_of(view)
                # A node's hook also runs if a layer returned None because its gradient is already
                # in the bucket; a parameter's hook would not.
                node = get_gradient_edge(view.parameter).node
                node.register_hook(partial(self._collect, bucket, view))
                self.nodes.append(node)

    @property
    def views(self) -> Iterator[GradientView]:
        return (view for bucket in self.buckets for view in bucket.views)

    def start(self) -> None:
        """Start a step, before its first forward; discards all gradients so far."""
        if self.sets_grad:
            if self.checks_weights:
                self.checks_weights = False
                compare.check_weights(self.model, self.specs, self.mesh)
            for view in self.views:
                view.parameter.grad = None  # of the previous step
        self.in_step, self.is_complete, self.next = True, False, 0
        if self.units is not None:
            self.units.end_backward()  # of an aborted step
        for bucket in self.buckets:
            bucket.start()

    def _collect(self, bucket: Bucket, view: GradientView, *_: object) -> None:
        """Runs when the backward has passed all uses of a parameter."""
        # In Python once for each parameter: 1 to 4 % of the host's time in 24 layers of h = 64.
        if self.completes is None:
            if not self.in_step:
                for each in self.views:
                    each.is_filled = False  # discards what was added outside of a step
            raise RuntimeError(
                "backward() outside of accumulate(), or after other GradientBuckets were made of "
                "this model: no rank would see the gradients of the others"
            )
        if self.completes and not bucket.missing_gradients:
            raise RuntimeError(
                f"{view.name} has a second gradient in the last accumulate(): each backward() "
                "takes an accumulate() of its own, and torch's checkpoint use_reentrant=False"
            )
        if (gradient := view.parameter.grad) is not None:
            view.parameter.grad = None
            if id(view) in self.arrived:  # from another backward in the same accumulate()
                self._add_arrived()
            self.arrived[id(view)] = view, gradient
            if gradient.numel() > SMALL or self.on_gradient is not nothing:
                self._add_arrived()
        elif view.is_filled:
            self.on_gradient(view)
        # With one stage both are None. With several, the lowest that reaches a parameter adds last.
        # The first step finds which: until then view.stage is None, and `finish` reduces.
        if self.completes and view.stage == self.stage:
            bucket.missing_gradients -= 1
            # The order is the same on all ranks, whichever layers their samples take.
            while self.next < len(self.buckets) and not self.buckets[self.next].missing_gradients:
                self._reduce_next()
        if self.stage is not None:
            self.lowest[view.name] = min(self.stage, self.lowest.get(view.name, self.stage))

    def _add_arrived(self) -> None:
        """Add the gradients from autograd to the buckets: small ones of all layers at once, in one
        kernel each for equal dtypes."""
        arrived, self.arrived = [*self.arrived.values()], {}
        alike = defaultdict[Any, list[tuple[Tensor, Tensor]]](list)
        for view, gradient in arrived:
            alike[view.is_filled, view.dtype, gradient.dtype].append((view.gradient, gradient))
            view.is_filled = True
        for (is_filled, total_dtype, dtype), pairs in alike.items():
            totals, gradients = map(list, zip(*pairs, strict=True))
            if is_filled and total_dtype != dtype:  # one call adds only tensors of one dtype
                half, gradients = gradients, [torch.empty_like(each) for each in totals]
                torch._foreach_copy_(gradients, half)
            (torch._foreach_add_ if is_filled else torch._foreach_copy_)(totals, gradients)
        for view, _ in arrived:
            self.on_gradient(view)

    def _reduce_next(self) -> None:
        bucket = self.buckets[self.next]
        if self.sums_each_micro_batch:
            if len(self.reducing) == IN_FLIGHT:  # before memory for one more sum is allocated
                self.reducing.popleft().wait()
            self.reducing.append(bucket)
        self._add_arrived()
        bucket.reduce()
        self.next += 1

    def _reduce_all(self) -> None:
        """Reduce the remaining buckets: a backward may not have reached every parameter."""
        while self.next < len(self.buckets):
            self._reduce_next()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        """Context for the backward of one micro-batch. Without start(), its forward runs inside,
        too, as the output layer with its loss adds its gradient there. With is_last each bucket is
        reduced as it fills, and gradients are complete on exit."""
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
        """Context for one backward, between start() and finish(). Yields its deferred gradients.

        is_last: whether it is the last one, or the last of its stage. stage: number of the virtual
        pipeline stage, if this rank has several. is_deferred: our layers leave the gradients of
        their weights to `add_deferred`, which takes the yielded list after the `with` has ended.
        """
        if self.sums_each_micro_batch and (stage is not None or is_deferred):
            raise ValueError("from ZeRO stage 2 on a micro-batch has one backward, and no halves")
        deferred: list[Deferred] = []
        # From ZeRO stage 2 on each backward completes sums, as no rank keeps whole gradients.
        self.completes = self.sums_each_micro_batch or (is_last and not is_deferred)
        self.stage = stage
        self.deferral.works = deferred if is_deferred else None
        try:
            yield deferred
            self._add_arrived()
        finally:
            self.completes = self.stage = self.deferral.works = None
            self.arrived.clear()
        if self.sums_each_micro_batch:
            self._reduce_all()
            self.next = 0
            for bucket in self.buckets:
                bucket.missing_gradients = len(bucket.views)
        if self.units is not None:
            self.units.end_backward()

    @torch.no_grad()
    def add_deferred(
        self, deferred: Sequence[Deferred], *, is_last: bool, stage: int | None = None
    ) -> None:
        """The other half of a backward: see `backward`."""
        for view, work in deferred:
            work()
            self.on_gradient(view)
        # With several stages any of them may add last to a shared parameter: `finish` reduces all.
        if is_last and stage is None:
            self._reduce_all()

    def finish(self) -> None:
        """End a step: reduce the remaining buckets and wait for all reductions."""
        if not self.sums_each_micro_batch:
            self._reduce_all()
        self.reducing.clear()
        for bucket in self.buckets:
            bucket.add_up(is_of_stages=False)
        for bucket in self.tied:  # after all messages between stages
            bucket.add_up(is_of_stages=True)
        for bucket in self.buckets:
            bucket.wait()
        if self.units is not None:
            self.units.end_step(self.mesh)
        for view in self.views:
            view.is_filled = False
            view.stage = self.lowest.get(view.name, view.stage)
        self.lowest.clear()
        self.in_step, self.is_complete = False, True
        if not self.sets_grad:
            return
        self.name_unreached()
        if self.to_compare:
            self.to_compare = compare.check_gradients(self.to_compare, self.mesh)
        for view in self.views:
            if view.parameter.requires_grad:
                view.parameter.grad = view.gradient.to(view.parameter.dtype)

    def name_unreached(self) -> None:
        """After the first step the first rank prints which parameters have no gradient on any rank
        (every rank calls this)."""
        if self.checks_reach:
            self.checks_reach = False
            if not all(self.mesh.control.gather(all(view.is_reached for view in self.views))):
                compare.name_unreached(list(self.views), self.mesh)

    def squares(self) -> Tensor:
        """This rank's term of the squared global L2 norm, an fp64 scalar.

        The squared norm is the sum of the terms over the mesh's `model_parallel`; an element that
        several ranks hold counts on its owner. Other ranks add 0 x their squares, which is NaN if
        a copy is not finite. Under ZeRO every rank calls this, as the sum over parts is done here.
        """
        device = self.buckets[0].device if self.buckets else self.mesh.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for is_owner, pieces in self.counted.items():
            if pieces:
                total += float(is_owner) * kernels.squares(pieces)
        return all_reduce(total, self.shared)

    def slices(self) -> Iterator[TensorSlice]:
        """This rank's slice of each gradient after a step, by the parameter's name."""
        return (each for bucket in self.buckets for each in bucket.slices(bucket.own_gradients))


@torch.no_grad()
def clip_grad_norm(gradients: GradientBuckets, max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`. Returns the norm
    before scaling, an fp64 scalar, the same on every rank (every rank calls this).

    This scales the buckets. `.grad` is a view of them, or is set again if its dtype is narrower:
    change `.grad` after this call, not before.

    torch.nn.utils.clip_grad_norm_ takes the norm of this rank's shards only, which differs between
    ranks.
    """
    if not isinstance(gradients, GradientBuckets) or not gradients.is_complete:
        raise ValueError(
            "clip_grad_norm takes the GradientBuckets of a model, after accumulate(is_last=True)"
        )
    norm = all_reduce(gradients.squares(), gradients.mesh.model_parallel).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for bucket in gradients.buckets:
        bucket.own_gradients.mul_(factor)
    for view in gradients.views:
        if view.parameter.grad is not None and view.parameter.dtype != view.gradient.dtype:
            view.parameter.grad.copy_(view.gradient)
    return norm
