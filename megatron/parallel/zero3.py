"""Memory of a layer while it runs: gathered weights (ZeRO stage 3) and offloaded activations.

    forward    gather 0 | run 0, gather 1 | run 1, gather 2 | .. | run n         n is kept
    backward   run n, gather n - 1 | run n - 1, gather n - 2 | ..                each is released

A unit is a layer; the rest (embeddings, the last norm and the head) is the root. In ZeRO stage 3
the weights of a unit are whole while it runs, and those of the root from the first forward to the
end of the step. Reading weights that are not gathered gives NaN. Offloaded activations of a unit
(offload.py) go to the host when it has run, and return during the backward of the next unit.

In place of a weight, saved-tensor hooks save a function, which in the backward returns the same
view of the re-gathered weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise, zip_longest
from math import nan
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from megatron.parallel.bucket import (
    UNITS,
    Bucket,
    LocalShard,
    ShardedBucket,
    nothing,
    require_whole,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.offload import LayerOffload


@cache
def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Placeholder for values that have no memory now; reading it gives NaN.

    Memory that is released by untyped_storage().resize_(0) would kill the process that reads it.
    """
    return torch.full((), nan, dtype=dtype, device=device).expand(shape)


def untrained_memory(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory for a parameter on meta. A trained parameter gets none, as its weights are gathered
    from the masters."""
    make = absent if parameter.requires_grad else torch.empty
    return make(parameter.shape, dtype=dtype or parameter.dtype, device=device)


class GatheredBucket(ShardedBucket):
    """ZeRO stage 3: each rank keeps the masters of its own part alone. The parameters are views of
    `weights` while these are gathered; reading a parameter at another time gives NaN."""

    keeps_weights = False

    def hold_weights(self, kind: type[LocalShard]) -> LocalShard:
        local = super().hold_weights(kind)
        self.release()
        return local

    def start_gather_weights(self, *, is_rounded: bool = False) -> None:
        if self.weights is None and self.local is not None:
            self.weights = torch.empty(self.size, dtype=self.weight_dtype, device=self.device)
            super().start_gather_weights()

    def gather_weights(self) -> None:
        """Gather the weights of all parts and wait for them."""
        self.start_gather_weights()
        if self.pending_weights is None or self.weights is None:
            return
        self.end_publish()
        for view in self.views:
            view.parameter.data = view.of_bucket(self.weights)

    def gathered_view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the weights, which are gathered again if need be."""
        self.gather_weights()
        assert self.weights is not None
        return self.weights.as_strided(shape, stride, offset)

    def release(self) -> None:
        """Free the weights."""
        self.end_publish()
        self.weights = None
        for view in self.views:
            shape = view.parameter.shape
            view.parameter.data = absent(shape, self.weight_dtype, self.device)

    def start_publish(self, *, is_rounded: bool = False) -> None:
        """After a change of the masters: weights are gathered when a layer uses them."""
        if self.local is not None:
            self.local.round()
        self.release()


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """A saved tensor. Autograd does not check whether one that hooks pack was written to."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} that a backward needs has been modified by an inplace "
            "operation after the forward that kept it"
        )
    return tensor


class Unit:
    """A module whose weights are gathered together, or whose saved activations are offloaded, or
    both. The root does not include the modules of other units."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buckets: list[GatheredBucket] = []
        self.previous: Unit | None = None
        self.next: Unit | None = None
        self.is_root = self.is_in_backward = False
        self.called: Callable[[], object] = nothing
        self.offloads = False  # whether saved activations go to the host
        self.last: ReferenceType[LayerOffload] | None = None  # of the last forward

    def wrap(self) -> None:
        """From now on, calls of the module go through this unit."""
        if isinstance(self.module, OfUnit):
            self.offloads = self.module.unit.offloads
        else:
            self.module.__class__ = _of_unit(cast(Any, type(self.module)))
        self.module.unit = self  # type: ignore[assignment]

    def start(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather_weights()

    def gather(self) -> None:
        self.start()
        for bucket in self.buckets:
            bucket.gather_weights()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def run(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the module's `forward` with its weights, while the next unit's are gathered."""
        self.gather()
        if self.is_in_backward:  # a recomputation, by any kind of checkpointing
            with self.saving(None):
                return forward(*arguments, **named)
        self.called()
        if self.next is not None:
            self.next.start()
        keeps, offload = torch.is_grad_enabled(), None
        if keeps and self.offloads:
            previous = self.previous.last if self.previous is not None else None
            offload = LayerOffload(self.module, previous() if previous is not None else None)
            self.last = ref(offload)
        with self.saving(offload) if keeps else nullcontext():
            output = forward(*arguments, **named)
        if offload is not None:
            offload.end()
        outputs = [each for each in tensors_of(output) if each.requires_grad]
        if outputs and not self.is_root:
            register_multi_grad_hook(outputs, partial(self.enter_backward, offload), mode="any")
            inputs = [each for each in tensors_of([arguments, named]) if each.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, self.leave_backward, mode="all")
        # The last unit keeps its weights: its backward comes next.
        if not outputs or not (self.is_root or self.next is None):
            self.release()
        return output

    def enter_backward(self, offload: LayerOffload | None, _: Tensor) -> None:
        """Called when the gradient of the module's output is there."""
        if offload is not None:
            offload.start()
            if offload.previous is not None:
                offload.previous.start()
        self.is_in_backward = bool(self.buckets)  # otherwise no weights are gathered
        self.gather()
        if self.previous is not None and not self.previous.is_root:
            self.previous.start()

    def leave_backward(self, *_: object) -> None:
        """Called when the gradients of the module's inputs are there, or the backward has ended."""
        self.is_in_backward = False
        self.release()

    def saving(self, offload: LayerOffload | None) -> AbstractContextManager[object]:
        """Context in which autograd saves no weights of this unit, and `offload` takes what else it
        can. In place of a tensor, autograd saves a function that returns it.

        torch calls only the innermost saved-tensor hooks. These pass every tensor that is not a
        weight on to the outer ones, such as those of a checkpoint that a model has around a layer.
        """
        weights = {
            bucket.weights.untyped_storage().data_ptr(): bucket
            for bucket in self.buckets
            if bucket.weights is not None and not bucket.weights.is_meta
        }
        if self.is_root or not (weights or offload):
            return nullcontext()
        # Private, because torch has no public function for it (2.11 to 2.13).
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            if weights and (bucket := weights.get(tensor.untyped_storage().data_ptr())):
                offset = int(tensor.storage_offset())
                return partial(bucket.gathered_view, tensor.shape, tensor.stride(), offset)
            if outer is not None:
                return partial(outer[1], outer[0](tensor))
            if offload is not None and (fetch := offload.pack(tensor)) is not None:
                return fetch
            return partial(_unchanged, tensor, tensor._version)

        return saved_tensors_hooks(pack, lambda restore: restore())


class OfUnit(nn.Module):
    """A base class added to that of a module whose calls go through a Unit."""

    unit: Unit

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.unit.run(super().__call__, *arguments, **named)


@cache
def _of_unit(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (OfUnit, kind), {"__module__": kind.__module__})


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Tensors of a floating dtype in a module's output, such as a tuple or a ModelOutput."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, Mapping):
        yield from tensors_of([*output.values()])
    elif isinstance(output, list | tuple):
        for each in output:
            yield from tensors_of(each)


class Units:
    """The units of a model, in order, and its root."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module] | None) -> None:
        chosen = find_units(model) if modules is None else modules
        self.all = [Unit(module) for module in chosen]
        if not self.all:
            raise ValueError(
                f"{type(model).__name__} has no list of layers: units= names the modules whose "
                "weights are gathered, or whose activations are offloaded, together"
            )
        # A parameter that two units have, or another module too, belongs to the root.
        unit_of: dict[int, int | None] = {}
        inside = set[int]()
        for number, unit in enumerate(self.all):
            inside |= {id(module) for module in unit.module.modules()}
            for parameter in unit.module.parameters():
                unit_of[id(parameter)] = None if id(parameter) in unit_of else number
        for module in model.modules():
            if id(module) not in inside:
                unit_of |= {id(each): None for each in module.parameters(recurse=False)}
        self.of_parameters: dict[str, int] = {}
        """Number of the unit of each parameter, by name. A parameter of the root has -1 - k if it
        comes after k units: its gradient comes before theirs."""
        after = 0
        for name, parameter in model.named_parameters():
            owner = unit_of.get(id(parameter))
            after = after if owner is None else owner + 1
            self.of_parameters[name] = -1 - after if owner is None else owner

        self.root = Unit(model)
        self.root.is_root = True
        for one, two in pairwise([self.root, *self.all]):
            one.next, two.previous = two, one
        self.depth = 0  # nesting depth of `gathered`
        self.order: list[int] | None = None  # in which layers are called, until it is compared

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Give each unit its buckets. From now on its module gathers them when it is called."""
        for bucket in buckets:
            assert isinstance(bucket, GatheredBucket)
            number = self.of_parameters[bucket.views[0].name]
            bucket.is_of_layer = number >= 0
            (self.all[number] if number >= 0 else self.root).buckets.append(bucket)
        self.order = []
        for number, unit in enumerate(self.all):
            unit.called = partial(self.order.append, number)
        model = self.root.module
        vars(model)[UNITS] = self
        for unit in (self.root, *self.all):  # also for a part of the model with some of its layers
            unit.wrap()
            unit.module.register_state_dict_pre_hook(lambda *_: require_whole(model, "state_dict"))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the root has its weights. A nested one does nothing."""
        if self.depth:
            yield
            return
        self.depth += 1
        self.root.gather()
        if self.root.next is not None:
            self.root.next.start()
        try:
            yield
        finally:
            self.depth -= 1
            for unit in (self.root, *self.all):
                unit.release()

    def end_backward(self) -> None:
        """Release the weights of all layers, also of one that the backward has not left: it may
        have reached only some of its parameters."""
        for unit in self.all:
            unit.leave_backward()

    def end_step(self, mesh: Mesh) -> None:
        """Release all weights. After the first step, check that ranks that gather weights from each
        other called the same layers in the same order. Raises RuntimeError, on every rank, if they
        did not."""
        for unit in (self.root, *self.all):
            unit.release()
        order, self.order = self.order, None
        if order is None:  # compared before
            return
        for unit in self.all:
            unit.called = nothing
        if mesh.control.group is None:  # nobody to ask
            return
        first, *others = mesh.control.gather(order)
        for rank, other in enumerate(others, 1):
            pairs = zip_longest(first, other)
            if differing := [n for n, (one, two) in enumerate(pairs, 1) if one != two]:
                raise RuntimeError(
                    f"ZeRO stage 3 gathers weights layer by layer, and call {differing[0]} of a "
                    f"layer differs between rank 0 and rank {rank}: every rank has to call the "
                    "same layers in the same order; zero_stage=2 works without"
                )


def offload_activations(model: nn.Module, units: Sequence[nn.Module] | None = None) -> None:
    """From now on, tensors that the layers of a model save for their backward are in host memory.
    They are fetched during the backward of the next layer. No number changes. Small tensors,
    integer tensors, weights, and all tensors outside of the layers stay on the device.

    units: the layers, in the order of the forward, see GradientBuckets.for_master_weights; in ZeRO
    stage 3 its units are used. By default the elements of the outermost lists in which two are of
    one class. Raises ValueError if there are none.
    """
    of_zero3: Units | None = vars(model).get(UNITS)
    for unit in (of_zero3 or Units(model, units)).all:
        unit.wrap()
        unit.offloads = True


LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def find_units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements with parameters of the outermost lists in which two elements are of one class.
    Elements of lists of lists, and of lists of unlike modules, are searched in turn."""
    children = [each for each in module.children() if [*each.parameters()]]
    if not isinstance(module, LISTS):
        for child in children:
            yield from find_units(child)
        return
    kinds = Counter(type(each) for each in children if not isinstance(each, LISTS))
    is_of_layers = any(number > 1 for number in kinds.values())
    for child in children:
        if is_of_layers and not isinstance(child, LISTS):
            yield child
        else:
            inside = [*find_units(child)]
            yield from inside or ([] if isinstance(child, LISTS) else [child])
