"""The replica check: one flipped bit on one rank is found and named, and training alone is not."""

from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor

from megatron.config.launch import Stopped
from megatron.data.gpt2 import GPT2Batch
from megatron.train.replicas import ReplicaDrift, check_replicas, digest
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.dist import Pool, on_ranks
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_config, tiny_state

NORM = "transformer.layers.1.attention_norm.weight"
CUT = "transformer.layers.0.mlp.up.weight"
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element, in place."""
    words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
    size = 8 * tensor.element_size()
    words[place] ^= -(2 ** (size - 1)) if bit == size - 1 else 2**bit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_flipped_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    hashes = [int(digest(tensor))]
    for place in range(len(tensor)):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, place, bit)
            hashes.append(int(digest(tensor)))
            flip(tensor, place, bit)
    assert int(digest(tensor)) == hashes[0]
    assert len(set(hashes)) == len(hashes)


def test_a_tensor_of_many_chunks_is_hashed_to_its_end() -> None:
    tensor = torch.randn(5 * 64 + 3)
    before = int(digest(tensor, chunk=64))
    for place in (0, 63, 64, 200, 319, 322):
        for bit in (0, 31):
            flip(tensor, place, bit)
            assert int(digest(tensor, chunk=64)) != before
            flip(tensor, place, bit)
    assert int(digest(tensor, chunk=64)) == before


def test_values_that_change_places_change_the_hash() -> None:
    """Within a chunk, between chunks, and where the two differ in their sign alone."""
    tensor = torch.randn(256)
    tensor[200] = -tensor[10]
    before = int(digest(tensor, chunk=64))
    for one, other in [(10, 11), (10, 200), (0, 64), (63, 255), (70, 134)]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert int(digest(swapped, chunk=64)) != before


def trained(
    tensor: int | str, dtype: torch.dtype, dropout: float = 0.0, zero_stage: int = 0
) -> TrainState:
    """tensor: ranks of a layer, or a layout."""
    config = tiny_config(hidden_dropout=dropout, attention_dropout=dropout)
    state = tiny_state(mesh_of_ranks(tensor), config, dtype=dtype, zero_stage=zero_stage)
    for number in range(3):
        batches = micro_batches(samples(4, first=4 * number), state.mesh, 1)
        train_step(state, batches, 1e-3)
    return state


@pytest.mark.parametrize("layout", ["tensor=2,data=2", "tensor=4:2d", "context=2"])
@on_ranks("layout")
def test_training_keeps_replicas_equal(layout: str) -> None:
    state = trained(layout, torch.bfloat16, 0.1)
    check_replicas(state, micro_batches(samples(4), state.mesh, 1))
    check_replicas(state, [])


@on_ranks(4)
def test_all_ranks_stop_where_one_wants_to() -> None:
    """The last rank stops after a few tensors; the check of the others is then of no use."""
    mesh = mesh_of_ranks(2)
    votes = chain([False] * 3, repeat(mesh.control.rank == mesh.size() - 1))
    with pytest.raises(Stopped):
        check_replicas(tiny_state(mesh), [], None, votes.__next__)


Drift = tuple[list[str], tuple[str, ...], list[list[str]]]
"""(names of what differs, axes along which the first differs, ranks that agree in it)"""


def found(state: TrainState, batches: list[GPT2Batch]) -> Drift | None:
    try:
        check_replicas(state, batches, passed=2)
    except ReplicaDrift as error:
        camps = [[rank.partition(" on ")[0] for rank in camp] for camp in error.camps]
        return list(error.names), tuple(error.axes), camps
    return None


def tensor(state: TrainState, key: str) -> Tensor:
    return next(each.local for each in state.slices() if each.key == key)


COUNTERS = ("counters.skipped", "counters.loss_scaler")


def spoil(state: TrainState, name: str, sign: int = 1) -> None:
    """sign: -1 puts it right again."""
    if name == "counters.skipped":
        state.skipped += sign
    elif name == "counters.loss_scaler":
        state.scaler.scale *= 2.0**sign
    else:  # at the end, which of the word embedding is padding
        flip(tensor(state, name), tensor(state, name).numel() - 1, 3)


def drifts_of(
    layout: int | str, bad: tuple[int, int], dtype: torch.dtype, names: list[str], zero: int = 0
) -> list[Drift | None]:
    """The finding where the rank `bad`, (replicas, tensor), has changed each of these alone."""
    state, drifts = trained(layout, dtype, zero_stage=zero), []
    batches = micro_batches(samples(4), state.mesh, 1)
    is_bad = (state.mesh.replicas.rank, state.mesh.tensor.rank) == bad
    for name in names:
        if is_bad:
            spoil(state, name)
        drifts.append(found(state, batches))
        if is_bad:
            spoil(state, name, -1)
    return drifts


WHOLE = [f"{kind}.{NORM}" for kind in ("model", "exp_avg", "exp_avg_sq")]
EMBEDDING = "model.word_embedding.weight"


@pytest.mark.parametrize(
    ("world", "tensor_size", "dtype", "names"),
    [
        (2, 2, torch.float32, [*WHOLE, f"model.{CUT}"]),
        (4, 2, torch.float32, [*WHOLE, f"model.{CUT}", EMBEDDING, *COUNTERS]),
        (4, 2, torch.bfloat16, [f"master.{NORM}"]),  # the weight rounded from it is the same
    ],
)
def test_a_flipped_bit_is_named(
    gloo: Pool, world: int, tensor_size: int, dtype: torch.dtype, names: list[str]
) -> None:
    """A tensor that is cut is compared along the data axis alone."""
    bad = (world // tensor_size - 1, tensor_size - 1)
    ranks = [f"(data {d}, tensor {t})" for d in range(bad[0] + 1) for t in range(bad[1] + 1)]
    sizes = {"data": world // tensor_size, "tensor": tensor_size}
    for drifts in gloo.run(world, drifts_of, tensor_size, bad, dtype, names):
        for name, drift in zip(names, drifts, strict=True):
            is_cut = name in (f"model.{CUT}", EMBEDDING)
            axes = tuple(a for a, size in sizes.items() if size > 1 and (a == "data" or not is_cut))
            if not axes:
                assert drift is None
                continue
            others = [rank for rank in ranks[:-1] if not is_cut or rank.endswith("tensor 1)")]
            assert drift == ([name], axes, [others, ranks[-1:]]), name


@pytest.mark.parametrize(
    ("zero_stage", "tensor_size", "expected"),
    [
        (1, 1, {f"model.{NORM}": ("data",), f"exp_avg.{NORM}": None}),
        (3, 1, {f"model.{NORM}": None, f"exp_avg.{NORM}": None, "counters.skipped": ("data",)}),
        (1, 2, {f"model.{CUT}": ("data",), f"exp_avg.{NORM}": ("tensor",)}),
        (3, 2, {f"model.{NORM}": ("tensor",), f"exp_avg.{NORM}": ("tensor",)}),
    ],
)
def test_parts_of_zero_are_not_compared(
    gloo: Pool, zero_stage: int, tensor_size: int, expected: dict[str, tuple[str, ...] | None]
) -> None:
    """The axis along which a flip is found, by name; the last rank has the tensor in its part."""
    bad, names = (1, tensor_size - 1), [*expected]
    arguments = (tensor_size, bad, torch.float32, names, zero_stage)
    for drifts in gloo.run(2 * tensor_size, drifts_of, *arguments):
        for name, drift in zip(names, drifts, strict=True):
            assert (drift and (drift[0][0], drift[1])) == (
                expected[name] and (name, expected[name])
            )
            assert not drift or [f"(data 1, tensor {bad[1]})"] in drift[2]


@pytest.mark.parametrize(
    ("has_documents", "fields"),
    [(False, ["numbers", "tokens", "labels", "loss_mask"]), (True, ["document_starts"])],
)
@on_ranks(4)
def test_another_batch_on_one_rank_is_named(has_documents: bool, fields: list[str]) -> None:
    """One tensor rank reads other samples, or bounds of documents that the others lack. The data
    ranks read different samples, and that is no drift."""
    state = trained(2, torch.float32)
    is_bad = (state.mesh.data.rank, state.mesh.tensor.rank) == (1, 0)
    batches = micro_batches(samples(4), state.mesh, 1)
    if is_bad and has_documents:
        batches = [replace(each, document_starts=0 * each.positions) for each in batches]
    elif is_bad:
        batches = micro_batches(samples(4, first=4), state.mesh, 1)
    camps = [["(data 1, tensor 0)"], ["(data 1, tensor 1)"]]
    assert found(state, batches) == ([f"batch.{each}" for each in fields], ("tensor",), camps)


def test_a_flipped_bit_is_named_in_2d(gloo: Pool) -> None:
    """Norms are cut over columns and equal along the rows of ranks; no weight has a replica; ranks
    that train alone have no difference."""
    names = [*WHOLE, f"model.{CUT}", "counters.skipped"]
    ranks = [f"(data 0, row {row}, column {column})" for row in (0, 1) for column in (0, 1)]
    of_norm = ("row",), [[ranks[1]], [ranks[3]]]
    of_counters = ("row", "column"), [ranks[:3], ranks[3:]]
    expected: list[Drift | None] = [([name], *of_norm) for name in WHOLE]
    expected += [None, (["counters.skipped"], *of_counters)]
    for drifts in gloo.run(4, drifts_of, "4:2d", (0, 3), torch.float32, names):
        assert drifts == expected


def test_a_flipped_bit_is_named_on_a_context_rank(gloo: Pool) -> None:
    """Context ranks hold the same parameters and read the same samples, of which each takes its
    tokens."""
    names = [*WHOLE, f"model.{CUT}", "counters.skipped"]
    ranks = [f"(data 0, context {c}, tensor {t})" for c in (0, 1) for t in (0, 1)]
    everywhere = ("context", "tensor"), [ranks[:3], ranks[3:]]
    expected: list[Drift | None] = [([name], *everywhere) for name in names]
    expected[3] = ([names[3]], ("context",), [[ranks[1]], [ranks[3]]])
    for drifts in gloo.run(4, drifts_of, "tensor=2,context=2:p2p", (1, 1), torch.float32, names):
        assert drifts == expected
