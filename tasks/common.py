"""What the tasks share: their settings, and scoring of tokens by a model at any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import trange

from megatron.config.checks import positive

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.model.gpt2 import GPT2
    from megatron.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    micro_batch_size: int = 8
    """Windows of one forward pass; does not change the result."""

    output: str | None = None
    """JSON file for the result, which is printed as well."""

    def __post_init__(self) -> None:
        positive(self, "micro_batch_size")


@dataclass(frozen=True)
class Window:
    """One forward pass: inputs and labels of equal length; labels from `first` on are scored."""

    inputs: Sequence[int]
    labels: Sequence[int]
    first: int


@dataclass(frozen=True)
class Totals:
    """Over all windows: log-probability (natural) of the scored labels, their number, the windows,
    and how many windows had every scored label as the most probable token."""

    log_probability: float
    tokens: int
    windows: int
    hits: int


def sliding_windows(tokens: Sequence[int], length: int, step: int) -> Iterator[Window]:
    """Windows of at most `length` in which every token but the first is scored exactly once.

    The first window scores all it predicts, each later one its last `step` tokens, so that these
    have at least length - step tokens before them (paper, appendix E: length 1024, step 32).
    """
    assert 1 <= step <= length
    predicted = len(tokens) - 1
    done = 0
    while done < predicted:
        end = min(predicted, done + (step if done else length))
        start = max(0, end - length)
        yield Window(tokens[start:end], tokens[start + 1 : end + 1], done - start)
        done = end


def score_windows(
    model: GPT2, mesh: Mesh, windows: Sequence[Window], micro_batch_size: int, name: str
) -> Totals:
    """Score all windows, dealt out to the data-parallel ranks, with a progress bar called `name`.

    Neither batch size nor padding nor layout changes the totals but for rounding.
    """
    import torch

    from megatron.parallel.collectives import all_reduce

    totals = torch.zeros(4, dtype=torch.float64, device=mesh.device)
    own = windows[mesh.data.rank :: mesh.data.size]
    for start in trange(0, len(own), micro_batch_size, desc=name, disable=not mesh.is_first):
        totals += _score_batch(model, mesh, own[start : start + micro_batch_size])
    log_probability, tokens, count, hits = all_reduce(totals, mesh.data).tolist()
    return Totals(log_probability, int(tokens), int(count), int(hits))


def _score_batch(model: GPT2, mesh: Mesh, batch: Sequence[Window]) -> Tensor:
    """The four fields of Totals for one forward pass, fp64."""
    import torch

    from megatron.train.evaluate import score

    length = max(len(window.inputs) for window in batch)
    # Padding stands on the right, where a causal model does not look.
    tokens, labels = (
        torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=mesh.device)
        for rows in ([window.inputs for window in batch], [window.labels for window in batch])
    )
    places = torch.arange(length, device=mesh.device)
    first, end = (
        torch.tensor(numbers, device=mesh.device)[:, None]
        for numbers in ([each.first for each in batch], [len(each.inputs) for each in batch])
    )
    scored = (places >= first) & (places < end)
    log_probabilities, hits = score(model, mesh, tokens, labels, scored)
    whole = torch.ones_like(scored).masked_scatter(scored, hits).all(dim=1)
    counts = [log_probabilities.double().sum(), scored.sum(), len(batch), whole.sum()]
    return torch.tensor(counts, dtype=torch.float64, device=mesh.device)
