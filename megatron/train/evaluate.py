"""Evaluation: a checkpoint's model at any layout, its mean loss, scores of given tokens,
and the outputs of a training step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint, model_slices, newest_whole
from megatron.config.launch import Stopped
from megatron.data.batch import Samples
from megatron.data.files import DataError
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.models.gpt import Decoder
from megatron.models.registry import config_of
from megatron.parallel.bucket import gathered
from megatron.parallel.collectives import all_reduce, gather_from, own_columns
from megatron.parallel.context import gather_tokens, local_tokens
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.train.executor import Executor, on_device, to_device
from megatron.train.objectives import Objective
from megatron.train.state import TrainState

GROUP = 8  # micro-batches read at a time, per pipeline stage
SCORED_AT_ONCE = 1024  # rows of logits in memory at a time; 0.2 GB with GPT-2's vocabulary


def load_newest(
    folders: Sequence[Path], mesh: Mesh, dtype: torch.dtype = torch.float32
) -> tuple[Checkpoint, Any]:
    """(checkpoint, its model), for the checkpoint that `find_newest` returns.

    dtype: of weights and activations, whatever the checkpoint's is. Raises as `find_newest` does.
    """
    newest = find_newest(folders, mesh)
    return newest, load_model(newest, mesh, dtype)


def find_newest(folders: Sequence[Path], mesh: Mesh) -> Checkpoint:
    """The first whole checkpoint; the first rank prints which ones were passed over, and why.

    Raises ValueError, on every rank, if none is whole.
    """
    newest, passed_over = newest_whole(folders, mesh)
    for reason in passed_over if mesh.is_first else ():
        print(f"warning: passed over: {reason}", file=sys.stderr)
    return newest


def load_model(checkpoint: Checkpoint, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a whole checkpoint, sharded over this mesh, in evaluation mode."""
    manifest = checkpoint.manifest
    config = config_of(manifest)
    if config.layernorm_impl != "torch":
        # The kernels used in training compute the same model, but need not be installed here.
        config = replace(config, layernorm_impl="torch")
    model = build_model(config, mesh, manifest["vocab_size"], seed=None, dtype=dtype)
    load_checkpoint(checkpoint, model_slices(model))
    return model.eval()


