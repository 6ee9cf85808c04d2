"""The fastest layouts of a model on a number of devices, and why others are slower.

All layouts are tried (layouts.py). Few of them are planned, the most promising first. The others
are left out by lower bounds, which cost less than a plan: they do not fit, or cannot be among the
best.

    seconds    of the FLOPs, at the share of the peak that matmuls attain, and the bubble; then of
               a traced layer, of a kind that is cut less: one that is cut n times as often takes at
               least 1/n of its time, and sends as much over the tensor axis; then of the layer
               itself, from traces of one and of two samples; then of all but embedding and head
    memory     weights, gradients and the optimizer's state; then also what layers keep
"""

from __future__ import annotations

import gc
import sys
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, reduce
from heapq import heapify, heappop, heappush
from math import inf, prod
from types import SimpleNamespace
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron.config.parallel import STAGES, VIRTUAL
from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError
from tools.layouts.work import Work
from tools.plan.buckets import OF_STAGES, WIDE, Model, axes_of
from tools.plan.hardware import Hardware
from tools.plan.layouts import Candidate, Layouts
from tools.plan.micro_batch import Trace
from tools.plan.quick import LayersStep, QuickStep, at_samples, layer_trace
from tools.plan.record import table
from tools.plan.search import VARIED, Row, check_sizes, flags, left_out, settings, spelled, varied
from tools.plan.software import error_band
from tools.plan.timing import Seconds, call_seconds, matmul_seconds, predict
from tools.report.numbers import size

SAFE = 0.98  # of bounds of seconds: a middle rank moves up to 1 % more than its layer
SAFE_MEMORY = 0.97  # of what layers keep: the keys of masks do not grow with the samples
OF_RING = 0.8  # of a ring of two, which computes more of the masked scores than larger ones
UNKNOWN = 0.1  # share of the time within which layouts tie where no error band is promised
LOSSES = {  # what a layout may lose by, by the parts of its time
    "matrix_products": "matmuls",
    "other_kernels": "other kernels and the optimizer",
    "tensor_parallel_exposed": "exposed tensor-parallel communication",
    "context_parallel_exposed": "exposed context-parallel communication",
    "data_parallel_exposed": "exposed data-parallel communication",
    "pipeline_parallel_exposed": "messages between stages",
    "pipeline_bubble": "the pipeline's bubble",
    "offload": "copies to the host",
    "host": "the host",
}


