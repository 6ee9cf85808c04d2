"""What a training step takes on one rank, derived from the model itself.

Rank 0 of ranks that are not there runs a micro-batch, forward and backward, on meta tensors, which
have shapes and no memory, under a meter (tools/layouts/work.py): of a model of one layer and of
one of two. What the second layer adds, each further one adds too. So of L layers, exactly for
matmuls, collectives, bytes moved and bytes kept for the backward,

    x = x of one layer + (L - 1) (x of two layers - x of one)

Peaks of memory are those of two layers, above what is kept. What happens once a step comes from the
gradient buckets of the whole model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from megatron.config.pretrain import PretrainConfig
from megatron.models.build import build_on_meta
from megatron.models.registry import find_kind
from megatron.optim.adam import LossScaler
from megatron.parallel.buckets import BUCKET_BYTES, GradientBuckets
from megatron.parallel.mesh import Mesh, absent_mesh
from megatron.parallel.sharding import materialize, sharding_specs
from megatron.train.inputs import vocabulary_of
from megatron.train.state import DTYPES, TrainState
from megatron.train.step import forward_backward
from tools.layouts.work import Call, Matmul, Meter, Work, on_meta
from tools.planning.hardware import Hardware, Ring

META = torch.device("meta")
PHASES = ("forward", "recomputation", "backward")
WIDE = 4  # bytes of a gradient, master or moment
# Passes of the optimizer over this rank's parameters: in fp32 norm 1, AdamW 8 with the scaled
# gradient, rounding 1; in the weights' own width rounding 1.
WIDE_PASSES, NARROW_PASSES = 10, 1


@dataclass(frozen=True)
class Trace:
    """A micro-batch. Bytes do not count what lasts, parameters and gradients."""

    work: Mapping[str, Work]  # by phase
    kept: int  # from forward to backward
    logits: int  # most above what is kept, in the forward
    one_layer: int  # and in the backward


@cache
def trace(config: PretrainConfig, precision: str, device: str, is_trimmed: bool = False) -> Trace:
    """device: "cpu" or "cuda", whose kernels are meant. is_trimmed: without what fills up a
    batch."""
    mesh, model = _on_meta(config, precision, config.parallel.sizes, device)
    gradients, nothing = _Followed(model, sets_grad=False), None
    meter = Meter(mesh, [*model.parameters(), *(each.flat for each in gradients.buckets)])
    gradients.meter, meter.phase = meter, "forward"
    mesh, model = replace(mesh, device=META), model.train()
    state = TrainState(
        mesh=mesh,
        model=model,
        objective=model,
        gradients=gradients,
        optimizer=nothing,
        scaler=LossScaler(),
    )
    numbers = np.arange(config.training.micro_batch_size)
    samples = resolve_name(find_kind(config.model.kind).samples)(config)
    batch = samples.batch(range(len(numbers))).numbered(numbers)
    denominators = torch.ones(1 + len(model.terms), dtype=torch.float64, device=META)
    with on_meta(meter, device):
        forward_backward(state, [batch.trimmed() if is_trimmed else batch], denominators)
    work, kept = {phase: meter.work[phase] for phase in PHASES}, gradients.kept
    return Trace(work, kept, gradients.forward_peak - kept, meter.peak - kept)


def trace_of_depth(config: PretrainConfig, *arguments: Any) -> Trace:
    """The trace of a model of any depth; arguments: further ones of `trace`."""
    model, more = config.model, config.model.num_layers - 1
    one, two = (
        trace(replace(config, model=replace(model, num_layers=layers)), *arguments)
        for layers in (1, min(2, model.num_layers))
    )
    work = {
        phase: first.plus(two.work[phase].plus(first, -1), more)
        for phase, first in one.work.items()
    }
    return replace(two, work=work, kept=one.kept + more * (two.kept - one.kept))


def _on_meta(
    config: PretrainConfig, precision: str, sizes: Mapping[str, int], device: str
) -> tuple[Mesh, Any]:
    cuts_stream = config.parallel.cuts_stream
    mesh = absent_mesh(sizes, torch.device(device), sequence_parallel=cuts_stream)
    model = build_on_meta(config.model, mesh, vocabulary_of(config))
    return mesh, materialize(model, device=META, dtype=DTYPES[precision], seed=None)


class _Followed(GradientBuckets):
    """Tells the meter where the backward begins; leaves reduction to the whole model's."""

    meter: Meter

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        meter = self.meter
        meter.phase, self.kept, self.forward_peak = "backward", meter.live, meter.peak
        meter.peak = meter.live
        with super().accumulate(is_last=False):
            yield


class Model:
    """The whole model on one rank.

    parameters: of all ranks, without padding. local: of this rank. buckets: each with the fraction
    of the last backward after which it is full. rings: by axis. agreement: calls of a step: what
    the terms of the loss are means over, the terms, and the gradient norm.
    """

    def __init__(
        self, config: PretrainConfig, copies: int, precision: str, bucket_bytes: int
    ) -> None:
        sizes = {**config.parallel.sizes, "data": copies}
        mesh, model = _on_meta(config, precision, sizes, "meta")
        specs = sharding_specs(model)
        self.parameters = sum(prod(spec.shape) for spec in specs.values())
        self.local = sum(each.numel() for each in model.parameters())
        ready, buckets = _ready(specs), GradientBuckets(model, bucket_bytes).buckets
        self.buckets = [(max(ready[view.name] for view in each.views), each) for each in buckets]
        self.rings, stride = dict[str, Ring](), 1
        for axis in reversed(mesh.axes):
            self.rings[axis.name] = Ring(axis.size, stride)
            stride *= axis.size
        terms = 1 + len(model.terms)
        agreed = ((mesh.loss, terms), (mesh.loss, terms), (mesh.model_parallel, 3))
        calls = (Call(axis.name, 8 * number, 2) for axis, number in agreed if axis.size > 1)
        self.agreement = Counter(calls)


