"""Gradients of one step, in flat buffers of fp32 (or the parameters' wider dtype).

Large weights' gradients are computed right into their slots of a buffer (linear.py), which autograd
then hears nothing of; those of other parameters a hook adds and drops. So all accumulate in fp32,
whatever the parameters' dtype, a tied weight's two uses too. In the last micro-batch a bucket whose
gradients are all there starts its reduction while the backward goes on. The same buffers serve
accumulation, reduction, the norm and the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.linalg import vector_norm

from megatron.parallel.collectives import begin_all_reduce
from megatron.parallel.linear import add_rows_
from megatron.parallel.mesh import Axis
from megatron.parallel.product import add_gradient_
from megatron.parallel.sharding import ShardedModule, ShardingSpec, sharding_specs

BUCKET_BYTES = 64 * 2**20

# Elements whose norm torch computes at a time; these are added up in fp64. On the CPU it adds up
# squares one after another in fp32: of 10^5 elements the norm is wrong by 1e-6, of 10^8 by 1e-2.
NORM_PIECE = 2**12


def _nothing(*_: object) -> None:
    pass


@dataclass
class Slot:
    """One parameter's elements [start, stop) of a flat buffer, and what is added there."""

    name: str
    parameter: nn.Parameter
    spec: ShardingSpec
    start: int
    is_filled: bool = False  # or what lies there is of an earlier step
    place: Tensor = field(init=False)  # of the parameter's shape

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of any flat tensor that is laid out like the buffer."""
        return flat[self.start : self.stop].view(self.spec.local_shape)

    def add(self, gradient: Tensor) -> None:
        """gradient: of the parameter's shape, or with its leading dims flattened to one."""
        place = self.place.view(gradient.shape)
        if self.is_filled:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self.is_filled = True

    def add_product(self, dy: Tensor, x: Tensor) -> None:
        """Add dy' x, with dy [n, out] and x [n, in]."""
        if dy.dtype != self.place.dtype:
            self.add(dy.T @ x)
            return
        place = self.place.view(-1, x.shape[1])
        add_gradient_(place, dy, x, is_filled=self.is_filled)
        self.is_filled = True

    def add_rows(self, index: Tensor, dy: Tensor) -> None:
        """Add dy [n, h] to the rows at `index` [n]."""
        if not self.is_filled:
            self.place.zero_()
        add_rows_(self.place, index, dy)
        self.is_filled = True


class GradientBuffer:
    """The parameters that share dtype, weight decay, cut axes and partial axes, in one tensor."""

    def __init__(self, named: list[tuple[str, nn.Parameter, ShardingSpec]]) -> None:
        _, parameter, spec = named[0]
        self.decay = spec.decay
        self.cut_axes = {axis.name for _, axis in spec.cuts}
        self.partial = spec.partial
        self.slots: list[Slot] = []
        for name, each, its_spec in named:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(name, each, its_spec, start))
        self.flat = torch.zeros(
            self.slots[-1].stop,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
            device=parameter.device,
        )
        for slot in self.slots:
            slot.place = slot.view(self.flat)

    def runs(self, most: int) -> Iterator[list[Slot]]:
        """Neighbouring slots of at most `most` elements, or one slot where it is larger."""
        run: list[Slot] = []
        for slot in self.slots:
            if run and slot.stop - run[0].start > most:
                yield run
                run = []
            run.append(slot)
        yield run


class Bucket:
    """A run of slots, reduced at once over the partial axes when its last gradient comes."""

    def __init__(self, buffer: GradientBuffer, slots: list[Slot]) -> None:
        self.flat = buffer.flat[slots[0].start : slots[-1].stop]
        self.axes = [axis for axis in buffer.partial if axis.size > 1]
        self.slots = slots
        self.missing = len(slots)
        self.wait: Callable[[], object] = _nothing

    def reduce(self) -> None:
        for axis in self.axes:
            self.wait()
            self.wait = begin_all_reduce(self.flat, axis)


class GradientBuffers:
    """All gradients of a materialised model. One step:

    start(); the backward of each micro-batch inside accumulate(); then every buffer's `flat` holds
    the sum over micro-batches and partial axes.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        table = sharding_specs(model)
        groups = defaultdict(list)
        # Reversed, since the backward reaches the last layers first: buckets fill up in order.
        for name, parameter in reversed(list(model.named_parameters())):
            spec = table[name]
            cut = tuple(axis.name for _, axis in spec.cuts)
            partial_axes = tuple(axis.name for axis in spec.partial)
            groups[parameter.dtype, spec.decay, cut, partial_axes].append((name, parameter, spec))
        self.buffers = [GradientBuffer(named) for named in groups.values()]
        self.buckets = [
            Bucket(buffer, run)
            for buffer in self.buffers
            for run in buffer.runs(bucket_bytes // buffer.flat.element_size())
        ]
        self.is_last = False
        self.watch: Callable[[Slot], object] = _nothing  # told of each when it is added to
        slots = {slot.name: slot for buffer in self.buffers for slot in buffer.slots}
        for prefix, module in model.named_modules():
            if isinstance(module, ShardedModule):
                for name in module.specs:
                    module.slots[name] = slots[f"{prefix}.{name}" if prefix else name]
        self.ends: list[Node] = []  # kept alive, since hooks go with the nodes that they hang on
        for bucket in self.buckets:
            for slot in bucket.slots:
                end = get_gradient_edge(slot.parameter).node
                end.register_hook(partial(self._collect, bucket, slot))
                self.ends.append(end)

    def start(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.is_filled = False

    def _collect(self, bucket: Bucket, slot: Slot, *_: object) -> None:
        """The backward has been at all uses of a parameter."""
        if slot.parameter.grad is not None:
            slot.add(slot.parameter.grad)
            slot.parameter.grad = None
        self.watch(slot)
        if self.is_last:
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.reduce()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        """The backward of one micro-batch runs inside; with is_last each bucket is reduced as it
        fills, and on leaving the buffers are complete."""
        self.is_last = is_last
        try:
            yield
        finally:
            self.is_last = False
        if is_last:
            self._finish()

    def _finish(self) -> None:
        for bucket in self.buckets:
            if bucket.missing:  # parameters that the last micro-batch did not reach
                for slot in bucket.slots:
                    if not slot.is_filled:
                        slot.place.zero_()
                bucket.reduce()
        for bucket in self.buckets:
            bucket.wait()
            bucket.wait = _nothing

    def squares(self, model_axis: Axis) -> Tensor:
        """This rank's term of the squared global L2 norm, fp64 scalar: the terms of the ranks of
        `model_axis` add up, and what each of them holds whole is counted on one of them. On the
        others it weighs nothing, but still spoils the sum where it is not finite."""
        total = self.buffers[0].flat.new_zeros((), dtype=torch.float64)
        for buffer in self.buffers:
            weight = float(model_axis.name in buffer.cut_axes or model_axis.rank == 0)
            whole = buffer.flat.numel() // NORM_PIECE * NORM_PIECE
            rows, rest = buffer.flat.tensor_split([whole])
            norms = torch.cat(
                [vector_norm(rows.view(-1, NORM_PIECE), dim=1), vector_norm(rest)[None]]
            )
            total += weight * norms.double().square().sum()
        return total
