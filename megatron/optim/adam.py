"""AdamW, and the master weights of every optimizer, one flat tensor for each bucket of gradients.

The masters have the same layout in memory as the gradients, so that scaling, norm and Adam are a
few passes over a few long tensors. Parameters of the masters' dtype are views of them; parameters
of a narrower dtype are rounded from them after each step. Masters and moments have the dtype of the
gradients: if that is narrow, too (--pure-bf16), there are no masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.parallel.bucket import LocalShard
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.offload import HostShard
from megatron.parallel.sharding import ShardingSpec, TensorSlice, load_whole

COUNTERS = ("scale", "good_steps", "overflows", "skips")


@dataclass
class LossScaler:
    """Loss scale: the factor on the loss before the backward, and how overflows change it.

    A dynamic scale is multiplied by `factor` after `window` steps in a row without overflow. The
    first hysteresis - 1 overflows since then leave it, and each later one divides it by `factor`. A
    static scale has window None. fp32 and bf16 need no scaling and skip no steps: most_skips is 0.
    """

    scale: float = 1.0
    window: int | None = None
    factor: float = 2.0
    hysteresis: int = 1
    smallest: float = 0.0  # an overflow at this scale ends the run
    most_skips: int = 0  # so many overflows in a row end the run: all but the last are skipped
    good_steps: int = 0  # in a row, since the scale was last raised
    overflows: int = 0  # since the scale was last raised
    skips: int = 0  # in a row

    @classmethod
    def of(cls, config: PrecisionConfig, dtype: torch.dtype) -> LossScaler:
        """The scaler of a run whose weights and activations have `dtype`."""
        if dtype != torch.float16:
            return cls()
        if config.loss_scale is not None:
            return cls(scale=config.loss_scale, most_skips=config.max_consecutive_skips)
        return cls(
            scale=config.first_scale(),
            window=config.loss_scale_window,
            factor=config.loss_scale_factor,
            hysteresis=config.hysteresis,
            smallest=config.min_loss_scale,
            most_skips=config.max_consecutive_skips,
        )

    @property
    def is_scaling(self) -> bool:
        return self.most_skips > 0

    def may_skip(self) -> bool:
        """Whether the run goes on if the step at hand overflows."""
        return self.scale > self.smallest and self.skips + 1 < self.most_skips

    def update(self, overflowed: bool) -> None:
        """Account for one step; every rank passes the same value."""
        self.skips = self.skips + 1 if overflowed else 0
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if self.window is None:
            return
        if overflowed:
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.smallest, self.scale / self.factor)
        elif self.good_steps >= self.window:
            self.scale *= self.factor
            self.good_steps = self.overflows = 0

    def counters(self) -> dict[str, float]:
        """Fields that change, for a checkpoint; the rest comes from the command line."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load(self, counters: dict[str, float]) -> None:
        """Continue from a checkpoint's counters; a static scale keeps its setting."""
        for name in COUNTERS[1:]:
            setattr(self, name, int(counters[name]))
        if self.window is not None:
            self.scale = max(self.smallest, counters["scale"])


@dataclass(frozen=True)
class FlatWeights:
    """Tensors that Adam updates as one: neighbours in a bucket with the same weight decay."""

    decay: float
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    half: Tensor | None = None  # the rounded weights; --optimizer-impl compiled fills it


