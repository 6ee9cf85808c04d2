"""Gradients of one step, in flat buffers of fp32 (or the parameters' wider dtype).

A hook adds each parameter's gradient to its place in a buffer and drops it, so gradients accumulate
in fp32 whatever the parameters' dtype. In the last micro-batch a bucket whose gradients are all
there starts its reduction while the backward goes on. The same buffers serve accumulation,
reduction, the norm and the optimizer. (The gradients of a tied weight's two uses are first added by
autograd, in the parameter's dtype.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm

from megatron.parallel.layout import Layout, layouts
from megatron.parallel.mesh import Axis

BUCKET_BYTES = 64 * 2**20

# Elements whose norm torch computes at a time; these are added up in fp64. On the CPU it adds up
# squares one after another in fp32: of 10^5 elements the norm is wrong by 1e-6, of 10^8 by 1e-2.
NORM_PIECE = 2**12


@dataclass
class Slot:
    """One parameter's place in a flat buffer: elements [start, stop)."""

    name: str
    parameter: nn.Parameter
    layout: Layout
    start: int
    is_filled: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of any flat tensor that is laid out like the buffer."""
        return flat[self.start : self.stop].view(self.layout.local_shape)


class GradientBuffer:
    """The parameters that share dtype, weight decay, cut axes and partial axes, in one tensor."""

    def __init__(self, named: list[tuple[str, nn.Parameter, Layout]]) -> None:
        _, parameter, layout = named[0]
        self.decay = layout.decay
        self.cut_axes = {axis.name for _, axis in layout.cuts}
        self.partial = layout.partial
        self.slots: list[Slot] = []
        for name, each, its_layout in named:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(name, each, its_layout, start))
        self.flat = torch.zeros(
            self.slots[-1].stop,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
            device=parameter.device,
        )

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
        self.gradients = {slot.name: slot.view(buffer.flat) for slot in slots}
        self.missing = len(slots)
        self.work: dist.Work | None = None

    def reduce(self) -> None:
        for axis in self.axes:
            self.wait()
            self.work = dist.all_reduce(self.flat, group=axis.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuffers:
    """All gradients of a materialised model. One step:

    start(); the backward of each micro-batch inside accumulate(); then every buffer's `flat` holds
    the sum over micro-batches and partial axes.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        table = layouts(model)
        groups = defaultdict(list)
        # Reversed, since the backward reaches the last layers first: buckets fill up in order.
        for name, parameter in reversed(list(model.named_parameters())):
            layout = table[name]
            cut = tuple(axis.name for _, axis in layout.cuts)
            partial_axes = tuple(axis.name for axis in layout.partial)
            groups[parameter.dtype, layout.decay, cut, partial_axes].append(
                (name, parameter, layout)
            )
        self.buffers = [GradientBuffer(named) for named in groups.values()]
        self.buckets = [
            Bucket(buffer, run)
            for buffer in self.buffers
            for run in buffer.runs(bucket_bytes // buffer.flat.element_size())
        ]
        self.is_last = False
        for bucket in self.buckets:
            for slot in bucket.slots:
                hook = partial(self._collect, bucket, slot)
                slot.parameter.register_post_accumulate_grad_hook(hook)

    def start(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.is_filled = False

    def _collect(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        assert parameter.grad is not None
        place = bucket.gradients[slot.name]
        if slot.is_filled:
            place.add_(parameter.grad)
        else:
            place.copy_(parameter.grad)
        slot.is_filled = True
        parameter.grad = None
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
                        bucket.gradients[slot.name].zero_()
                bucket.reduce()
        for bucket in self.buckets:
            bucket.wait()

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

    def scale_(self, factor: float) -> None:
        """Multiply every gradient by a scalar, in place."""
        for buffer in self.buffers:
            buffer.flat.mul_(factor)