@contextmanager
def _frozen() -> Iterator[None]:
    """Leaves torch's objects alone, else 4 % of the time goes into collections of them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class LayoutPlan(NamedTuple):
    """A layout that fits, and its plan. memory: bytes of the rank that needs most."""

    config: PretrainConfig
    step: QuickStep
    seconds: Seconds
    memory: int


class Entry(NamedTuple):
    """A candidate with a bound of its seconds, or one of its layouts. level: number of bounds that
    were worked out."""

    seconds: float
    number: float
    level: int
    candidate: Candidate
    config: PretrainConfig | None = None


class Search(Layouts):
    """Plans layouts. most: how many of the best layouts are wanted."""

    def __init__(
        self, given: PretrainConfig, gpus: int, hardware: Hardware, precision: str, most: int
    ) -> None:
        super().__init__(given, gpus)
        self.hardware, self.precision, self.most = hardware, precision, most
        self.found, self.times = list[LayoutPlan](), list[float]()  # the times sorted
        self.trace, self.work = cache(self._trace), cache(self._work)
        self.matmuls = cache(self._matmuls)
        self.layer, self.exact, self.rough = map(cache, (self._layer, self._exact, self._rough))

    def run(self) -> list[LayoutPlan]:
        """The layouts that were planned and fit, best first; the first `most` are the best of all
        that fit."""
        queue, limit, left = list[Entry](), self.hardware.limit, 0
        for number, each in enumerate([*self.candidates()]):
            if self._lasting(each) <= limit:
                queue.append(Entry(self._by_flops(each), number, 0, each))
                left += len(each.zero_stages)
            else:
                self.counts["not_fitting"] += len(each.zero_stages)
        heapify(queue)
        is_hidden = not sys.stderr.isatty()  # it would fill a log file
        shown = tqdm(total=left, desc="layouts", leave=False, disable=is_hidden)
        with _frozen(), shown as bar:
            while queue and SAFE * queue[0].seconds <= self._slowest_of_best:
                bound, number, level, each, config = heappop(queue)
                if config is not None:
                    self._add(config)
                    done = 1
                elif level < len(self.wider[each.kind]) + 2:
                    seconds, memory = self._bounds(each, level)
                    done = len(each.zero_stages) * (memory > limit)
                    self.counts["not_fitting"] += done
                    if not done:
                        entry = Entry(max(bound, seconds), number, level + 1, each)
                        heappush(queue, entry)
                else:
                    done = len(each.zero_stages)
                    for stage in each.zero_stages:
                        if (found := self._bound(self.config_of(each, stage), each)) is not None:
                            seconds, config = found
                            number += 1 / 8
                            heappush(queue, Entry(max(bound, seconds), number, 0, each, config))
                            done -= 1
                left -= done
                bar.update(done)
        self.counts["pruned"] = left
        self.found.sort(key=lambda each: each.seconds.total)
        return self.found

    @property
    def _slowest_of_best(self) -> float:
        return self.times[self.most - 1] if len(self.times) >= self.most else inf

    def _add(self, config: PretrainConfig) -> None:
        try:
            planned = self.plan(config)
        except UsageError:
            self.counts["refused"] += 1
            return
        if isinstance(planned, LayoutPlan):
            self.found.append(planned)
            insort(self.times, planned.seconds.total)
        self.counts["planned" if isinstance(planned, LayoutPlan) else "not_fitting"] += 1

    def _bound(
        self, config: PretrainConfig, candidate: Candidate
    ) -> tuple[float, PretrainConfig] | None:
        """Least seconds of a layout, which may fit; else None, and it is counted."""
        try:
            config.check(self.gpus)
        except UsageError:
            self.counts["refused"] += 1
            return None
        own, device = self.layer(candidate.kind, candidate.batch), self.hardware.device
        step = LayersStep(config, self.gpus, self.precision, device, layer_trace=own)
        if step.lacks(self.hardware.limit / SAFE_MEMORY) > 0:
            self.counts["not_fitting"] += 1
            return None
        return predict(step, self.hardware).total, config

    def plan(self, config: PretrainConfig) -> LayoutPlan | float:
        """The plan of a layout, or bytes that a device lacks. Raises UsageError."""
        check_sizes(config, self.gpus)
        step = QuickStep(config, self.gpus, self.precision, self.hardware.device)
        if (lack := step.lacks(self.hardware.limit)) > 0:
            return lack
        memory = max(each.memory["total"] for each in step.unlike)
        return LayoutPlan(config, step, predict(step, self.hardware), memory)

    def _trace(self, kind: int, samples: int) -> Trace:
        config = varied(self.kinds[kind], micro_batch_size=samples)
        return layer_trace(config, self.precision, self.hardware.device, is_staged=self.is_staged)

    def _layer(self, kind: int, samples: int) -> Trace:
        """The trace of a layer, or what it is nearly."""
        if samples > 2:
            near = at_samples(self.trace(kind, 1), self.trace(kind, 2), samples)
            if near is not None:
                return near
        return self.trace(kind, samples)

    def _work(self, kind: int, samples: int) -> Work:
        return reduce(Work.plus, self.layer(kind, samples).work.values())

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of all weights, of their gradients, and of the optimizer's state on the device."""
        whole, *_ = self._roots.values()
        step = QuickStep(self.kinds[whole], self.gpus, self.precision)
        state = step.wide * (step.moments + (step.width < step.wide))
        state *= not self.config.optimizer.optimizer_cpu_offload
        return step.model.own * step.width, step.model.own * step.wide, step.model.own * state

    def _lasting(self, candidate: Candidate) -> float:
        """Least bytes of weights, gradients and the optimizer's state on a rank."""
        weights, gradients, state = self._sizes
        whole = weights + gradients + state / candidate.replicas
        if 3 in candidate.zero_stages:
            whole = (gradients + state) / candidate.replicas
        parallel = self.kinds[candidate.kind].parallel
        shares = parallel.tensor_model_parallel_size // parallel.tensor_parallel_depth
        return whole / candidate.pipeline / shares

    def _idle(self, candidate: Candidate) -> float:
        """On a CPU other ranks may take the cores of one that waits."""
        return 0.0 if self.hardware.is_cpu else candidate.idle

    @cached_property
    def _roots(self) -> dict[str, int]:
        """Kinds of one rank, by recomputation."""
        return {
            each.model.recompute_granularity: number
            for number, each in enumerate(self.kinds)
            if prod(each.parallel.sizes.values()) == 1
        }

    @cached_property
    def _flop_seconds(self) -> dict[str, float]:
        """By recomputation: least seconds of all matmuls of a step on all ranks together."""
        layers = self.batch * self.config.model.num_layers
        return {again: layers * self.matmuls(kind) for again, kind in self._roots.items()}

    def _matmuls(self, kind: int) -> float:
        """Least seconds of the matmuls of a sample in a layer."""
        hardware = self.hardware
        share = max(hardware.attained_share, hardware.unaligned_share or 0)
        peaks = {True: hardware.peak("fp32"), False: hardware.peak(self.precision)}
        matmuls = self.work(kind, 1).matmuls.items()
        found = (n * each.flops * each.share / peaks[each.width >= WIDE] for each, n in matmuls)
        return sum(found) / share

    def _by_flops(self, candidate: Candidate) -> float:
        """Least seconds of the FLOPs of layers and of the bubble."""
        again = self.kinds[candidate.kind].model.recompute_granularity
        return self._flop_seconds[again] / self.gpus * (1 + self._idle(candidate))

    def _bounds(self, candidate: Candidate, level: int) -> tuple[float, float]:
        """Least seconds; least bytes of the pipeline's first rank. level: of wider kinds, of the
        kind by a trace of one sample, and of its micro-batch."""
        kind, stages, *_, samples, number, _ = candidate
        if self.hardware.layers:  # measured ones may be faster than derived ones
            return 0.0, self._lasting(candidate)
        sources, layers = [*self.wider[kind], kind], self.config.model.num_layers
        if level < len(sources):
            seconds, kept = self.rough(kind, sources[level], samples)
        else:
            seconds, kept = self.exact(kind, samples)
        seconds *= number * layers / stages * (1 + self._idle(candidate))
        kept *= min(number, stages) * (layers // stages)
        return seconds, self._lasting(candidate) + SAFE_MEMORY * kept

    def _rough(self, kind: int, source: int, samples: int) -> tuple[float, float]:
        """(least seconds of a micro-batch in a layer, bytes that it keeps) by a trace of one sample
        in a layer that is cut as often, or less."""
        own, other = (self.kinds[each].parallel for each in (kind, source))
        cuts = own.context_parallel_size / other.context_parallel_size
        parts = cuts * own.tensor_model_parallel_size / other.tensor_model_parallel_size
        root = self._roots[self.kinds[kind].model.recompute_granularity]
        one, two = (self.work(root, each).moved for each in (1, 2))
        work, more = self.work(source, 1), samples - 1
        moved = work.moved / parts + more * (two - one) / prod(own.sizes.values())
        seconds = samples * self.matmuls(source) / parts + moved / self.hardware.moved_per_second
        if other.is_ring and cuts > 1:
            seconds *= OF_RING
        seconds += self._waits(kind, work, samples / cuts)
        return seconds, samples * self.trace(source, 1).kept / parts

    def _exact(self, kind: int, samples: int) -> tuple[float, float]:
        """The same by the trace of the layer."""
        work, hardware = self.work(kind, samples), self.hardware
        seconds = work.moved / hardware.moved_per_second + self._waits(kind, work, 1.0)
        for each, number in work.matmuls.items():
            seconds += number * matmul_seconds(each, hardware, self.precision)
        return seconds, self.layer(kind, samples).kept

    def _waits(self, kind: int, work: Work, times: float) -> float:
        """Least seconds of collectives of so many times as many bytes."""
        config = self.kinds[kind]
        rings, _ = axes_of(config.parallel, config.data_parallel_size(self.gpus), 1)
        step: Any = SimpleNamespace(model=Model(rings, "data"))
        return sum(
            number * call_seconds(step, call._replace(bytes=times * call.bytes), self.hardware)
            for call, number in work.calls.items()
            if not call.beside and call.axis not in OF_STAGES
        )

    @cached_property
    def band(self) -> float:
        """Share of the best time within which others tie with it."""
        band, _ = error_band(self.hardware, self.found[0].step)
        return UNKNOWN if band is None else band

    def row(self, planned: LayoutPlan) -> Row:
        """JSON."""
        config, step, seconds, memory = planned
        found, plan, total = settings(config), step.pipeline, seconds.total
        row: Row = {own: found[name] for name, (_, own) in VARIED.items()}
        row |= {"virtual_stages": plan.virtual, "schedule": plan.kind, "data": step.copies}
        row |= {"micro_batches": step.micro_batches, "seconds": total}
        row |= {"tokens_per_second": step.tokens / total, "mfu": self._peak_seconds / total}
        row |= {"memory_bytes": memory, "flags": flags(self.given, config, self.gpus)}
        return row | {"tie": total <= (1 + self.band) * self.found[0].seconds.total}

    @cached_property
    def _peak_seconds(self) -> float:
        flops = self.found[0].step.flops  # the same in all layouts
        return flops / self.gpus / self.hardware.peak(self.precision)

    def record(self) -> Row:
        """JSON. neighbours: layouts that differ from the best in a setting, and why they are not
        better: bytes that a device lacks, or the part of the time by which they lose most."""
        rows = [self.row(each) for each in self.found or self.run()]
        changes = _changes(self.found[0], self.gpus) if rows else ()
        near = [self._neighbour(each) for each in changes]
        counts = self.counts | {"left_out": left_out(self.given)}
        return {"layouts": rows, "neighbours": near, "search": counts}

    def _neighbour(self, changes: Row) -> Row:
        best = self.found[0]
        row: Row = {"flags": spelled(changes), "reason": "", "part": None, "seconds": None}
        try:
            found = self.plan(varied(best.config, **changes))
        except UsageError as error:
            return row | {"reason": f"refused: {error.flag} must be {error.allowed}"}
        except ValueError as error:  # a model that cannot be built so
            return row | {"reason": f"refused: {error}"}
        if not isinstance(found, LayoutPlan):
            reason = f"does not fit: a device lacks {size(found)}"
            return row | {"reason": reason, "lacking_bytes": found}
        old, new = vars(best.seconds), vars(found.seconds)
        losses = {part: new[part] - old[part] for part in LOSSES if part in old}
        part = max(losses, key=lambda each: losses[each])
        name, slower = LOSSES[part], found.seconds.total / best.seconds.total - 1
        if part == "matrix_products" and "recompute_granularity" in changes:
            name = "recomputed FLOPs"
        reason = f"{100 * slower:+.1f} %: {name}, {1000 * losses[part]:+.3g} ms"
        if slower <= self.band:
            reason += ", within the error"
        return row | {"reason": reason, "part": part, "seconds": found.seconds.total}

    def text(self, found: Row) -> str:
        """A record as readable text."""
        counts = ", ".join(f"{number:,} {name}" for name, number in self.counts.items())
        lines = [f"layouts: {counts}".replace("_", " ")]
        if not found["layouts"]:
            return f"{lines[0]}\n--hardware with more memory may help"
        best = [
            {
                "": "=" if row["tie"] else "",
                "seconds": row["seconds"],
                "tokens/s": row["tokens_per_second"],
                "MFU, %": 100 * row["mfu"],
                "GB": row["memory_bytes"] / 1e9,
            }
            for row in found["layouts"][: self.most]
        ]
        flags = ["flags", *(row["flags"] or "as given" for row in found["layouts"])]
        lines += map("  ".join, zip(table(best).splitlines(), flags, strict=False))
        lines += [f"= within {100 * self.band:g} % of the best", ""]
        if names := left_out(self.given):
            lines += [f"with these flags {' and '.join(names)} is left out", ""]
        lines += ["changes of the best, and why they are not better:"]
        lines += [f"  {each['flags']}: {each['reason']}" for each in found["neighbours"]]
        return "\n".join(lines)


def _changes(best: LayoutPlan, gpus: int) -> Iterator[Row]:
    """Changes of one setting, and of those that go with it, for as many devices."""
    now, ranks = settings(best.config), prod(best.config.parallel.sizes.values())
    mode, size, stages = now["tensor_parallel_mode"], best.step.tensor, best.step.pipeline.ranks
    unstaged = {VIRTUAL: None, "pipeline_schedule": None}

    def doubled(name: str, with_one: Row) -> Iterator[Row]:
        value = now[name]
        if name == "micro_batch_size" or gpus % (2 * ranks) == 0:
            yield {name: 2 * value}
        if value % 2 == 0:
            yield {name: value // 2} | (with_one if value == 2 else {})

    yield from doubled("micro_batch_size", {})
    yield from doubled(STAGES, unstaged)
    if stages > 1:
        ways: list[Row] = [unstaged, unstaged | {"pipeline_schedule": "zb-h1"}]
        ways += [unstaged | {VIRTUAL: each} for each in (2, 4)]
        yield from (way for way in ways if not way.items() <= now.items())
    if mode == "1d":
        yield from doubled("tensor_model_parallel_size", {"sequence_parallel": False})
        if size > 1:
            yield {"sequence_parallel": not now["sequence_parallel"]}
        yield from doubled("context_parallel_size", {"cp_comm_type": "a2a"})
        other = {"cp_comm_type": "a2a" if now["cp_comm_type"] == "p2p" else "p2p"}
        if best.step.context > 1:
            yield other
        elif gpus % (2 * ranks) == 0:
            yield {"context_parallel_size": 2} | other
        for grid, deep, dims in (("2d", 1, 2), ("2.5d", 2, 2), ("3d", 1, 3)):
            if size > deep and round((size / deep) ** (1 / dims)) ** dims * deep == size:
                yield {
                    "tensor_parallel_mode": grid,
                    "tensor_parallel_depth": deep,
                    "sequence_parallel": False,
                }
    else:
        yield {"tensor_parallel_mode": "1d", "tensor_parallel_depth": 1}
    again = best.config.model.granularities
    yield from (
        {"recompute_granularity": each} for each in again if each != now["recompute_granularity"]
    )
    if gpus * best.step.context * now["tensor_parallel_depth"] > ranks:  # that share the state
        yield from ({"zero_stage": each} for each in range(4) if each != now["zero_stage"])