class TorchAdam:
    """AdamW, or Adam with weight decay as a part of the gradient, by torch's fused kernel.

    The kernel is called as a function: torch's optimizer object imports a compiler's front end in
    the first step, which takes 1.8 s, and accepts a factor only from its own GradScaler.
    """

    def __init__(self, segments: Sequence[FlatWeights], config: OptimizerConfig) -> None:
        self.config = config
        self.groups = defaultdict[tuple[float, torch.dtype], list[FlatWeights]](list)
        """Each group is updated by one call."""
        for each in segments:
            self.groups[each.decay, each.weight.dtype].append(each)
        self.set_updates(0)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the moments have had."""
        # The function takes a counter per tensor: here elements of one, incremented in one call.
        self.updates = [
            torch.full((len(group),), float(updates), device=group[0].weight.device)
            for group in self.groups.values()
        ]

    @torch.no_grad()
    def step(self, lr: float, factor: Tensor) -> None:
        """Update by the gradients x factor, an fp64 scalar on their device, or if it is 0 change
        nothing; the gradients are undefined afterwards. The host does not wait for the factor."""
        config, is_zero = self.config, factor == 0
        for ((decay, dtype), group), updates in zip(self.groups.items(), self.updates, strict=True):
            gradients = [each.gradient for each in group]
            # The kernel divides by grad_scale as it reads, but writes the quotients back, which
            # takes a fifth of its time. So there is a second call, for a factor of 1: found_inf
            # stops the other one, or both for a factor of 0.
            calls = [(factor.reciprocal().float(), is_zero | (factor == 1)), (None, factor != 1)]
            if dtype == torch.float64:  # the kernel's divisor is fp32
                torch._foreach_mul_(gradients, factor)
                calls = [(None, is_zero)]
            for divisor, is_skipped in calls:
                adam(
                    [each.weight for each in group],
                    gradients,
                    [each.exp_avg for each in group],
                    [each.exp_avg_sq for each in group],
                    [],
                    [*updates],
                    fused=True,
                    grad_scale=divisor,
                    found_inf=is_skipped.float(),  # 1 also takes back that `updates` are counted
                    decoupled_weight_decay=config.decoupled_weight_decay,
                    amsgrad=False,
                    beta1=config.adam_beta1,
                    beta2=config.adam_beta2,
                    lr=lr,
                    weight_decay=decay,
                    eps=config.adam_eps,
                    maximize=False,
                )


class MasterWeights:
    """The optimizer of a model whose weights are set already, or are set next."""

    def __init__(self, gradients: GradientBuckets, config: OptimizerConfig) -> None:
        """gradients: of GradientBuckets.for_master_weights. Each rank updates its own part of a
        bucket (ZeRO), on the host with --optimizer-cpu-offload."""
        self.config, self.gradients = config, gradients
        self.buckets = gradients.buckets
        kind = HostShard if config.optimizer_cpu_offload else LocalShard
        self.parts = [bucket.hold_weights(kind) for bucket in self.buckets]
        # With offload a call for each bucket, while others are copied. Else one for all: 244 calls
        # took 10.1 ms at 1.2 billion parameters, their bytes 8 ms.
        numbers = list(range(len(self.buckets)))
        self.updated = [[n] for n in numbers] if config.optimizer_cpu_offload else [numbers]
        """Numbers of the buckets that each of `optimizers` updates."""
        self.moments: list[tuple[Tensor, Tensor]] = []  # of adamw, by bucket
        self.named: list[Any] = []  # optimizers of other names, which make their own state
        if config.optimizer == "adamw":
            self.moments = [(part.zeros(), part.zeros()) for part in self.parts]
            self.optimizers = [self._adam(each) for each in self.updated]
        else:
            self.optimizers = self.named = [self._named(each) for each in self.updated]

    def _decay(self, spec: ShardingSpec) -> float:
        decays = spec.decay or self.config.decay_biases_and_norms
        return self.config.weight_decay if decays else 0.0

    def _adam(self, numbers: Sequence[int]) -> Any:
        segments = []
        for number in numbers:
            part, moments = self.parts[number], self.moments[number]
            tensors = [part.masters, part.gradients, *moments]
            if part.half is not None:
                tensors.append(part.half)
            for local, spec in self.buckets[number].own_segments:
                segments.append(FlatWeights(self._decay(spec), *(each[local] for each in tensors)))
        make: Any = TorchAdam
        if self.config.optimizer_impl != "torch":  # imported only if it is asked for
            kind = self.config.optimizer_impl
            make = resolve_name(f"megatron.optim.{kind}:{kind.capitalize()}Adam")
        return make(segments, self.config)

    def _named(self, numbers: Sequence[int]) -> Any:
        from megatron.optim.by_name import NamedOptimizer

        shards = list[tuple[TensorSlice, Tensor]]()
        for number in numbers:
            bucket, part = self.buckets[number], self.parts[number]
            slices = bucket.slices(part.masters), bucket.slices(part.gradients)
            shards += [(master, gradient.local) for master, gradient in zip(*slices, strict=True)]
        return NamedOptimizer(shards, self._decay, self.gradients.mesh, self.config)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        unscale: float = 1.0,
        norm: float | Tensor = 0.0,
        is_sound: Callable[[], bool] = lambda: True,
    ) -> None:
        """Clip by the global norm and update; by torch's Adam the host does not wait for the norm.

        unscale: scalar that turns the buckets' sums into gradients of the mean loss.
        norm: of all the model's gradients x `unscale`, or an fp64 scalar of it on their device; 0,
            the default, clips nothing, as after clip_grad_norm. With one that is not finite the
            step changes no master and no moment.
        is_sound: called when the update is queued; whether the norm is finite. If it is not, the
            masters are not rounded again: a damaged weight stays, for the diagnosis to name.
        """
        self.gradients.name_unreached()
        limit, device = self.config.clip_grad, self.gradients.mesh.device
        if not isinstance(norm, Tensor):
            norm = torch.full((), norm, dtype=torch.float64, device=device)
        clip = torch.full_like(norm, limit).div(norm + 1e-6) if limit else torch.ones_like(norm)
        factor = (unscale * clip.clamp(max=1.0)).where(norm.isfinite(), 0.0)
        # With offload, while one bucket is updated, gradients of the next and weights of the
        # previous ones are copied. None starts before clip_grad_norm has scaled the sums.
        arrivals = [part.start() for part in self.parts]
        rounds = self.config.optimizer_impl == "compiled"
        if self.config.optimizer_cpu_offload:
            factor = factor.cpu()
        for optimizer, numbers in zip(self.optimizers, self.updated, strict=True):
            for number in numbers:
                arrivals[number]()
            optimizer.step(lr, factor)
            # Each rounds its masters and starts to gather weights; the last loop waits for all.
            for number in numbers if is_sound() else ():
                self.buckets[number].start_publish(is_rounded=rounds)
        for bucket in self.buckets:
            bucket.end_publish()

    def publish(self) -> None:
        """Round the masters to the parameters, and gather each rank's part on all ranks; in ZeRO
        stage 3 parameters are gathered when they are used."""
        for bucket in self.buckets:
            bucket.start_publish()
        for bucket in self.buckets:
            bucket.end_publish()

    def masters(self) -> Iterator[TensorSlice]:
        """This rank's part of the master of every trained parameter: key NAME."""
        for bucket, part in zip(self.buckets, self.parts, strict=True):
            yield from bucket.slices(part.masters)

    def weights(self) -> Iterator[TensorSlice]:
        """This rank's part of every parameter, trained or not: key model.NAME. In ZeRO stage 3,
        and with masters on the host, that is its part of the masters, rounded."""
        is_whole = all(bucket.keeps_weights for bucket in self.buckets)
        is_of_masters = self.config.optimizer_cpu_offload or not is_whole
        masters = {each.key: each for each in self.masters()} if is_of_masters else {}
        for name, parameter in self.gradients.model.named_parameters():
            local, spec = parameter.detach(), self.gradients.specs[name]
            if name in masters:
                local, spec = masters[name].local.to(parameter.dtype), masters[name].spec
            yield TensorSlice(f"model.{name}", spec, local)

    def slices(self) -> Iterator[TensorSlice]:
        """Every tensor of a checkpoint, to save or to load: parameters, the optimizer's state,
        masters of half weights. Before load_checkpoint call `make_state`, after it `loaded`."""
        yield from self.weights()
        yield from self.tensors()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set weights from (name, whole tensor) pairs; memory holds only as many as the iterable
        does: a model that no rank has room for comes one tensor at a time. Every rank calls this
        with the same values. Masters take them unrounded. Raises ValueError for a name that the
        model does not have."""
        masters = {each.key: each for each in self.masters()}
        parameters = dict(self.gradients.model.named_parameters())
        for name, whole in values:
            if name not in parameters:
                raise ValueError(f"the model has no parameter {name}")
            local, spec = parameters[name].detach(), self.gradients.specs[name]
            if name in masters:
                local, spec = masters[name].local, masters[name].spec
            load_whole(local, whole.detach(), spec)
        self.publish()

    def tensors(self) -> Iterator[TensorSlice]:
        """This rank's part of the optimizer's state in a checkpoint: key KIND.NAME."""
        for bucket, moments in zip(self.buckets, self.moments, strict=not self.named):
            for moment, prefix in zip(moments, ("exp_avg.", "exp_avg_sq."), strict=True):
                yield from bucket.slices(moment, prefix)
        for optimizer in self.named:
            yield from optimizer.slices()
        for bucket, part in zip(self.buckets, self.parts, strict=True):
            if bucket.weight_dtype != bucket.dtype:
                yield from bucket.slices(part.masters, "master.")

    def make_state(self, updates: int) -> None:
        """Before `slices()` are filled from a checkpoint: make the state that an optimizer of
        torch makes in its first update. updates: number made before the checkpoint."""
        for each in self.named if updates else ():
            each.make_state()

    def loaded(self, updates: int) -> None:
        """Continue from a checkpoint that filled `slices()`. updates: number made before it."""
        for each in self.optimizers:
            each.set_updates(updates)
        self.publish()
