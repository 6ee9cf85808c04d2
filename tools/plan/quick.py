"""Steps of many layouts, quickly: ranks of a pipeline that are alike are planned once, and the peak
of activations is that of the first micro-batches of a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

from megatron.config.pretrain import PretrainConfig
from megatron.parallel.schedules import KINDS
from tools.layouts.work import Matmul, Work
from tools.plan.buckets import THREE
from tools.plan.layers import in_one_stage
from tools.plan.micro_batch import MIDDLE, MicroBatch, Trace, trace_at
from tools.plan.trace import Step

ENOUGH = 3  # micro-batches for each rank of a pipeline, which fill it, run in it and leave it


@dataclass(frozen=True)
class QuickStep(Step):
    """A step whose stages have the ranks that are alike as one object."""

    @cached_property
    def stages(self) -> list[Step]:
        return self._by_rank

    @cached_property
    def _by_rank(self) -> list[Step]:
        """Ranks between the ends with as many layers are one object: the first of them, which keeps
        most."""
        plan, found, kinds = self.pipeline, list[Step](), dict[object, Step]()
        for rank in range(plan.ranks):
            is_end = rank in (0, plan.ranks - 1)
            kind = rank if is_end else tuple(map(len, plan.layers[rank :: plan.ranks]))
            if kind not in kinds:
                kinds[kind] = replace(self, rank=rank)
            found.append(kinds[kind])
        return found

    @property
    def activations(self) -> int:
        plan, m = self.pipeline, self.micro_batches
        enough = ENOUGH * plan.ranks
        if plan.kind not in KINDS or m <= enough or m % plan.ranks:
            return super().activations
        batch = self.config.global_batch_size(self.ranks) // m * enough
        training = replace(self.config.training, global_batch_size=batch)
        return replace(self, config=replace(self.config, training=training)).activations

    @property
    def unlike(self) -> list[Step]:
        """Each of `stages` once."""
        return [*{id(each): each for each in self._by_rank}.values()]

    def lacks(self, limit: float) -> float:
        """Bytes that the fullest rank has too few, at most 0 if the layout fits; without those that
        need a trace if the others do not fit."""
        lasting = max(sum(each.lasting.values()) for each in self.unlike)
        if lasting <= limit:
            lasting = max(each.memory["total"] for each in self.unlike)
        return lasting - limit


@dataclass(frozen=True)
class LayersStep(QuickStep):
    """A step without what is outside of layers: the whole one takes no less time and memory. layer:
    trace of a layer at the step's micro-batch."""

    layer_trace: Trace = field(kw_only=True, compare=False)

    @cached_property
    def stages(self) -> list[Step]:
        """Stages alike count once, so that the bubble is not quite that of the mean stage."""
        return self.unlike

    @cached_property
    def trace(self) -> Trace:
        own, layers = self.layer_trace, self.layers
        work = {phase: Work().plus(each, layers) for phase, each in own.work.items()}
        depths = [*map(len, self.pipeline.layers[self.rank :: self.pipeline.ranks])] or [layers]
        kept = tuple(depth * own.kept for depth in depths)
        return replace(
            own, work=work, kept_by_stage=kept, owed_by_stage=kept, kept_of_layer=own.kept
        )

    @cached_property
    def layer(self) -> Work:  # type: ignore[override]
        return reduce(Work.plus, self.layer_trace.work.values())


def layer_trace(
    config: PretrainConfig, precision: str, device: str, *, is_staged: bool = True
) -> Trace:
    """Trace of one layer. is_staged: whether the model can have stages; then it is that of a middle
    rank with one layer, which moves 1 % more."""
    ranks = config.parallel.context_parallel_size
    if config.parallel.is_ring and ranks > 8 and "seq_length" in vars(config.data):
        # Each two ranks more, with their tokens, add what the second two add: the trace of a ring
        # takes time as its size grows, 1.4 s for 32 ranks.
        def smaller(size: int) -> Trace:
            """A ring of this size has as many tokens on a rank."""
            data = replace(config.data, seq_length=config.seq_length // ranks * size)  # type: ignore[call-arg]
            parallel = replace(config.parallel, context_parallel_size=size)
            ring = replace(config, data=data, parallel=parallel)
            return layer_trace(ring, precision, device, is_staged=is_staged)

        two, four = smaller(2), smaller(4)
        return _plus(four, _plus(four, two, -1), ranks // 2 - 2)
    asked = MicroBatch(replace(config, parallel=in_one_stage(config.parallel)), precision, device)
    if is_staged:
        return trace_at(replace(asked, pipeline=THREE), MIDDLE, 1)
    one, two = (trace_at(asked, 0, layers) for layers in (1, 2))
    return _plus(two, one, -1)


def _plus(base: Trace, other: Trace, times: int) -> Trace:
    """base and `times` the work of the other, and what it keeps."""
    work = dict[str, Work]()
    for phase, own in base.work.items():
        found = own.plus(other.work[phase], times)
        work[phase] = Work(+found.matmuls, +found.calls, found.moved)
    return replace(base, work=work, kept_by_stage=(base.kept + times * other.kept,))


def at_samples(one: Trace, two: Trace, samples: int) -> Trace | None:
    """Trace of a micro-batch of so many samples, from those of one and of two: a layer's sizes grow
    by as much with each. None where the two do not do the same."""

    def at(a: int, b: int) -> int:
        return a + (samples - 1) * (b - a)

    def of_matmul(a: Matmul, b: Matmul) -> Matmul:
        sizes = (at(x, y) for x, y in zip(a[:4], b[:4], strict=True))
        return a._replace(**dict(zip(a._fields, sizes, strict=False)))

    work = dict[str, Work]()
    for phase, first in one.work.items():
        second, found = two.work[phase], Work(moved=at(first.moved, two.work[phase].moved))
        if [*first.matmuls.values(), *first.calls.values()] != [
            *second.matmuls.values(),
            *second.calls.values(),
        ]:
            return None
        for (a, number), b in zip(first.matmuls.items(), second.matmuls, strict=True):
            found.matmuls[of_matmul(a, b)] += number
        for (call, number), other in zip(first.calls.items(), second.calls, strict=True):
            if (call.axis, len(call.beside)) != (other.axis, len(other.beside)):
                return None
            beside = tuple(map(of_matmul, call.beside, other.beside))
            call = call._replace(bytes=at(call.bytes, other.bytes), beside=beside)
            found.calls[call] += number
        work[phase] = found
    kept = (at(one.kept, two.kept),)
    names = ("logits", "head", "one_layer", "message")
    sizes = [at(getattr(one, each), getattr(two, each)) for each in names]
    parts = {part: at(peak, two.by_gradient[part]) for part, peak in one.by_gradient.items()}
    return Trace(work, kept, kept, *sizes, parts)
