"""Each parallel layer of every mode beside torch's in fp64: outputs, and the gradients of inputs
and of every parameter; what a rank holds; initial values; sizes that cannot be cut."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import api
from megatron.api import Mesh, gather_whole, layer_factory, materialize, serial_mesh, sharding_specs
from megatron.parallel.collectives import all_reduce
from megatron.parallel.factory import ApexLayerNorm, LayerFactory
from megatron.parallel.layers import VocabParallelHead, padded_vocabulary
from megatron.parallel.layers_grid import exchange
from megatron.parallel.layers_llama import GroupedQueryLinear, RotaryEmbedding, gated, rotate
from megatron.parallel.mesh import Axis
from megatron.parallel.regions import gather_stream
from tests import plain, threads
from tests.dist import Pool
from tests.refusals import refusal
from tests.tiny import assert_exact, mesh_of_ranks, scatter_weights

assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
HIDDEN, OUT, VOCABULARY, HEADS, HEAD_SIZE = 36, 72, 13, 12, 2
TOKENS = 4  # of a rank

# By name: mode and axes. A 2D mesh that is no square has no SUMMA.
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "one rank": ("1d", {"tensor": 1}),
    "1d": ("1d", {"tensor": 4}),
    "2d": ("2d", {"row": 2, "column": 2}),
    "2d, no square": ("2d", {"row": 2, "column": 3}),
    "2d of 9": ("2d", {"row": 3, "column": 3}),
    "2.5d": ("2.5d", {"depth": 2, "row": 2, "column": 2}),
    "3d": ("3d", {"weight": 2, "input": 2, "output": 2}),
    "3d of 27": ("3d", {"weight": 3, "input": 3, "output": 3}),
}


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


class Case(NamedTuple):
    make: Callable[[LayerFactory, Mesh], nn.Module]
    dense: Callable[[Tensor, Weights], Tensor]
    x: Place
    y: Place
    width: int | None = HIDDEN  # of x; None for token ids
    call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__


def of(name: str, *sizes: int, **settings: Any) -> Callable[[LayerFactory, Mesh], nn.Module]:
    return lambda make, _: getattr(make, name)(*sizes, **settings)


def dense(x: Tensor, w: Weights) -> Tensor:
    """[n, out], or [n, parts, out]"""
    weight, bias = w["weight"], w.get("bias")
    y = torch.einsum("ni,...oi->n...o", x, weight)
    return y if bias is None else y + bias


def layer_norm(x: Tensor, w: Weights) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"])


def rms_norm(x: Tensor, w: Weights) -> Tensor:
    return plain.rms_norm(x, w["weight"])


def words(ids: Tensor, w: Weights) -> Tensor:
    is_known = (ids >= 0) & (ids < len(w["weight"]))
    return F.embedding(ids * is_known, w["weight"]) * is_known[..., None]


def heads_of(layer: Any, x: Tensor) -> Tensor:
    """[n, 3, query heads, size]: each query beside the key and the value that it uses."""
    q, k, v = (each.unflatten(-1, (-1, HEAD_SIZE)) for each in layer(x))
    used = layer.kv_head_index
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
    make = of("grouped_query", HIDDEN, **sizes, bias=bias)
    return Case(make, dense_heads, STREAM, INSIDE, call=heads_of)


CASES = {
    "column": Case(of("column", HIDDEN, OUT), dense, STREAM, INSIDE),
    "three columns": Case(of("column", HIDDEN, OUT, parts=3), dense, STREAM, INSIDE),
    "column without bias": Case(of("column", HIDDEN, OUT, bias=False), dense, STREAM, INSIDE),
    "row": Case(of("row", OUT, HIDDEN), dense, INSIDE, STREAM, OUT),
    "row without bias": Case(of("row", OUT, HIDDEN, bias=False), dense, INSIDE, STREAM, OUT),
    "linear": Case(of("linear", HIDDEN, OUT), dense, STREAM, STREAM),
    "input": Case(of("input", 5, HIDDEN), dense, WHOLE, STREAM, 5),
    "output": Case(of("output", HIDDEN, 2), dense, STREAM, WHOLE),
    "layer norm": Case(of("layer_norm", HIDDEN), layer_norm, STREAM, STREAM),
    "RMS norm": Case(of("rms_norm", HIDDEN, epsilon=1e-5), rms_norm, STREAM, STREAM),
    "inner layer norm": Case(of("inner_layer_norm", OUT), layer_norm, INSIDE, INSIDE, OUT),
    "inner RMS norm": Case(
        lambda make, mesh: api.RMSNorm3D(mesh, OUT, is_inside=True), rms_norm, INSIDE, INSIDE, OUT
    ),
    "words": Case(
        of("word_embedding", VOCABULARY, HIDDEN, divisible_by=1), words, WHOLE, STREAM, None
    ),
    "positions": Case(of("position_embedding", VOCABULARY, HIDDEN), words, WHOLE, STREAM, None),
    "head": Case(
        of("head", VOCABULARY, HIDDEN, divisible_by=1, bias=True, untied_std=1.0),
        dense,
        STREAM,
        LOGITS,
    ),
    **{
        f"{count} key/value heads, {'a' if bias else 'no'} bias": grouped_query(count, bias)
        for count in (1, 3, 4, HEADS)
        for bias in (True, False)
    },
}


# Each of N ranks of a model holds 1/N of their weights.
CUT = ("column", "three columns", "row", "words", "head")


def random_weights(module: nn.Module) -> Weights:
    """Whole weights, from which the module's are set; leaves of autograd."""
    materialize(module, device=torch.device("cpu"), dtype=torch.float64, seed=None)
    shapes = {name: spec.shape for name, spec in sharding_specs(module).items()}
    weights = {name: random(number, *shape) for number, (name, shape) in enumerate(shapes.items())}
    scatter_weights(module, weights)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def assert_gradients(module: nn.Module, weights: Weights) -> None:
    """Gradients, summed over the axes that the specs name, are those of the whole weights."""
    table = sharding_specs(module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        for axis in table[name].partial:
            all_reduce(parameter.grad, axis)
        assert_close(gather_whole(parameter.grad, table[name]), weights[name].grad, msg=name)


def turned(x: Tensor) -> Tensor:
    """The same numbers with other strides."""
    return x.mT.contiguous().mT


def check_layer(mesh: Mesh, name: str, leading: tuple[int, ...]) -> None:
    """leading: dims of x on this rank."""
    case = CASES[name]
    tokens = torch.Size(leading).numel() * mesh.batch.size
    with torch.device("meta"):
        layer = case.make(layer_factory(mesh), mesh)
    weights = random_weights(layer)
    if case.width is None:
        known = torch.arange(tokens) * 5 % VOCABULARY
        strange = torch.tensor([-1, VOCABULARY, 10_000])[torch.arange(tokens) // 3 % 3]
        is_strange = (torch.arange(tokens) % 3 == 1) & (name == "words")
        x = torch.where(is_strange, strange, known)
        own = case.x.own(x, mesh).unflatten(0, leading)
    else:
        x = random(10, tokens, case.width)
        own = turned(case.x.own(x, mesh).unflatten(0, leading)).requires_grad_()
        x.requires_grad_()
    expected = case.dense(x, weights)
    dy = random(11, *expected.shape)
    expected.backward(dy)

    y = case.call(layer, own)
    assert y.shape[: len(leading)] == leading
    its_part = case.y.own(expected, mesh)
    y = y.reshape(its_part.shape)
    assert_close(y, its_part)
    y.backward(turned(case.y.own(dy, mesh)))
    if own.grad is not None:
        assert_close(own.grad.flatten(0, len(leading) - 1), case.x.own(x.grad, mesh))
    assert_gradients(layer, weights)
    if name in CUT and mesh.tensor_parallel_mode != "1d":
        spec, ranks = sharding_specs(layer)["weight"], mesh.model_parallel.size
        whole = torch.Size((spec.padded_rows or spec.shape[0], *spec.shape[1:])).numel()
        assert layer.weight.numel() * ranks == whole


def check_loss(mesh: Mesh, is_tied: bool) -> None:
    """Losses of each token, and their weighted sum, which never holds all logits."""
    make, sizes = layer_factory(mesh), (VOCABULARY, HIDDEN)
    embedding = make.word_embedding(*sizes, divisible_by=1)
    std = None if is_tied else 1.0
    head = make.head(*sizes, divisible_by=1, untied_std=std)
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
    is_1d = mesh.tensor_parallel_mode == "1d"
    few = ("column", "row", "inner layer norm", "words", "positions", "head")
    for name in CASES if is_1d else few:
        check_layer(mesh, name, (2, TOKENS // 2))
    for is_tied in (True, False):
        check_loss(mesh, is_tied)


@pytest.mark.parametrize("name", MESHES)
def test_layers_equal_those_of_torch(name: str) -> None:
    threads.run(*MESHES[name], check_all)


@pytest.mark.parametrize("name", ["2d", "2d, no square", "3d"])
def test_a_batch_may_be_empty(name: str) -> None:
    def check(mesh: Mesh) -> None:
        for each in CASES:
            check_layer(mesh, each, (0,))

    threads.run(*MESHES[name], check)


def check_stream(mesh: Mesh) -> None:
    for each in (mesh, replace(mesh, stream=mesh.tensor)) if mesh.hidden.size == 1 else (mesh,):
        x, w = random(1, 12, HIDDEN).requires_grad_(), random(2, 12, HIDDEN)
        own = api.split_stream(x, each)
        assert own.numel() * each.hidden.size * each.stream.size == x.numel()
        y = gather_stream(own, each)
        (y * w).sum().backward()
        assert_close(y, x)
        assert_close(x.grad, w)


@pytest.mark.parametrize("name", ["1d", "2d", "3d"])
def test_a_split_stream_is_gathered(name: str) -> None:
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


def built_at_once(tensor_size: int) -> dict[str, Tensor]:
    """The whole parameters of all layers, as they are built on the device."""
    mesh = mesh_of_ranks(tensor_size)
    torch.manual_seed(7)
    factory = layer_factory(mesh)
    layers = nn.ModuleDict({name: case.make(factory, mesh) for name, case in CASES.items()})
    table = sharding_specs(layers)
    return {name: gather_whole(each, table[name]) for name, each in layers.named_parameters()}


def test_a_layer_is_built_with_the_same_values_at_every_layout(gloo: Pool) -> None:
    expected = built_at_once(1)
    for name, value in expected.items():
        assert value.dim() < 2 or "bias" in name or value.std() > 0, name
    for found in gloo.run(2, built_at_once, 2):
        assert_exact(found, expected)


def test_a_layer_on_meta_has_no_weights_until_they_are_made() -> None:
    for name in ("column", "row", "words", "RMS norm", "3 key/value heads, a bias"):
        case, mesh = CASES[name], serial_mesh()
        with torch.device("meta"):
            layer = case.make(layer_factory(mesh), mesh)
        x = torch.arange(4) if case.width is None else random(1, 4, case.width)
        assert isinstance(refusal(partial(layer, x), lines=1), RuntimeError)
        for use in (layer, copy.deepcopy(layer)):
            materialize(use, device=torch.device("cpu"), dtype=torch.float64, seed=0)
            assert case.call(use, x).isfinite().all()


def test_rotary_is_that_of_llama() -> None:
    # Seconds for test_cpu_kernels.py, which runs tests of this file in a process of its own.
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=16, num_attention_heads=2)
    positions = torch.tensor([[0, 1, 2, 4, 9, 100, 63]])
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


def test_negative_labels_have_no_loss() -> None:
    """As torch's -100, in losses as in their scaled sum, and in gradients."""
    head = VocabParallelHead(serial_mesh(), VOCABULARY, HIDDEN, untied_std=1.0).double()
    labels = torch.tensor([0, -100, 4, 12, 7, -100])
    gradients = []
    for use in ("losses", "sum", "torch"):
        x = random(10, 6, HIDDEN).requires_grad_()
        if use == "losses":
            total = head(x, None, labels).sum()
        elif use == "sum":
            total = head(x, None, labels, torch.ones(6).double())
        else:
            total = F.cross_entropy(x @ head.weight[:VOCABULARY].T, labels, reduction="sum")
        total.backward()
        gradients.append((total.detach(), x.grad))
    for each in gradients[:2]:
        assert_close(each, gradients[2])


def on_rows(mesh: Mesh, name: str) -> object:
    """[b, s, h] or ids [b, s] where the rows of the stream are cut."""
    its_mesh, case = replace(mesh, stream=Axis("stream", size=2)), CASES[name]
    layer = case.make(layer_factory(its_mesh), its_mesh).double()
    x = torch.zeros(2, 3, case.width).double() if case.width else torch.zeros(2, 3).long()
    return layer(x)


ON_ROWS = ["column", "row", "words", "positions", "linear", "layer norm", "RMS norm"]
ON_ROWS += ["input", "output"]


def under_autocast(mesh: Mesh, layer: nn.Module, width: int) -> object:
    with torch.autocast("cpu"):
        return layer(torch.zeros(2, width))


def grouped(kind: Any, mesh: Mesh, heads: int, key_value_heads: int) -> nn.Module:
    made: nn.Module = kind(mesh, 8, heads=heads, key_value_heads=key_value_heads, head_size=2)
    return made


# By mode: whole sizes that two columns of ranks cannot share, parts that are not theirs, layers of
# another mode.
REFUSED: dict[str, list[Callable[[Mesh], object]]] = {
    "2d": [
        lambda mesh: api.Linear2D(mesh, 7, 8),
        lambda mesh: api.Linear2D(mesh, 8, 7),
        lambda mesh: api.InputLinear2D(mesh, 8, 7),
        lambda mesh: api.OutputLinear2D(mesh, 7, 8),
        lambda mesh: api.LayerNorm2D(mesh, 7),
        lambda mesh: api.VocabParallelEmbedding2D(mesh, 8, 7),
        lambda mesh: api.VocabParallelHead2D(mesh, 8, 7),
        lambda mesh: grouped(api.GroupedQueryLinear2D, mesh, 3, 3),
        lambda mesh: api.split_stream(torch.zeros(2, 7), mesh),
        lambda mesh: api.Linear2D(mesh, 8, 8)(torch.zeros(2, 8)),
        lambda mesh: api.LayerNorm2D(mesh, 8)(torch.zeros(2, 8)),
        lambda mesh: api.ColumnParallelLinear(mesh, 8, 8),
        lambda mesh: api.Linear3D(mesh, 8, 8),
        lambda mesh: under_autocast(mesh, api.Linear2D(mesh, 8, 8), 4),
    ],
    "2.5d": [lambda mesh: api.RowParallelLinear(mesh, 8, 8)],
    "3d": [
        lambda mesh: api.LayerNorm3D(mesh, 7),
        lambda mesh: grouped(GroupedQueryLinear, mesh, 4, 4),
        lambda mesh: ApexLayerNorm(mesh, 8),
    ],
    "1d": [lambda mesh: api.Linear2D(mesh, 8, 8)],
    "serial": [
        lambda mesh: api.ColumnParallelLinear(mesh, 8, 8)(torch.zeros(2, 7)),
        lambda mesh: api.RowParallelLinear(mesh, 8, 8)(torch.zeros(2, 7)),
        lambda mesh: layer_factory(mesh).linear(8, 8)(torch.zeros(2, 7)),
        lambda mesh: VocabParallelHead(mesh, 8, 8)(torch.zeros(2, 8)),  # of no weight
        lambda mesh: grouped(GroupedQueryLinear, mesh, 12, 5),
        lambda mesh: grouped(GroupedQueryLinear, mesh, 4, 8),
        lambda mesh: under_autocast(mesh, api.ColumnParallelLinear(mesh, 8, 8), 8),
        *(partial(on_rows, name=name) for name in ON_ROWS),
    ],
}


@pytest.mark.parametrize(
    ("mode", "number"), [(mode, n) for mode, calls in REFUSED.items() for n in range(len(calls))]
)
def test_layers_that_cannot_be_are_refused(mode: str, number: int) -> None:
    """In one line, before torch would complain of shapes."""
    call = REFUSED[mode][number]
    if mode == "serial":
        error = refusal(lambda: call(serial_mesh()), lines=1)
    else:
        error = refusal(lambda: threads.run(*MESHES[mode], call), lines=1)
    assert isinstance(error, ValueError) or "autocast" in str(error)
