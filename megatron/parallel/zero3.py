"""Memory of a layer while it runs: gathered weights (ZeRO stage 3) and offloaded activations.

    forward    gather 0 | run 0, gather 1 | run 1, gather 2 | .. | run n         n is kept
    backward   run n, gather n - 1 | run n - 1, gather n - 2 | ..                each is released

A unit is a layer; the rest (embeddings, the last norm and the head) is the root. In ZeRO stage 3
the weights of a unit are whole while it runs, and those of the root from the first forward to the
end of the step. Reading weights that are not gathered gives NaN. Offloaded activations of a unit
(offload.py) go to the host when it has run, and return during the backward of the next unit.

Saved-tensor hooks replace every weight that autograd would save by (bucket, shape, stride, offset).
Unpacking it in the backward returns a view of the re-gathered weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megatron.parallel.bucket import (
    Bucket,
    LocalPart,
    OfUnit,
    ShardedBucket,
    is_gathered,
    require_whole,
)
from megatron.parallel.mesh import Mesh
from megatron.parallel.offload import Offloaded, Trip, saving


@cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), nan, dtype=dtype, device=device)


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Placeholder for values that have no memory now; reading it gives NaN."""
    return _nan(dtype, device).expand(shape)


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

    @torch.no_grad()
    def hold_weights(self, kind: type[LocalPart]) -> LocalPart:
        self.local = kind(self)
        parameters = {view.name: view.parameter for view in self.views}
        for each in self.slices(self.local.masters):
            if (flat := each.spec.flat) is None:
                each.local.copy_(parameters[each.key])
            else:
                each.local.copy_(parameters[each.key].flatten()[flat.start : flat.stop])
        self.local.round()
        self.release()
        return self.local

    def start_gather(self) -> None:
        if self.weights is None and self.local is not None:
            self.weights = torch.empty(self.size, dtype=self.weight_dtype, device=self.device)
            super().start_gather()

    def gather(self) -> None:
        """Gather the weights of all parts and wait for them."""
        self.start_gather()
        if self.coming is None or self.weights is None:
            return
        self.coming()
        self.coming = None
        for view in self.views:
            view.parameter.data = view.view(self.weights)

    def release(self) -> None:
        """Free the weights."""
        if self.coming is not None:
            self.coming()
        self.coming = self.weights = None
        for view in self.views:
            shape = view.spec.local_shape
            view.parameter.data = absent(shape, self.weight_dtype, self.device)

    def start_publish(self) -> None:
        """After a change of the masters: weights are gathered when a layer uses them."""
        if self.local is not None:
            self.local.round()
        self.release()


