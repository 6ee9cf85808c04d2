"""Each parallel layer against its dense twin in fp64: output, input gradient, weight gradients."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron.parallel.collectives import all_reduce, gather_from
from megatron.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    linear,
    linears,
)
from megatron.parallel.layers_2d import Linear2D
from megatron.parallel.layers_llama import (
    GroupedQueryLinear,
    RMSNorm,
    RotaryEmbedding,
    gated,
    rotate,
)
from megatron.parallel.layers_whole import InputLinear, Linear, OutputLinear
from megatron.parallel.mesh import Axis, Mesh, serial_mesh
from megatron.parallel.sharding import gather_whole, materialize, sharding_specs
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, scatter_weights

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


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, 1e-5)


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
    "column without bias": Case(
        maker(ColumnParallelLinear, HIDDEN, OUT, bias=False), F.linear, X, (OUT,), y_dim=1
    ),
    "row without bias": Case(
        maker(RowParallelLinear, OUT, HIDDEN, bias=False), F.linear, WIDE_X, (HIDDEN,), x_dim=1
    ),
    "linear": Case(maker(Linear, HIDDEN, OUT), F.linear, X, (OUT,)),
    "linear without bias": Case(maker(Linear, HIDDEN, OUT, bias=False), F.linear, X, (OUT,)),
    "RMS norm": Case(lambda mesh: RMSNorm(mesh, HIDDEN, epsilon=1e-5), rms_norm, X, (HIDDEN,)),
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


def check_grouped_query(heads: int, key_value_heads: int, bias: bool) -> None:
    """Against heads whose keys and values are written out for each query head."""
    mesh, size = mesh_of_ranks(dist.get_world_size()), 2
    layer = GroupedQueryLinear(
        mesh,
        HIDDEN,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        bias=bias,
        std=1.0,
    )
    weights = dense_weights(layer)

    def per_head(y: Tensor) -> Tensor:  # [n, heads, size]
        return y.unflatten(1, (-1, size))

    x, own = X.clone().requires_grad_(), X.clone().requires_grad_()
    k_bias, v_bias = weights["key_value_bias"] if bias else (None, None)
    k_weight, v_weight = weights["key_value"]
    dense_q = per_head(F.linear(x, weights["query"], weights.get("query_bias")))
    dense = [dense_q]
    for weight, its_bias in ((k_weight, k_bias), (v_weight, v_bias)):
        y = per_head(F.linear(x, weight, its_bias))
        dense.append(y.repeat_interleave(heads // key_value_heads, dim=1))
    expected = torch.stack(dense)  # [3, n, heads, size]
    dy = random(11, *expected.shape)
    expected.backward(dy)

    q, k, v = (per_head(each) for each in layer(own))
    used = layer.of_query
    if used is None:
        used = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    found = torch.stack([q, k[:, used], v[:, used]])
    found.backward(dy.chunk(mesh.tensor.size, 2)[mesh.tensor.rank])
    assert_close(gather_from(found, 2, mesh.tensor), expected)
    assert_close(own.grad, x.grad)
    table = sharding_specs(layer)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        if mesh.tensor in table[name].partial:
            all_reduce(parameter.grad, mesh.tensor)
    assert_gradients_equal(layer, weights)


def check_head(is_tied: bool) -> None:
    mesh = mesh_of_ranks(dist.get_world_size())
    embedding = VocabParallelEmbedding(mesh, VOCABULARY, HIDDEN, divisible_by=4, std=1.0)
    untied_std = None if is_tied else 1.0
    head = VocabParallelHead(mesh, VOCABULARY, HIDDEN, divisible_by=4, untied_std=untied_std)
    owner = embedding if is_tied else head
    weights = dense_weights(owner)
    x, labels = random(10, TOKENS, HIDDEN), torch.tensor([12, 0, 4, 5, 7, 12])
    importance = random(12, TOKENS)

    dense_x = x.clone().requires_grad_()
    expected_logits = F.linear(dense_x, weights["weight"])
    expected = F.cross_entropy(expected_logits, labels, reduction="none")
    expected.backward(importance)

    x.requires_grad_()
    logits = gather_from(head(x, embedding), 1, mesh.tensor)
    assert_close(logits[:, :VOCABULARY], expected_logits)
    losses, total = head(x, embedding, labels), head(x, embedding, labels, importance)
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
    for is_tied in (True, False):
        check_head(is_tied)
    for heads, key_value_heads in ((12, 3), (12, 4), (12, 1), (4, 4)):
        for bias in (True, False):
            check_grouped_query(heads, key_value_heads, bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layers_equal_their_dense_twins(gloo: Pool, size: int) -> None:
    gloo.run(size, check_all)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    """q at i and k at j score as at 0 and j - i; position 0 turns nothing; lengths stay."""
    rotary = RotaryEmbedding(8)

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, *rotary(positions, x.dtype))

    q, k = random(1, 1, 2, 5, 8), random(2, 1, 2, 5, 8)
    positions = torch.tensor([[0, 1, 4, 9, 100]])
    turned_q, turned_k = turned(q, positions), turned(k, positions + 3)
    assert_close(turned_q[:, :, 0], q[:, :, 0])
    assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    at_zero = (q * turned(k, torch.full((1, 5), 3))).sum(-1)
    assert_close((turned_q * turned_k).sum(-1), at_zero)


def test_rotary_is_that_of_llama() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=2)
    positions = torch.arange(7)[None]
    q, k = random(1, 1, 2, 7, 8), random(2, 1, 2, 7, 8)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    theirs, _ = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
    ours = rotate(q, *RotaryEmbedding(8)(positions, q.dtype))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by", [F.silu, F.gelu])
def test_a_gated_activation_has_the_gradient_of_its_composition(
    by: Callable[[Tensor], Tensor],
) -> None:
    x, own = (random(3, 5, 8).requires_grad_() for _ in range(2))
    gate, y = x.chunk(2, dim=1)
    expected, found = by(gate) * y, gated(own, by)
    assert_close(found, expected)
    for each in (expected, found):
        each.backward(random(4, 5, 4))
    assert_close(own.grad, x.grad)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_meta_has_no_weights_until_they_are_made(name: str) -> None:
    with torch.device("meta"):
        layer = LAYERS[name].make(serial_mesh())
    x = LAYERS[name].x
    with pytest.raises(RuntimeError, match="materialize") as error:
        layer(x)
    assert "\n" not in str(error.value)
    for use in (layer, copy.deepcopy(layer)):
        materialize(use, device=torch.device("cpu"), dtype=torch.float64, seed=0)
        assert use(x).isfinite().all()


def built_at_once() -> dict[str, Tensor]:
    """The whole parameters of all layers, as they are built on the device."""
    mesh = mesh_of_ranks(dist.get_world_size() if dist.is_initialized() else 1)
    torch.manual_seed(7)
    layers = nn.ModuleDict({name: case.make(mesh) for name, case in LAYERS.items()})
    table = sharding_specs(layers)
    return {name: gather_whole(each, table[name]) for name, each in layers.named_parameters()}


def test_a_layer_is_built_with_the_same_values_at_every_layout(gloo: Pool) -> None:
    expected = built_at_once()
    assert all(
        value.std() > 0 for name, value in expected.items() if "weight" in name and value.dim() > 1
    )
    for found in gloo.run(2, built_at_once):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


ROW_ORDER = replace(serial_mesh(), stream=Axis("stream", size=2))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_batches_of_sequences_where_rows_are_not_cut(name: str) -> None:
    case = LAYERS[name]
    layer = case.make(serial_mesh()).double()
    folded = case.x.unflatten(0, (2, 3))
    assert_close(layer(folded), layer(case.x).unflatten(0, (2, 3)))


@pytest.mark.parametrize(
    ("name", "mesh", "x"),
    [
        ("column", serial_mesh(), X[:, 1:]),
        ("row", serial_mesh(), X),
        ("column", ROW_ORDER, X.unflatten(0, (2, 3))),
        ("row", ROW_ORDER, WIDE_X.unflatten(0, (2, 3))),
        ("words", ROW_ORDER, IDS.view(2, 3)),
        ("positions", ROW_ORDER, IDS.view(2, 3)),
        ("linear", serial_mesh(), X[:, 1:]),
        *((name, ROW_ORDER, X.unflatten(0, (2, 3))) for name in ("linear", "norm", "RMS norm")),
        *((name, ROW_ORDER, X.unflatten(0, (2, 3))) for name in ("input", "output")),
    ],
)
def test_misuse_is_an_error_of_one_line(name: str, mesh: Mesh, x: Tensor) -> None:
    """A wrong width, and [b, s, h] or ids [b, s] where the rows of the stream are cut."""
    others = {"input": InputLinear, "output": OutputLinear}
    make = LAYERS[name].make if name in LAYERS else maker(others[name], HIDDEN, OUT)
    layer = make(mesh).double()
    with pytest.raises(ValueError, match=type(layer).__name__) as error:
        layer(x)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [ColumnParallelLinear, Linear2D])
def test_autocast_is_refused(make: Callable[..., nn.Module]) -> None:
    layer = make(serial_mesh(), HIDDEN, OUT)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        layer(X.float())


def test_negative_labels_have_no_loss() -> None:
    """As torch's -100, in losses as in their scaled sum, and in gradients."""
    head = VocabParallelHead(serial_mesh(), VOCABULARY, HIDDEN, untied_std=1.0).double()
    with pytest.raises(ValueError, match="embedding"):
        VocabParallelHead(serial_mesh(), VOCABULARY, HIDDEN)(X)
    labels, scales = IDS.where(IDS != 3, -100), torch.ones(TOKENS).double()
    gradients = []
    for use in ("losses", "sum", "torch"):
        x = X.clone().requires_grad_()
        if use == "losses":
            total = head(x, None, labels).sum()
        elif use == "sum":
            total = head(x, None, labels, scales)
        else:
            total = F.cross_entropy(x @ head.weight[:VOCABULARY].T, labels, reduction="sum")
        total.backward()
        gradients.append((total.detach(), x.grad))
    for each in gradients[:2]:
        assert_close(each, gradients[2])


