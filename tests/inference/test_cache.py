"""Reading token by token with a cache of keys and values gives what reading at once gives."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.data.gpt2 import GPT2Batch
from megatron.inference.generate import BatchReader
from megatron.models.cache import KeyValueCache
from megatron.models.gpt import GPT2
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import whole_logits
from tests.dist import Pool
from tests.tiny import SEQUENCE, mesh_of_ranks, samples, tiny_model

CPU = torch.device("cpu")
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


@torch.no_grad()
def largest_difference(tensor_size: int, dtype: torch.dtype) -> float:
    """Between the two ways, over all steps and rows; each row alone is read at once."""
    mesh = mesh_of_ranks(tensor_size)
    model = tiny_model(mesh, dtype=dtype)
    differences = []
    for step, cached in enumerate(with_cache(model.eval())):
        for row, length in enumerate(LENGTHS):
            text = torch.tensor([TEXTS[row][: length + step]])
            whole = whole_logits(model, mesh, text)[0, -1]
            start = mesh.tensor.rank * cached.shape[1]
            own = whole[start : start + cached.shape[1]]  # of the last rank maybe none
            differences += (cached[row, : len(own)] - own).abs().tolist()
    return torch.tensor([0.0, *differences]).max().item()  # NaN, if one is


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [(1, torch.float32, 1e-5), *((size, torch.float64, 1e-12) for size in (1, 2, 4))],
)
def test_the_logits_of_each_step_are_those_without_a_cache(
    gloo: Pool, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    for difference in gloo.run(size, largest_difference, size, dtype):
        assert difference <= tolerance


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
    cache = KeyValueCache(4, torch.tensor([0, 2]))
    mask = cache.mask(3, CPU)
    assert mask is not None
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    cache.advance(3)
    mask = cache.mask(1, CPU)
    assert mask is not None
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@torch.no_grad()
def test_padding_leaves_no_nan() -> None:
    """Of padding either: a weight of 0 times NaN is NaN, in the rows that look elsewhere."""
    model = tiny_model(serial_mesh())
    cache = KeyValueCache(8, torch.tensor([0, 6]))
    positions = torch.arange(8).repeat(2, 1)
    x = behind_layers(model.eval(), torch.tensor(TEXTS)[:2, :8], positions, cache)
    assert x.isfinite().all()
