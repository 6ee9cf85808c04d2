"""Measured times of layers: what they are times of, the layouts to measure, and their tables in a
hardware file. Needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Any

from megatron.config.parallel import EACH, ENDS, PROCESSES, STAGES, VIRTUAL, TrainingParallelConfig
from megatron.config.pretrain import PretrainConfig
from megatron.errors import UsageError
from megatron.train.inputs import vocabulary_of

if TYPE_CHECKING:
    from tools.plan.trace import Step

# Settings of a model that do not change the time of a layer, or are fields of a Shape themselves.
APART = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "recompute_granularity"}
APART |= {"max_position_embeddings", "init_method_std", "layernorm_epsilon"}
OF_TRAINING = ("compile", "cuda_graph")
OF_PARALLEL = ("tensor_parallel_mode", "tensor_parallel_depth", "context_parallel_size")
OF_PARALLEL += ("cp_comm_type",)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All that decides how long a layer takes for a micro-batch, and the edge: embedding, logits
    and loss. settings: others that are not the defaults, such as "attention_dropout=0.0"."""

    kind: str
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tensor: int
    micro_batch: int
    sequence_parallel: bool
    recompute: str
    precision: str
    settings: str = ""

    @classmethod
    def of(cls, step: Step) -> Shape:
        config, model = step.config, step.config.model
        parts: tuple[tuple[Any, Any], ...] = (
            (model, {each.name for each in fields(model)} - APART),
            (config.training, OF_TRAINING),
            (config.parallel, OF_PARALLEL),
        )
        others = {
            each.name: getattr(part, each.name)
            for part, names in parts
            for each in fields(part)
            if each.name in names and getattr(part, each.name) != each.default
        }
        return cls(
            kind=model.kind,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            sequence=config.seq_length,
            vocabulary=vocabulary_of(config),
            tensor=step.tensor,
            micro_batch=config.training.micro_batch_size,
            sequence_parallel=config.parallel.cuts_stream,
            recompute=model.recompute_granularity,
            precision=step.precision,
            settings=" ".join(f"{name}={value}" for name, value in sorted(others.items())),
        )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Measured seconds of a micro-batch of this shape on a rank, with the collectives of tensor
    parallelism: of a layer, and of the edge where that was measured, too. The backward's are with
    recomputation, if there is any."""

    shape: Shape
    forward: float
    backward: float
    edge_forward: float | None = None
    edge_backward: float | None = None

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def edge(self) -> float | None:
        if self.edge_forward is None or self.edge_backward is None:
            return None
        return self.edge_forward + self.edge_backward

    def table(self) -> dict[str, Any]:
        """A table of a hardware file, but for its source."""
        return {**asdict(self.shape), **{each: getattr(self, each) for each in SECONDS}}


SECONDS = ("forward", "backward", "edge_forward", "edge_backward")


def read_layers(tables: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """[[layers]] of a hardware file. Raises ValueError that names the table and its key."""
    kinds = {each.name: str(each.type) for each in fields(Shape)} | dict.fromkeys(SECONDS, "float")
    found = []
    for number, table in enumerate(tables, start=1):
        where = f"[[layers]] {number}"
        if unknown := table.keys() - kinds.keys() - {"source"}:
            raise ValueError(f"{where}: {min(unknown)} is not known")
        for name, kind in {**kinds, "source": "str"}.items():
            value = table.get(name, "" if name == "settings" else None)
            wanted = {"int": int, "float": (int, float), "bool": bool}.get(kind, str)
            is_right = isinstance(value, wanted) and (isinstance(value, bool) == (kind == "bool"))
            if is_right and isinstance(value, (int, float)) and kind != "bool":
                is_right = isfinite(value) and (value > 0 or (value == 0 and name[:4] == "edge"))
            if not is_right:
                raise ValueError(f"{where}: {name} is {value!r}, and has to be a {kind} above 0")
        sizes = {each.name: table[each.name] for each in fields(Shape) if each.name in table}
        found.append(Layer(shape=Shape(**sizes), **{each: table[each] for each in SECONDS}))
    return tuple(found)


@cache
def in_one_stage(parallel: TrainingParallelConfig) -> TrainingParallelConfig:
    """The same division of a layer, without a pipeline and without ZeRO."""
    names = ("pipeline_schedule", EACH, VIRTUAL, *ENDS)
    changes: dict[str, Any] = dict.fromkeys(names) | {STAGES: 1, "pipeline_partition": "balanced"}
    changes |= {"zero_stage": 0, "use_distributed_optimizer": False}
    return replace(parallel, **changes)


def variants(
    config: PretrainConfig,
    ranks: int,
    tensor_sizes: Sequence[int] = (),
    context_sizes: Sequence[int] = (),
    micro_batches: Sequence[int] = (),
    recomputations: Sequence[str] = (),
) -> list[PretrainConfig]:
    """The config at these sizes, by default at its own, without a pipeline and ZeRO, which cut no
    layer; where tensor parallelism allows it, with and without sequence parallelism. Each runs on
    t c of the ranks, while the others do the same; pairs of t and c whose product does not divide
    the ranks are left out, with a warning. Raises UsageError where one cannot run, or none is left.
    """
    given = config.parallel
    whole = replace(in_one_stage(given), sequence_parallel=False)
    allowed = f"divisors of {PROCESSES}, now {ranks}"
    undivided = dict[str, None]()

    def found() -> Iterator[PretrainConfig]:
        for size, context, batch, again in product(
            tensor_sizes or (given.tensor_model_parallel_size,),
            context_sizes or (given.context_parallel_size,),
            micro_batches or (config.training.micro_batch_size,),
            recomputations or (config.model.recompute_granularity,),
        ):
            for name, each in (("--tensor-sizes", size), ("--context-sizes", context)):
                if each < 1 or ranks % each:
                    fit = max(n for n in range(1, ranks + 1) if not ranks % n and n <= max(1, each))
                    raise UsageError(name, each, allowed, works=(name, str(fit)))
            if ranks % (size * context):
                undivided[f"{size} x {context}"] = None
                continue
            training = replace(config.training, micro_batch_size=batch, global_batch_size=None)
            model = replace(config.model, recompute_granularity=again)
            cut = replace(whole, tensor_model_parallel_size=size, context_parallel_size=context)
            one = replace(config, model=model, training=training, parallel=cut)
            one.check(ranks)
            yield one
            if size > 1 and cut.tensor_parallel_mode == "1d":
                rows = replace(one, parallel=replace(cut, sequence_parallel=True))
                with suppress(UsageError):  # a sample that so many ranks cannot divide
                    rows.check(ranks)
                    yield rows

    if not (several := [*found()]):
        sizes = context_sizes or (given.context_parallel_size,)
        name = "--context-sizes" if context_sizes else "--context-parallel-size"
        allowed = f"sizes whose product with a tensor-parallel size divides the {ranks} processes"
        raise UsageError(name, " ".join(map(str, sizes)), allowed, works=(name, "1"))
    if undivided:
        pairs = ", ".join(undivided)
        text = f"tensor x context {pairs} does not divide the {ranks} processes: not timed"
        warnings.warn(text, stacklevel=2)
    return several