_model = cache(Model)


def _ready(names: Iterable[str]) -> dict[str, float]:
    """The fraction of the backward after which each parameter's gradient is there. A number in a
    name is that of the layer; before the layers come embeddings, behind them heads."""
    matches = {name: re.search(r"(?:^|\.)(\d+)\.", name) for name in names}
    layers = {name: int(match[1]) for name, match in matches.items() if match}
    depth, is_ahead, ready = 1 + max(layers.values(), default=0), True, {}
    for name in matches:
        is_ahead = is_ahead and name not in layers
        ready[name] = 1 - layers[name] / depth if name in layers else float(is_ahead)
    return ready


@dataclass(frozen=True)
class Step:
    """All that is derived. config: one that `check(ranks)` has let pass. device: "cpu" or "cuda",
    whose kernels are meant."""

    config: PretrainConfig
    ranks: int
    precision: str
    device: str = "cuda"

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        return self.flops / (seconds * self.ranks * hardware.peak(self.precision))

    @property
    def width(self) -> int:
        """Bytes of a weight and of an activation."""
        return DTYPES[self.precision].itemsize

    @property
    def copies(self) -> int:
        """Data-parallel."""
        return self.config.data_parallel_size(self.ranks)

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def micro_batches(self) -> int:
        size = self.copies * self.config.training.micro_batch_size
        return self.config.global_batch_size(self.ranks) // size

    @property
    def tokens(self) -> int:
        """Of the global batch."""
        return self.config.global_batch_size(self.ranks) * self.config.data.seq_length

    def model_of(self, bucket_bytes: int) -> Model:
        model = replace(self.config.model, recompute_granularity="none")
        training = replace(self.config.training, micro_batch_size=1)
        config = replace(self.config, model=model, training=training)  # so more calls are alike
        return _model(config, self.copies, self.precision, bucket_bytes)

    @cached_property
    def model(self) -> Model:
        return self.model_of(BUCKET_BYTES)

    @cached_property
    def trace(self) -> Trace:
        """Of a micro-batch."""
        return trace_of_depth(self.config, self.precision, self.device)

    @cached_property
    def work(self) -> Mapping[str, Work]:
        """Of the micro-batches of a step, by phase."""
        found = self.trace.work.items()
        return {phase: Work().plus(each, self.micro_batches) for phase, each in found}

    @property
    def reductions(self) -> list[tuple[float, str, int]]:
        """(as in Model.buckets, axis, bytes) of each all-reduce of gradients."""
        found = [
            (ready, bucket, axis) for ready, bucket in self.model.buckets for axis in bucket.axes
        ]
        return [(ready, axis.name, bucket.flat.nbytes) for ready, bucket, axis in found]

    @property
    def updated(self) -> int:
        """Bytes that the optimizer moves."""
        return self.model.local * (WIDE_PASSES * WIDE + NARROW_PASSES * self.width)

    @property
    def calls(self) -> dict[str, Counter[Call]]:
        """All collectives of a step, by phase."""
        found = {phase: Counter(each.calls) for phase, each in self.work.items()}
        found["backward"].update(Call(axis, size, 2) for _, axis, size in self.reductions)
        return {**found, "agreement": self.model.agreement}

    def sent(self, axis: str) -> int:
        """Bytes of a step that a rank sends along the axis."""
        calls = sum(self.calls.values(), Counter[Call]())
        ranks = self.model.rings[axis].ranks
        return sum(n * call.sent(ranks) for call, n in calls.items() if call.axis == axis)

    @property
    def lasting(self) -> dict[str, int]:
        """Bytes that are there all the time, by kind."""
        weights = self.width * self.model.local
        flat = sum(bucket.flat.nbytes for _, bucket in self.model.buckets)
        masters = flat if self.width < WIDE else 0
        return {"weights": weights, "gradients": flat, "masters": masters, "moments": 2 * flat}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind, and the most of them at a time as "total"."""
        found, lasting = self.trace, self.lasting
        total = sum(lasting.values()) + found.kept + max(found.logits, found.one_layer)
        passing = {"activations": found.kept, "logits": found.logits, "one_layer": found.one_layer}
        return {**lasting, **passing, "total": total}

    @cached_property
    def flops(self) -> int:
        """Of a step on all ranks, as MFU counts them: without recomputation and padding, with all
        of attention."""
        return self._flops(is_executed=False)

    @cached_property
    def executed_flops(self) -> int:
        """The same with recomputation and padding, as the authors count TFLOP/s."""
        return self._flops(is_executed=True)

    def _flops(self, *, is_executed: bool) -> int:
        """Of a model on one rank, which computes what a tensor-parallel group does."""
        model, parallel = self.config.model, self.config.parallel
        changes: dict[str, Any] = {} if is_executed else {"recompute_granularity": "none"}
        if (multiple := getattr(model, "make_vocab_size_divisible_by", None)) is not None:
            padded = multiple * self.tensor if is_executed else 1
            changes["make_vocab_size_divisible_by"] = padded
        config = replace(
            self.config,
            model=replace(model, **changes),
            parallel=replace(parallel, tensor_model_parallel_size=1, sequence_parallel=False),
        )
        found = trace_of_depth(config, self.precision, "cuda", not is_executed)
        matmuls = sum((work.matmuls for work in found.work.values()), Counter[Matmul]())
        of_group = sum(times * each.flops for each, times in matmuls.items() if not each.again)
        return of_group * self.micro_batches * self.copies
