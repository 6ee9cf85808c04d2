"""Plans the pipeline of a run from its config, without torch: each stage's layers, the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.config.checks import UsageError
from megatron.config.parallel import TrainingParallelConfig
from megatron.config.pretrain import PretrainConfig
from megatron.parallel.pipeline import PipelinePlan, head_weight, partition, partition_uniform
from megatron.parallel.schedules import KINDS, Lists, ScheduleError, check, read_schedule


def plan_pipeline(
    parallel: TrainingParallelConfig,
    model: Any,
    *,
    seq_length: int,
    vocab_size: int,
    scored: float = 1.0,
) -> PipelinePlan:
    """The pipeline of a model that divides into its stages (`TrainingParallelConfig.check_model`).

    model: its config. seq_length: tokens per sample. scored: the share of tokens whose logits the
    head computes, which is the head's cost. The embedding, a look-up, costs nothing. Raises
    UsageError for a file that is not a schedule of this number of stages.
    """
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_stages(model.num_layers)
    kind = parallel.pipeline_schedule or ("interleaved" if virtual > 1 else "1f1b")
    own = None if kind in KINDS else _own_schedule(kind, ranks, virtual, model)
    stages, layers = ranks * virtual, tuple[range, ...]()
    each = parallel.num_layers_per_virtual_pipeline_stage
    if stages > 1 and (parallel.pipeline_partition == "uniform" or each is not None):
        layers = partition_uniform(model.num_layers, stages, virtual)
    elif stages > 1:
        layers = partition(
            model.num_layers,
            stages,
            head=scored * head_weight(model.hidden_size, seq_length, vocab_size),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
        )
    return PipelinePlan(ranks=ranks, virtual=virtual, kind=kind, layers=layers, own=own)


def plan_of_run(config: PretrainConfig, world_size: int, vocab_size: int) -> PipelinePlan:
    """The pipeline of a run that `config.check` accepts. Raises UsageError if a user's schedule
    does not work, or has another number of micro-batches than a step of this run."""
    plan = plan_pipeline(
        config.parallel,
        config.model,
        seq_length=config.data.seq_length,
        vocab_size=vocab_size,
        scored=getattr(config.data, "mask_prob", 1.0),
    )
    batch = config.global_batch_size(world_size)
    samples = config.training.micro_batch_size
    samples *= config.parallel.batch_parallel_size(world_size)
    if plan.own is not None and batch != (
        wanted := samples * check(plan.own, plan.virtual).micro_batches
    ):
        raise UsageError(
            "--global-batch-size",
            batch,
            f"{wanted} samples, {wanted // samples} micro-batches as in --pipeline-schedule "
            f"{plan.kind}",
            works=("--global-batch-size", str(wanted)),
        )
    return plan


def _own_schedule(file: str, ranks: int, virtual: int, model: Any) -> Lists:
    with _refused(file, virtual):
        own = read_schedule(Path(file))
        if len(own) != ranks:
            flag = "--pipeline-model-parallel-size"
            raise ScheduleError(f"it is of {len(own)} ranks, and {flag} is {ranks}")
        if not any(check(own, virtual).in_flight):
            raise ScheduleError("it has no backward")
        halves = any(each.direction == "backward_weight" for actions in own for each in actions)
        if halves and model.recompute_granularity == "full":
            raise ScheduleError("its halves of a backward undo --recompute-granularity full")
    return own


@contextmanager
def _refused(given: str, virtual: int) -> Iterator[None]:
    """Turns a ScheduleError into a UsageError, which suggests the default schedule."""
    try:
        yield
    except ScheduleError as error:
        works = ("--pipeline-schedule", "interleaved" if virtual > 1 else "1f1b")
        allowed = f"a schedule that works: {error}"
        raise UsageError("--pipeline-schedule", given, allowed, works=works) from None
