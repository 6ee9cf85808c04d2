"""The replica check: one flipped bit on one rank is found and named, and training alone is not."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.parallel.sharding import sharding_specs
from megatron.train.replicas import ReplicaDrift, check_replicas, digest
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_section, tiny_state

NORM = "transformer.layers.1.attention_norm.weight"
CUT = "transformer.layers.0.mlp.up.weight"
LAYOUTS = [(2, 2), (2, 1), (4, 2)]  # (ranks, tensor-parallel size)
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


def test_an_empty_tensor_has_a_hash() -> None:
    assert int(digest(torch.empty(0, 8))) == int(digest(torch.empty(0)))


def trained(tensor_size: int, dtype: torch.dtype, dropout: float = 0.0) -> TrainState:
    section = tiny_section(hidden_dropout=dropout, attention_dropout=dropout)
    state = tiny_state(mesh_of_ranks(tensor_size), section, dtype=dtype)
    for number in range(3):
        batches = micro_batches(samples(4, first=4 * number), state.mesh, 1)
        train_step(state, batches, 1e-3)
    return state


def check_after_steps(tensor_size: int, dtype: torch.dtype, dropout: float) -> None:
    state = trained(tensor_size, dtype, dropout)
    check_replicas(state, micro_batches(samples(4), state.mesh, 1))
    check_replicas(state, [])


@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), *LAYOUTS])
@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.float64, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.1)]
)
def test_training_keeps_replicas_equal(
    gloo: Pool, world: int, tensor_size: int, dtype: torch.dtype, dropout: float
) -> None:
    gloo.run(world, check_after_steps, tensor_size, dtype, dropout)


def at(state: TrainState, bad: tuple[int, int]) -> bool:
    return (state.mesh.data.rank, state.mesh.tensor.rank) == bad


def drift(state: TrainState, first: int = 0) -> str:
    """The message of the check; `first`: of this rank's samples."""
    batches = micro_batches(samples(4, first=first), state.mesh, 1)
    with pytest.raises(ReplicaDrift) as caught:
        check_replicas(state, batches, passed=2)
    return str(caught.value)


def piece(state: TrainState, key: str) -> Tensor:
    return next(each.local for each in state.pieces() if each.key == key)


def flip_in_training(tensor_size: int, bad: tuple[int, int], key: str, dtype: torch.dtype) -> str:
    state = trained(tensor_size, dtype)
    if at(state, bad):
        flip(piece(state, key), 5, 0)
    return drift(state)


def only(messages: list[str]) -> str:
    """The one message that all ranks gave, its host left out."""
    assert len(set(messages)) == 1, messages
    return re.sub(r" on [^ ,;]+(?=[ ,;])", "", messages[0])


@pytest.mark.parametrize("key", [f"model.{NORM}", f"exp_avg.{NORM}", f"exp_avg_sq.{NORM}"])
@pytest.mark.parametrize(
    ("world", "tensor_size", "axes"), [(2, 2, "tensor"), (2, 1, "data"), (4, 2, "data and tensor")]
)
def test_one_flipped_bit_is_named(
    gloo: Pool, key: str, world: int, tensor_size: int, axes: str
) -> None:
    bad = (0, 1) if world == tensor_size else (1, 0)
    message = only(gloo.run(world, flip_in_training, tensor_size, bad, key, torch.float32))
    assert f"drift at step 3: {key} is not the same along the {axes} ax" in message
    assert f"1 in all: {key}\n" in message
    assert "hardware is suspect" in message
    assert "the last check passed at step 2: resume from the checkpoint of that step" in message
    odd = f"(data {bad[0]}, tensor {bad[1]})"
    if world == 4:
        assert f"who: {odd} differs from the 3 others, which agree" in message
    else:
        assert f"who: (data 0, tensor 0) against {odd}; no majority" in message


