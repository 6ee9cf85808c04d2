"""Pipeline parallelism compared with torch's, and the measured bubble.

The peer is torch.distributed.pipelining: its Schedule1F1B and its ScheduleInterleaved1F1B over
stages of plain torch modules, which start from the same weights, read the same samples and have the
same losses. Head and word embedding are not tied, since torch's pipelining has no ties; there is no
dropout. Without an update, a turn is the forward and backward of all micro-batches; with it,
clipping by the global norm and fused AdamW follow. In bf16 the peer's weights and gradients are
bf16; this project sums gradients in fp32. The same models also run as one process with one thread:
their ratio is due to the layers, and the rest to the pipeline. Memory is that of all ranks, without
imported modules; it is compared only with the update, as without one this project has moments and
the peer has none.

The bubble: (time of a step / m) over the same at the largest m, compared with the schedule's value:
(1 + idle / ideal time at m) / (1 + that at the largest m). Stages cost the same: the head counts as
one layer. Bytes saved for the backward are counted at their peak on each rank, each storage once
and without parameters, in units of one micro-batch of one virtual stage at m = 1, and compared with
the number in flight in the schedule. Ranks are processes with one thread each on one machine, over
gloo; the figures say nothing about NCCL.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks import peers, steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.plain_gpt2 import PlainGPT2
from benchmarks.report import Results
from megatron.config.pretrain import PretrainGPT2Config
from megatron.errors import UsageError
from megatron.parallel.collectives import all_reduce
from megatron.parallel.schedules import check, schedule
from megatron.train.pipelining import plan_of_run
from megatron.train.step import count, forward_backward, train_step
from tools.layouts.job import open_samples
from tools.layouts.work import Meter

OURS, TORCH = "this project", "torch.distributed.pipelining"
ALONE, PLAIN = "this project, one process", "plain torch, one process"
KINDS: tuple[Any, ...] = ("1f1b", "interleaved", "zb-h1", "gpipe")
VIRTUAL = {"interleaved": 2}  # virtual stages per rank; 1 for other schedules
WORDS = """--preset gpt2_124m --num-layers 7 --seq-length 512 --vocab-size 10240
--micro-batch-size 1 --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --no-compile"""
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3}  # of the losses
RATIO, MEMORY = "time / the first's", "peak memory / the first's"
MEASURED, PROMISED = "time per micro-batch / the first's", "by the schedule"
ALL, UPDATE = "forward and backward", "with the update"
SCOPES: tuple[Any, ...] = (ALL, UPDATE)


def piped(kind: str, ranks: int) -> str:
    """Flags of the pipeline."""
    if ranks == 1:
        return ""
    words = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule {kind}"
    if kind in VIRTUAL:
        words += f" --num-virtual-stages-per-pipeline-rank {VIRTUAL[kind]}"
    return words


def batches_of(config: PretrainGPT2Config, micro_batches: int) -> list[Any]:
    return [steps.batch_of(config, number) for number in range(micro_batches)]


def ours(rank: Rank, flags: Sequence[str], micro_batches: int, updates: bool) -> Turn:
    run = steps.ours(rank, flags)
    state, batches = run.state, batches_of(run.config, micro_batches)

    def turn() -> Figures:
        if updates:
            done = train_step(state, batches, steps.LEARNING_RATE)
            return {"loss": done.loss, "tokens": done.tokens}
        counts = count(state, batches)
        totals = forward_backward(state, batches, counts)
        loss = (all_reduce(totals, state.mesh.loss_sums) / counts[1:]).item()
        return {"loss": loss, "tokens": counts[0]}

    return turn


def torchs(rank: Rank, flags: Sequence[str], micro_batches: int, updates: bool) -> Turn:
    """The peer in plain torch; a single process runs the micro-batches one after another."""
    config = steps.read(flags, rank.size)
    device, model, vocab_size = rank.device, config.model, open_samples(config)[1]
    plan = plan_of_run(config, vocab_size, rank.size)
    own = range(rank.rank, plan.stages, rank.size)
    layers = plan.layers or (range(model.num_layers),)
    modules = [PlainGPT2(model, vocab_size, layers[stage]) for stage in own]
    weights = peers.in_parts(peers.initial_weights(model, vocab_size), 1)
    for module in modules:
        module.load_state_dict({name: weights[name] for name in module.state_dict()})
        module.to(device, steps.dtype_of(config))
    del weights
    batches = batches_of(config, micro_batches)
    tokens, labels = (
        torch.cat([torch.from_numpy(getattr(each, name)) for each in batches]).to(device)
        for name in ("tokens", "labels")
    )

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        """A micro-batch's share of the mean loss over all micro-batches."""
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / micro_batches

    training = peers.MasterTraining(
        rank, config, nn.ModuleList(modules), loss_of, is_cut=lambda parameter: True
    )
    run = alone(modules[0], loss_of, micro_batches)
    if rank.size > 1:
        rank.connect()
        stages = [
            PipelineStage(module, stage, plan.stages, device)
            for module, stage in zip(modules, own, strict=True)
        ]
        run = scheduled(stages, loss_of, micro_batches)

    def turn() -> Figures:
        training.model.zero_grad(set_to_none=True)
        loss = run(tokens, labels)
        if rank.size > 1:
            dist.all_reduce(loss)
        if updates:
            training.update()
        return {"loss": loss.item(), "tokens": tokens.numel()}

    return turn


