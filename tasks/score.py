"""A model's scores at any layout: of windows, of continued prompts, and the logits of examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron.config.model import FinetunedConfig
from megatron.data.batch import ExampleBatch
from megatron.data.images import Images
from megatron.inference.generate import DivergedError, Sampling, generate_all
from megatron.models.gpt import Decoder
from megatron.parallel.bucket import gathered
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import local_tokens
from megatron.parallel.mesh import Mesh
from megatron.train.evaluate import score
from megatron.train.executor import on_device
from megatron.train.inputs import shard
from tasks.protocol import Example, ImageTask, Prompts, Scores, Task, Tokens, Window, WindowSequence


def score_task(
    task: Task | ImageTask, model: Any, mesh: Mesh, micro_batch_size: int, name: str
) -> Mapping[str, Any]:
    """The task's figures on the first rank, {} on the others; every rank calls this."""
    if isinstance(task, ImageTask):
        best = best_classes(model, mesh, task.images, micro_batch_size)
        return task.score(best) if mesh.is_first else {}
    scores = score_windows(model, mesh, task, micro_batch_size, name)
    continuations: list[list[int]] = []
    if task.prompts is not None:
        continuations = continue_prompts(
            model, mesh, task.prompts, micro_batch_size, f"{name}, greedy"
        )
    return task.score(scores, continuations) if mesh.is_first else {}


def score_windows(
    model: Decoder, mesh: Mesh, windows: WindowSequence, micro_batch_size: int, name: str
) -> Scores:
    """Score all windows, sharded over the data-parallel ranks, with a progress bar called `name`.

    Every rank returns the same scores. Batch size, padding and layout change them only by rounding.
    Raises, on every rank, ValueError where a window is longer than the model's positions, and
    DivergedError where log-probabilities are not finite.
    """
    lengths = [len(windows[number].inputs) for number in range(len(windows))]
    if max(lengths, default=0) > model.positions:
        raise ValueError(f"{name}: {max(lengths)} tokens in a window, {model.positions} positions")
    rows = torch.zeros(len(windows), 4, dtype=torch.float64)
    for numbers in shard(lengths, micro_batch_size, mesh, name):
        batch = [windows[number] for number in numbers]
        rows[numbers] = torch.from_numpy(_score_batch(model, mesh, batch))
    columns = all_reduce(rows.to(mesh.device), mesh.copies).cpu().numpy().T
    log_probability, tokens, hits, last_hit = columns
    if not np.isfinite(log_probability).all():
        raise DivergedError(f"{name}: log-probabilities are not numbers")
    return Scores(log_probability, tokens.astype(int), hits.astype(int), last_hit.astype(bool))


def _score_batch(model: Decoder, mesh: Mesh, batch: Sequence[Window]) -> NDArray[np.float64]:
    """The four fields of Scores for each window of one forward pass, [b, 4]."""
    # Padding is on the right, where a causal model does not attend to it.
    tokens = _padded([window.inputs for window in batch])
    labels = _padded([window.labels for window in batch])
    first, end = (
        np.array(numbers)[:, None]
        for numbers in ([each.first for each in batch], [len(each.inputs) for each in batch])
    )
    places = np.arange(tokens.shape[1])
    scored = (places >= first) & (places < end)
    counts = scored.sum(axis=1)
    assert counts.min() > 0, "a window without a scored label"
    arguments = [torch.from_numpy(each).to(mesh.device) for each in (tokens, labels, scored)]
    found = score(model, mesh, *arguments)
    log_probabilities, hits = (each.double().cpu().numpy() for each in found)
    ends = counts.cumsum()
    sums = [np.add.reduceat(each, ends - counts) for each in (log_probabilities, hits)]
    return np.stack([sums[0], counts, sums[1], hits[ends - 1]], axis=1)