class Saved(NamedTuple):
    """Stands in for a saved view of a gathered weight."""

    bucket: GatheredBucket
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Unit:
    """A module whose weights are gathered together, or whose saved activations are offloaded, or
    both. The root does not include the modules of other units."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buckets: list[GatheredBucket] = []
        self.before: Unit | None = None
        self.behind: Unit | None = None
        self.is_root = self.is_in_backward = False
        self.depth = 0  # nesting depth of `gathered`, for the root
        self.called: Callable[[], object] = lambda: None
        self.offloads = False  # whether saved activations go to the host
        self.last: ReferenceType[Trip] | None = None  # of the last forward

    def start(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather()

    def gather(self) -> None:
        self.start()
        for bucket in self.buckets:
            bucket.gather()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def run(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the module's `forward` with its weights, while the next unit's are gathered."""
        self.gather()
        if self.is_in_backward:  # a recomputation, by any kind of checkpointing
            with self.keeping(None):
                return forward(*arguments, **named)
        self.called()
        if self.behind is not None:
            self.behind.start()
        keeps, trip = torch.is_grad_enabled(), None
        if keeps and self.offloads:
            before = self.before.last if self.before is not None else None
            trip = Trip(self.module, before() if before is not None else None)
            self.last = ref(trip)
        with self.keeping(trip) if keeps else nullcontext():
            output = forward(*arguments, **named)
        if trip is not None:
            trip.end()
        found = [each for each in tensors_of(output) if each.requires_grad]
        if found and not self.is_root:
            register_multi_grad_hook(found, partial(self.enter_backward, trip), mode="any")
            inputs = [each for each in tensors_of([arguments, named]) if each.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, self.leave_backward, mode="all")
        # The last unit keeps its weights: its backward comes next.
        if not found or not (self.is_root or self.behind is None):
            self.release()
        return output

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the root has its weights. A nested one does nothing."""
        if self.depth:
            yield
            return
        self.depth += 1
        self.gather()
        if self.behind is not None:
            self.behind.start()
        try:
            yield
        finally:
            self.depth -= 1
            for unit in (self, *_behind(self)):
                unit.release()

    def enter_backward(self, trip: Trip | None, _: Tensor) -> None:
        """Called when the gradient of the module's output is there."""
        if trip is not None:
            trip.start()
            if trip.before is not None:
                trip.before.start()
        self.is_in_backward = bool(self.buckets)  # otherwise no weights are gathered
        self.gather()
        if self.before is not None and not self.before.is_root:
            self.before.start()

    def leave_backward(self, *_: object) -> None:
        """Called when the gradients of the module's inputs are there, or the backward has ended."""
        self.is_in_backward = False
        self.release()

    def keeping(self, trip: Trip | None) -> Any:
        """Context in which autograd saves no weights of this unit. All else that it saves goes to
        `trip`, if there is one."""
        if self.is_root:
            return nullcontext()
        places = {
            each.weights.untyped_storage().data_ptr(): each
            for each in self.buckets
            if each.weights is not None and not each.weights.is_meta
        }

        def by_name(tensor: Tensor) -> Any:
            bucket = places.get(tensor.untyped_storage().data_ptr())
            if bucket is None:
                return tensor
            return Saved(bucket, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        to_host = None if trip is None else trip.pack
        return saving(by_name if places else None, to_host, unpack)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Tensors of a floating dtype in a module's output, such as a tuple or a ModelOutput."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, Mapping):
        yield from tensors_of([*output.values()])
    elif isinstance(output, list | tuple):
        for each in output:
            yield from tensors_of(each)


def unpack(kept: Any) -> Tensor:
    if isinstance(kept, Offloaded):
        return kept.fetch()
    kept.bucket.gather()
    whole: Tensor = kept.bucket.weights
    return whole.as_strided(kept.shape, kept.stride, kept.offset)


@cache
def _of_unit(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (OfUnit, kind), {"__module__": kind.__module__})


class Units:
    """The units of a model, in order, and its root."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module] | None) -> None:
        self.order: list[int] | None = None  # in which layers are called, until it is compared
        self.modules = list(find_units(model) if modules is None else modules)
        owners = Counter(key for each in self.modules for key in {id(p) for p in each.parameters()})
        inside = {id(each) for unit in self.modules for each in unit.modules()}
        for module in model.modules():
            if id(module) not in inside:
                owners.update(2 * [id(p) for p in module.parameters(recurse=False)])
        number = {
            id(p): place
            for place, each in enumerate(self.modules)
            for p in each.parameters()
            if owners[id(p)] == 1
        }
        self.of_parameters: dict[str, int] = {}
        """Number of the unit of each parameter, by name. A parameter of the root has -1 - k if it
        comes after k units: its gradient comes before theirs."""
        behind = 0
        for name, parameter in model.named_parameters():
            place = number.get(id(parameter))
            behind = behind if place is None else place + 1
            self.of_parameters[name] = -1 - behind if place is None else place

        self.all = [Unit(each) for each in self.modules]
        self.root = Unit(model)
        self.root.is_root = True
        for one, two in pairwise([self.root, *self.all]):
            one.behind, two.before = two, one

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Give each unit its buckets. From now on its module gathers them when it is called."""
        for bucket in buckets:
            assert isinstance(bucket, GatheredBucket)
            place = self.of_parameters[bucket.views[0].name]
            bucket.is_of_layer = place >= 0
            (self.all[place] if place >= 0 else self.root).buckets.append(bucket)
        self.order = []
        for unit in (self.root, *self.all):
            _run(unit)
        for number, unit in enumerate(self.all):
            unit.called = partial(self._note, number)
        for unit in (self.root, *self.all):  # also refuses a module between them
            unit.module.register_state_dict_pre_hook(_refuse_state_dict)

    def _note(self, number: int) -> None:
        if self.order is not None:
            self.order.append(number)

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
        own, self.order = self.order, None
        if own is None or mesh.control.group is None:  # checked before, or a single rank
            return
        first, *others = mesh.control.gather(own)
        for rank, order in enumerate(others, 1):
            if order != first:
                pairs = enumerate(zip(first, order, strict=False))
                shorter = min(len(first), len(order))
                place = next((n for n, (one, two) in pairs if one != two), shorter)
                raise RuntimeError(
                    f"ZeRO stage 3 gathers weights layer by layer, and call {place + 1} of a layer "
                    f"differs between rank 0 and rank {rank}: every rank has to call the same "
                    "layers in the same order; zero_stage=2 works without"
                )


def _run(unit: Unit) -> None:
    """From now on, calls of the unit's module go through the unit."""
    module = unit.module
    if isinstance(module, OfUnit):
        unit.offloads = module.unit.offloads
    else:
        module.__class__ = _of_unit(cast(Any, type(module)))
    module.unit = unit  # type: ignore[assignment]


def offload_activations(model: nn.Module, units: Sequence[nn.Module] | None = None) -> None:
    """From now on, tensors that the layers of a model save for their backward are in host memory.
    They are fetched during the backward of the next layer. No number changes. Small tensors,
    integer tensors, weights, and all tensors outside of the layers stay on the device.

    units: the layers, in the order of the forward, see GradientBuckets.for_master_weights; in ZeRO
    stage 3 its units are used. By default the elements of the outermost lists in which two are of
    one class. Raises ValueError if there are none.
    """
    found = Units(model, units).all
    if is_gathered(model):
        found = list(_behind(cast(Any, model).unit))
    if not found:
        raise ValueError("offload_activations takes units=: the model has no list of layers")
    for unit in found:
        _run(unit)
        unit.offloads = True


def _behind(root: Unit) -> Iterator[Unit]:
    unit = root.behind
    while unit is not None:
        yield unit
        unit = unit.behind


LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def find_units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements with parameters of the outermost lists in which two elements are of one class.
    Elements of lists of lists, and of lists of unlike modules, are searched in turn."""
    own = [each for each in module.children() if [*each.parameters()]]
    if not isinstance(module, LISTS):
        for child in own:
            yield from find_units(child)
        return
    kinds = Counter(type(each) for each in own if not isinstance(each, LISTS))
    is_of_layers = any(number > 1 for number in kinds.values())
    for child in own:
        if is_of_layers and not isinstance(child, LISTS):
            yield child
        else:
            inside = [*find_units(child)]
            yield from inside or ([] if isinstance(child, LISTS) else [child])


def _refuse_state_dict(module: nn.Module, *_: object) -> None:
    require_whole(module, "state_dict")
