"""Plans the pipeline of a run, and runs a step of a user's own stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron.config.parallel import TrainingParallelConfig
from megatron.config.parts import PARTS
from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Batch
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import local_tokens
from megatron.parallel.partition import head_weight, partition, partition_uniform
from megatron.parallel.schedules import KINDS, Lists, PipelinePlan, ScheduleError
from megatron.parallel.stages import PipelineModel
from megatron.train.executor import Executor


def plan_pipeline(
    parallel: TrainingParallelConfig,
    model: Any,
    *,
    seq_length: int,
    vocab_size: int,
    scored: float = 1.0,
    micro_batches: int | None = None,
    custom_schedule: Lists | None = None,
) -> PipelinePlan:
    """The pipeline of a model that divides into its stages (`TrainingParallelConfig.check_model`).

    model: its config. seq_length: tokens per sample. scored: the share of tokens whose logits the
    head computes, which is the head's cost. The embedding, a look-up, costs nothing.
    micro_batches: of a step, for a --pipeline-schedule of one's own. custom_schedule: see
    PipelinePlan. Raises ValueError if that is not a schedule of this number of stages, or halves
    backwards although layers are recomputed in full.
    """
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_stages(model.num_layers)
    kind = parallel.pipeline_schedule or ("interleaved" if virtual > 1 else "1f1b")
    if kind not in KINDS and custom_schedule is None:
        make = PARTS["pipeline_schedule"].find(kind)
        custom_schedule = make(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    is_halved = any(each.direction == "backward_weight" for each in chain(*custom_schedule or ()))
    if is_halved and model.recompute_granularity == "full":
        # A deferred half keeps what full recomputation frees, 64 times the memory.
        raise ScheduleError("custom_schedule: its halves undo --recompute-granularity full")
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
    return PipelinePlan(ranks, virtual, kind, layers, custom_schedule)


def plan_of_run(config: PretrainConfig, vocab_size: int, world_size: int) -> PipelinePlan:
    """The pipeline of a run that `config.check` accepts."""
    return plan_pipeline(
        config.parallel,
        config.model,
        seq_length=config.seq_length,
        vocab_size=vocab_size,
        scored=config.scored,
        micro_batches=config.micro_batches(world_size),
    )


def run_pipeline(
    model: PipelineModel, gradients: GradientBuckets, micro_batches: Sequence[Batch]
) -> Tensor:
    """Forward and backward of a global batch through the stages of a user's model (every rank calls
    this). Then each parameter has its `.grad`, for an optimizer of torch and for `clip_grad_norm`.

    gradients: the model's. micro_batches: this rank's along the mesh's batch axis, with arrays as
    fields; the ranks of one model have the same. Returns the mean of the loss over the global
    batch, an fp64 scalar, the same on every rank; NaN if the denominators are 0. Raises ValueError,
    before any message is sent, if the schedule does not have this number of micro-batches or a
    stage does not run on meta.
    """
    mesh, pipeline = model.mesh, model.pipeline
    micro_batches = [local_tokens(each, mesh) for each in micro_batches]
    pipeline.lists(len(micro_batches))  # raises before any message is sent
    for each in micro_batches if pipeline.ranks > 1 else ():
        model.stream(each, model.count - 1)
    denominators = [model.denominators(each) for each in micro_batches]
    counts = torch.tensor(denominators, dtype=torch.float64).sum(0).to(mesh.device)
    counts = all_reduce(counts, mesh.loss)
    executor = Executor(
        model=model,
        objective=model,
        mesh=mesh,
        pipeline=pipeline,
        batches=micro_batches,
        loss_scales=1 / counts.where(counts > 0, 1),
        gradients=gradients,
    )
    return (all_reduce(executor.step(), mesh.loss_sums) / counts).sum()
