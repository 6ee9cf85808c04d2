"""The protocol of a task, and the scores that a model gives to its windows, at any layout.

The module of a task has
    Settings, a dataclass derived from TaskSettings;
    prepare(settings, manifest, tokenizer) -> Task, which reads and checks its input without torch.
README.md adds a task in 40 lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import positive, writable
from megatron.config.parallel import ParallelConfig
from megatron.data.tokenizer import GPT2BPETokenizer, Tokenizer
from megatron.train.inputs import shard

if TYPE_CHECKING:
    from megatron.models.gpt import Decoder
    from megatron.parallel.mesh import Mesh

Tokens: TypeAlias = Sequence[int] | NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    compare_paper: bool = False
    """Show the paper's figures next to the result, and put them into the record."""

    output: Path | None = None
    """JSON file for the result, which is also printed."""

    def __post_init__(self) -> None:
        writable(self, "output")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ReportConfig):
    micro_batch_size: int = 8
    """Windows per forward pass; it changes the result only by rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings that all tasks have; each task adds its own fields."""

    trained: TrainedConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def files(self) -> Sequence[Path]:
        """Input files, which the record identifies: every field that is the path of a file."""
        return [each for each in vars(self).values() if isinstance(each, Path) and each.is_file()]


@dataclass(frozen=True)
class Window:
    """One forward pass: inputs and labels of equal length. Labels from `first` on are scored, at
    least one. Label i is the token that follows inputs[: i + 1]."""

    inputs: Tokens
    labels: Tokens
    first: int


class WindowSequence(Protocol):
    """Windows by number, 0 to len - 1: a list, or an object that makes each window on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Window: ...


@dataclass(frozen=True)
class Scores:
    """A model's scores for the scored labels of each window, in the order of the windows."""

    log_probability: NDArray[np.float64]  # [N], natural, summed over the window's scored labels
    tokens: NDArray[np.int64]  # [N], number of scored labels
    hits: NDArray[np.int64]  # [N], how many of them were the most probable token
    last_hit: NDArray[np.bool_]  # [N], whether the last of them was the most probable token

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Scores:
        return Scores(*(array[part] for array in vars(self).values()))

    @property
    def all_hit(self) -> NDArray[np.bool_]:
        """[N], whether every scored label was the most probable token."""
        return np.equal(self.hits, self.tokens)

    def perplexity(self, count: float) -> float:
        """exp of the total negative log-likelihood / `count`; infinite if that overflows."""
        mean = -float(self.log_probability.sum()) / count
        return inf if mean > 700 else exp(mean)


@dataclass(frozen=True)
class Prompts:
    """Texts to continue by greedy decoding: the most probable token each time."""

    tokens: Sequence[Tokens]
    is_done: Callable[[Sequence[int]], bool]  # whether these new tokens are enough
    most: int  # largest number of new tokens per prompt
    ends: Sequence[int]  # tokens that end a text; they are not part of the result


class Task(ABC):
    """The windows of a task (len and indexing), and the figures computed from their scores."""

    prompts: Prompts | None = None
    """Set by a task that compares the text that the model writes."""
    windows: WindowSequence
    """All windows, where the task makes them in advance. A task that makes each window on demand
    overrides __len__ and __getitem__ instead."""

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> Window:
        return self.windows[number]

    @abstractmethod
    def score(self, scores: Scores, continuations: Sequence[Sequence[int]]) -> Mapping[str, Any]:
        """The figures, JSON; called only on the first rank. "conventions" gives the meaning of each
        figure by its name, and "protocol", where needed, how the figures were measured.

        continuations: the new tokens of each prompt; empty without prompts.
        """


@dataclass(frozen=True)
class Sliding:
    """Windows of at most `length` in which every token but the first is scored exactly once.

    The first window scores all the tokens that it predicts. Each later window scores its last
    `stride` tokens, so each of them has at least length - stride tokens of context.

    Window k starts at k x stride, and the last one may be shorter, as in the paper (appendix E:
    length 1024, stride 32) and its authors' code. reach_back: the last window starts early enough
    to be full, which gives its tokens more context, as in lm-evaluation-harness.
    """

    tokens: Tokens
    length: int
    stride: int
    reach_back: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.stride <= self.length

    def __len__(self) -> int:
        predicted = len(self.tokens) - 1
        if predicted < 1:
            return 0
        return 1 + max(0, -(-(predicted - self.length) // self.stride))

    def __getitem__(self, number: int) -> Window:
        if not 0 <= number < len(self):
            raise IndexError(number)
        done = self.length + (number - 1) * self.stride if number else 0
        end = min(len(self.tokens) - 1, done + (self.stride if number else self.length))
        start = max(0, end - self.length) if self.reach_back else number * self.stride
        return Window(self.tokens[start:end], self.tokens[start + 1 : end + 1], done - start)


def encode_targets(
    tokenizer: Tokenizer, places: Sequence[str], contexts: Sequence[str], targets: Sequence[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids of the context, ids of the target) of each pair: the ids of context + target, split
    where the ids of the context end.

    places: location of each pair in the input, for messages. Raises ValueError where no id begins
    at the target; lm-evaluation-harness splits inside the id there, and scores the rest.
    """
    wholes = list(map(add, contexts, targets))
    pairs = zip(tokenizer.encode_batch(contexts), tokenizer.encode_batch(wholes), strict=True)
    for place, target, (start, ids) in zip(places, targets, pairs, strict=True):
        if ids[: len(start)] != start or len(ids) == len(start):
            raise ValueError(
                f"{place}: no token of the model's tokenizer begins at {target!r}, so that it has "
                "no tokens to score; a model with a byte-level BPE would work, such as "
                f"--tokenizer-type {GPT2BPETokenizer.kind}"
            )
        yield start, ids[len(start) :]


def score_windows(
    model: Decoder, mesh: Mesh, windows: WindowSequence, micro_batch_size: int, name: str
) -> Scores:
    """Score all windows, sharded over the data-parallel ranks, with a progress bar called `name`.

    Every rank returns the same scores. Batch size, padding and layout change them only by rounding.
    Raises, on every rank, ValueError where a window is longer than the model's positions, and
    DivergedError where log-probabilities are not finite.
    """
    import torch

    from megatron.inference.generate import DivergedError
    from megatron.parallel.collectives import all_reduce

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
    import torch

    from megatron.train.evaluate import score

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
    from megatron.inference.generate import Sampling, generate_all

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