@torch.no_grad()
def mean_losses(
    model: nn.Module,
    objective: Objective,
    data: Samples,
    samples: int,
    micro_batch_size: int,
    mesh: Mesh,
    pipeline: PipelinePlan = WHOLE_MODEL,
    wants_stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """The mean of each term of the loss, over the first `samples` samples of a split.

    Except for rounding, the micro-batch size and the layout do not matter. objective: that of
    TrainState. pipeline: the plan that the model's stages follow. wants_stop: called before each
    group of micro-batches; all ranks pass one, or none does. Raises megatron.config.launch.Stopped
    on all ranks if it returns True on one.
    """
    was_training = model.training
    model.eval()
    k, stage = len(objective.terms), mesh.pipeline
    totals = torch.zeros(2, k, dtype=torch.float64, device=mesh.device)
    # Every rank makes the same calls with equally many samples, since they may gather weights. One
    # more call is for the remainder; it counts on the ranks that have a sample for it.
    local, even = range(mesh.batch.rank, samples, mesh.batch.size), samples // mesh.batch.size
    group = GROUP * stage.size * micro_batch_size  # samples read at a time
    calls = [(local[start : min(start + group, even)], True) for start in range(0, even, group)]
    if samples % mesh.batch.size:
        calls.append((local[even:] or range(1), len(local) > even))
    try:
        with gathered(model):
            for numbers, counts in calls:
                if wants_stop is not None:
                    stops = totals.new_full((1,), float(wants_stop()))
                    if all_reduce(all_reduce(stops, mesh.loss_sums), mesh.model_parallel).item():
                        raise Stopped
                starts = range(0, len(numbers), micro_batch_size)
                batches = [
                    local_tokens(data.batch(numbers[start : start + micro_batch_size]), mesh)
                    for start in starts
                ]
                executor = Executor(
                    model=model,
                    objective=objective,
                    mesh=mesh,
                    pipeline=pipeline,
                    batches=batches,
                    loss_scales=torch.ones_like(totals[0]),
                )
                sums = executor.run(pipeline.evaluation(stage.rank, len(batches)))
                if not counts:
                    continue
                totals[0] += sums
                if stage.rank == stage.size - 1:
                    totals[1] += totals.new_tensor([*map(objective.denominators, batches)]).sum(0)
    finally:
        model.train(was_training)
    numerators, denominators = all_reduce(totals, mesh.loss_sums).tolist()
    if not all(denominators):
        raise DataError("--split: no token of the validation split counts towards the loss")
    means = (total / number for total, number in zip(numerators, denominators, strict=True))
    return dict(zip(objective.terms, means, strict=True))


def validate(
    state: TrainState,
    data: Samples | None,
    *,
    samples: int,
    micro_batch_size: int,
    wants_stop: Callable[[], bool],
    write: Callable[[dict[str, Any]], None],
    log: Callable[[str], None],
) -> float | None:
    """Records and returns the validation loss of a run; None without data or samples. Raises
    Stopped, on every rank, if `wants_stop` returns True on one: see mean_losses."""
    if data is None or samples == 0:
        return None
    samples = min(samples, data.samples_per_epoch)  # a smaller split is evaluated whole
    objective = getattr(state.objective, "measured", state.objective)
    terms = mean_losses(
        state.model,
        objective,
        data,
        samples,
        micro_batch_size,
        state.mesh,
        state.pipeline,
        wants_stop,
    )
    loss, first = sum(terms[name] for name in state.objective.terms), next(iter(terms.values()))
    line = {
        "step": state.step,
        "samples": state.samples,
        "validation_loss": loss,
        **{f"validation_{name}": mean for name, mean in terms.items()},
        "validation_samples": samples,
    }
    is_all = objective is state.objective
    said = {name: terms[name] for name in terms if is_all or name not in state.objective.terms}
    text = f"step {state.step} | validation loss {loss:.4f}{in_words(said)}"
    if is_all:  # the first term is of tokens
        perplexity = inf if first > 700 else exp(first)  # above, the run diverges
        line["validation_perplexity"] = perplexity
        text += f" | perplexity {perplexity:.2f}"
    write(line)
    log(text)
    return loss


def in_words(terms: Mapping[str, float]) -> str:
    """The terms of a loss that has several, for the console."""
    if len(terms) == 1:
        return ""
    return f" ({', '.join(f'{name} {mean:.4f}' for name, mean in terms.items())})"


def batch_of(tokens: Tensor, mesh: Mesh | None = None) -> GPT2Batch:
    """A batch of texts; tokens: int64 [b, s], with positions counted from 0. mesh: takes this
    rank's tokens, see local_tokens."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    batch = GPT2Batch(tokens=tokens, positions=positions)
    if mesh is None or mesh.context.size == 1:
        return batch
    batch = GPT2Batch(tokens=tokens.cpu().numpy(), positions=positions.cpu().numpy())
    return on_device(local_tokens(batch, mesh), mesh.device)


@torch.no_grad()
def whole_logits(model: Decoder, mesh: Mesh, tokens: Tensor) -> Tensor:
    """Logits [b, s, true vocabulary], fp32 or wider, of tokens int64 [b, s]; on every rank."""
    logits = gather_from(model(batch_of(tokens, mesh)), -1, mesh.vocabulary)
    logits = logits[:, : model.vocab_size].view(len(tokens), -1, model.vocab_size)
    logits = gather_tokens(logits, mesh)[:, : tokens.shape[1]]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def score(
    model: Decoder, mesh: Mesh, tokens: Tensor, labels: Tensor, scored: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probability [m] of the m scored labels, whether each is the most probable token [m]).

    tokens, labels: int64 [b, s]; labels[i, j] is the token that follows tokens[i, : j + 1].
    scored: bool [b, s]; at other positions no logits are computed. The log-probabilities are fp32
    or wider; if tokens are equally probable, the one with the lowest id is the most probable.
    """
    batch, whole = batch_of(tokens, mesh), scored
    if batch.token_order is not None:  # this rank scores its own tokens
        count = batch.tokens.shape[1] * mesh.context.size - tokens.shape[1]
        labels, scored = (
            F.pad(each, (0, count))[:, batch.token_order] for each in (labels, scored)
        )
    rows = model.layers(model.embed(batch), batch)[scored.flatten()]
    log_probabilities, hits = [], []
    parts = rows.split(SCORED_AT_ONCE), labels[scored].split(SCORED_AT_ONCE)
    for x, ids in zip(*parts, strict=True):
        logits = model.logits(x)
        # Before the loss, which overwrites the logits.
        hits.append(most_probable(logits, mesh.vocabulary, model.vocab_size) == ids)
        losses = vocab_parallel_cross_entropy(logits, ids, mesh.vocabulary, model.vocab_size)
        log_probabilities.append(-losses)
    found = torch.cat(log_probabilities), torch.cat(hits)
    if mesh.context.size == 1:
        return found
    # Every context rank gets the scores of all tokens.
    local = (each.new_zeros(scored.shape).masked_scatter(scored, each) for each in found)
    gathered_scores = (gather_tokens(each, mesh)[:, : whole.shape[1]] for each in local)
    first, second = (each[whole] for each in gathered_scores)
    return first, second


def most_probable(logits: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """The token with the largest logit, the lowest one of a tie: int64 [n].

    Where a logit is NaN on any rank, the result is vocab_size, which is no token.
    logits: [n, padded v / t], this rank's columns; the padded ones do not count.
    """
    start, columns = own_columns(logits, axis, vocab_size)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    best = logits.new_full((logits.shape[0],), -torch.inf, dtype=dtype)
    column = torch.zeros_like(best, dtype=torch.int64)
    if columns:
        values, column = logits[:, :columns].max(dim=1)
        best = values.to(dtype)
    local_best = best
    # NaN counts as inf: whether NaN or a number is the larger depends on the backend.
    best = all_reduce(best.where(~best.isnan(), torch.inf), axis, ReduceOp.MAX)
    candidate = (column + start).where(local_best == best, vocab_size)
    candidate = candidate.where(~local_best.isnan(), -1)
    chosen = all_reduce(candidate, axis, ReduceOp.MIN)
    return chosen.where(chosen >= 0, vocab_size)


@dataclass(frozen=True)
class Outputs:
    """The model's output for the global batch of b samples, in the order of their numbers; the same
    at every layout, on every rank.

    logits: [b, s, vocabulary], fp32 or wider, without padding. labels: int64 [b, s], as the batch
    has them. Both on the mesh's device.
    """

    logits: Tensor
    labels: Tensor


def require_outputs(model: Any, micro_batches: Sequence[Any]) -> None:
    """Raises ValueError if the model lacks `logits`, or batches lack labels [b, s] of one shape or
    have a rank's tokens only."""
    if not hasattr(model, "logits"):
        raise ValueError(f"return_outputs: {type(model).__name__} has no `logits`, as GPT2 has")
    shapes = {getattr(each.labels, "shape", None) for each in micro_batches}
    if any(each.token_order is not None for each in micro_batches):
        raise ValueError("return_outputs takes whole samples, not those of `local_tokens`")
    if len(shapes) != 1 or None in shapes:
        raise ValueError("return_outputs takes micro-batches with labels [b, s], of one shape")


@torch.no_grad()
def gather_outputs(
    model: Any, mesh: Mesh, micro_batches: Sequence[Any], hidden_states: Mapping[int, Tensor]
) -> Outputs:
    """Runs the output layer again on the output of the layers, and gathers the columns and samples
    of all ranks (every rank calls this). hidden_states: [n, h] by micro-batch, on the last pipeline
    stage only."""
    labels = torch.stack([to_device(mesh.device, each.labels)[0] for each in micro_batches])
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    # [micro-batches, samples of each, s, vocabulary]
    logits = torch.zeros(*labels.shape, model.vocab_size, dtype=dtype, device=mesh.device)
    with gathered(model):
        for number, x in hidden_states.items():
            columns = gather_from(model.logits(x), -1, mesh.vocabulary)[:, : model.vocab_size]
            tokens = columns.view(labels.shape[1], -1, model.vocab_size)
            logits[number] = gather_tokens(tokens, mesh)[:, : labels.shape[2]]
    all_reduce(logits, mesh.pipeline)
    # The samples of a step are in order of micro-batch, and within each in order of rank.
    logits, labels = (gather_from(each, 1, mesh.batch).flatten(0, 1) for each in (logits, labels))
    return Outputs(logits, labels)
