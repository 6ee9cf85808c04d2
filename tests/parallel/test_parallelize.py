"""A model that was not written for parallel layers, cut by a plan, is the model in fp64: output,
gradient of its input, every gradient. A model whose code would compute wrongly is refused by name;
its weights go in and out by its own names."""

import re
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from megatron.huggingface.parallelize import parallelize, whole_state_dict
from megatron.huggingface.plan import (
    Column,
    Local,
    Plan,
    PlanError,
    Redistribute,
    Row,
    Summed,
    Vocabulary,
)
from megatron.huggingface.replacements import parameters_on_meta
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.initialize import materialize
from megatron.parallel.sharding import gather_whole
from tests.dist import on_ranks
from tests.refusals import refusal
from tests.tiny import leave_to_autograd, mesh_of_ranks
from tools.layouts.meters import counting

HIDDEN, INNER, WORDS = 8, 16, 13
PAIR: Plan = {"up": Column(), "down": Row()}


class Layers(nn.Module):
    """Named modules, and a forward of them."""

    def __init__(self, forward: Callable[["Layers", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def __getattr__(self, name: str) -> Any:  # for type checkers
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def pair(read: Callable[[Any, Tensor], Any] | None = None, **options: Any) -> Layers:
    """x [b, s, h] through two layers. read: what a user's forward does with the first one."""
    return Layers(
        lambda m, x: m.down(F.gelu(m.up(x) if read is None else read(m, x))),
        up=nn.Linear(HIDDEN, INNER, **options),
        down=nn.Linear(INNER, HIDDEN, **options),
    )


def tied(embedding: nn.Module, head: nn.Module) -> Layers:
    """Logits [b, s, v] of ids."""
    model = Layers(lambda m, ids: m.head(torch.tanh(m.words(ids))), words=embedding, head=head)
    model.head.weight = model.words.weight
    return model


def with_gate(forward: Callable[[Layers, Tensor], Tensor], bias: bool = False) -> Layers:
    up, gate = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
    return Layers(forward, up=up, gate=gate, down=nn.Linear(INNER, HIDDEN, bias=bias))


GATED: Plan = {"up": Column(), "gate": Column(), "down": Row()}


def gated(m: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    return m.down(F.silu(m.gate(x)) * m.up(x))


def twice(m: Layers, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(m.down(F.gelu(m.up(x))))))


def twice_on_one(m: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    return m.down(F.gelu(m.up(x)) * m.up(x))


def checkpointed(m: Layers, x: Tensor, use_reentrant: bool = False) -> Tensor:
    return x + checkpoint(partial(gated, m), x, use_reentrant=use_reentrant)


def checkpointed_inside(m: Layers, x: Tensor) -> Tensor:
    """One sibling reads the same tensor outside."""
    x = torch.tanh(x)
    inner = checkpoint(lambda x: F.silu(m.gate(x)) * m.up(x), x, use_reentrant=False)
    return m.down(inner + m.up(x))


def once_without_gradients(m: Layers, x: Tensor) -> Tensor:
    x = torch.tanh(x)
    with torch.no_grad():
        constant = m.down(m.up(x))
    return constant + m.down(F.gelu(m.up(x)) * m.gate(x))


def between(m: Layers, x: Tensor) -> Tensor:
    """The tensor that siblings read is written to in between."""
    with torch.no_grad():
        x = torch.tanh(x)
        one = m.gate(x)
        x.mul_(2.0)
        two = m.up(x)
        x = m.down(one * two)
    return m.down(m.up(x))


def frozen() -> nn.Module:
    model = pair()
    model.up.weight.requires_grad_(False)
    model.down.bias.requires_grad_(False)
    return model


def shared_instance() -> nn.Module:
    up = nn.Linear(HIDDEN, INNER)
    return Layers(lambda m, x: m.down(m.up(x) * m.other(x)), up=up, other=up, down=pair().down)


def two_embeddings() -> nn.Module:
    model = Layers(
        lambda m, ids: m.words(ids) * m.others(ids.flip(-1)),
        words=nn.Embedding(WORDS, HIDDEN),
        others=nn.Embedding(WORDS, HIDDEN),
    )
    model.others.weight = model.words.weight
    return model


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Renamed(nn.Linear):
    """With a forward that is torch's."""


def heads(m: Layers, x: Tensor) -> Tensor:
    """A norm of heads inside what is cut."""
    q = m.norm(m.up(x).unflatten(-1, (-1, 4)))
    return m.down(F.softmax(q, dim=-1).flatten(-2))


def fused(m: Layers, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, dim=-1)
    return m.out(q * torch.tanh(k) + v)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    plan: Plan
    of_ids: bool = False  # its input is ids, not [b, s, h]


def alone(make: Callable[[], nn.Module], style: Any) -> Case:
    return Case(lambda: nn.Sequential(make()), {"0": style})


def embedding(style: Any = "vocabulary", **options: Any) -> Case:
    return Case(lambda: nn.Embedding(WORDS, HIDDEN, **options), {"": style}, of_ids=True)


def tied_head(plan: Plan, bias: bool = True) -> Case:
    def make() -> nn.Module:
        return tied(nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS, bias=bias))

    return Case(make, plan, of_ids=True)


def of_tokens(forward: Callable[[Layers, Tensor], Tensor]) -> Case:
    """Under sequence parallelism."""
    plan = {
        "1": Redistribute({0: ("whole", "tokens")}, {0: ("tokens", "whole")}),
        **{f"1.{name}": Column(tokens=True) for name in ("up", "gate")},
        "1.down": Row(tokens=True),
    }
    return Case(lambda: nn.Sequential(nn.Tanh(), with_gate(forward, bias=True)), plan)


# Plans whose result is that of one process.
RIGHT = {
    "a pair": Case(pair, PAIR),
    "a pattern of parameters": Case(pair, {"*up.weight": Column(), "*down.weight": Row()}),
    "in the words of a plan in text": Case(pair, {"up": "column", "down": {"style": "row"}}),
    "a plan that cuts nothing": Case(pair, {}),
    "a pattern of children alone": Case(
        lambda: nn.Sequential(with_gate(gated)), {"0.*": Column(), "0.down": Row()}
    ),
    "without biases": Case(partial(pair, bias=False), PAIR),
    "frozen parameters": Case(frozen, PAIR),
    "a subclass with torch's forward": Case(
        lambda: Layers(twice, up=Renamed(HIDDEN, INNER), down=pair().down), PAIR
    ),
    "siblings that read one tensor": Case(partial(with_gate, gated), GATED),
    "siblings that are called twice": Case(
        partial(with_gate, lambda m, x: gated(m, gated(m, x))), GATED
    ),
    "gathered": Case(pair, {"up": Column(gather=True), "down": Column(gather=True)}),
    "a row layer of a whole input": Case(pair, {"up": Row(), "down": Row()}),
    "13 features, gathered": alone(lambda: nn.Linear(HIDDEN, WORDS), Column(gather=True)),
    "parts, gathered": alone(lambda: nn.Linear(HIDDEN, 24), Column(parts=3, gather=True)),
    "three parts, chunked": Case(
        lambda: Layers(fused, qkv=nn.Linear(HIDDEN, 24), out=nn.Linear(HIDDEN, HIDDEN)),
        {"qkv": Column(parts=3), "out": Row()},
    ),
    "a norm of heads": Case(
        lambda: Layers(heads, up=pair().up, norm=nn.LayerNorm(4), down=pair().down),
        {**PAIR, "norm": Summed()},
    ),
    "called twice": Case(partial(with_gate, twice), GATED),
    "called twice on one tensor": Case(partial(with_gate, twice_on_one), GATED),
    "one instance of two names": Case(shared_instance, PAIR),
    "one instance by its second name": Case(shared_instance, {"other": Column(), "down": Row()}),
    "checkpointed": Case(partial(with_gate, checkpointed), GATED),
    "checkpointed, reentrant": Case(
        partial(with_gate, partial(checkpointed, use_reentrant=True)), GATED
    ),
    "checkpointed in part": Case(partial(with_gate, checkpointed_inside), GATED),
    "without gradients, then with": Case(partial(with_gate, once_without_gradients), GATED),
    "of tokens without gradients, then with": of_tokens(once_without_gradients),
    "of tokens that are written to between siblings": of_tokens(between),
    "of tokens, checkpointed in part": of_tokens(checkpointed_inside),
    "a layer of torch's": Case(
        lambda: nn.TransformerEncoderLayer(HIDDEN, 4, INNER, dropout=0.0, batch_first=True),
        {"linear1": Column(), "linear2": Row()},
    ),
    "tokens on each rank": Case(
        lambda: nn.Sequential(nn.Tanh(), with_gate(gated), with_gate(gated), nn.LayerNorm(HIDDEN)),
        {
            "1": Redistribute({0: ("whole", "tokens")}, {}),
            "2": Redistribute({}, {}),
            "*.up": Column(tokens=True),
            "*.gate": Column(tokens=True),
            "*.down": Row(tokens=True),
            "3": [Summed(), Redistribute({}, {0: ("tokens", "whole")})],
        },
    ),
    "channels on each rank": Case(
        lambda: nn.Sequential(nn.Tanh(), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)),
        {
            "0": Redistribute({}, {0: ("whole", "channels")}),
            "1": Redistribute({0: ("channels", "whole")}, {0: ("whole", "channels")}),
            "2": Row(),
        },
    ),
    "words": embedding(),
    "words by channels": embedding(Column(gather=True)),
    "words of a subclass": Case(lambda: Scaled(WORDS, HIDDEN), {"": Vocabulary()}, of_ids=True),
    "padding_idx": embedding(padding_idx=3),
    "padding_idx by channels": embedding(Column(gather=True), padding_idx=-1),
    "a tied head": tied_head({"words": Vocabulary()}),
    "a tied head that is named": tied_head({"head": Column(gather=True)}, bias=False),
    "a tied head by channels": tied_head({"words": Column(gather=True)}),
    "two tied embeddings": Case(two_embeddings, {"words": Vocabulary()}, of_ids=True),
}


def inputs(of_ids: bool) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if of_ids:
        return torch.randint(WORDS, (2, 8), generator=generator)
    return torch.randn(2, 8, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(output: Tensor) -> Tensor:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    return (output * weights.double()).sum() + output.square().sum()


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same random weights on every rank, in fp64."""
    torch.manual_seed(3)
    model = make().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gradients_of(buckets: GradientBuckets, model: nn.Module) -> dict[str, Tensor]:
    """Whole, as the model writes its parameters."""
    modules, found = dict(model.named_modules()), {}
    for view in buckets.views:
        name, _, own = view.name.rpartition(".")
        layout = getattr(modules[name], "layouts", {}).get(own)
        whole = gather_whole(view.gradient, view.spec)
        found[view.name] = whole if layout is None else layout.to_original(whole)
    return found


def errors(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> float:
    """The largest of differences / the norm of the reference; NaN if one is."""
    assert found.keys() == wanted.keys()
    norms = [0.0]
    for name, reference in wanted.items():
        ours = found[name]
        assert (ours is None) == (reference is None), name
        if ours is not None and reference is not None:
            assert ours.shape == reference.shape, name
            norms.append(float((ours - reference).norm() / reference.norm().clamp(min=1e-9)))
    return torch.tensor(norms).max().item()


def results(
    model: nn.Module, x: Tensor, buckets: GradientBuckets | None = None
) -> dict[str, Tensor | None]:
    """Output, and every gradient."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    if buckets is None:
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        parameters = [each for each in model.named_parameters() if each[1].requires_grad]
        gradients = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in parameters
        }
    else:
        with buckets.accumulate(is_last=True):
            output = model(x)
            loss_of(output).backward()
        gradients = gradients_of(buckets, model)
    return {"output": output.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_a_cut_model_is_the_model(world: int) -> None:
    """Also a copy of it, whose gradients go through autograd, where its own go into the buckets."""
    mesh, wrong = mesh_of_ranks(world), {}
    for name, case in RIGHT.items():
        model, x = built(case.make), inputs(case.of_ids)
        wanted = results(model, x)
        parallelize(model, case.plan, mesh, [x])
        twin = deepcopy(model)
        of_twin = GradientBuckets(twin)
        leave_to_autograd(twin)
        ways = {
            "copy": results(twin, x, of_twin),
            "buckets": results(model, x, GradientBuckets(model)),
        }
        with torch.no_grad():
            ways["no gradients"] = {**wanted, "output": model(x)}
        found = {(name, way): errors(each, wanted) for way, each in ways.items()}
        wrong |= {each: error for each, error in found.items() if not error < 1e-12}
    assert not wrong


def test_a_transposed_weight_on_one_rank_is_the_model_s_for_its_code() -> None:
    model = Layers(
        lambda m, x: m.transposed(x) + x @ m.transposed.weight, transposed=Conv1D(HIDDEN, HIDDEN)
    )
    model, x = built(lambda: model), inputs(False)
    wanted = results(model, x)
    buckets = GradientBuckets(parallelize(model, {"transposed": Row()}, mesh_of_ranks(1)))
    assert errors(results(model, x, buckets), wanted) < 1e-12


@on_ranks(2)
def test_layers_that_read_one_tensor_sum_its_gradient_once() -> None:
    """(collectives of forward and backward, warnings) with inputs, without, and if the model's code
    needs the values of its inputs."""

    def reading(m: Layers, x: Tensor) -> Tensor:
        return gated(m, x) if float(x.detach().sum()) else x

    mesh, found = mesh_of_ranks(2), []
    for forward, has_inputs in ((gated, True), (gated, False), (reading, True)):
        model, x = built(partial(with_gate, forward)), inputs(False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, GATED, mesh, [x] if has_inputs else None)
        with counting(mesh) as counts:
            model(x).sum().backward()
        found.append((counts.calls["tensor"], len(caught)))
    assert found == [(2, 0), (3, 0), (3, 1)]


@on_ranks(2)
def test_a_module_may_be_called_without_the_model() -> None:
    """Twice on a leaf: a backward leaves nothing of a call."""
    model, x = built(partial(with_gate, gated)), inputs(False)
    whole = {name: model.get_parameter(f"{name}.weight").detach() for name in ("up", "gate")}
    parallelize(model, GATED, mesh_of_ranks(2), [x])
    assert model.get_parameter("up.weight").shape[1] == HIDDEN
    for name in ("up", "gate", "up"):
        model.get_submodule(name)(x).sum().backward()
    wanted = (2 * whole["up"].sum(0) + whole["gate"].sum(0)).expand_as(x)
    assert x.grad is not None
    assert float((x.grad - wanted).norm() / wanted.norm()) < 1e-12


# Plans that do not cut rightly


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def held_in_a_list() -> nn.Module:
    model = pair()
    model.weights = [model.up.weight]  # type: ignore[assignment]
    return model


def registered_elsewhere() -> nn.Module:
    model = pair(lambda m, x: m.up(x) + m.other.sum())
    model.other = model.up.weight
    return model


def with_forward() -> nn.Module:
    model = pair()
    own = model.up.forward
    model.up.forward = lambda x: 2.0 * own(x)  # type: ignore[method-assign,assignment]
    return model


def heads_of_pair(**options: Any) -> Case:
    return Case(pair, {"up": Column(**options), "down": Row()})


def using(read: Callable[[Any, Tensor], Any], plan: Plan = PAIR) -> Case:
    """A model whose code computes with the weight of `up` outside of that module."""
    return Case(lambda: pair(read), plan)


ATTENTION = partial(nn.MultiheadAttention, HIDDEN, 4, batch_first=True)
# Models for which the plan, or at the latest the forward, raises an error that names this.
REFUSED = {
    "F.linear": ("up.weight", using(lambda m, x: F.linear(x, m.up.weight))),
    "a bias": ("up.bias", using(lambda m, x: m.up(x) + m.up.bias)),
    "from the right": ("up.weight", using(lambda m, x: (m.up.weight @ x.mT).mT)),
    "a transposed one": ("up.weight", using(lambda m, x: m.up.weight.T)),
    "element-wise": ("up.weight", using(lambda m, x: m.up(x) * (m.up.weight * 2).sum())),
    "from a number": ("up.weight", using(lambda m, x: m.up(x) + (1.0 - m.up.weight).sum())),
    "a part": ("up.weight", using(lambda m, x: m.up(x) + m.up.weight[0, 0])),
    "a norm": ("up.weight", using(lambda m, x: m.up(x) + m.up.weight.norm())),
    "its values": ("up.weight", using(lambda m, x: m.up(x) + m.up.weight.data.sum())),
    "its gradient": ("up.weight", using(lambda m, x: m.up.weight.grad)),
    "in a list": ("up.weight", using(lambda m, x: torch.cat([m.up.weight, m.up.weight]))),
    "initialisation": ("up.weight", using(lambda m, x: nn.init.normal_(m.up.weight))),
    "in place": ("up.weight", using(lambda m, x: m.up.weight.requires_grad_(False))),
    "weight_norm later": ("up.weight", using(lambda m, x: parametrizations.weight_norm(m.up)(x))),
    "registered on another module": ("other", Case(registered_elsewhere, PAIR)),
    "the same, with a sum of gradients": ("other", Case(registered_elsewhere, {"up": Summed()})),
    "heads that ranks share": (
        "up.weight",
        using(lambda m, x: x @ m.up.weight.T, {"up": Column(heads=1, queries=2), "down": Row()}),
    ),
    "a bias of own tokens": (
        "down.bias",
        using(lambda m, x: m.up(x) + m.down.bias.sum(), {**PAIR, "down": Row(tokens=True)}),
    ),
    "held in a list": (".weights", Case(held_in_a_list, PAIR)),
    "torch's attention, its output cut": (
        "out_proj",
        Case(
            lambda: Layers(lambda m, x: m.attention(x, x, x)[0], attention=ATTENTION()),
            {"attention.out_proj": Row()},
        ),
    ),
    "torch's attention, its weight cut": (
        "in_proj_weight",
        Case(lambda: nn.Sequential(ATTENTION()), {"*.in_proj_weight": Column(parts=3)}),
    ),
    "torch's attention": ("0", alone(ATTENTION, Column())),
    "a convolution": ("0", alone(lambda: nn.Conv1d(HIDDEN, HIDDEN, 1), Column())),
    "a norm by columns": ("0", alone(lambda: nn.LayerNorm(HIDDEN), Column())),
    "a matmul by vocabulary": ("up", Case(pair, {"up": Vocabulary()})),
    "a subclass with its own forward": ("0", alone(lambda: Doubled(HIDDEN, INNER), Column())),
    "a forward of its own": ("up", Case(with_forward, PAIR)),
    "prune": (
        "0",
        alone(lambda: prune.l1_unstructured(nn.Linear(HIDDEN, INNER), "weight", 0.5), Column()),
    ),
    "max_norm": ("max_norm", embedding(max_norm=1.0)),
    "scale_grad_by_freq": ("scale_grad_by_freq", embedding(scale_grad_by_freq=True)),
    "sparse": ("sparse", embedding(sparse=True)),
    "output features": ("0", alone(lambda: nn.Linear(HIDDEN, 9, bias=False), Column())),
    "input features": ("0.weight", alone(lambda: nn.Linear(9, HIDDEN), Row())),
    "channels": ("0", alone(lambda: nn.Embedding(9, 9), Column(gather=True))),
    "a tie that is cut in two ways": (
        "head.weight",
        Case(
            lambda: tied(nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, 16)),
            {"words": Vocabulary(), "head": Row()},
        ),
    ),
    "a tie to a matmul of another kind": (
        "head.weight",
        Case(
            lambda: tied(Conv1D(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)),
            {"words": Column(gather=True), "head": Column(gather=True)},
        ),
    ),
    "queries, keys and values in one": ("0", alone(lambda: Conv1D(3 * HIDDEN, HIDDEN), Column())),
    "no such module": ("upp", Case(pair, {"upp": Column()})),
    "no such attribute": ("heads", Case(pair, {"up": Local("heads")})),
    "no multiple": ("in_features", alone(lambda: nn.Linear(9, 4), Local("in_features"))),
    "no such move": ("up", Case(pair, {"up": Redistribute({0: ("tokens", "channels")}, {})})),
    "outputs by name": (
        "0",
        alone(lambda: Layers(lambda m, x: {"y": x}), Redistribute({}, {0: ("whole", "tokens")})),
    ),
    "no such input": ("up", Case(pair, {"up": Redistribute({"mask": ("whole", "tokens")}, {})})),
    "cut twice": ("up", Case(lambda: parallelize(pair(), PAIR, mesh_of_ranks(2)), PAIR)),
    "late, of a plan that is right so far": (
        "down",
        Case(pair, {"up": [Column(), Local("in_features")], "down": Column(heads=3, queries=6)}),
    ),
    "an object that is no style": ("up", Case(pair, {"up": 3})),
    "a word that is no style": ("up", Case(pair, {"up": "colum"})),
    "parts of an embedding": ("0", alone(lambda: nn.Embedding(8, 8), Column(3))),
    "tokens of an embedding": ("0", alone(lambda: nn.Embedding(8, 8), Column(tokens=True))),
    "parts of heads that ranks share": ("up", heads_of_pair(heads=1, queries=8, parts=2)),
    "gathered heads that ranks share": ("up", heads_of_pair(heads=1, queries=8, gather=True)),
    "heads that the output is not of": ("up", heads_of_pair(heads=3, queries=6)),
}


@on_ranks(2)
def test_plans_that_would_be_wrong_are_refused_by_name() -> None:
    mesh, wrong = mesh_of_ranks(2), []
    for name, (named, case) in REFUSED.items():
        model, x = built(case.make), inputs(case.of_ids)
        before, is_cut = parts(model), False
        try:
            parallelize(model, case.plan, mesh)
            is_cut = True
            error: Exception = refusal(partial(model, x), lines=9)
        except PlanError as refused:
            error = refused
        pattern = rf"(^|[ .']){re.escape(named.lstrip('.'))}\b"
        is_right = isinstance(error, PlanError | RuntimeError) and re.search(pattern, str(error))
        if not (is_right and (is_cut or parts(model) == before)):
            wrong.append(f"{name}: {error}")
    assert not wrong


def parts(model: nn.Module) -> list[Any]:
    """The parts of a model that `parallelize` changes."""
    return [
        (type(each), {k: v for k, v in vars(each).items() if isinstance(v, int)}, own)
        for each in model.modules()
        for own in [[id(parameter) for parameter in each.parameters(recurse=False)]]
    ]


class Transposed(nn.Module):
    """With every form of a weight; nothing says how it would be called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.qkv, self.square = Conv1D(3 * HIDDEN, HIDDEN), Conv1D(HIDDEN, HIDDEN)
        self.key, self.down = Conv1D(HIDDEN, HIDDEN), nn.Linear(INNER, HIDDEN)
        self.norm, self.head = nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.head.weight = self.words.weight


TRANSPOSED: Plan = {
    "words": Vocabulary(),
    "qkv": Column(parts=3),
    "square": Column(gather=True),
    "key": Column(heads=1, queries=4),  # as large as the whole on each rank, and transposed
    "down": Row(),
}


@on_ranks(2)
@torch.no_grad()
def test_weights_go_in_and_out_by_the_model_s_names() -> None:
    model = built(Transposed)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    parallelize(model, TRANSPOSED, mesh_of_ranks(2))
    shards = {name: each.clone() for name, each in model.state_dict().items()}

    def is_whole(model: nn.Module, wanted: Mapping[str, Tensor] = weights) -> bool:
        found = whole_state_dict(model)
        assert found["words.weight"] is found["head.weight"]
        same = (torch.equal(found[name], each) for name, each in wanted.items())
        return [*found] == [*wanted] and all(same)

    assert is_whole(model)
    with parameters_on_meta():
        empty = parallelize(Transposed(), TRANSPOSED, mesh_of_ranks(2))
    materialize(empty, device=torch.device("cpu"), dtype=torch.float64, seed=None)
    for state, each in product((shards, weights), (model, empty)):
        for parameter in each.parameters():
            parameter.zero_()
        each.load_state_dict(state)
        assert is_whole(each)
    wrong = {**weights, "square.weight": torch.zeros(3, 3)}
    wrong.pop("qkv.bias")
    refusal(lambda: model.load_state_dict(wrong), "square.weight", "qkv.bias", lines=9)
    narrow = {name: each.float() for name, each in weights.items() if each.is_floating_point()}
    assert is_whole(model.float(), weights | narrow)