@pytest.mark.parametrize(("heads", "key_value_heads"), [(12, 5), (4, 8)])
def test_key_value_heads_that_do_not_divide_the_heads_are_refused(
    heads: int, key_value_heads: int
) -> None:
    with pytest.raises(ValueError, match=f"{heads} heads"):
        GroupedQueryLinear(
            serial_mesh(), 32, heads=heads, key_value_heads=key_value_heads, head_size=4, std=0.1
        )


@pytest.mark.parametrize(("readers", "is_used"), [(0, True), (2, True), (2, False)])
def test_an_input_passed_on_has_the_gradients_of_all_readers(readers: int, is_used: bool) -> None:
    """is_used: the output of the matmul that passes it on."""
    x = random(9, TOKENS, HIDDEN).requires_grad_()
    weights = [random(n, OUT, HIDDEN).requires_grad_() for n in range(1 + readers)]
    y, rows = linears(x, weights[:1], [None], views=[None], passes_on=True)
    found = [y, *(linear(rows, weight, None) for weight in weights[1:])]
    gradients = []
    for outputs in (found, [F.linear(x, weight) for weight in weights]):
        chosen = outputs if is_used else outputs[1:]
        dys = [random(20 + n, TOKENS, OUT) for n in range(len(chosen))]
        gradients.append(torch.autograd.grad(chosen, [x, *weights], dys, materialize_grads=True))
    assert_close(*gradients)
