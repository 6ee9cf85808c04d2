"""One rank's part of a comparison: the same steps at one layout, compared and counted."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan, sqrt

import torch
import torch._dynamo  # counting loads it: once, in the fork server, and not in each rank
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.config.parse import user_errors
from megatron.data.batch import Samples
from megatron.optim.schedule import learning_rate
from megatron.parallel.collectives import all_reduce
from megatron.parallel.compare import SEEN, unseen
from megatron.parallel.sharding import TensorSlice, gather_whole
from megatron.train.diagnose import NonFiniteError
from megatron.train.inputs import prefetch
from megatron.train.launch import launch
from megatron.train.machine import choose_compile
from megatron.train.pipelining import plan_of_run
from megatron.train.state import DTYPES, TrainState, build_state
from megatron.train.step import StepResult, train_step
from tools.layouts.job import Job, open_samples
from tools.layouts.meters import Counts, measure


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of one rank. Differences are those of the gradients of the first step that does not
    overflow (nan if all do) and of the last weights; counts those of a step's forward and backward.
    unseen: on the reference, phrases for what a comparison with it cannot see."""

    device: str
    losses: list[float]
    norms: list[float]
    gradient_difference: float
    weight_difference: float
    counts: Counts
    unseen: Sequence[str] = ()


def train_layout(job: Job) -> Report:
    """Trains at the job's layout. Every rank calls this; a failure is logged once and ends all."""
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.ranks))
    environ, config = os.environ, job.config
    try:
        with (
            user_errors(environ),
            launch(config.parallel, environ, deterministic=config.training.deterministic) as mesh,
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
                pipeline=plan_of_run(config, vocabulary, mesh.size()),
                zero_stage=config.parallel.stage_of_zero,
                reduction=config.parallel.gradient_reduction,
            )
            return report(job, state, samples)
    except Exception:  # of a single process; with several the failure watch reports it
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
    if job.is_reference:
        compare(job, state, "initial", state.optimizer.masters())
    counts, results, norm, gradients = Counts(), list[StepResult](), inf, nan
    for batches in steps:
        if not isfinite(norm):  # no step so far has a finite norm
            found = measure(state, batches)
            counts = counts if results else found
            norm = sqrt(float(all_reduce(state.gradients.squares(), mesh.model_parallel)))
            if isfinite(norm):
                gradients = compare(job, state, "gradients", state.gradients.slices())
        results.append(train_step(state, batches, lr(state.updates + 1)))
    losses, weights = [each.loss for each in results], state.optimizer.masters()
    return Report(
        device=mesh.device.type,
        losses=losses,
        norms=[each.grad_norm for each in results],
        gradient_difference=gradients,
        weight_difference=compare(job, state, "weights", weights),
        counts=counts,
        unseen=unseen_of(job, state, norm, losses) if job.is_reference else (),
    )


def unseen_of(job: Job, state: TrainState, norm: float, losses: Sequence[float]) -> list[str]:
    """See compare.unseen; reads the files that the ranks of the reference have written."""
    state.mesh.control.gather(None)  # waits until all have written
    free = {each.key for each in state.gradients.slices() if each.spec.zero_gradient}
    with ExitStack() as stack:
        gradients, weights, initial = (
            read(job, stack, name) for name in ("gradients", "weights", "initial")
        )
        largest = {
            key: float(read_one().abs().max())
            for key, read_one in gradients.items()
            if key not in free
        }
        found = unseen(largest, norm, losses)
        moved = total = 0.0
        for key, read_one in weights.items():
            before = initial[key]().double()
            moved += float((read_one().double() - before).square().sum())
            total += float(before.square().sum())
        if moved <= SEEN**2 * total:
            found.append("weights, which do not move")
    return found


def read(job: Job, stack: ExitStack, name: str) -> dict[str, Callable[[], Tensor]]:
    """Functions that read the whole tensors of the reference, of all pipeline stages, by key."""
    files = job.folder.glob(f"{name}_*.safetensors")
    opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
    return {key: partial(file.get_tensor, key) for file in opened for key in file.keys()}  # noqa: SIM118


def compare(job: Job, state: TrainState, name: str, slices: Iterable[TensorSlice]) -> float:
    """The norm of the difference of all whole tensors / the norm of the reference's; 0 on the
    reference, which writes its tensors. Every rank calls this.

    The first rank of each pipeline stage compares the tensors of its stage.
    """
    mesh, stage = state.mesh, state.mesh.pipeline
    is_first = all(axis.rank == 0 for axis in mesh.axes if not axis.is_of_stages)
    whole = ((each, gather_whole(each.local, each.spec)) for each in slices)
    found = {
        own.key: each.cpu() for own, each in whole if is_first and own.spec.of_shard.is_owner()
    }
    if job.is_reference:
        if is_first:
            save_file(found, job.folder / f"{name}_{stage.rank}.safetensors")
        return 0.0
    squares = total = 0.0
    with ExitStack() as stack:
        reference = read(job, stack, name)
        for key, each in found.items():
            other = reference[key]().double()
            squares += float((each.double() - other).square().sum())
            total += float(other.square().sum())
    sums = mesh.control.gather((squares, total))
    squares, total = (sum(each) for each in zip(*sums, strict=True))
    return sqrt(squares / total) if total else squares
