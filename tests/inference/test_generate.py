"""Generation: the same text at every layout and batch, its end, and the draws; and its cache of
keys and values, by which reading token by token gives what reading at once gives.

Greedy text beside that of transformers is in test_unmodified.py and tests/tools/test_generate.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data.gpt2 import GPT2Batch
from megatron.inference.generate import (
    BatchReader,
    DivergedError,
    Sampling,
    draw,
    generate,
    probabilities,
)
from megatron.models.cache import KeyValueCache
from megatron.models.gpt import GPT2
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import whole_logits
from tests.dist import Pool, on_ranks
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, samples, tiny_config, tiny_model

POSITIONS = 64
PROMPTS = [[5, 6], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [], [5, 6], [99, 100, 0, 1]]
GREEDY = Sampling(24, temperature=0.0)
DRAWN = Sampling(24, seed=5)


Texts = list[list[int]]


def continued(tensor_size: int | str, sampling: Sampling, batch: int = len(PROMPTS)) -> Texts:
    """The new tokens of PROMPTS, so many of them together."""
    mesh = mesh_of_ranks(tensor_size)
    config = tiny_config(max_position_embeddings=POSITIONS)
    model = tiny_model(mesh, config, dtype=torch.float32)
    new = []
    for start in range(0, len(PROMPTS), batch):
        numbers = range(len(PROMPTS))[start : start + batch]
        prompts = [PROMPTS[number] for number in numbers]
        new += generate(model.eval(), mesh, prompts, sampling, ends=[0], numbers=numbers)
    return new


def each_way(tensor_size: int | str, batch: int) -> list[Texts]:
    ways = (Sampling(6, temperature=0.0), Sampling(6, 0.8, 20, 0.9, seed=5))
    return [continued(tensor_size, sampling, batch) for sampling in ways]


def test_the_text_is_the_same_at_every_layout_and_in_every_batch(gloo: Pool) -> None:
    expected = each_way(1, len(PROMPTS))
    for texts in expected:
        assert len({tuple(tokens) for tokens in texts}) >= 5, "not all the same"
    assert each_way(1, 1) == each_way(1, 4) == expected
    layouts = (2, 2), (4, "4:2d"), (8, "8:3d"), (2, "context=2:p2p")
    for world, size in layouts:
        for found in gloo.run(world, each_way, size, 4):
            assert found == expected


def test_draws_depend_on_the_seed_and_on_the_number_of_the_prompt() -> None:
    first, again, other = (continued(1, Sampling(24, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert first[0] != first[4], "one prompt, two numbers"


FULL = [prompt for prompt in PROMPTS if prompt]  # none of them needs an end mark


def new_tokens(sampling: Sampling, eod: int | None, **others: Any) -> list[list[int]]:
    mesh = mesh_of_ranks(1)
    model = tiny_model(mesh, tiny_config(max_position_embeddings=POSITIONS))
    return generate(model.eval(), mesh, FULL, sampling, ends=() if eod is None else [eod], **others)


def test_a_text_ends_at_its_mark_and_leaves_the_others() -> None:
    whole = new_tokens(DRAWN, None)
    assert all(len(row) == 24 for row in whole)
    ended = 0
    for mark in range(20):
        expected = [row[: row.index(mark)] if mark in row else row for row in whole]
        assert new_tokens(DRAWN, mark) == expected
        ended += sum(len(row) < 24 for row in expected)
    assert ended > 5


def test_a_text_ends_where_it_is_said_to_be_done() -> None:
    seen: list[list[int]] = []

    def is_done(tokens: Sequence[int]) -> bool:
        seen.append(list(tokens))
        return sum(tokens) > 300

    whole = new_tokens(DRAWN, None)
    ends = [next(n for n in range(1, 25) if sum(row[:n]) > 300) for row in whole]
    assert new_tokens(DRAWN, None, is_done=is_done) == [
        row[:end] for row, end in zip(whole, ends, strict=True)
    ]
    assert len(set(ends)) > 1
    assert len(seen) == sum(ends), "a row that has ended is not asked again"


def test_no_prompt_has_no_continuation() -> None:
    mesh = mesh_of_ranks(1)
    assert generate(tiny_model(mesh).eval(), mesh, [], GREEDY, ends=[0]) == []


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(24, top_k=3)])
def test_logits_that_are_no_numbers_are_an_error(sampling: Sampling) -> None:
    mesh = mesh_of_ranks(1)
    model = tiny_model(mesh)
    with torch.no_grad():
        model.position_embedding.weight[5] = torch.nan
    few = replace(sampling, max_new_tokens=6)
    assert len(generate(model.eval(), mesh, [[1]], replace(few, max_new_tokens=5), ends=())[0])
    with pytest.raises(DivergedError, match=r"prompt 8\b.* 5 "):
        generate(model.eval(), mesh, [[1]], few, ends=(), numbers=[7])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
def test_narrow_weights_generate_too(dtype: torch.dtype, tolerance: float) -> None:
    mesh = mesh_of_ranks(1)
    config = tiny_config(max_position_embeddings=POSITIONS)
    narrow, wide = (tiny_model(mesh, config, dtype=d).eval() for d in (dtype, torch.float64))
    with torch.inference_mode():
        logits = [BatchReader(model, FULL, 1).logits() for model in (narrow, wide)]
    assert logits[0].dtype == dtype
    torch.testing.assert_close(logits[0].double(), logits[1], rtol=0, atol=tolerance)
    assert all(len(row) == 24 for row in generate(narrow, mesh, FULL, DRAWN, ends=()))


def test_draws_follow_the_distribution() -> None:
    """The rows have a thousand even shares."""
    shares = [number / 1000 for number in range(1000)]
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(1000, 4)
    for sampling, expected in (
        (Sampling(1), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
    ):
        found = (draw(logits, sampling, shares).bincount(minlength=4) / 1000).tolist()
        assert found == pytest.approx(expected, abs=0.002)
        assert [share == 0 for share in found] == [share == 0 for share in expected]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 40, VOCABULARY - 1])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_the_distribution_is_that_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
    ours = probabilities(logits, Sampling(1, temperature, top_k, top_p))
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    theirs = logits
    for warper in [*warpers, TopPLogitsWarper(top_p)]:
        theirs = warper(None, theirs)
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), theirs.softmax(-1))


def test_the_texts_of_many_seeds_have_the_distribution_of_the_model() -> None:
    mesh = mesh_of_ranks(1)
    model = tiny_model(mesh)
    sampling = Sampling(1, top_k=4)
    prompts = [[5, 6]] * 2000
    found = torch.tensor(generate(model.eval(), mesh, prompts, sampling, ends=())).flatten()
    logits = whole_logits(model, mesh, torch.tensor([[5, 6]]))[0, -1:]
    expected = probabilities(logits, sampling)[0]
    assert (found.bincount(minlength=VOCABULARY) / 2000).tolist() == pytest.approx(
        expected.tolist(), abs=0.04
    )


def test_top_p_ends_at_the_token_that_reaches_it() -> None:
    """The four tokens have a quarter of the probability each."""
    for top_p, kept in ((0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)):
        shares = probabilities(torch.zeros(1, 4), Sampling(1, top_p=top_p))
        assert shares.count_nonzero() == kept, top_p


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """At so high a temperature all logits are alike, those of padding too."""
    found = continued(1, Sampling(24, temperature=1e6))
    assert max(id for tokens in found for id in tokens) < VOCABULARY


TEXTS = [row.tolist() for row in torch.from_numpy(samples(4).tokens)]
LENGTHS = [3, 7, 1, 7]  # of the prompts, so that two rows are padded
STEPS = SEQUENCE - max(LENGTHS)


def with_cache(model: GPT2) -> Iterator[Tensor]:
    """Logits [4, v/t] of each step, where row r reads TEXTS[r] from LENGTHS[r] tokens on."""
    prompts = [text[:length] for text, length in zip(TEXTS, LENGTHS, strict=True)]
    reader = BatchReader(model, prompts, STEPS)
    for step in range(STEPS):
        yield reader.logits()
        following = [text[length + step] for text, length in zip(TEXTS, LENGTHS, strict=True)]
        reader.follow(torch.tensor(following))


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [(1, torch.float32, 1e-5), *((size, torch.float64, 1e-12) for size in (1, 2, 4))],
)
@on_ranks("size")
@torch.no_grad()
def test_the_logits_of_each_step_are_those_without_a_cache(
    size: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Each row alone is read at once."""
    mesh = mesh_of_ranks(size)
    model = tiny_model(mesh, dtype=dtype)
    for step, cached in enumerate(with_cache(model.eval())):
        for row, length in enumerate(LENGTHS):
            text = torch.tensor([TEXTS[row][: length + step]])
            whole = whole_logits(model, mesh, text)[0, -1]
            start = mesh.tensor.rank * cached.shape[1]
            own = whole[start : start + cached.shape[1]]  # of the last rank maybe none
            assert ((cached[row, : len(own)] - own).abs() <= tolerance).all()


