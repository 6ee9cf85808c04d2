"""Text generation, token by token, greedy or by sampling, at any layout.

    b rows   v vocabulary   t tensor-parallel size

A prompt is read once; from then on each step reads one new token per row (cache.py).
Draws do not depend on the batch or on the layout: every prompt has its own source of random
numbers, and each new token takes one of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data.gpt2 import GPT2Batch
from megatron.models.cache import KeyValueCache
from megatron.models.gpt import Decoder
from megatron.parallel.bucket import require_whole
from megatron.parallel.collectives import gather_from, start_broadcast
from megatron.parallel.initialize import derive_seed
from megatron.parallel.mesh import Mesh
from megatron.train.evaluate import most_probable
from megatron.train.inputs import shard


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and the largest number of new tokens.

    temperature: divides the logits; 0 always takes the most probable token.
    top_k: only the k most probable tokens are drawn; 0 for all.
    top_p: of these, only the fewest that together have this share of their probability.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


class DivergedError(ValueError):
    """The model's logits are not numbers; the message says where."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; a model that has not diverged would work, and in place of "
            "--dtype fp16 --dtype bf16 or fp32"
        )


class BatchReader:
    """Feeds a batch of texts of unequal length to a model: once whole, then token by token.

    Shorter texts are padded on the left. No token attends to padding; positions start after it.
    """

    def __init__(self, model: Decoder, texts: Sequence[Sequence[int]], new: int) -> None:
        """texts: token ids, none empty. new: the largest number of tokens that follow."""
        self.model = model
        device = next(model.parameters()).device
        longest = max(len(text) for text in texts)
        first = [longest - len(text) for text in texts]
        rows = [[*[0] * gap, *text] for gap, text in zip(first, texts, strict=True)]
        self._unread = torch.tensor(rows, device=device)
        self._first = torch.tensor(first, device=device)
        self._cache = KeyValueCache(longest + new, self._first if any(first) else None)

    def follow(self, ids: Tensor) -> None:
        """ids: int64 [b], the next token of each row."""
        self._unread = ids[:, None]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._first.device)
        self._unread, self._first = self._unread[index], self._first[index]
        self._cache.keep(index)

    def logits(self) -> Tensor:
        """Logits [b, v/t] of each row's next token; reads all unread tokens."""
        tokens, done = self._unread, self._cache.length
        columns = torch.arange(done, done + tokens.shape[1], device=tokens.device)
        positions = (columns - self._first[:, None]).clamp_(min=0)
        batch = GPT2Batch(tokens=tokens, positions=positions)
        x = self.model.layers(self.model.embed(batch), batch, self._cache)
        return self.model.logits(x.view(*tokens.shape, -1)[:, -1])


@torch.inference_mode()
def generate(
    model: Decoder,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: Sequence[int],
    numbers: Sequence[int] | None = None,
    is_done: Callable[[Sequence[int]], bool] = lambda new: False,
) -> list[list[int]]:
    """The new tokens of each prompt, one batch; the same on every rank of the tensor axis.

    A row ends at one of the ids `ends`, which is left out, after max_new_tokens, or when
    is_done(its new tokens so far) is true. An empty prompt begins with the first of `ends`.
    numbers: a number for each prompt, which together with the seed determines its draws; default
    0, 1, 2, ... The model is in evaluation mode; prompt and new tokens fit its positions. Raises
    DivergedError if logits are not numbers, and ValueError for a model in ZeRO stage 3, whose ranks
    would all have to read the same number of tokens.
    """
    require_whole(model, "generate")
    assert sampling.max_new_tokens > 0, f"max_new_tokens {sampling.max_new_tokens}"
    if not prompts:
        return []
    texts = [list(prompt) or list(ends[:1]) for prompt in prompts]
    assert all(texts), "an empty prompt begins with the end mark"
    longest = max(len(text) for text in texts) + sampling.max_new_tokens
    assert longest <= model.positions, f"{longest} tokens for {model.positions} positions"
    numbers = range(len(prompts)) if numbers is None else numbers
    sources = [random.Random(derive_seed(sampling.seed, "generate", each)) for each in numbers]
    new: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    reader = BatchReader(model, texts, sampling.max_new_tokens)
    while running:
        logits = reader.logits()
        if sampling.temperature == 0:
            ids = most_probable(logits, mesh.vocabulary, model.vocab_size)
        else:
            whole = gather_from(logits, -1, mesh.vocabulary)[:, : model.vocab_size]
            shares = [sources[row].random() for row in running]
            ids = draw(whole.cpu(), sampling, shares).to(logits.device)
        # Ranks that compute the same texts may add in another order, and round differently.
        ids = start_broadcast(ids, mesh.tokens, 0)()
        unfinished = []  # indices into `running`
        for index, (row, token) in enumerate(zip(running, ids.tolist(), strict=True)):
            if token == model.vocab_size:  # no token: a logit is NaN
                where = f"prompt {numbers[row] + 1}: after {len(new[row])} new tokens"
                raise DivergedError(f"{where} the logits are not numbers")
            new[row].append(token)
            is_full = len(new[row]) == sampling.max_new_tokens
            if not (token in ends or is_full or is_done(new[row])):
                unfinished.append(index)
        reader.follow(ids)
        if len(unfinished) < len(running):
            running = [running[index] for index in unfinished]
            reader.keep(unfinished)
    return [tokens[:-1] if tokens[-1] in ends else tokens for tokens in new]


def generate_all(
    model: Decoder,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: Sequence[int],
    micro_batch_size: int,
    name: str,
    is_done: Callable[[Sequence[int]], bool] = lambda new: False,
) -> list[list[int]]:
    """The new tokens of each prompt, on every rank; the data-parallel ranks divide the work.

    name: title of the progress bar; the rest as for `generate`. Raises DivergedError on every rank
    if one of them does.
    """
    new_tokens: dict[int, list[int]] = {}
    failure = None
    try:
        for numbers in shard([len(each) for each in prompts], micro_batch_size, mesh, name):
            texts = [prompts[number] for number in numbers]
            new = generate(
                model, mesh, texts, sampling, ends=ends, numbers=numbers, is_done=is_done
            )
            new_tokens |= zip(numbers, new, strict=True)
    except DivergedError as error:
        failure = error
    for of_rank, failure_there in mesh.control.gather((new_tokens, failure)):
        if failure_there is not None:
            raise failure_there
        new_tokens |= of_rank
    return [new_tokens[number] for number in range(len(prompts))]


def draw(logits: Tensor, sampling: Sampling, shares: Sequence[float]) -> Tensor:
    """Ids [b] from logits [b, v] on the CPU: the first id whose cumulative probability exceeds the
    row's share, in [0, 1), of the total; v where there is none.

    Tokens stay in the order of their ids, so that rounding that swaps two equally probable ones
    changes no draw.
    """
    probability = probabilities(logits, sampling)
    below = probability.cumsum(-1)
    share = torch.tensor(shares, dtype=below.dtype)[:, None] * below[:, -1:]
    return torch.searchsorted(below, share, right=True).squeeze(1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [b, v] in fp64 of drawing each token; a row's sum is 1 only without top-p."""
    scaled = logits.double() / sampling.temperature
    is_cut = 0 < sampling.top_k < scaled.shape[1]
    if not is_cut and sampling.top_p == 1:
        return scaled.softmax(-1)
    top, ids = scaled.topk(sampling.top_k if is_cut else scaled.shape[1])
    probability = top.softmax(-1)
    if sampling.top_p < 1:
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(before >= sampling.top_p, 0)
    return torch.zeros_like(scaled).scatter_(1, ids, probability)