def test_a_flipped_bit_of_a_master_is_named(gloo: Pool) -> None:
    """Though the bf16 weight that is rounded from it is the same."""
    key = f"master.{NORM}"
    message = only(gloo.run(4, flip_in_training, 2, (1, 1), key, torch.bfloat16))
    assert f"{key} is not the same along the data and tensor axes" in message
    assert "(data 1, tensor 1) differs from the 3 others" in message
    assert f"1 in all: {key}\n" in message


def test_a_cut_tensor_is_compared_over_the_data_axis_alone(gloo: Pool) -> None:
    key = f"model.{CUT}"
    message = only(gloo.run(4, flip_in_training, 2, (1, 1), key, torch.float32))
    assert f"{key} is not the same along the data axis" in message
    assert "who: (data 0, tensor 1) against (data 1, tensor 1); no majority" in message


def change_cut_tensor(tensor_size: int) -> None:
    state = trained(tensor_size, torch.float32)
    assert sharding_specs(state.model)[CUT].cuts
    if at(state, (0, 1)):
        flip(piece(state, f"model.{CUT}"), 5, 0)
    check_replicas(state, [])


def test_a_cut_tensor_may_differ_over_the_tensor_axis(gloo: Pool) -> None:
    gloo.run(2, change_cut_tensor, 2)


def spoil(change: Callable[[TrainState], None], bad: tuple[int, int]) -> str:
    state = trained(2, torch.float32)
    if at(state, bad):
        change(state)
    return drift(state)


def flip_padding(state: TrainState) -> None:
    weight = piece(state, "model.word_embedding.weight")
    flip(weight, weight.numel() - 1, 3)


def count_another_skip(state: TrainState) -> None:
    state.skipped += 1


def scale_the_loss(state: TrainState) -> None:
    state.scaler.scale *= 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (flip_padding, "model.word_embedding.weight"),
        (count_another_skip, "counters.skipped"),
        (scale_the_loss, "counters.loss_scaler"),
    ],
)
def test_padding_and_counters_are_compared(
    gloo: Pool, change: Callable[[TrainState], None], name: str
) -> None:
    message = only(gloo.run(4, spoil, change, (1, 1)))
    assert f"{name} is not the same along" in message
    assert "(data 1, tensor 1)" in message
    assert "1 in all" in message


def read_another_batch(bad: tuple[int, int]) -> str:
    state = trained(2, torch.float32)
    return drift(state, first=4 if at(state, bad) else 0)


def test_another_batch_on_one_tensor_rank_is_named(gloo: Pool) -> None:
    """The data ranks read different samples, and that is no drift."""
    message = only(gloo.run(4, read_another_batch, (1, 0)))
    assert "batch.tokens is not the same along the tensor axis" in message
    assert "who: (data 1, tensor 0) against (data 1, tensor 1); no majority" in message
    assert "3 in all: batch.tokens, batch.labels, batch.loss_mask\n" in message
    assert "--data-path" in message


def attend_within_documents(bad: tuple[int, int]) -> str:
    state = trained(2, torch.float32)
    batch = samples(1)
    if at(state, bad):
        batch = replace(batch, document_starts=0 * batch.positions)
    with pytest.raises(ReplicaDrift) as caught:
        check_replicas(state, [batch])
    return str(caught.value)


def test_document_bounds_on_one_rank_only_are_named(gloo: Pool) -> None:
    message = only(gloo.run(2, attend_within_documents, (0, 1)))
    assert "1 in all: batch.document_starts\n" in message
    assert "no check has passed since this run started" in message


def drift_of_much(tensor_size: int) -> str:
    state = trained(tensor_size, torch.float32)
    if at(state, (0, 1)):
        for each in state.pieces():
            flip(each.local, 0, 0)
    return drift(state)


def test_many_are_counted_and_the_first_named(gloo: Pool) -> None:
    message = only(gloo.run(2, drift_of_much, 2))
    assert re.search(r"what: \d+ in all: model\.\S+(, model\.\S+){4} and \d+ more\n", message)
