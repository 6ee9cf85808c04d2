"""The authors' programs, counted in their source, for which figure 5 is predicted; and the share of
peak and memory bandwidth that a program's kernels attain, from one run on one device. How right a
plan is depends on what of this was measured (error_band)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any

from megatron.config.model import GPT2Config
from megatron.config.parallel import TrainingParallelConfig
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import GPT2DataConfig, TrainingConfig
from megatron.errors import UsageError
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.train.inputs import vocabulary_of
from tools.layouts.work import Call, Matmul, Work
from tools.plan.buckets import WIDE, Model
from tools.plan.hardware import PROGRAMS, Anchor, Hardware, Ring, load_hardware
from tools.plan.timing import predict
from tools.plan.trace import Step

Passes = tuple[float, float, float, int, int]
"""Reads and writes of tensors by one layer in one direction: of [n, h], whole on every rank; of
[n, h/t]; of attention's scores [b, a/t, s, s]; and dropouts of [n, h] and of the scores. A dropout
reads, writes, and keeps or reads a mask of one byte a number."""


@dataclass(frozen=True)
class Software:
    """A program that writes attention's scores to memory and computes the loss of all logits at
    once.

    bucket_bytes: of gradients, reduced during the backward; None: in one call after it.
    outside_passes: over [n, h] in embedding and final norm, both directions. logit_bytes: moved for
    each logit of a rank, matmuls aside. accumulated, updated: bytes moved for each parameter of a
    rank, by a micro-batch and by the optimizer, the latter by default in 17 passes in fp32 and 13
    in half. fuses_four: whether the fused softmax takes only multiples of four heads x samples of a
    rank. hides_sums: whether the all-reduce behind a column-parallel layer in the backward runs
    beside the matmul of its weight's gradient. is_zero_3: whether weights, gradients and the
    optimizer's state are in parts, as in the DeepSpeed of 2021.
    """

    forward: Passes
    backward: Passes
    bucket_bytes: int | None = None
    outside_passes: int = 28
    logit_bytes: int = 60
    accumulated: int = 0
    updated: int = 17 * 4 + 13 * 2
    fuses_four: bool = False
    hides_sums: bool = False
    is_zero_3: bool = False


# The authors' code of 2019 (mpu/transformer.py, fp16/fp16.py, model/distributed.py and
# pretrain_gpt2.py of github.com/NVIDIA/Megatron-LM); each operation is a kernel of its own.
# [n, h] forward: two norms 4, two biases after the all-reduces 4, two residual adds 6; backward:
# adding the gradients of the two branches 6, biases 2, norms 10 (one kernel for x, one for weight
# and bias). [n, h/t] forward: bias of q, k, v 6, their copies 6, of the heads 2, bias 8 and GeLU 8
# of the MLP; backward: GeLU 12, biases 7, heads 2, q, k, v side by side 6. Scores forward: division
# 2, times mask 2, minus mask 2, softmax 2; backward: softmax 3, mask 2, division 2. Parameters:
# zeroing both gradients 1 + 1, accumulating 3, overflow check 2 + 1, copying 1 + 1, unscaling 2,
# norm 1, clipping 2, Adam 7, rounding 1 + 1, flattening, dividing and copying back to reduce 6.
# A logit: widening 6 bytes, copy 8, maximum 4, shift 8, exponential 8, sum 4, division 8, backward
# 14. Gradients are reduced after the backward in one call: --DDP-impl local.
MEGATRON_2019 = Software(forward=(14, 30, 8, 2, 1), backward=(18, 27, 7, 2, 1))

# The code of 2020 ("version 1.0"): bias with GeLU, bias with dropout and residual add (3 passes and
# a mask each), and scale, mask and softmax (2, backward 3) are fused; q, k, v are not copied.
MEGATRON_2020 = Software(forward=(11, 16, 2, 0, 1), backward=(18, 27, 3, 2, 1))

# That of 2021 (PTD-P): gradients of micro-batches are added in half precision (2 + 2 + 2 bytes).
# Kernels of the update take many tensors (megatron/optimizer): dividing 2 + 2, copying to fp32
# 2 + 4, unscaling with the overflow check 4 + 4, norm 4, clipping 4 + 4, Adam 16 + 12, rounding
# 4 + 2, zeroing 2.
MEGATRON_2021 = replace(MEGATRON_2020, accumulated=6, updated=66)

# That of 2022: residual adds and dropouts are one kernel in the backward, too; logits stay in half
# precision until the loss (36 bytes).
MEGATRON_2022 = replace(
    MEGATRON_2021,
    backward=(18, 27, 3, 0, 1),
    outside_passes=10,
    logit_bytes=36,
    fuses_four=True,
    hides_sums=True,
)

YEARS = MEGATRON_2019, MEGATRON_2020, MEGATRON_2021, MEGATRON_2022
SOFTWARE = dict(zip(PROGRAMS[1:], YEARS, strict=True))
TORCH_BUCKET = 25 * 2**20  # bytes of a bucket of torch's DistributedDataParallel, --DDP-impl torch


@dataclass(frozen=True)
class AuthorsStep(Step):
    """A step of a GPT-2 in the authors' program; the rest is as in this project."""

    software: Software = MEGATRON_2019
    is_replayed = False

    @cached_property
    def pipeline(self) -> PipelinePlan:
        """Equal virtual stages, run as 1F1B, interleaved where a rank has several."""
        parallel, depth = self.config.parallel, self.config.model.num_layers
        if (ranks := parallel.pipeline_model_parallel_size) == 1:
            return WHOLE_MODEL
        virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
        stages = ranks * virtual
        layers = tuple(range(k * depth // stages, (k + 1) * depth // stages) for k in range(stages))
        return PipelinePlan(ranks, virtual, "interleaved" if virtual > 1 else "1f1b", layers)

    @property
    def idle_share(self) -> float:
        """As schedules.check proves it, where p divides m."""
        return (self.pipeline.ranks - 1) / (self.pipeline.virtual * self.micro_batches)

    @cached_property
    def model(self) -> Model:
        model, t, d, p = self.config.model, self.tensor, self.copies, self.pipeline.ranks
        h, ends = model.hidden_size, self.has_head * 2 * model.hidden_size  # the final norm
        local = self.layers * (12 * h * h // t + 7 * h // t + 6 * h) + ends
        own = self.layers * (12 * h * h + 13 * h) + ends
        if self.rank == 0:
            own += vocabulary_of(self.config) * h
        if self.rank == 0 or self.has_head:
            local += self.logits * h
        positions = model.max_position_embeddings * h * (self.rank == 0)
        rings = {
            "tensor": Ring(t, 1),
            "data": Ring(d, t),
            "pipeline": Ring(p, t * d),
            "embedding_group": Ring(min(p, 2), (p - 1) * t * d, p * t * d),
        }
        return Model(rings, "data", local=local + positions, own=own + positions)

    @property
    def tokens_of_rank(self) -> int:
        """n, of a micro-batch."""
        return self.config.training.micro_batch_size * self.config.seq_length

    @property
    def heads(self) -> int:
        """Heads of all sequences of a micro-batch on a rank."""
        samples = self.config.training.micro_batch_size
        return samples * self.config.model.num_attention_heads // self.tensor

    @property
    def logits(self) -> int:
        """Logits of a token on a rank."""
        multiple = self.config.model.make_vocab_size_divisible_by * self.tensor
        return -(-vocabulary_of(self.config) // multiple) * multiple // self.tensor

    @property
    def is_softmax_fused(self) -> bool:
        return not self.software.fuses_four or self.heads % 4 == 0

    @property
    def message(self) -> int:
        """Each rank of a tensor-parallel group sends a part (PTD-P, section 4.1)."""
        return self.tokens_of_rank * self.config.model.hidden_size * self.width // self.tensor

    @property
    def stream_ranks(self) -> int:
        """Number of ranks that share the hidden states: with sequence parallelism those of t."""
        return self.tensor if self.config.parallel.sequence_parallel else 1

    @cached_property
    def layer_work(self) -> Mapping[str, Work]:
        """Work of a micro-batch in one layer, by phase."""
        model, width, t, program = self.config.model, self.width, self.tensor, self.software
        s, n, h, heads = self.config.seq_length, self.tokens_of_rank, model.hidden_size, self.heads
        size = h // model.num_attention_heads
        weights = ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h))
        matmuls = [Matmul(1, n, rows, columns, width) for rows, columns in weights]
        core = [Matmul(heads, s, size, s, width), Matmul(heads, s, s, size, width)]

        def of_scores(passes: Passes) -> float:
            return (width * passes[2] + (2 * width + 1) * passes[4]) * heads * s**2

        def of_layer(matmuls: Iterable[Matmul], calls: Iterable[Call], passes: Passes) -> Work:
            whole, cut, _, dropouts, _ = passes
            moved = width * (whole / self.stream_ranks + cut / t) * n * h + of_scores(passes)
            moved += (2 * width + 1) * dropouts * n * h / self.stream_ranks
            return Work(Counter(matmuls), Counter(calls), moved)

        stream = self._of_stream
        calls_there, calls_back = [stream] * 2, [stream] * 2
        columns = [[*gradients([each])] for each in (matmuls[0], matmuls[2])]
        if program.hides_sums:
            calls_back = [stream._replace(beside=(of_weight,)) for _, of_weight in columns]
        if self.stream_ranks > 1:
            # All-gathers and reduce-scatters. In the backward those of the row-parallel layers are
            # waited for; the two of a column-parallel layer run beside its matmuls.
            part = stream._replace(passes=1)
            calls_there, calls_back = [part] * 4, [part] * 2
            calls_back += [part._replace(beside=(each,)) for own in columns for each in own]
        there = of_layer([*matmuls, *core], calls_there, program.forward)
        back = of_layer(gradients([*matmuls, *core]), calls_back, program.backward)
        back.moved += program.accumulated * (12 * h * h // t + 13 * h)
        again = {
            "none": Work(),
            "selective": Work(Counter(core), Counter(), of_scores(program.forward)),
            "full": there,
        }
        return {
            "forward": there,
            "recomputation": again[model.recompute_granularity],
            "backward": back,
        }

    @property
    def layer(self) -> Work:  # type: ignore[override]
        return reduce(Work.plus, self.layer_work.values())

    @property
    def _of_stream(self) -> Call:
        """f or g."""
        return Call("tensor", self.tokens_of_rank * self.config.model.hidden_size * self.width, 2)

    @cached_property
    def work(self) -> Mapping[str, Work]:
        n, h, logits, width = (
            self.tokens_of_rank, self.config.model.hidden_size, self.logits, self.width
        )  # fmt: skip
        ends: dict[str, Work] = {phase: Work() for phase in self.layer_work}
        if self.rank == 0:
            ends["forward"].calls[self._of_stream] += 1
        if self.has_head:
            head = Matmul(1, n, h, logits, width)
            moved = self.software.outside_passes * n * h * width / self.stream_ranks
            moved += self.software.logit_bytes * n * logits
            of_loss = Call("tensor", n * WIDE, 2), Call("tensor", 2 * n * WIDE, 2)
            there = Work(Counter([head]), Counter([self._of_stream, *of_loss]), moved / 2)
            back = Work(Counter(gradients([head])), Counter(), moved / 2)
            back.moved += self.software.accumulated * logits * h
            ends["forward"], ends["backward"] = ends["forward"].plus(there), back
        return {
            phase: Work().plus(ends[phase].plus(each, self.layers), self.micro_batches)
            for phase, each in self.layer_work.items()
        }

    @property
    def reductions(self) -> list[tuple[float, Call]]:
        found = []
        if self.pipeline.ranks > 1 and (self.rank == 0 or self.has_head):
            size = self.logits * self.config.model.hidden_size * self.width
            found = [(1.0, Call("embedding_group", size, 2))]
        if self.software.is_zero_3:
            return []
        if (size := self.software.bucket_bytes) is None:
            return [*found, (1.0, Call("data", self.model.local * self.width, 2))]
        buckets = self.model_of(size // self.width * WIDE).buckets
        sums = ((ready, Call("data", each.numbers * self.width, 2)) for ready, each in buckets)
        return [*found, *sums]

    @property
    def layer_gathers(self) -> dict[str, list[list[Call]]]:
        return {"forward": [], "backward": []}

    @property
    def gathers(self) -> tuple[str, list[Call]]:
        """Under ZeRO 3: of the embedding, and of each weight and bias of each layer, two gathers
        and a reduce-scatter, which hide behind nothing."""
        if not self.software.is_zero_3:
            return "update", []
        h = self.config.model.hidden_size
        layer = (3 * h * h, h * h, 4 * h * h, 4 * h * h, 3 * h, 4 * h, *[h] * 6)
        calls = [Call("data", n * self.width, 1) for n in (self.logits * h, *layer * self.layers)]
        return "forward", 3 * self.micro_batches * calls

    @property
    def updated(self) -> int:
        owners = self.copies if self.software.is_zero_3 else 1
        return self.model.local // owners * self.software.updated


def gradients(matmuls: Iterable[Matmul]) -> Iterator[Matmul]:
    """The matmuls for the gradients of both factors of each matmul."""
    for each in matmuls:
        yield each._replace(k=each.n, n=each.k)
        yield each._replace(m=each.k, k=each.m)


def find_hardware(name: str, software: str | None = None) -> Hardware:
    """load_hardware, with what kernels attain: by the anchor; or with the figures that were fitted
    to runs of this software. Raises UsageError where it is a program of the authors, and the
    file has neither its figures nor an anchor of it."""
    hardware = load_hardware(name)
    if software in hardware.software:
        figures = dict(hardware.software[software])
        sources = hardware.sources | dict.fromkeys(figures, figures.pop("source"))
        return replace(hardware, anchor=None, sources=sources, **figures)
    is_anchored = hardware.anchor is not None and hardware.anchor.software == software
    if software in SOFTWARE and not is_anchored:
        allowed = f"a program of which {hardware.name}'s file has figures, or this project"
        raise UsageError("--software", software, allowed, works=("--software", "this project"))
    return anchored(hardware)


def anchored(hardware: Hardware) -> Hardware:
    """The hardware with the share, the same for matmuls and other kernels, at which the predicted
    time of its anchor is the measured one; unchanged if it has no anchor."""
    if (anchor := hardware.anchor) is None:
        return hardware
    step = anchor_step(anchor)
    measured = step.executed_flops / anchor.flops_per_second
    ideal = predict(step, replace(hardware, attained_share=1.0))
    host = ideal.host  # overheads, which no share changes
    return replace(hardware, attained_share=(ideal.total - host) / (measured - host))


# Mean errors of plans from datasheets alone against 1,549 measured iterations of GPT-2 on A100s
# (docs/results/plan.md has a third of them): on one server, and on 8 to 64.
OF_DATASHEETS = {False: 0.38, True: 0.18}
# The same page has plans with shares of the peaks that were measured.
OF_SHARES = "on one H200 such plans were 4 to 19 % off, on several GPUs none was compared"
FAR = 100  # devices of a ZeRO-3 whose plans were 12 to 47 % too fast


def error_band(hardware: Hardware, step: Step) -> tuple[float | None, str]:
    """(share of the predicted time by which a measured one may differ, None where that is not
    promised; why)."""
    program = getattr(step, "software", None)
    names = [name for name, each in SOFTWARE.items() if each == program]
    is_far = step.ranks > hardware.devices_per_server
    is_measured, is_fitted = hardware.measures(step), (names or PROGRAMS)[0] in hardware.software
    if not is_measured and not is_fitted:
        unmeasured = "no layer of this shape was measured"
        if hardware.is_cpu:
            return None, f"{unmeasured}: on a CPU nothing is promised of such plans"
        if "attained_share" in hardware.are_measured:
            return None, f"{unmeasured}, but kernels were: {OF_SHARES}"
        servers = "many A100 servers" if is_far else "one server of A100s"
        error = f"{100 * OF_DATASHEETS[is_far]:.0f} % on average on {servers}"
        return None, f"{unmeasured}: plans from datasheets were off by {error}"
    unknown = {
        "ZeRO stage 3 on hundreds of devices": step.stage == 3 and step.ranks >= FAR,
        "tensor parallelism across servers": step.tensor > hardware.devices_per_server,
        "context parallelism on more than two": step.context > 2 and not is_measured,
    }
    if found := [name for name, is_so in unknown.items() if is_so]:
        return None, f"no plan of {' and '.join(found)} was compared with a measured step"
    if is_far:
        return 0.1, "several servers: plans with fitted constants were off by 7 % on average"
    if is_measured and hardware.is_cpu:
        return (
            None,
            "a layer was measured; on a CPU such plans were off by 9 % on average, 31 % at worst",
        )
    if is_measured:
        return 0.01, "a layer of this shape was measured"
    return 0.05, "constants fitted on this machine, to this program"


def anchor_step(anchor: Anchor) -> Step:
    config = gpt2(
        num_layers=anchor.num_layers,
        hidden_size=anchor.hidden_size,
        num_attention_heads=anchor.heads,
        seq_length=anchor.sequence,
        vocab_size=anchor.vocabulary,
        make_vocab_size_divisible_by=1,
        recompute_granularity="full",
        micro_batch_size=anchor.batch,
    )
    return step_in(anchor.software, config, 1, anchor.precision)


def step_in(
    software: str, config: PretrainGPT2Config, gpus: int, precision: str, device: str = "cuda"
) -> Step:
    """A step of this program."""
    if software == "this project":
        config.check(gpus)
        return Step(config, gpus, precision, device)
    return AuthorsStep(config, gpus, precision, software=SOFTWARE[software])


def gpt2(**settings: Any) -> PretrainGPT2Config:
    """The config of a GPT-2 with these settings, by their names in megatron/config."""

    def part(make: Any) -> Any:
        names = {each.name for each in fields(make)} & values.keys()
        return make(**{name: values[name] for name in names})

    values = {"train_iters": 1, "max_position_embeddings": settings["seq_length"], **settings}
    return PretrainGPT2Config(
        model=part(GPT2Config),
        parallel=part(TrainingParallelConfig),
        training=part(TrainingConfig),
        data=part(GPT2DataConfig),
    )
