"""All layouts of a model on a number of devices: pipelines and their schedules, tensor parallelism
and its modes, context parallelism, ZeRO, micro-batches and recomputation; data parallelism takes
the other devices. gpipe is left out: it idles as 1f1b does, and keeps more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import isqrt, prod
from typing import NamedTuple

from megatron.config.parallel import STAGES, VIRTUAL
from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError
from megatron.parallel.schedules import KINDS
from tools.plan.buckets import parameters_of
from tools.plan.layers import in_one_stage
from tools.plan.micro_batch import MIDDLE
from tools.plan.search import PLAIN, batches, divisors, keeping_batch, varied
from tools.plan.trace import idle_share


class Candidate(NamedTuple):
    """A layout, or several that differ in the stage of ZeRO. kind: a number of Layouts.kinds.
    replicas: ranks with the same weights."""

    kind: int
    pipeline: int
    virtual: int | None
    schedule: str | None
    batch: int
    micro_batches: int
    replicas: int

    @property
    def zero_stages(self) -> range:
        return range(1 if self.replicas == 1 else 2 if self.pipeline > 1 else 4)

    @property
    def idle(self) -> float:
        """Least idle share; that of a schedule of one's own is not known."""
        kind, virtual = self.schedule or "1f1b", self.virtual or 1
        return idle_share(kind, self.pipeline, self.micro_batches, virtual) * (kind in KINDS)


class Layouts:
    """given: a config, whose global batch and model are kept."""

    def __init__(self, given: PretrainConfig, gpus: int) -> None:
        self.given, self.gpus = given, gpus
        self.config = varied(keeping_batch(given, gpus), **PLAIN)
        self.batch = self.config.global_batch_size(gpus)
        self.kinds = list[PretrainConfig]()
        """Ways to divide a layer and to recompute it; each a config with one stage."""
        self.wider = list[list[int]]()
        """By kind: kinds that are cut less."""
        self.counts = dict.fromkeys(("tried", "planned", "refused", "not_fitting", "pruned"), 0)
        """Layouts. refused: by a rule of the settings. pruned: they cannot be among the best."""

    @cached_property
    def is_staged(self) -> bool:
        """Whether the model can be built in stages."""
        config = replace(self.config, parallel=in_one_stage(self.config.parallel))
        try:
            return bool(parameters_of(config, "fp32", MIDDLE)[0])
        except ValueError:
            return False

    def candidates(self) -> Iterator[Candidate]:
        """Those that divide devices, layers and the global batch."""
        samples, depth = batches(self.given), self.config.model.num_layers
        for kind in self._kinds():
            number, parallel = len(self.kinds), kind.parallel
            self.kinds.append(kind)
            each = parallel.context_parallel_size * parallel.tensor_parallel_depth
            ranks, readers = prod(parallel.sizes.values()), parallel.batch_parallel_size(self.gpus)
            for stages in divisors(self.gpus // ranks):
                replicas = self.gpus // ranks // stages * each
                parts = {size: divmod(self.batch * stages, size * readers) for size in samples}
                found = [
                    Candidate(number, stages, *way, size, parts[size][0], replicas)
                    for way, size in product(self._schedules(kind, stages), samples)
                ]
                fitting = [size for size in samples if not parts[size][1]]
                accepted = fitting if stages <= depth and self._takes(kind, stages, fitting) else []
                for candidate in found:
                    several = len(candidate.zero_stages)
                    self.counts["tried"] += several
                    if candidate.batch in accepted:
                        yield candidate
                    else:
                        self.counts["refused"] += several

    def _kinds(self) -> Iterator[PretrainConfig]:
        config, gpus = self.config, self.gpus
        plain = dict.fromkeys((VIRTUAL, "pipeline_schedule")) | {"zero_stage": 0}
        one_stage = varied(config, **plain, **{STAGES: 1, "micro_batch_size": 1})
        sides = range(2, isqrt(gpus) + 1)
        grids = [("1d", size, 1) for size in divisors(gpus)]
        if config.model.has_grids:
            grids += [("2d", n**2, 1) for n in sides] + [("3d", n**3, 1) for n in sides]
            grids += [("2.5d", deep * n**2, deep) for deep, n in product(divisors(gpus)[1:], sides)]
        known = dict[tuple[object, ...], int]()
        for mode, size, deep in grids:
            if gpus % size:
                continue
            contexts = [("a2a", 1)]
            if mode == "1d" and config.model.has_context:
                contexts += product(("a2a", "p2p"), divisors(gpus // size)[1:])
            cuts = (False, True) if mode == "1d" and size > 1 else (False,)
            for again, cut, (way, ranks) in product(config.model.granularities, cuts, contexts):
                known[mode, size, deep, again, cut, way, ranks] = len(self.kinds)
                wider = [(mode, 2, 1, again, cut, "a2a", 1), (mode, size, 1, again, cut, "a2a", 1)]
                wider += [(mode, size, 1, again, cut, way, 2)]
                numbers = dict.fromkeys(known[key] for key in wider if key in known)
                numbers.pop(len(self.kinds), None)
                self.wider.append([*numbers] if mode == "1d" else [])
                yield varied(
                    one_stage,
                    tensor_model_parallel_size=size,
                    tensor_parallel_mode=mode,
                    tensor_parallel_depth=deep,
                    sequence_parallel=cut,
                    context_parallel_size=ranks,
                    cp_comm_type=way,
                    recompute_granularity=again,
                )

    def _schedules(self, kind: PretrainConfig, stages: int) -> list[tuple[int | None, str | None]]:
        """(virtual stages of a rank, schedule)"""
        found: list[tuple[int | None, str | None]] = [(None, None)]
        if stages == 1:
            return found
        if kind.model.recompute_granularity != "full":
            found.append((None, "zb-h1"))
        most = kind.model.num_layers // stages
        powers = {2**power for power in range(1, most.bit_length())}
        found += [(each, None) for each in sorted(powers | {most}) if each > 1]
        own = self.given.parallel.pipeline_schedule
        return found if own in (None, *KINDS) else [*found, (None, own)]

    def _takes(self, kind: PretrainConfig, stages: int, samples: Sequence[int]) -> bool:
        """Whether a run takes so many stages, with one of these micro-batches."""
        for each in samples:
            try:
                varied(kind, **{STAGES: stages, "micro_batch_size": each}).check(self.gpus)
            except UsageError as error:
                if error.flag != "--micro-batch-size":
                    return False
            else:
                return stages == 1 or self.is_staged
        return False

    def config_of(self, candidate: Candidate, zero_stage: int) -> PretrainConfig:
        _, stages, virtual, schedule, batch, *_ = candidate
        changes = {STAGES: stages, VIRTUAL: virtual, "pipeline_schedule": schedule}
        changes |= {"micro_batch_size": batch, "zero_stage": zero_stage}
        return varied(self.kinds[candidate.kind], **changes)
