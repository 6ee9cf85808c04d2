import pytest
import torch
from torch import Tensor

from megatron.parallel.layers import AttentionCore, SharedDropout
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.random import NamedRNGs, derive_seed
from tests.dist import Pool
from tests.tiny import SEED, mesh_of_ranks

Position = tuple[int, int]
POSITIONS: list[Position] = [(0, 0), (0, 1), (1, 0), (1, 1)]
NAMES = ["layers.0", "layers.1"]
Draws = dict[tuple[Position, str], Tensor]


def residual(rngs: NamedRNGs, name: str) -> Tensor:
    return SharedDropout(rngs, 0.5, name)(torch.ones(64, 8))


def attention(rngs: NamedRNGs, name: str) -> Tensor:
    """The attention probabilities after dropout: queries see all keys alike, values are one-hot."""
    q = torch.zeros(1, 2, 16, 16)
    v = torch.eye(16).expand_as(q)
    return AttentionCore(rngs, 0.5, name)(
        q, q, v, torch.ones(1, 1, 16, 16, dtype=torch.bool), False
    )


def draws(tensor_size: int, seed: int = SEED) -> tuple[dict[str, int], Draws, Draws]:
    """(where this rank is, its residual draws, its attention draws)."""
    mesh = mesh_of_ranks(tensor_size)
    rngs = NamedRNGs(seed, mesh)
    shared, inner = {}, {}
    torch.manual_seed(mesh.data.rank * 10 + mesh.tensor.rank)  # must not matter
    for position in POSITIONS:
        with rngs.at(*position):
            for name in NAMES:
                shared[position, name] = residual(rngs, name)
                inner[position, name] = attention(rngs, name)
    return mesh.coordinates, shared, inner


def assert_all_differ(tensors: list[Tensor]) -> None:
    for number, one in enumerate(tensors):
        for other in tensors[:number]:
            assert not torch.equal(one, other)


def test_residual_draws_are_shared_and_attention_draws_are_not(gloo: Pool) -> None:
    ranks = gloo.run(4, draws, 2)
    by_rank = {(where["data"], where["tensor"]): (shared, inner) for where, shared, inner in ranks}
    for data in (0, 1):
        left, right = by_rank[data, 0], by_rank[data, 1]
        for key in left[0]:
            assert torch.equal(left[0][key], right[0][key])
    # Different for each step, micro-batch, layer and data rank ...
    assert_all_differ([by_rank[data, 0][0][key] for data in (0, 1) for key in left[0]])
    # ... and inside the parallel region for each tensor rank too.
    assert_all_differ([inner[key] for _, inner in by_rank.values() for key in inner])


def test_draws_depend_on_the_seed_alone() -> None:
    _, first, inner = draws(1)
    torch.manual_seed(77)
    _, again, inner_again = draws(1)
    _, other, _ = draws(1, seed=SEED + 1)
    for key in first:
        assert torch.equal(first[key], again[key])
        assert torch.equal(inner[key], inner_again[key])
        assert not torch.equal(first[key], other[key])


def test_dropout_keeps_the_mean_and_evaluation_drops_nothing() -> None:
    layer = SharedDropout(NamedRNGs(SEED, serial_mesh()), 0.25, "place")
    x = torch.ones(1000, 100)
    kept = layer(x) > 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    assert torch.equal(layer(x)[kept], torch.full((int(kept.sum()),), 1 / 0.75))
    assert layer.eval()(x) is x


def test_the_default_generator_is_left_alone() -> None:
    rngs = NamedRNGs(SEED, serial_mesh())
    state = torch.get_rng_state()
    with rngs.at(3, 4):
        residual(rngs, "here")
        attention(rngs, "there")
    assert rngs.position == (0, 0)
    with pytest.raises(ZeroDivisionError), rngs.at(1, 1), rngs.per_rank("place"):
        _ = torch.rand(3) / (1 // 0)
    assert rngs.position == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_the_same_on_every_machine_and_tell_keys_apart() -> None:
    assert derive_seed(1, "a", 2) == 2524119925830061422
    keys = [(1, 2), (12,), ("1", 2), (1, "2"), (1, 2, 0)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(number) < 2**63 for number in range(100))