def _padded(rows: Sequence[Tokens]) -> NDArray[np.int64]:
    """[b, longest], each row padded with zeros at its end."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded


def continue_prompts(
    model: Decoder, mesh: Mesh, prompts: Prompts, micro_batch_size: int, name: str
) -> list[list[int]]:
    """The new tokens of every prompt, in order, the same on every rank."""
    return generate_all(
        model,
        mesh,
        [[*map(int, each)] for each in prompts.tokens],
        Sampling(max_new_tokens=prompts.most, temperature=0.0),
        ends=prompts.ends,
        micro_batch_size=micro_batch_size,
        name=name,
        is_done=prompts.is_done,
    )


@torch.no_grad()
def best_classes(
    model: nn.Module, mesh: Mesh, images: Images, micro_batch_size: int
) -> NDArray[np.int64]:
    """The five classes with the highest scores of each image, best first: [images, up to 5]."""
    count = images.samples_per_epoch
    # Every rank makes the same calls with equally many images; the last ones may come twice.
    each = -(-count // mesh.batch.size)
    first = mesh.batch.rank * each
    own = [min(number, count - 1) for number in range(first, first + each)]
    found = []
    for start in range(0, each, micro_batch_size):
        batch = images.batch(own[start : start + micro_batch_size])
        order = model(on_device(batch, mesh.device)).argsort(dim=1, descending=True, stable=True)
        found.append(order[:, :5].cpu().numpy())
    best = np.empty((count, found[0].shape[1]), np.int64)
    for numbers, rows in mesh.control.gather((own, np.concatenate(found))):
        best[numbers] = rows
    return best


def make_batch(
    examples: Sequence[Example], counted: int | None = None, parts: int = 1, longest: int = 0
) -> ExampleBatch:
    """The batch of these examples, which all have equally many options and equally long labels.

    counted: how many examples, from the first on, are part of the loss; all if not given. parts:
    number of shards along the tokens; sequences are padded to a multiple of it. longest: number of
    tokens that sequences are at least padded to.
    """
    sequences = [each for example in examples for each in example.options]
    lengths = np.array([len(each.tokens) for each in sequences])[:, None]
    positions = np.arange(-(-max(longest, lengths.max()) // parts) * parts)
    is_real = positions < lengths
    tokens = np.zeros(is_real.shape, np.int64)
    tokens[is_real] = np.concatenate([np.asarray(each.tokens) for each in sequences])
    is_second = positions >= np.array([each.second for each in sequences])[:, None]
    options = len(examples[0].options)
    assert len(sequences) == options * len(examples), "unequal numbers of options"
    shape = (len(examples), options, -1) if options > 1 else is_real.shape
    count = len(examples) if counted is None else counted
    return ExampleBatch(
        tokens=tokens.reshape(shape),
        token_types=(is_real & is_second).astype(np.int64).reshape(shape),
        is_real=is_real.reshape(shape),
        labels=np.array([each.label for each in examples], np.int64).reshape(len(examples), -1),
        counted=(np.arange(len(examples)) < count).astype(np.float32),
    )


@torch.no_grad()
def logits_of(
    model: nn.Module,
    config: FinetunedConfig,
    mesh: Mesh,
    examples: Sequence[Example],
    micro_batch_size: int,
    name: str,
) -> list[NDArray[np.float32]]:
    """The model's logits for each example: [classes], [options], or [n, 2] for the n tokens of its
    sequence; the same on every rank. `name` is the label of the progress bar.

    Batch size, padding and layout change them only by rounding. Raises DivergedError where logits
    are not finite.
    """
    was_training = model.training
    model.eval()
    shapes = [_shape_of(each, config) for each in examples]
    ends = np.cumsum([prod(shape) for shape in shapes])
    flat = torch.zeros(int(ends[-1]) if len(ends) else 0)

    def answer(numbers: Sequence[int]) -> Tensor:
        unlabelled = [replace(examples[number], label=()) for number in numbers]
        batch = local_tokens(make_batch(unlabelled, parts=mesh.token_multiple), mesh)
        logits: Tensor = model(on_device(batch, mesh.device))
        return logits.float().cpu()

    calls = 0
    with gathered(model):
        for numbers in shard([each.longest for each in examples], micro_batch_size, mesh, name):
            for number, row in zip(numbers, answer(numbers), strict=True):
                count = prod(shapes[number])
                flat[ends[number] - count : ends[number]] = row.flatten()[:count]
            calls += 1
        if calls * micro_batch_size * mesh.copies.size < len(examples):
            answer([0])  # logits unused: other ranks make one call more, and it may gather weights
    model.train(was_training)
    whole = all_reduce(flat.to(mesh.device), mesh.copies).cpu().numpy()
    if not np.isfinite(whole).all():
        raise DivergedError(f"{name}: logits are not numbers")
    parts = np.split(whole, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shape_of(example: Example, config: FinetunedConfig) -> tuple[int, ...]:
    """Shape of the logits of this example."""
    if config.head == "span":
        return (len(example.options[0].tokens), 2)
    return (len(config.labels) if config.head == "classifier" else len(example.options),)
