"""What is there while a layer runs, forward and backward: its weights, and what its backward needs.

    forward    gather 0 | run 0, gather 1 | run 1, gather 2 | .. | run n         n stays
    backward   of n, gather n - 1 | of n - 1, gather n - 2 | ..                  each then goes

A unit is a layer, and all else, embeddings, the last norm and the head, is the root. In ZeRO stage
3 the weights of a unit are whole while it runs, and those of the root from the first forward to the
end of the step; whoever reads weights that are not there sees NaN. Offloaded activations of a unit
(offload.py) go to the host when it has run, and come back beside the backward of the unit behind.

Autograd keeps no weights of a unit, and no views of them, but what they are; whoever unpacks them
in the backward finds the weights that were gathered again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megatron.parallel.bucket import Bucket
from megatron.parallel.mesh import Mesh
from megatron.parallel.offload import Offloaded, Trip, saving


class Saved(NamedTuple):
    """A view of weights, in place of it."""

    bucket: Bucket
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Unit:
    """A module whose weights are gathered together, or what it keeps offloaded, or both; as the
    root, without the modules of other units."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buckets: list[Bucket] = []
        self.before: Unit | None = None
        self.behind: Unit | None = None
        self.is_root = self.is_in_backward = False
        self.depth = 0  # of `gathered` of the root
        self.called: Callable[[], object] = lambda: None
        self.offloads = False  # whether what is kept for the backward goes to the host
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
        """Call `forward`, the module's, with its weights, while those of the next are gathered."""
        self.gather()
        if self.is_in_backward:  # of a recomputation, whoever has asked for it
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
        # The backward of the last one comes next.
        if not found or not (self.is_root or self.behind is None):
            self.release()
        return output

    def enter_backward(self, trip: Trip | None, _: Tensor) -> None:
        """The gradient of what the module returned is there."""
        if trip is not None:
            trip.start()
            if trip.before is not None:
                trip.before.start()
        self.is_in_backward = bool(self.buckets)  # else none is gathered
        self.gather()
        if self.before is not None and not self.before.is_root:
            self.before.start()

    def leave_backward(self, *_: object) -> None:
        """The gradients of what the module was given are there, or the backward has ended."""
        self.is_in_backward = False
        self.release()

    def keeping(self, trip: Trip | None) -> Any:
        """Inside, autograd keeps no weights of this unit, and what else it keeps goes with the
        trip, if there is one."""
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
    """Those of a floating dtype in what a module returns, such as a tuple or a ModelOutput."""
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


class OfUnit(nn.Module):
    """What the class of a unit's module becomes: the unit runs it when it is called."""

    unit: Unit

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.unit.run(super().__call__, *arguments, **named)


@cache
def _of_unit(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (OfUnit, kind), {"__module__": kind.__module__})


class Units:
    """The units of a model, in their order, and its root."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module] | None) -> None:
        self.order: list[int] | None = None  # in which layers were called, until it was compared
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
        """By name the number of the unit. Of the root's a negative one: -1 - k of what comes behind
        k units, as its gradients come before theirs."""
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
        """Give each unit its buckets, and have the modules gather them when they are called."""
        for bucket in buckets:
            place = self.of_parameters[bucket.views[0].name]
            bucket.is_of_layer = place >= 0
            (self.all[place] if place >= 0 else self.root).buckets.append(bucket)
        self.order = []
        for unit in (self.root, *self.all):
            _run(unit)
        for number, unit in enumerate(self.all):
            unit.called = partial(self._note, number)
        for unit in (self.root, *self.all):  # also of a module between them
            unit.module.register_state_dict_pre_hook(_refuse_state_dict)

    def _note(self, number: int) -> None:
        if self.order is not None:
            self.order.append(number)

    def end_backward(self) -> None:
        """The layers' weights go, also of one that the backward has not left: it may have reached
        some of its parameters alone."""
        for unit in self.all:
            unit.leave_backward()

    def check_order(self, mesh: Mesh) -> None:
        """Behind the first step: ranks that gather weights from each other have called the same
        layers, in the same order. Raises RuntimeError, on every rank, where they have not."""
        own, self.order = self.order, None
        if own is None or mesh.control.group is None:  # none but this rank is there
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
    """From now on the unit runs its module."""
    module = unit.module
    if isinstance(module, OfUnit):
        unit.offloads = module.unit.offloads
    else:
        module.__class__ = _of_unit(cast(Any, type(module)))
    module.unit = unit  # type: ignore[assignment]


def offload_activations(model: nn.Module, units: Sequence[nn.Module] | None = None) -> None:
    """From now on what the layers of a model keep for their backward lives in the host's memory,
    and is fetched while that of the layer behind computes. No number changes. Small tensors, those
    of integers, weights, and all that is outside of the layers stay on the device.

    units: the layers, in the order of the forward, see GradientBuckets, whose are taken in ZeRO
    stage 3; by default the elements of the outermost lists in which two are of one class. Raises
    ValueError where there are none.
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
    """The elements with parameters of the outermost lists of layers, in which two are of one class;
    of lists of lists, and of lists of unlike modules, those of what is in them."""
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


def is_gathered(model: nn.Module) -> bool:
    """Whether a forward gathers weights: then all ranks that share them run as many."""
    return isinstance(model, OfUnit) and model.unit.is_root


def require_whole(model: nn.Module, reader: str) -> None:
    """Raise ValueError, naming who reads it, for a model of which no rank has the parameters."""
    if is_gathered(model):
        raise ValueError(
            f"{reader}: in ZeRO stage 3 no rank has the parameters; a checkpoint of the "
            "optimizer's slices() loads whole"
        )


def _refuse_state_dict(module: nn.Module, *_: object) -> None:
    require_whole(module, "state_dict")


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Inside, the root's weights of a model of ZeRO stage 3 are there; other models have theirs.
    One inside another does nothing."""
    root: Unit | None = model.unit if is_gathered(model) else None
    if root is None or root.depth:
        yield
        return
    root.depth += 1
    root.gather()
    if root.behind is not None:
        root.behind.start()
    try:
        yield
    finally:
        root.depth -= 1
        for unit in (root, *_behind(root)):
            unit.release()