def behind_layers(
    model: GPT2, tokens: Tensor, positions: Tensor, cache: KeyValueCache | None = None
) -> Tensor:
    batch = GPT2Batch(tokens=tokens, positions=positions)
    return model.layers(model.embed(batch), batch, cache)


@torch.no_grad()
def test_a_cache_is_filled_in_parts_of_any_size() -> None:
    model = tiny_model(serial_mesh())
    tokens = torch.tensor(TEXTS)
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    cache = KeyValueCache(SEQUENCE)
    bounds = [0, 5, 6, 10, 11, SEQUENCE]
    parts = []
    for start, stop in pairwise(bounds):
        own = slice(start, stop)
        x = behind_layers(model.eval(), tokens[:, own], positions[:, own], cache)
        parts.append(x.view(len(tokens), stop - start, -1))
    together = behind_layers(model, tokens, positions).view(*tokens.shape, -1)
    torch.testing.assert_close(torch.cat(parts, 1), together, rtol=1e-12, atol=1e-12)


def test_a_cache_is_read_where_gradients_are_recorded() -> None:
    model = tiny_model(serial_mesh(), dtype=torch.bfloat16)
    tokens = torch.tensor(TEXTS)
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    found = []
    for recorded in (True, False):
        cache = KeyValueCache(SEQUENCE)
        with torch.set_grad_enabled(recorded):
            behind_layers(model.eval(), tokens[:, :5], positions[:, :5], cache)
            x = behind_layers(model, tokens[:, 5:6], positions[:, 5:6], cache)
            found.append(x.detach())
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_rows_that_end_leave_and_change_no_other() -> None:
    model = tiny_model(serial_mesh())
    kept = [3, 0]
    everything = list(with_cache(model.eval()))
    reader = BatchReader(model, [TEXTS[row][: LENGTHS[row]] for row in range(4)], STEPS)
    reader.logits()
    reader.follow(torch.tensor([TEXTS[row][LENGTHS[row]] for row in range(4)]))
    reader.keep(kept)
    torch.testing.assert_close(reader.logits(), everything[1][kept], rtol=1e-12, atol=1e-12)


def test_a_padded_query_sees_itself_alone_and_nothing_sees_padding() -> None:
    """torch's attention on a CPU gives zeros where a query sees nothing, other kernels NaN."""
    cache = KeyValueCache(4, torch.tensor([0, 2]))
    mask = cache.mask(3, torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    cache.advance(3)
    mask = cache.mask(1, torch.device("cpu"))
    assert mask is not None
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@torch.no_grad()
def test_padding_leaves_no_nan() -> None:
    """Padding leaves none: a weight of 0 times NaN is NaN, in the rows that look elsewhere."""
    model = tiny_model(serial_mesh())
    cache = KeyValueCache(8, torch.tensor([0, 6]))
    positions = torch.arange(8).repeat(2, 1)
    x = behind_layers(model.eval(), torch.tensor(TEXTS)[:2, :8], positions, cache)
    assert x.isfinite().all()