Run = Callable[[Tensor, Tensor], Tensor]  # (tokens, labels) to the loss; 0 but on the last rank


def alone(module: nn.Module, loss_of: Run, micro_batches: int) -> Run:
    def run(tokens: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for x, y in zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            loss = loss_of(module(x), y)
            loss.backward()
            total += loss.detach()
        return total

    return run


def scheduled(stages: list[PipelineStage], loss_of: Run, micro_batches: int) -> Run:
    options: Any = {"loss_fn": loss_of, "scale_grads": False}
    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], micro_batches, **options)
    else:
        schedule = ScheduleInterleaved1F1B(list(stages), micro_batches, **options)

    def run(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (tokens,) if stages[0].is_first else ()
        schedule.step(*given, target=labels, losses=losses, return_outputs=False)
        total = torch.zeros((), device=tokens.device)
        return total + sum(each.detach().float() for each in losses)

    return run


def watch(meter: Meter, tensor: Tensor) -> Tensor:
    meter.watch(tensor)
    return tensor


def counted(rank: Rank, flags: Sequence[str], micro_batches: int) -> Turn:
    """Forward and backward by this project, with what each rank keeps for the backward."""
    run = steps.ours(rank, flags)
    state, batches = run.state, batches_of(run.config, micro_batches)

    def step(number: int) -> None:
        forward_backward(state, batches[:number], count(state, batches[:number]))

    peaks = []
    for number in (1, micro_batches):
        kept = Meter(state.mesh, [*state.model.parameters()])
        with saved_tensors_hooks(partial(watch, kept), lambda tensor: tensor):
            step(number)
        peaks.append(kept.peak)
    found: Figures = {"tokens": sum(batch.num_tokens for batch in batches)}
    for other, (one, all_) in enumerate(state.mesh.control.gather(peaks)):
        found[f"kept_{other}"] = all_ / (one / state.pipeline.virtual)

    def turn() -> Figures:
        step(micro_batches)
        return found

    return turn


def contenders(
    flags: Flags,
    pipeline: int = 2,
    micro_batches: int = 8,
    schedules: tuple[Literal["1f1b", "interleaved"], ...] = ("1f1b", "interleaved"),
    bubble_schedules: tuple[Literal["1f1b", "interleaved", "zb-h1", "gpipe"], ...] = KINDS,
    bubble_micro_batches: tuple[int, ...] = (16, 8, 4, 2, 1),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    scopes: tuple[Literal["forward and backward", "with the update"], ...] = SCOPES,
    program_flags: str = "",
) -> Iterator[Contender]:
    """Compare pipelines, and measure the bubble.

    Args:
        pipeline: ranks of the pipeline axis.
        micro_batches: micro-batches per step, in the comparison with torch.
        schedules: schedules to compare with torch's.
        bubble_schedules: schedules whose bubble is measured.
        bubble_micro_batches: numbers of micro-batches for which the bubble is measured; the first
            is the base of the comparison.
        dtypes: dtypes of weights and activations; the bubble is measured in the first.
        scopes: work of a turn; "with the update" is run only for the first schedule.
        program_flags: flags of pretrain_gpt2.py: --program-flags="--num-layers 7 --hidden-size 64".
    """
    if max(bubble_micro_batches) != bubble_micro_batches[0]:
        ordered = sorted(bubble_micro_batches, reverse=True)
        raise UsageError(
            "--bubble-micro-batches",
            " ".join(map(str, bubble_micro_batches)),
            "numbers of which the first is the largest",
            works=("--bubble-micro-batches", *map(str, ordered)),
        )
    small = f"{steps.SMALL} --num-layers 4" if flags.small else ""

    def words(dtype: str, kind: str, ranks: int) -> list[str]:
        own = f"{steps.DTYPE_FLAGS[dtype]} {piped(kind, ranks)}"
        return shlex.split(f"{WORDS} {own} {small} {program_flags}")

    for dtype, kind, scope in product(dtypes, schedules, scopes):
        if scope == UPDATE and kind != schedules[0]:
            continue
        own = {"micro_batches": micro_batches, "updates": scope == UPDATE}
        runs = {OURS: (ours, pipeline), TORCH: (torchs, pipeline)}
        if kind == schedules[0] and scope == ALL:
            runs |= {ALONE: (ours, 1), PLAIN: (torchs, 1)}
        for name, (run, ranks) in runs.items():
            yield Contender(
                name,
                run,
                {"flags": words(dtype, kind, ranks), **own},
                group=f"{dtype}, {kind}, m = {micro_batches}, {scope}",
                ranks=ranks,
                same={"loss": TOLERANCES[dtype]},
                facts={"updates": scope == UPDATE},
            )
    for kind, m in product(bubble_schedules, bubble_micro_batches):
        virtual = VIRTUAL.get(kind, 1)
        facts = check(schedule(kind, pipeline, m, virtual), virtual)
        in_flight = {f"in_flight_{rank}": each for rank, each in enumerate(facts.in_flight)}
        yield Contender(
            f"m = {m}",
            counted,
            {"flags": words(dtypes[0], kind, pipeline), "micro_batches": m},
            group=f"bubble, {kind}" + f", v = {virtual}" * (virtual > 1),
            ranks=pipeline,
            facts={"idle_share": facts.idle_share, "elapsed": 1 + facts.idle_share, **in_flight},
            x=m,
        )


def result(found: Results) -> str:
    """The peer's time and memory, and the bubble's largest deviation from the schedules."""
    others = {OURS, ALONE, PLAIN}
    text = f"Time of torch's pipelining over this project's: {found.ratios(RATIO, others)}."
    text += f" Peak memory: {found.ratios(MEMORY, others)}."
    apart = [
        abs(cells[0].median / cells[1].median - 1)
        for row in found.rows
        if all(cells := [found.cell(*row, title) for title in (MEASURED, PROMISED)])
    ]
    if apart:
        text += f" The bubble: within {100 * max(apart):.0f} % of what the schedules say."
    return text


def compared(key: str, *, with_update: bool = False) -> Callable[[Figures, Figures], float]:
    """Ratio of a figure to the first's; not in rows of the bubble, and in the others only with an
    update if it says so."""

    def ratio(own: Figures, first: Figures) -> float:
        if own["updates"] < with_update:
            raise KeyError(key)
        return float(own[key] / first[key])

    return ratio


def measured(own: Figures, first: Figures) -> float:
    ours, its = (each["wall"] / each["tokens"] for each in (own, first))
    return float(ours / its) if own["elapsed"] else 0.0


def promised(own: Figures, first: Figures) -> float:
    return float(own["elapsed"] / first["elapsed"])


COLUMNS = (
    Column("seconds", "wall", "{:.3f}"),
    Column("CPU seconds", "cpu", "{:.3f}"),
    Column(RATIO, compared("wall"), "{:.3f}", "its / first"),
    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    Column(MEMORY, compared("peak_bytes", with_update=True), "{:.3f}", "its / first"),
    Column(MEASURED, measured, "{:.3f}", "its / first"),
    Column(PROMISED, promised, "{:.3f}"),
    Column("idle / ideal time", "idle_share", "{:.3f}"),
    *(
        Column(f"{title}, rank {rank}", f"{key}_{rank}", form)
        for rank in range(8)
        for title, key, form in (("in flight", "in_flight", "{:g}"), ("kept", "kept", "{:.2f}"))
    ),
)
QUESTION = Question(
    contenders,
    COLUMNS,
    result,
    picture="lines",
    drawn=[f"{MEASURED} | {PROMISED}"],
    small="--micro-batches 4 --dtypes fp32 --bubble-schedules 1f1b gpipe --bubble-micro-batches 5",
)

if __name__ == "__main__":
    QUESTION.run()
