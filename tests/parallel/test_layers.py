"""Each parallel layer against its dense twin in fp64: output, input gradient, weight gradients."""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.collectives import gather_from
from megatron.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    Linear,
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
IDS = torch.tensor([0, 3, 4, 12, 7, 3])


def random(name: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def column(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[n, parts, out]"""
    return torch.einsum("ni,poi->npo", x, weight) + bias


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, bias)


def maker(layer: type[nn.Module], *sizes: int, **others: int) -> Callable[[Mesh], nn.Module]:
    return lambda mesh: layer(mesh, *sizes, **others, std=1.0)


class Case(NamedTuple):
    """x_dim, y_dim: of input and output, the dim that is cut over the tensor axis, if one is."""

    make: Callable[[Mesh], nn.Module]
    dense: Callable[..., Tensor]
    x: Tensor
    out: tuple[int, ...]
    x_dim: int | None = None
    y_dim: int | None = None


X, WIDE_X = random(10, TOKENS, HIDDEN), random(10, TOKENS, OUT)
LAYERS = {
    "column": Case(maker(ColumnParallelLinear, HIDDEN, OUT), F.linear, X, (OUT,), y_dim=1),
    "three columns": Case(
        maker(ColumnParallelLinear, HIDDEN, OUT, parts=3), column, X, (3, OUT), y_dim=2
    ),
    "row": Case(maker(RowParallelLinear, OUT, HIDDEN), F.linear, WIDE_X, (HIDDEN,), x_dim=1),
    "linear": Case(maker(Linear, HIDDEN, OUT), F.linear, X, (OUT,)),
    "norm": Case(lambda mesh: LayerNorm(mesh, HIDDEN, epsilon=1e-5), norm, X, (HIDDEN,)),
    "words": Case(
        maker(VocabParallelEmbedding, VOCABULARY, HIDDEN, divisible_by=4),
        F.embedding,
        IDS,
        (HIDDEN,),
    ),
    "positions": Case(maker(PositionEmbedding, VOCABULARY, HIDDEN), F.embedding, IDS, (HIDDEN,)),
}


def dense_weights(module: nn.Module) -> dict[str, Tensor]:
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


def check_layer(name: str) -> None:
    case, mesh = LAYERS[name], mesh_of_ranks(dist.get_world_size())

    def shard(x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else x.chunk(mesh.tensor.size, dim)[mesh.tensor.rank]

    layer = case.make(mesh)
    weights = dense_weights(layer)
    x, own, dy = case.x.clone(), shard(case.x, case.x_dim).clone(), random(11, TOKENS, *case.out)
    if x.is_floating_point():
        x.requires_grad_()
        own.requires_grad_()
    expected = case.dense(x, *weights.values())
    expected.backward(dy)
    y = layer(own).view(TOKENS, *case.out[:-1], -1)
    y.backward(shard(dy, case.y_dim))
    assert_close(y if case.y_dim is None else gather_from(y, case.y_dim, mesh.tensor), expected)
    if own.grad is not None:
        assert_close(own.grad, shard(x.grad, case.x_dim))
    assert_gradients_equal(layer, weights)


def check_head() -> None:
    mesh = mesh_of_ranks(dist.get_world_size())
    owner = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=4, std=1.0)
    head = VocabParallelHead(mesh, VOCABULARY)
    weights = dense_weights(owner)
    x, labels = random(10, TOKENS, HIDDEN), torch.tensor([12, 0, 4, 5, 7, 12])
    importance = random(12, TOKENS)

    dense_x = x.clone().requires_grad_()
    expected_logits = F.linear(dense_x, weights["weight"])
    expected = F.cross_entropy(expected_logits, labels, reduction="none")
    expected.backward(importance)

    x.requires_grad_()
    logits = gather_from(head(x, owner), 1, mesh.tensor)
    assert_close(logits[:, :VOCABULARY], expected_logits)
    losses, total = head(x, owner, labels), head(x, owner, labels, importance)
    assert_close(losses, expected)
    assert_close(total, expected @ importance)
    for loss in (losses @ importance, total):
        x.grad = owner.weight.grad = None
        loss.backward()
        assert_close(x.grad, dense_x.grad)
        assert_gradients_equal(owner, weights)


def check_all() -> None:
    for name in LAYERS:
        check_layer(name)
    check_head()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layers_equal_their_dense_twins(gloo: Pool, size: int) -> None:
    gloo.run(size, check_all)


@pytest.mark.parametrize("name", ["column", "row", "words", "positions"])
def test_misuse_is_an_error_of_one_line(name: str) -> None:
    """A layer without weights, and a stream [b, s, h] or ids [b, s] that it does not take."""
    layer, flat = LAYERS[name].make(serial_mesh()), LAYERS[name].x
    with pytest.raises(RuntimeError, match="materialize") as error:
        layer(flat)
    assert "\n" not in str(error.value)
    for use in (layer, copy.deepcopy(layer)):
        materialize(use, device=torch.device("cpu"), dtype=torch.float64, seed=0)
        assert use(flat).isfinite().all()
        with pytest.raises(ValueError, match=r"flatten\(0, 1\)") as error:
            use(flat.unflatten(0, (2, 3)))
        assert "\n" not in str(error.value)
