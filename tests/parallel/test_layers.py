"""Each parallel layer against its dense twin in fp64: output, input gradient, weight gradients."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import gather_from
from megatron.parallel.layers import (
    ColumnParallelLinear,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import materialize, sharding_specs
from tests.dist import Pool
from tests.tiny import gather_whole, mesh_of_ranks, scatter_weights

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
TOKENS, HIDDEN, OUT, VOCABULARY = 6, 8, 12, 13


def random(name: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def mesh_of_all() -> Mesh:
    return mesh_of_ranks(dist.get_world_size())


def own_shard(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    return x.chunk(mesh.tensor.size, dim)[mesh.tensor.rank]


def dense(module: nn.Module) -> dict[str, Tensor]:
    """Random whole weights, put into the module; leaves to differentiate by."""
    materialize(module, device=torch.device("cpu"), dtype=torch.float64, seed=None)
    shapes = {name: spec.shape for name, spec in sharding_specs(module).items()}
    weights = {name: random(number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    scatter_weights(module, weights)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def assert_gradients_equal(module: nn.Module, weights: dict[str, Tensor]) -> None:
    table = sharding_specs(module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert_close(gather_whole(parameter.grad, table[name]), weights[name].grad)


def check_column(parts: int) -> None:
    mesh = mesh_of_all()
    layer = ColumnParallelLinear(mesh, HIDDEN, OUT, parts=parts, std=1.0)
    weights = dense(layer)
    x, dy = random(10, TOKENS, HIDDEN), random(11, TOKENS, parts, OUT)

    dense_x = x.clone().requires_grad_()
    flat = weights["weight"].reshape(parts * OUT, HIDDEN), weights["bias"].reshape(parts * OUT)
    expected = F.linear(dense_x, *flat).view(TOKENS, parts, OUT)
    expected.backward(dy)

    x.requires_grad_()
    y = layer(x).view(TOKENS, parts, OUT // mesh.tensor.size)
    y.backward(own_shard(dy, 2, mesh))
    assert_close(gather_from(y, 2, mesh.tensor), expected)
    assert_close(x.grad, dense_x.grad)
    assert_gradients_equal(layer, weights)


def check_row() -> None:
    mesh = mesh_of_all()
    layer = RowParallelLinear(mesh, OUT, HIDDEN, std=1.0)
    weights = dense(layer)
    x, dy = random(10, TOKENS, OUT), random(11, TOKENS, HIDDEN)

    dense_x = x.clone().requires_grad_()
    expected = F.linear(dense_x, weights["weight"], weights["bias"])
    expected.backward(dy)

    part = own_shard(x, 1, mesh).clone().requires_grad_()
    y = layer(part)
    y.backward(dy)
    assert_close(y, expected)
    assert_close(part.grad, own_shard(dense_x.grad, 1, mesh))
    assert_gradients_equal(layer, weights)


def check_embedding() -> None:
    mesh = mesh_of_all()
    layer = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=4, std=1.0)
    weights = dense(layer)
    tokens, dy = torch.tensor([0, 3, 4, 12, 7, 3]), random(11, TOKENS, HIDDEN)

    expected = F.embedding(tokens, weights["weight"])
    expected.backward(dy)

    y = layer(tokens)
    y.backward(dy)
    assert_close(y, expected)
    assert_gradients_equal(layer, weights)


def check_head() -> None:
    mesh = mesh_of_all()
    owner = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=4, std=1.0)
    head = VocabParallelHead(mesh, VOCABULARY)
    weights = dense(owner)
    x, labels = random(10, TOKENS, HIDDEN), torch.tensor([12, 0, 4, 5, 7, 12])
    importance = random(12, TOKENS)

    dense_x = x.clone().requires_grad_()
    expected_logits = F.linear(dense_x, weights["weight"])
    expected = F.cross_entropy(expected_logits, labels, reduction="none")
    expected.backward(importance)

    x.requires_grad_()
    logits = gather_from(head(x, owner), 1, mesh.tensor)
    losses = head(x, owner, labels)
    losses.backward(importance)
    assert_close(logits[:, :VOCABULARY], expected_logits)
    assert_close(losses, expected)
    assert_close(x.grad, dense_x.grad)
    assert_gradients_equal(owner, weights)

    x.grad = owner.weight.grad = None
    total = head(x, owner, labels, importance)
    total.backward()
    assert_close(total, expected @ importance)
    assert_close(x.grad, dense_x.grad)
    assert_gradients_equal(owner, weights)


def check_layers() -> None:
    check_column(parts=1)
    check_column(parts=3)
    check_row()
    check_embedding()
    check_head()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layers_equal_their_dense_twins(gloo: Pool, size: int) -> None:
    gloo.run(size, check_layers)


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Each layer, and a stream [b, s, h] or ids [b, s] that it does not take."""
    mesh = serial_mesh()
    stream, ids = torch.ones(2, 3, HIDDEN), torch.ones(2, 3, dtype=torch.int64)
    return {
        "column": (ColumnParallelLinear(mesh, HIDDEN, OUT, std=1.0), stream),
        "row": (RowParallelLinear(mesh, HIDDEN, OUT, std=1.0), stream),
        "words": (VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=1, std=1.0), ids),
        "positions": (PositionEmbedding(mesh, 8, HIDDEN, std=1.0), ids),
    }


@pytest.mark.parametrize("name", layers())
def test_misuse_is_an_error_of_one_line(name: str) -> None:
    layer, x = layers()[name]
    flat = x.flatten(0, 1)
    with pytest.raises(RuntimeError, match="materialize") as error:
        layer(flat)
    assert "\n" not in str(error.value)
    for use in (layer, copy.deepcopy(layer)):
        materialize(use, device=torch.device("cpu"), dtype=torch.float32, seed=0)
        assert use(flat).isfinite().all()
        with pytest.raises(ValueError, match=r"flatten\(0, 1\)") as error:
            use(x)
        assert "\n" not in str(error.value)
