"""Gradients of one step, in flat buffers of fp32 (or the parameters' wider dtype).

Our layers add the gradients of large weights to the buffers themselves (layers.py); a hook adds the
`.grad` of all other parameters and sets it to None. So all accumulate in fp32, whatever the
parameters' dtype, a tied weight's two uses too. In the last micro-batch a bucket that has all its
gradients starts its reduction while the backward goes on. The same buffers serve accumulation,
reduction, the norm and the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.linalg import vector_norm

from megatron.parallel.collectives import start_all_reduce
from megatron.parallel.mesh import Axis
from megatron.parallel.sharding import GradientView, ShardedModule, ShardingSpec, sharding_specs

BUCKET_BYTES = 64 * 2**20

# Elements whose norm torch computes at a time; the squares of these norms are added up in fp64. On
# the CPU torch adds squares one by one in fp32: the norm of 10^5 elements is wrong by 1e-6, of 10^8
# by 1e-2.
NORM_CHUNK = 2**12


def _nothing(*_: object) -> None:
    pass


class GradientBuffer:
    """The parameters that share dtype, weight decay, cut axes and partial axes, in one tensor."""

    def __init__(self, named: list[tuple[str, nn.Parameter, ShardingSpec]]) -> None:
        _, parameter, spec = named[0]
        self.decay = spec.decay
        self.cut_axes = {axis.name for _, axis in spec.cuts}
        self.partial = spec.partial
        self.views: list[GradientView] = []
        for name, each, its_spec in named:
            start = self.views[-1].stop if self.views else 0
            self.views.append(GradientView(name, each, its_spec, start))
        self.flat = torch.zeros(
            self.views[-1].stop,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
            device=parameter.device,
        )
        for view in self.views:
            view.gradient = view.view(self.flat)

    def runs(self, most: int) -> Iterator[list[GradientView]]:
        """Neighbouring views of at most `most` elements, or one view where it is larger."""
        run: list[GradientView] = []
        for view in self.views:
            if run and view.stop - run[0].start > most:
                yield run
                run = []
            run.append(view)
        yield run


class Bucket:
    """Neighbouring views, reduced at once over the partial axes when the last gradient comes."""

    def __init__(self, buffer: GradientBuffer, views: list[GradientView]) -> None:
        self.flat = buffer.flat[views[0].start : views[-1].stop]
        self.axes = [axis for axis in buffer.partial if axis.size > 1]
        self.views = views
        self.missing = len(views)
        self.wait: Callable[[], object] = _nothing

    def reduce(self) -> None:
        for view in self.views:
            if not view.is_filled:  # no gradient came
                view.gradient.zero_()
        for axis in self.axes:
            self.wait()
            self.wait = start_all_reduce(self.flat, axis)


class GradientBuffers:
    """All gradients of a materialised model. One step:

    start(); the backward of each micro-batch inside accumulate(); then every buffer's `flat` holds
    the sum over micro-batches and partial axes.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        specs: Mapping[str, ShardingSpec] | None = None,
        direct: bool = True,
    ) -> None:
        """specs: of all parameters; by default `sharding_specs(model)`, which has to know them all.

        direct: the switch of the fast path. True: our layers add weight gradients to the buffers
        during the backward. False: all gradients go through autograd and `.grad`, in the
        parameters' dtype: the same numbers in fp32 or wider; in a narrow dtype each micro-batch's
        gradient is rounded to it.
        """
        table = sharding_specs(model) if specs is None else specs
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
        self.watch: Callable[[GradientView], object] = _nothing  # called when one was added to
        views = {view.name: view for buffer in self.buffers for view in buffer.views}
        for prefix, module in model.named_modules():
            if isinstance(module, ShardedModule):
                start = f"{prefix}." if prefix else ""
                own = {name: views[start + name] for name in module.specs}
                module.gradient_views = own if direct else {}
        self.nodes: list[Node] = []  # kept alive, since hooks go with the nodes that they hang on
        for bucket in self.buckets:
            for view in bucket.views:
                node = get_gradient_edge(view.parameter).node
                node.register_hook(partial(self._collect, bucket, view))
                self.nodes.append(node)

    def start(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.views)
            for view in bucket.views:
                view.is_filled = False

    def _collect(self, bucket: Bucket, view: GradientView, *_: object) -> None:
        """Runs when the backward has passed all uses of a parameter."""
        if view.parameter.grad is not None:
            view.add(view.parameter.grad)
            view.parameter.grad = None
        self.watch(view)
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
                bucket.reduce()
        for bucket in self.buckets:
            bucket.wait()
            bucket.wait = _nothing

    def squares(self, model_axis: Axis) -> Tensor:
        """This rank's term of the squared global L2 norm, an fp64 scalar.

        The terms add up over `model_axis`; a parameter that is whole on its ranks counts on the
        first. On the others its weight is 0, which still makes the sum NaN where it is not finite.
        """
        total = self.buffers[0].flat.new_zeros((), dtype=torch.float64)
        for buffer in self.buffers:
            weight = float(model_axis.name in buffer.cut_axes or model_axis.rank == 0)
            whole = buffer.flat.numel() // NORM_CHUNK * NORM_CHUNK
            rows, rest = buffer.flat.tensor_split([whole])
            norms = torch.cat(
                [vector_norm(rows.view(-1, NORM_CHUNK), dim=1), vector_norm(rest)[None]]
            )
            total += weight * norms.double().square().sum()
        return total
