"""Each layer of 2D, 2.5D and 3D beside torch's in fp64: outputs, and the gradients of inputs and of
every parameter; SUMMA beside the gathered product; what a rank holds; sizes that cannot be cut."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.api import (
    ColumnParallelLinear,
    GroupedQueryLinear2D,
    InputLinear2D,
    LayerNorm,
    LayerNorm2D,
    LayerNorm3D,
    Linear2D,
    Linear3D,
    Mesh,
    OutputLinear2D,
    RMSNorm3D,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelEmbedding2D,
    VocabParallelHead2D,
    build_mesh,
    exchange,
    gather_stream,
    gather_whole,
    layer_factory,
    materialize,
    sharding_specs,
    split_stream,
)
from megatron.parallel.collectives import all_reduce
from megatron.parallel.factory import LayerFactory
from megatron.parallel.layers import padded_vocabulary
from megatron.parallel.layers_2d import Gathered, Summa, outside
from tests import threads
from tests.dist import Pool
from tests.tiny import scatter_weights

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
HIDDEN, OUT, VOCABULARY, HEADS, HEAD_SIZE = 36, 72, 13, 12, 2
TOKENS = 4  # of a rank

# By name: mode and axes. A 2D mesh that is no square has no SUMMA.
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "1d": ("1d", {"tensor": 4}),
    "2d": ("2d", {"row": 2, "column": 2}),
    "2d, no square": ("2d", {"row": 2, "column": 3}),
    "2d of 9": ("2d", {"row": 3, "column": 3}),
    "2d, two models": ("2d", {"data": 2, "row": 2, "column": 2}),
    "2.5d": ("2.5d", {"depth": 2, "row": 2, "column": 2}),
    "3d": ("3d", {"weight": 2, "input": 2, "output": 2}),
    "3d of 27": ("3d", {"weight": 3, "input": 3, "output": 3}),
}
GRIDS = [name for name in MESHES if name != "1d"]


def random(name: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Place(NamedTuple):
    """Where a tensor [n, .., columns] lies: on which side, and the axis that cuts its columns."""

    is_inside: bool
    axis: str | None

    def own(self, x: Tensor, mesh: Mesh) -> Tensor:
        """This rank's part of x, which is of all tokens."""
        ranks = mesh.inner_tokens if self.is_inside else mesh.tokens
        number, count = mesh.copies.rank * ranks.size + ranks.rank, mesh.copies.size * ranks.size
        own = x.unflatten(0, (count, len(x) // count))[number]
        if self.axis == "vocabulary":
            own = F.pad(own, (0, padded_vocabulary(VOCABULARY, 1, mesh) - VOCABULARY))
        if self.axis is not None:
            own = own.chunk(mesh.size(self.axis), -1)[mesh.rank(self.axis)]
        return own.clone()


STREAM, INSIDE = Place(False, "hidden"), Place(True, "inner_hidden")
WHOLE, LOGITS = Place(False, None), Place(False, "vocabulary")
Weights = dict[str, Tensor]


def call(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


class Case(NamedTuple):
    make: Callable[[LayerFactory, Mesh], nn.Module]
    dense: Callable[[Tensor, Weights], Tensor]
    x: Place
    y: Place
    width: int | None = HIDDEN  # of x; None for token ids
    is_cut: bool = False  # whether each of N ranks of a model holds 1/N of the weight
    call: Callable[[nn.Module, Tensor], Tensor] = call


def dense(x: Tensor, w: Weights) -> Tensor:
    """[n, out], or [n, parts, out]"""
    weight, bias = w["weight"], w.get("bias")
    y = torch.einsum("ni,...oi->n...o", x, weight)
    return y if bias is None else y + bias


def layer_norm(x: Tensor, w: Weights) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"])


def rms_norm(x: Tensor, w: Weights) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w["weight"], 1e-5)


def words(ids: Tensor, w: Weights) -> Tensor:
    is_known = (ids >= 0) & (ids < len(w["weight"]))
    return F.embedding(ids * is_known, w["weight"]) * is_known[..., None]


def heads_of(layer: Any, x: Tensor) -> Tensor:
    """[n, 3, query heads, size]: each query beside the key and the value that it uses."""
    q, k, v = (each.unflatten(-1, (-1, HEAD_SIZE)) for each in layer(x))
    used = layer.of_query
    if used is None:
        used = torch.arange(q.shape[-2]) * k.shape[-2] // q.shape[-2]
    return torch.stack([q, k[..., used, :], v[..., used, :]], -3).flatten(-2)


def dense_heads(x: Tensor, w: Weights) -> Tensor:
    biases = w.get("query_bias"), *w.get("key_value_bias", (None, None))
    found = []
    for weight, bias in zip((w["query"], *w["key_value"]), biases, strict=True):
        y = F.linear(x, weight, bias).unflatten(1, (-1, HEAD_SIZE))
        found.append(y.repeat_interleave(HEADS // y.shape[1], 1).flatten(1))
    return torch.stack(found, 1)


def grouped_query(key_value_heads: int, bias: bool) -> Case:
    sizes = {"heads": HEADS, "key_value_heads": key_value_heads, "head_size": HEAD_SIZE}
    return Case(
        lambda make, mesh: make.grouped_query(HIDDEN, **sizes, bias=bias),
        dense_heads,
        STREAM,
        INSIDE,
        call=heads_of,
    )


CASES = {
    "column": Case(lambda make, mesh: make.column(HIDDEN, OUT), dense, STREAM, INSIDE, is_cut=True),
    "three columns": Case(
        lambda make, mesh: make.column(HIDDEN, OUT, parts=3),
        dense,
        STREAM,
        INSIDE,
        is_cut=True,
    ),
    "column without bias": Case(
        lambda make, mesh: make.column(HIDDEN, OUT, bias=False), dense, STREAM, INSIDE
    ),
    "row": Case(lambda make, mesh: make.row(OUT, HIDDEN), dense, INSIDE, STREAM, OUT, is_cut=True),
    "row without bias": Case(
        lambda make, mesh: make.row(OUT, HIDDEN, bias=False), dense, INSIDE, STREAM, OUT
    ),
    "linear": Case(lambda make, mesh: make.linear(HIDDEN, OUT), dense, STREAM, STREAM),
    "input": Case(lambda make, mesh: make.input(5, HIDDEN), dense, WHOLE, STREAM, 5),
    "output": Case(lambda make, mesh: make.output(HIDDEN, 2), dense, STREAM, WHOLE),
    "layer norm": Case(lambda make, mesh: make.layer_norm(HIDDEN), layer_norm, STREAM, STREAM),
    "RMS norm": Case(
        lambda make, mesh: make.rms_norm(HIDDEN, epsilon=1e-5), rms_norm, STREAM, STREAM
    ),
    "inner layer norm": Case(
        lambda make, mesh: make.inner_layer_norm(OUT), layer_norm, INSIDE, INSIDE, OUT
    ),
    "inner RMS norm": Case(
        lambda make, mesh: RMSNorm3D(mesh, OUT, is_inside=True), rms_norm, INSIDE, INSIDE, OUT
    ),
    "words": Case(
        lambda make, mesh: make.word_embedding(VOCABULARY, HIDDEN, divisible_by=1),
        words,
        WHOLE,
        STREAM,
        None,
        is_cut=True,
    ),
    "positions": Case(
        lambda make, mesh: make.position_embedding(VOCABULARY, HIDDEN), words, WHOLE, STREAM, None
    ),
    "head": Case(
        lambda make, mesh: make.head(VOCABULARY, HIDDEN, divisible_by=1, bias=True, untied_std=1.0),
        dense,
        STREAM,
        LOGITS,
        is_cut=True,
    ),
    **{
        f"{count} key/value heads, {'a' if bias else 'no'} bias": grouped_query(count, bias)
        for count in (1, 3, 4, HEADS)
        for bias in (True, False)
    },
}


def random_weights(module: nn.Module) -> Weights:
    """Whole ones, put into the module; leaves to differentiate by."""
    materialize(module, device=torch.device("cpu"), dtype=torch.float64, seed=None)
    shapes = {name: spec.shape for name, spec in sharding_specs(module).items()}
    weights = {name: random(number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    scatter_weights(module, weights)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def assert_gradients(module: nn.Module, weights: Weights) -> None:
    """Summed over the axes that the specs say, they are those of the whole weights."""
    table = sharding_specs(module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        for axis in table[name].partial:
            all_reduce(parameter.grad, axis)
        assert_close(gather_whole(parameter.grad, table[name]), weights[name].grad, msg=name)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def check_layer(mesh: Mesh, name: str, leading: tuple[int, ...]) -> None:
    """leading: dims of x on this rank."""
    case, tokens = CASES[name], torch.Size(leading).numel() * mesh.batch.size
    layer = build(lambda: case.make(layer_factory(mesh), mesh))
    weights = random_weights(layer)
    if case.width is None:
        known = torch.arange(tokens) * 5 % VOCABULARY
        strange = torch.tensor([-1, VOCABULARY, 10_000])[torch.arange(tokens) // 3 % 3]
        is_strange = (torch.arange(tokens) % 3 == 1) & (name == "words")
        x = torch.where(is_strange, strange, known)
        own = case.x.own(x, mesh).unflatten(0, leading)
    else:
        x = random(10, tokens, case.width)
        own = case.x.own(x, mesh).unflatten(0, leading).requires_grad_()
        x.requires_grad_()
    expected = case.dense(x, weights)
    dy = random(11, *expected.shape)
    expected.backward(dy)

    y = case.call(layer, own)
    assert y.shape[: len(leading)] == leading
    its_part = case.y.own(expected, mesh)
    y = y.reshape(its_part.shape)
    assert_close(y, its_part)
    y.backward(case.y.own(dy, mesh))
    if own.grad is not None:
        assert_close(own.grad.flatten(0, len(leading) - 1), case.x.own(x.grad, mesh))
    assert_gradients(layer, weights)
    if case.is_cut and mesh.tensor_parallel_mode != "1d":
        spec, ranks = sharding_specs(layer)["weight"], mesh.model_parallel.size
        whole = torch.Size((spec.padded_rows or spec.shape[0], *spec.shape[1:])).numel()
        assert layer.weight.numel() * ranks == whole


def check_loss(mesh: Mesh, is_tied: bool) -> None:
    """Losses of each token, and their weighted sum, which never holds all logits."""
    make, sizes = layer_factory(mesh), (VOCABULARY, HIDDEN)
    embedding = build(lambda: make.word_embedding(*sizes, divisible_by=1))
    std = None if is_tied else 1.0
    head = build(lambda: make.head(*sizes, divisible_by=1, untied_std=std))
    owner = embedding if is_tied else head
    weights = random_weights(owner)
    tokens = TOKENS * mesh.batch.size
    x = random(10, tokens, HIDDEN).requires_grad_()
    labels, scales = torch.arange(tokens) * 5 % VOCABULARY, random(12, tokens)
    expected = F.cross_entropy(F.linear(x, weights["weight"]), labels, reduction="none")
    expected.backward(scales)

    own = STREAM.own(x.detach(), mesh).requires_grad_()
    its_labels, its_scales = (WHOLE.own(each, mesh) for each in (labels, scales))
    losses = head(own, embedding, its_labels)
    assert_close(losses, WHOLE.own(expected, mesh))
    for total in (losses @ its_scales, head(own, embedding, its_labels, its_scales)):
        own.grad = owner.weight.grad = None
        total.backward()
        assert_close(own.grad, STREAM.own(x.grad, mesh))
        assert_gradients(owner, weights)


def check_all(mesh: Mesh) -> None:
    for name in CASES:
        check_layer(mesh, name, (TOKENS,))
    for name in ("column", "row", "inner layer norm", "words", "positions", "head"):
        check_layer(mesh, name, (2, TOKENS // 2))
    for is_tied in (True, False):
        check_loss(mesh, is_tied)


@pytest.mark.parametrize("name", MESHES)
def test_layers_equal_those_of_torch(name: str) -> None:
    threads.run(*MESHES[name], check_all)


def on_real_ranks() -> None:
    mesh = build_mesh({"row": 2, "column": 2}, "cpu", tensor_parallel_mode="2d")
    check_all(mesh)
    check_summa(mesh)


def test_layers_equal_those_of_torch_on_processes(gloo: Pool) -> None:
    gloo.run(4, on_real_ranks)


def check_no_tokens(mesh: Mesh) -> None:
    for name in CASES:
        check_layer(mesh, name, (0,))


@pytest.mark.parametrize("name", ["2d", "2d, no square", "3d"])
def test_a_batch_may_be_empty(name: str) -> None:
    threads.run(*MESHES[name], check_no_tokens)


def check_summa(mesh: Mesh) -> None:
    place = outside(mesh)
    assert isinstance(place.division, Summa)
    gathered = replace(place, division=Gathered((1, mesh.hidden), (1, mesh.tokens)))
    found = []
    for each in (place, gathered):
        layer = build(lambda: Linear2D(mesh, HIDDEN, OUT, parts=2))
        layer.place = each
        random_weights(layer)
        x = STREAM.own(random(10, TOKENS * mesh.batch.size, HIDDEN), mesh)
        x = x.T.contiguous().T.requires_grad_()  # what is sent has other strides
        y = layer(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(each.grad for each in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-14 * other.norm()


@pytest.mark.parametrize("name", ["2d", "2d of 9", "2.5d"])
def test_summa_is_the_gathered_product(name: str) -> None:
    threads.run(*MESHES[name], check_summa)


def check_mlp(mesh: Mesh) -> None:
    """The layers of 3D by their names: into the parallel region, and out of it."""
    model = build(
        lambda: nn.Sequential(
            LayerNorm3D(mesh, HIDDEN),
            Linear3D(mesh, HIDDEN, OUT),
            LayerNorm3D(mesh, OUT, is_inside=True),
            nn.GELU(),
            Linear3D(mesh, OUT, HIDDEN, is_inside=True),
        )
    )
    weights = random_weights(model)

    def of(name: str) -> Weights:
        return {key: weights[f"{name}.{key}"] for key in ("weight", "bias")}

    x = random(10, TOKENS * mesh.batch.size, HIDDEN)
    y = dense(layer_norm(x, of("0")), of("1"))
    y = dense(F.gelu(layer_norm(y, of("2"))), of("4"))
    y.square().sum().backward()
    own = split_stream(WHOLE.own(x, mesh), mesh)
    found = model(own)
    assert_close(gather_stream(found, mesh), WHOLE.own(y, mesh), rtol=1e-11, atol=1e-11)
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        for axis in sharding_specs(model)[name].partial:
            all_reduce(parameter.grad, axis)
        whole = gather_whole(parameter.grad, sharding_specs(model)[name])
        expected = weights[name].grad
        assert expected is not None
        assert (whole - expected).norm() <= 1e-12 * expected.norm(), name


@pytest.mark.parametrize("name", ["3d", "3d of 27"])
def test_layers_of_3d_are_a_model_of_torch(name: str) -> None:
    threads.run(*MESHES[name], check_mlp)


def check_stream(mesh: Mesh) -> None:
    for each in (mesh, replace(mesh, stream=mesh.tensor)) if mesh.hidden.size == 1 else (mesh,):
        x, w = random(1, 12, HIDDEN).requires_grad_(), random(2, 12, HIDDEN)
        own = split_stream(x, each)
        assert own.numel() * each.hidden.size * each.stream.size == x.numel()
        y = gather_stream(own, each)
        (y * w).sum().backward()
        assert_close(y, x)
        assert_close(x.grad, w)


@pytest.mark.parametrize("name", ["1d", "2d", "3d"])
def test_what_is_split_is_gathered(name: str) -> None:
    threads.run(*MESHES[name], check_stream)


def check_exchange(mesh: Mesh) -> None:
    x = random(1, 3 * mesh.batch.size, 2)
    outer, inner = (Place(is_inside, None).own(x, mesh) for is_inside in (False, True))
    assert exchange(mesh, None) is None
    assert_close(exchange(mesh, outer), inner)
    assert torch.equal(exchange(mesh, outer > 0), inner > 0)


@pytest.mark.parametrize("name", ["2.5d", "3d", "3d of 27"])
def test_masks_are_those_of_the_samples_inside(name: str) -> None:
    threads.run(*MESHES[name], check_exchange)


HEADS_OF_3 = {"heads": 3, "key_value_heads": 3, "head_size": 2}
# Whole sizes that two columns of ranks cannot share, and parts that are not theirs.
REFUSED: dict[str, Callable[[Mesh], Any]] = {
    "in": lambda mesh: Linear2D(mesh, 7, 8),
    "out": lambda mesh: Linear2D(mesh, 8, 7),
    "input": lambda mesh: InputLinear2D(mesh, 8, 7),
    "output": lambda mesh: OutputLinear2D(mesh, 7, 8),
    "norm": lambda mesh: LayerNorm2D(mesh, 7),
    "words": lambda mesh: VocabParallelEmbedding2D(mesh, 8, 7),
    "head": lambda mesh: VocabParallelHead2D(mesh, 8, 7),
    "heads": lambda mesh: GroupedQueryLinear2D(mesh, 8, **HEADS_OF_3),
    "split": lambda mesh: split_stream(torch.zeros(2, 7), mesh),
    "whole x": lambda mesh: Linear2D(mesh, 8, 8)(torch.zeros(2, 8)),
    "whole x of a norm": lambda mesh: LayerNorm2D(mesh, 8)(torch.zeros(2, 8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_cannot_be_cut_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"\b[378]\b"):
        threads.run(*MESHES["2d"], REFUSED[name])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("2d", ColumnParallelLinear),
        ("2.5d", RowParallelLinear),
        ("3d", VocabParallelEmbedding),
        ("3d", LayerNorm),
        ("2d", Linear3D),
        ("1d", Linear2D),
    ],
)
def test_layers_of_another_mode_are_refused(name: str, make: Callable[..., Any]) -> None:
    sizes = (8,) if make is LayerNorm else (8, 8)
    with pytest.raises(ValueError, match=make.__name__):
        threads.run(*MESHES[name], lambda mesh: make(mesh, *sizes))


def under_autocast(mesh: Mesh) -> None:
    layer, x = Linear2D(mesh, 8, 8), torch.zeros(2, 4)
    with torch.autocast("cpu"):
        layer(x)


def test_autocast_is_refused() -> None:
    with pytest.raises(RuntimeError, match="autocast"):
        threads.run(*MESHES["2d"], under_autocast)
