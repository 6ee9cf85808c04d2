"""One rank's part of a comparison: the same steps at one layout, compared and counted."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron.config.parse import user_errors
from megatron.data.batch import Samples
from megatron.optim.schedule import learning_rate
from megatron.parallel.sharding import TensorSlice, gather_whole
from megatron.train.diagnose import NonFiniteError
from megatron.train.launch import launch
from megatron.train.loader import prefetch
from megatron.train.pipelining import plan_of_run
from megatron.train.state import DTYPES, TrainState, build_state, choose_compile
from megatron.train.step import train_step
from tools.layouts.job import Job, open_samples
from tools.layouts.meters import Counts, measure


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says; differences are of the first step's gradients and the last weights,
    counts of forward and backward of a step."""

    device: str
    losses: list[float]
    norms: list[float]
    gradient_difference: float
    weight_difference: float
    counts: Counts


def train_layout(job: Job) -> Report:
    """Every rank of the layout calls this; a failure is told once, and ends all."""
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.ranks))
    environ, config = os.environ, job.config
    try:
        with (
            user_errors(environ),
            launch(config.parallel, environ) as mesh,
            user_errors(environ, agreed=True, kinds=(NonFiniteError,)),
        ):
            samples, vocabulary = open_samples(config)
            state = build_state(
                config.model,
                mesh,
                vocabulary,
                seed=config.training.seed,
                dtype=(DTYPES | {"fp64": torch.float64})[job.precision],
                optimizer=config.optimizer,
                precision=config.precision,
                compiled=choose_compile(config.training.compile or False, mesh)[0],
                pipeline=plan_of_run(config, mesh.size(), vocabulary),
                zero_stage=config.parallel.stage_of_zero,
            )
            return report(job, state, samples)
    except Exception:  # of one process; of several the watch tells it
        traceback.print_exc()
        raise SystemExit(1) from None


def report(job: Job, state: TrainState, samples: Samples) -> Report:
    training, mesh = job.config.training, state.mesh
    size = job.config.global_batch_size(mesh.size())
    steps = prefetch(
        samples,
        range(0, job.steps * size, size),
        micro_batch_size=training.micro_batch_size,
        data_rank=mesh.batch.rank,
        data_size=mesh.batch.size,
    )
    lr = partial(learning_rate, job.config.optimizer, decay_iters=job.config.lr_decay_iters())
    first = next(steps)
    counts = measure(state, first)
    gradients = compare(job, state, "gradients", state.gradients.slices())
    results = [train_step(state, first, lr(1))]
    results += [train_step(state, each, lr(state.updates + 1)) for each in steps]
    return Report(
        device=mesh.device.type,
        losses=[each.loss for each in results],
        norms=[each.grad_norm for each in results],
        gradient_difference=gradients,
        weight_difference=compare(job, state, "weights", state.optimizer.masters()),
        counts=counts,
    )


def compare(job: Job, state: TrainState, name: str, slices: Iterable[TensorSlice]) -> float:
    """The norm of the difference of all whole tensors over the norm of the reference's; the
    reference writes its own. Every rank calls this. What is not finite, as where fp16 overflows,
    counts as 0.

    The first rank of each pipeline stage looks at the tensors of its stage.
    """
    mesh, stage = state.mesh, state.mesh.pipeline
    is_first = all(axis.rank == 0 for axis in mesh.axes if not axis.is_of_stages)
    whole = ((each, gather_whole(each.local, each.spec)) for each in slices)
    found = {
        own.key: each.cpu().nan_to_num(0, 0, 0)
        for own, each in whole
        if is_first and own.spec.of_shard.is_owner()
    }
    if job.is_reference:
        if is_first:
            save_file(found, job.folder / f"{name}_{stage.rank}.safetensors")
        return 0.0
    squares = total = 0.0
    with ExitStack() as stack:
        files = job.folder.glob(f"{name}_*.safetensors")
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        reference = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        for key, each in found.items():
            other = reference[key].get_tensor(key).double()
            squares += float((each.double() - other).square().sum())
            total += float(other.square().sum())
    sums = mesh.control.gather((squares, total))
    squares, total = (sum(each) for each in zip(*sums, strict=True))
    return sqrt(squares / total) if total else squares
