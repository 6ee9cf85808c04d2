"""What a model's code does with parameters that a plan cuts is refused by name where it would be
wrong; and its weights go in and out by its own names."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
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
from megatron.parallel.initialize import materialize
from tests.dist import Pool
from tests.parallel.test_parallelize import (
    HIDDEN,
    INNER,
    PAIR,
    WORDS,
    Case,
    Layers,
    Pair,
    built,
    inputs,
    linear,
    sequential,
    tied,
)
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

CPU = torch.device("cpu")


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def held_in_a_list() -> nn.Module:
    model = Pair()
    model.weights = [model.up.weight]  # type: ignore[assignment]
    return model


def registered_elsewhere(read: Callable[[Any], Any]) -> nn.Module:
    model = Pair(lambda m, x: m.up(x) + read(m))
    model.other = model.up.weight
    return model


def with_forward() -> nn.Module:
    model = Pair()
    own = model.up.forward
    model.up.forward = lambda x: 2.0 * own(x)  # type: ignore[method-assign,assignment]
    return model


def pruned() -> nn.Module:
    model = Pair()
    prune.l1_unstructured(model.up, "weight", amount=0.5)
    return model


def embedding(**options: Any) -> Case:
    return Case(lambda: nn.Embedding(WORDS, HIDDEN, **options), {"": Vocabulary()}, of_ids=True)


def alone(make: Callable[[], nn.Module], style: Any) -> Case:
    return Case(lambda: sequential(make()), {"0": style})


def heads_of_pair(**options: Any) -> Case:
    return Case(Pair, {"up": Column(**options), "down": Row()})


def using(read: Callable[[Any, Tensor], Any], plan: Plan = PAIR) -> Case:
    """A model whose code computes with the weight of `up` outside of that module."""
    return Case(lambda: Pair(read), plan)


ATTENTION = partial(nn.MultiheadAttention, HIDDEN, 4, batch_first=True)
# Of each of these the plan, or at the latest the forward, raises an error that names this.
REFUSED = {
    "F.linear": ("up.weight", using(lambda m, x: F.linear(x, m.up.weight))),
    "a bias": ("up.bias", using(lambda m, x: m.up(x) + m.up.bias)),
    "a matmul": ("up.weight", using(lambda m, x: x @ m.up.weight.T)),
    "from the right": ("up.weight", using(lambda m, x: (m.up.weight @ x.mT).mT)),
    "a transposed one": ("up.weight", using(lambda m, x: m.up.weight.T)),
    "einsum": ("up.weight", using(lambda m, x: torch.einsum("bsi,oi->bso", x, m.up.weight))),
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
    "prune later": (
        "up.weight",
        using(lambda m, x: prune.l1_unstructured(m.up, "weight", amount=0.5)(x)),
    ),
    "registered on another module": (
        "other",
        Case(partial(registered_elsewhere, lambda m: m.other.sum()), PAIR),
    ),
    "registered on another module, with a sum of gradients": (
        "other",
        Case(partial(registered_elsewhere, lambda m: m.other.sum()), {"up": Summed()}),
    ),
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
        Case(lambda: sequential(ATTENTION()), {"*.in_proj_weight": Column(parts=3)}),
    ),
    "torch's attention": ("0", alone(ATTENTION, Column())),
    "a convolution": ("0", alone(lambda: nn.Conv1d(HIDDEN, HIDDEN, 1), Column())),
    "a norm by columns": ("0", alone(lambda: nn.LayerNorm(HIDDEN), Column())),
    "a matmul by vocabulary": ("up", Case(Pair, {"up": Vocabulary()})),
    "a subclass with its own forward": ("0", alone(lambda: Doubled(HIDDEN, INNER), Column())),
    "a forward of its own": ("up", Case(with_forward, PAIR)),
    "weight_norm": (
        "0",
        alone(lambda: parametrizations.weight_norm(linear(HIDDEN, INNER)), Column()),
    ),
    "prune": ("up", Case(pruned, PAIR)),
    "max_norm": ("max_norm", embedding(max_norm=1.0)),
    "scale_grad_by_freq": ("scale_grad_by_freq", embedding(scale_grad_by_freq=True)),
    "sparse": ("sparse", embedding(sparse=True)),
    "output features": ("0", alone(lambda: linear(HIDDEN, 9, bias=False), Column())),
    "input features": ("0.weight", alone(lambda: linear(9, HIDDEN), Row())),
    "channels": ("0", alone(lambda: nn.Embedding(9, 9), Column(gather=True))),
    "a tie that is cut in two ways": (
        "head.weight",
        Case(
            lambda: tied(nn.Embedding(16, HIDDEN), linear(HIDDEN, 16)),
            {"words": Vocabulary(), "head": Row()},
        ),
    ),
    "a tie to a matmul of another kind": (
        "head.weight",
        Case(
            lambda: Layers(
                lambda m, x: m.head(m.transposed(x)),
                transposed=(transposed := Conv1D(HIDDEN, HIDDEN)),
                head=same_weight(linear(HIDDEN, HIDDEN), transposed),
            ),
            {"transposed": Column(gather=True), "head": Column(gather=True)},
        ),
    ),
    "queries, keys and values in one": ("0", alone(lambda: Conv1D(3 * HIDDEN, HIDDEN), Column())),
    "no such module": ("upp", Case(Pair, {"upp": Column()})),
    "no such attribute": ("heads", Case(Pair, {"up": Local("heads")})),
    "an attribute that is no multiple": (
        "in_features",
        alone(lambda: linear(9, 4), Local("in_features")),
    ),
    "no such move": ("up", Case(Pair, {"up": Redistribute({0: ("tokens", "channels")}, {})})),
    "outputs by name": (
        "0",
        alone(lambda: Layers(lambda m, x: {"y": x}), Redistribute({}, {0: ("whole", "tokens")})),
    ),
    "no such input": ("up", Case(Pair, {"up": Redistribute({"mask": ("whole", "tokens")}, {})})),
    "cut twice": (
        "up",
        Case(lambda: parallelize(Pair(), PAIR, mesh_of_ranks(2)), {"up": Column()}),
    ),
    "late, of a plan that is right so far": (
        "down",
        Case(Pair, {"up": [Column(), Local("in_features")], "down": Column(heads=3, queries=6)}),
    ),
    "an object that is no style": ("up", Case(Pair, {"up": 3})),
    "a word that is no style": ("up", Case(Pair, {"up": "colum"})),
    "parts of an embedding": ("0", alone(lambda: nn.Embedding(8, 8), Column(3))),
    "tokens of an embedding": ("0", alone(lambda: nn.Embedding(8, 8), Column(tokens=True))),
    "parts of heads that ranks share": ("up", heads_of_pair(heads=1, queries=8, parts=2)),
    "gathered heads that ranks share": ("up", heads_of_pair(heads=1, queries=8, gather=True)),
    "heads that the output is not of": ("up", heads_of_pair(heads=3, queries=6)),
}


def same_weight(module: Any, other: nn.Module) -> Any:
    module.weight = other.weight
    return module


def check_refused() -> list[str]:
    """Names of cases of REFUSED whose error does not name what it should."""
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
    return wrong


def parts(model: nn.Module) -> list[Any]:
    """What `parallelize` changes of a model."""
    return [
        (type(each), {k: v for k, v in vars(each).items() if isinstance(v, int)}, own)
        for each in model.modules()
        for own in [[id(parameter) for parameter in each.parameters(recurse=False)]]
    ]


def test_plans_that_would_be_wrong_are_refused_by_name(gloo: Pool) -> None:
    assert gloo.run(2, check_refused) == [[], []]


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


@torch.no_grad()
def check_states(world: int) -> dict[str, bool]:
    """Ways to give the model its weights, each from zero, and whether it has them then."""
    model = built(Transposed)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    parallelize(model, TRANSPOSED, mesh_of_ranks(world))
    shards = {name: each.clone() for name, each in model.state_dict().items()}

    def is_whole(model: nn.Module, wanted: Mapping[str, Tensor] = weights) -> bool:
        found = whole_state_dict(model)
        assert found["words.weight"] is found["head.weight"]
        same = (torch.equal(found[name], each) for name, each in wanted.items())
        return [*found] == [*wanted] and all(same)

    found = {"cut in place": is_whole(model)}
    with parameters_on_meta():
        empty = parallelize(Transposed(), TRANSPOSED, mesh_of_ranks(world))
    materialize(empty, device=CPU, dtype=torch.float64, seed=None)
    for name, state in {"shards": shards, "whole": weights}.items():
        for each in (model, empty):
            for parameter in each.parameters():
                parameter.zero_()
            each.load_state_dict(state)
            found[f"{name} {each is model}"] = is_whole(each)
    wrong = {**weights, "square.weight": torch.zeros(3, 3)}
    wrong.pop("qkv.bias")
    error = refusal(lambda: model.load_state_dict(wrong), lines=9)
    assert "square.weight" in str(error)
    assert "qkv.bias" in str(error)
    narrow = {
        name: each.float() if each.is_floating_point() else each for name, each in weights.items()
    }
    return {**found, "another dtype": is_whole(model.float(), narrow)}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_go_in_and_out_by_the_model_s_names(gloo: Pool, world: int) -> None:
    for found in gloo.run(world, check_states, world):
        assert len(found) == 6
        assert [name for name, is_right in found.items() if not is_right] == []
