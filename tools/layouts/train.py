"""One rank's part of a comparison: the same steps at one layout, compared and counted."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.config.parse import user_errors
from megatron.data.batch import Samples
from megatron.optim.schedule import learning_rate
from megatron.parallel.sharding import gather_whole
from megatron.train.diagnose import NonFiniteError
from megatron.train.launch import launch
from megatron.train.loader import prefetch
from megatron.train.state import DTYPES, TrainState, build_state, choose_compile
from megatron.train.step import train_step
from tools.layouts.job import Job, open_samples
from tools.layouts.meters import Counts, counting, parameter_bytes, saved_bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says; counts are of the first step."""

    device: str
    losses: list[float]
    norms: list[float]
    counts: Counts
    weight_difference: float | None  # on the first rank


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
                config.optimizer,
                config.precision,
                mesh,
                vocabulary,
                seed=config.training.seed,
                dtype=(DTYPES | {"fp64": torch.float64})[job.precision],
                compiled=choose_compile(config.training.compile or False, mesh)[0],
            )
            return report(job, state, samples)
    except Exception:  # of one process; of several the watch tells it
        traceback.print_exc()
        raise SystemExit(1) from None


def report(job: Job, state: TrainState, samples: Samples) -> Report:
    training, mesh = job.config.training, state.mesh
    size = job.config.global_batch_size(mesh.size)
    steps = prefetch(
        samples,
        range(0, job.steps * size, size),
        micro_batch_size=training.micro_batch_size,
        data_rank=mesh.batch.rank,
        data_size=mesh.batch.size,
    )
    lr = partial(learning_rate, job.config.optimizer, decay_iters=job.config.lr_decay_iters())
    first = next(steps)
    kept = saved_bytes(state.model, state.objective, first[0], mesh.device)
    with counting(mesh) as counts:
        results = [train_step(state, first, lr(1))]
    counts.saved_bytes, counts.parameter_bytes = kept, parameter_bytes(state.model)
    results += [train_step(state, each, lr(state.updates + 1)) for each in steps]
    return Report(
        device=str(mesh.device.type),
        losses=[each.loss for each in results],
        norms=[each.grad_norm for each in results],
        counts=counts,
        weight_difference=compare_weights(job, state),
    )


def compare_weights(job: Job, state: TrainState) -> float | None:
    """Norm of the difference of the master weights over that of the reference's, on the first rank;
    the reference writes its own."""
    whole = (
        (view.name, gather_whole(own, view.spec)) for view, own in state.optimizer.master_views()
    )
    if job.is_reference:
        kept = {name: each.cpu() for name, each in whole}
        if state.mesh.is_first:
            save_file(kept, job.weights)
        return 0.0
    squares = total = 0.0
    with safe_open(job.weights, "pt") as file:
        for name, each in whole:
            if state.mesh.is_first:
                own, other = (with_gradient(name, x) for x in (each.cpu(), file.get_tensor(name)))
                squares += float((own.double() - other.double()).square().sum())
                total += float(other.double().square().sum())
    return sqrt(squares / total) if state.mesh.is_first else None


def with_gradient(name: str, x: Tensor) -> Tensor:
    """Without the bias of the keys, whose gradient is zero but for rounding: a constant added to
    all keys adds the same to all scores of a query."""
    return x[[0, 2]] if name.endswith("qkv.bias") and len(x) == 3 else x
