"""Dropout is a function of coordinates, whatever is cut or compiled."""

import shutil
from collections.abc import Iterable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel.dropout import (
    CHUNK,
    STEPS,
    Dropout,
    dropout,
    fold,
    head_keys,
    kept_mask,
    layer_key,
    rounded,
    row_keys,
)
from megatron.parallel.initialize import derive_seed
from megatron.parallel.layers import AttentionCore
from megatron.parallel.mesh import Axis
from tests.dist import Pool
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

U32, U64 = 2**32, 2**64


def folded(key: int, numbers: Iterable[int]) -> int:
    """SplitMix64 of one coordinate after another, in Python's integers."""

    def step(key: int, number: int) -> int:
        x = (key + number + 0x9E3779B97F4A7C15) % U64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % U64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % U64
        return x ^ x >> 31

    return reduce(step, numbers, key)


def keeps(key: int, column: int, p: float) -> bool:
    x = (key % U32 + column // 2 * 0x9E3779B1) % U32
    x = ((x ^ x >> 16) * 0x7FEB352D + (key >> 32)) % U32
    of_sign = 0xFFFE0000 if x >= U32 // 2 else 0
    x = (x ^ x >> 15 ^ of_sign) * 0x846CA68B % U32
    half = x >> 16 if column % 2 else x % 2**16
    signed = half - STEPS if half >= STEPS // 2 else half
    return signed >= round(p * STEPS) - STEPS // 2


def mask(keys: Tensor, columns: range, p: float = 0.3) -> Tensor:
    return kept_mask(keys, columns.start, len(columns), p, torch.bool)


NUMBERS, PLACES = torch.tensor([0, 7, 2**40]), torch.tensor([0, 1, 5])


def test_a_mask_is_the_hash_that_the_file_says() -> None:
    """A hash of every coordinate; another one would change the losses of a run that is resumed."""
    keys = fold(layer_key(3, "here"), row_keys(NUMBERS, PLACES))
    found, own = mask(keys, range(2, 9)), derive_seed(3, "dropout", "here")
    rows = [(number, place) for number in NUMBERS.tolist() for place in PLACES.tolist()]
    for row, (number, place) in enumerate(rows):
        # The layer's key is added to that of the row.
        key = folded(folded(0, [number, place]), [own])
        assert found[row].tolist() == [keeps(key, column, 0.3) for column in range(2, 9)]
    heads = head_keys(row_keys(NUMBERS, PLACES), layer_key(3, "here"), range(1, 3), len(NUMBERS))
    assert heads.shape == (3, 2, 3)
    expected = folded(folded(0, [7, 5]), [own, 2])
    assert heads[1, 1, 2].item() % U64 == expected


def test_a_rank_computes_its_part_alone() -> None:
    """The rank has more numbers than are hashed at once."""
    keys = fold(layer_key(1, "a"), row_keys(torch.arange(25), torch.arange(9)))
    x = torch.ones(len(keys), 3 * CHUNK // len(keys))
    whole = dropout(x, keys, 0.3)
    for rows in (slice(0, 225, 9), slice(224, 225), slice(3, 120)):
        for columns in (range(x.shape[1]), range(1, 2), range(3, 20), range(8, 900)):
            part = slice(columns.start, columns.stop)
            found = dropout(x[rows, part], keys[rows], 0.3, first=columns.start)
            assert torch.equal(found, whole[rows, part])


def attention_masks(tensor_size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(what this rank keeps of the stream, of the probabilities of its heads, and of all heads
    where it has them all, by coordinates and where the kernel would draw)."""
    mesh = mesh_of_ranks(tensor_size)
    torch.manual_seed(mesh.data.rank * 10 + mesh.tensor.rank)  # must not matter
    numbers, size, heads = torch.arange(2) + 2 * mesh.data.rank, 20, 4 // tensor_size
    rows = row_keys(numbers, torch.arange(size))

    def kept(own: int, heads: int | None = None, **settings: Any) -> Tensor:
        q, v = torch.zeros(2, own, size, size), torch.eye(size).expand(2, own, -1, -1)
        core = AttentionCore(mesh, 5, 0.5, "core", **settings)
        core.heads = heads
        found: Tensor = core(q, q, v, None, False, rows)
        return found

    stream = Dropout(5, 0.5, "stream")(torch.ones(len(rows), 8), rows)
    own = kept(heads)
    whole = [kept(4, 4, draws_in_kernel=each) for each in (False, True)]
    assert tensor_size == 1 or torch.equal(own, kept(heads, 4))
    return stream, own, whole


def test_ranks_share_one_mask_of_the_stream_and_have_their_heads_of_attention(gloo: Pool) -> None:
    (whole, scores, _), (other, other_scores, _) = gloo.run(2, attention_masks, 1)
    ranks = gloo.run(4, attention_masks, 2)
    for rank, (stream, own, of_all_heads) in enumerate(ranks):
        data, tensor = divmod(rank, 2)
        assert torch.equal(stream, (whole, other)[data])
        heads = slice(2 * tensor, 2 * tensor + 2)
        assert torch.equal(own, (scores, other_scores)[data][:, heads])
        for each in of_all_heads:
            assert torch.equal(each, (scores, other_scores)[data])
    assert not torch.equal(whole, other)
    assert not torch.equal(scores[:, 0], scores[:, 1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_it_has_the_same_bits() -> None:
    torch._dynamo.reset()
    layer, rows = Dropout(1, 0.3, "a"), row_keys(torch.arange(5), torch.arange(9))
    x = torch.randn(45, 33, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, rows)
    (dx,) = torch.autograd.grad(y.sum(), x)
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        found = torch.compile(layer, fullgraph=True)(x, rows)
        assert torch.equal(found, y)
        assert torch.equal(torch.autograd.grad(found.sum(), x)[0], dx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.05, 0.1, 0.15])
def test_the_expectation_stays_and_the_gradient_has_the_same_mask(
    p: float, dtype: torch.dtype
) -> None:
    """In bf16 too, where 1 / (1 - p) itself may be off by four parts in a thousand."""
    assert abs(rounded(p) - p * STEPS) <= 0.5
    keys = fold(layer_key(1, "a"), row_keys(torch.arange(20), torch.arange(20)))
    x = torch.rand(400, 500, generator=torch.manual_seed(0)).to(dtype).requires_grad_()
    y = dropout(x, keys, p)
    y.sum().backward()
    kept = y != 0
    assert (y[kept].double() / x[kept].double()).mean().item() == pytest.approx(
        1 / (1 - p), rel=2e-4
    )
    assert torch.equal(x.grad != 0, kept)
    assert torch.isfinite(dropout(x, keys, 1 - 1e-9)).all()


def test_evaluation_drops_nothing_and_training_needs_sample_numbers() -> None:
    layer, x = Dropout(1, 0.3, "a"), torch.ones(4, 4)
    assert isinstance(refusal(lambda: layer(x, None)), ValueError)
    assert layer.eval()(x, None) is x
    assert Dropout(1, 0.0, "a")(x, None) is x


def test_seeds_are_the_same_on_every_machine_and_tell_keys_apart() -> None:
    assert derive_seed(1, "a", 2) == 2524119925830061422
    keys = [(1, 2), (12,), ("1", 2), (1, "2"), (1, 2, 0)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(number) < 2**63 for number in range(100))


def test_the_stream_drops_alike_however_it_is_cut() -> None:
    rows, x = row_keys(torch.tensor([3]), torch.arange(8)), torch.ones(8, 6)
    whole = Dropout(5, 0.5, "stream")(x, rows)
    for rank in (0, 1):
        axis = Axis("tensor", 2, rank)
        by_rows = Dropout(5, 0.5, "stream", stream=axis)(x[:4], rows)
        by_columns = Dropout(5, 0.5, "stream", hidden=axis)(x[:, :3], rows)
        assert torch.equal(by_rows, whole.chunk(2)[rank])
        assert torch.equal(by_columns, whole.chunk(2, 1)[rank])
