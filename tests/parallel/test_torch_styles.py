"""Source C: the tutorial's Llama class, unmodified, with its dictionary of torch's styles, is the
model of one process and torch's own parallelize_module, in fp64."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron.huggingface.parallelize import parallelize
from megatron.huggingface.plan import Column, Local, PlanError
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.sharding import gather_whole
from tests.dist import on_ranks
from tests.parallel.test_parallelize import Layers, errors
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tools.layouts.meters import counting

WORDS, HIDDEN, HEADS, KV_HEADS, LAYERS, SAMPLES, TOKENS = 24, 32, 8, 4, 2, 2, 8


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """x [b, s, heads, d] by freqs_cis [s, d/2, 2]: cosines and sines."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (each[:, None] for each in freqs_cis.unbind(-1))
    return torch.stack([one * cos - two * sin, one * sin + two * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, kv_heads, HIDDEN // HEADS
        self.n_rep = HEADS // kv_heads
        self.wq = nn.Linear(HIDDEN, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(HIDDEN, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(HIDDEN, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, HIDDEN, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        xq = self.wq(x).view(bs, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bs, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bs, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        xk, xv = (
            each[:, :, :, None].expand(bs, seqlen, -1, self.n_rep, -1).flatten(2, 3)
            for each in (xk, xv)
        )
        q, k, v = (each.transpose(1, 2) for each in (xq, xk, xv))
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        mask = torch.full((seqlen, seqlen), float("-inf"), dtype=x.dtype).triu(1)
        if isinstance(scores, DTensor):  # torch computes with no tensor beside one
            mask = DTensor.from_local(mask, scores.device_mesh, [Replicate()], run_check=False)
        output = (F.softmax(scores + mask, dim=-1) @ v).transpose(1, 2).contiguous()
        return self.wo(output.view(bs, seqlen, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(kv_heads), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    freqs_cis: Tensor

    def __init__(self, layers: int, kv_heads: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(n): TransformerBlock(kv_heads) for n in range(layers)})
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.output = nn.Linear(HIDDEN, WORDS, bias=False)
        size = HIDDEN // HEADS
        angles = torch.outer(torch.arange(64.0), 10_000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("freqs_cis", torch.stack([angles.cos(), angles.sin()], dim=-1))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[: tokens.shape[1]]
        for layer in self.layers.values():
            h = layer(h, freqs_cis)
        return self.output(self.norm(h))


# The tutorial's dictionaries, of a block and of the model: first without sequence parallelism.
TENSOR_LAYER: dict[str, Any] = {
    "attention": PrepareModuleInput(
        input_layouts=(Replicate(), Replicate()), desired_input_layouts=(Replicate(), Replicate())
    ),
    "attention.wq": ColwiseParallel(use_local_output=False),
    "attention.wk": ColwiseParallel(use_local_output=False),
    "attention.wv": ColwiseParallel(use_local_output=False),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
}
TENSOR_MODEL: dict[str, Any] = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
    "output": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE_LAYER = TENSOR_LAYER | {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate())
    ),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}
SEQUENCE_MODEL: dict[str, Any] = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
PLANS = {"tensor": (TENSOR_LAYER, TENSOR_MODEL), "sequence": (SEQUENCE_LAYER, SEQUENCE_MODEL)}


def of_model(layer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return {**model, **{f"layers.*.{name}": style for name, style in layer.items()}}


def own_heads(name: str) -> dict[str, Any]:
    """Ranks keep columns, and the class counts heads by attributes; what PrepareModuleInput says of
    attention stays."""
    plan = of_model(*PLANS[name])
    prepared = plan.pop("layers.*.attention")
    for each in "qkv":
        del plan[f"layers.*.attention.w{each}"]
    return plan | {
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention": [prepared, Local("n_heads", "n_kv_heads")],
    }


def built(layers: int = LAYERS, kv_heads: int = KV_HEADS) -> Transformer:
    torch.manual_seed(1)
    return Transformer(layers, kv_heads).double()


IDS = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))


def backward(model: nn.Module) -> Tensor:
    logits = model(IDS)
    F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
    return logits.detach()


Found = dict[str, Tensor]


def serial(model: nn.Module) -> Found:
    return {"logits": backward(model), **{n: p.grad for n, p in model.named_parameters()}}


def ours(world: int, name: str, way: str) -> Found:
    mesh, model = mesh_of_ranks(world), built()
    layer, whole = PLANS[name]
    if way == "one dictionary":
        parallelize(model, of_model(layer, whole), mesh, [IDS])
    elif way == "own heads":
        parallelize(model, own_heads(name), mesh, [IDS])
    else:  # as the tutorial has it
        parallelize(model, whole, mesh)
        for block in model.layers.values():
            parallelize(block, layer, mesh)
    return of_buckets(model)


def of_buckets(model: nn.Module, run: Callable[[nn.Module], Tensor | None] = backward) -> Found:
    """Whole gradients, and the logits if `run` returns any."""
    buckets = GradientBuckets(model)
    with buckets.accumulate(is_last=True):
        logits = run(model)
    found = {view.name: gather_whole(view.gradient, view.spec) for view in buckets.views}
    return found if logits is None else {"logits": logits, **found}


def torchs(world: int, name: str) -> Found:
    mesh, model = init_device_mesh("cpu", (world,)), built()
    layer, whole = PLANS[name]
    parallelize_module(model, mesh, whole)
    for block in model.layers.values():
        parallelize_module(block, mesh, layer)
    found = {"logits": backward(model)}
    for key, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        found[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


@pytest.mark.parametrize("name", PLANS)
@on_ranks(2)
def test_the_tutorial_s_dictionary_is_one_process(name: str) -> None:
    wanted = serial(built())
    for way in ("one dictionary", "block by block", "own heads"):
        assert errors(ours(2, name, way), wanted) < 1e-13, way
    assert errors(torchs(2, name), wanted) < 1e-13, "torch's parallelize_module"


@pytest.mark.parametrize("name", PLANS)
@on_ranks(4)
def test_fewer_heads_than_ranks_are_shared(name: str) -> None:
    """Each of 4 ranks computes the one of 2 key/value heads that its 2 queries need."""
    plan = own_heads(name) | {"layers.*.attention.w[kv]": Column(heads=2, queries=HEADS)}
    prepared, _ = plan["layers.*.attention"]
    plan["layers.*.attention"] = [prepared, Local("n_heads", n_kv_heads=1, n_rep=2)]
    model = parallelize(built(kv_heads=2), plan, mesh_of_ranks(4))
    assert errors(of_buckets(model), serial(built(kv_heads=2))) < 1e-13


@pytest.mark.parametrize(("name", "calls"), [("tensor", 4), ("sequence", 8)])
@pytest.mark.parametrize(
    ("world", "has_own_heads"), [(4, True), (2, False)], ids=["own heads", "whole heads"]
)
@on_ranks("world")
def test_a_layer_sends_what_its_form_has_to(
    world: int, has_own_heads: bool, name: str, calls: int
) -> None:
    """Four all-reduces of b s h; or four gathers and four reduce-scatters, half as long each. With
    whole heads, q, k and v (half of q each) are gathered in the forward, and in the backward the
    input of the row layer."""
    stream, passes = SAMPLES * TOKENS * HIDDEN * 8, 8
    plan = own_heads(name)
    if not has_own_heads:
        plan, calls, passes = of_model(*PLANS[name]), calls + 4, 8 + 1 + 2 * KV_HEADS // HEADS + 1
    counts = []
    for layers in (1, 2):
        mesh, model = mesh_of_ranks(world), built(layers)
        parallelize(model, plan, mesh, [IDS])
        with counting(mesh) as found:
            backward(model)
        counts.append((found.calls["tensor"], found.sent_bytes["tensor"]))
    (one, sent), (two, sent_by_two) = counts
    assert (two - one, sent_by_two - sent) == (calls, passes * (world - 1) * stream // world)


class Mine(ColwiseParallel):
    """It could do anything."""


GLOBAL = {"use_local_output": False}
whole, tokens, channels = Replicate(), Shard(1), Shard(-1)


def taking(one: Any, other: Any, **options: Any) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=one, desired_input_layouts=other, **options)


def giving(one: Any, other: Any, **options: Any) -> PrepareModuleOutput:
    return PrepareModuleOutput(output_layouts=one, desired_output_layouts=other, **options)


def both(taken: Any, given: Any, **options: Any) -> PrepareModuleInputOutput:
    """taken, given: (layouts, desired ones)."""
    return PrepareModuleInputOutput(
        input_layouts=taken[0],
        desired_input_layouts=taken[1],
        use_local_input=True,
        output_layouts=given[0],
        desired_output_layouts=given[1],
        **options,
    )


# (module, its style) which no style of ours means.
REFUSED: list[tuple[str, Any]] = [
    ("output", ColwiseParallel(output_layouts=tokens)),
    ("output", ColwiseParallel(input_layouts=Shard(0))),
    ("output", ColwiseParallel(input_layouts=channels)),
    ("output", ColwiseParallel(output_layouts=Partial())),
    ("output", RowwiseParallel(input_layouts=tokens)),
    ("output", RowwiseParallel(output_layouts=channels)),
    ("output", RowwiseParallel(output_layouts=Partial())),
    ("output", RowwiseParallel(output_layouts=tokens, **GLOBAL)),
    ("norm", SequenceParallel(sequence_dim=0)),
    ("norm", SequenceParallel(sequence_dim=2)),
    ("norm", taking(whole, tokens, **GLOBAL)),
    ("norm", taking(Shard(0), whole)),
    ("norm", taking(tokens, channels, use_local_output=True)),
    ("norm", giving(whole, tokens, **GLOBAL)),
    ("norm", both((tokens, whole), (whole, tokens), **GLOBAL)),
    ("output", Mine()),
    ("norm", ColwiseParallel()),
    ("layers", ColwiseParallel()),
]


@pytest.mark.parametrize(("name", "style"), REFUSED)
def test_a_style_that_no_style_of_ours_means_is_refused_by_name(name: str, style: Any) -> None:
    error = refusal(lambda: parallelize(built(1), {name: style}, mesh_of_ranks(1)))
    assert isinstance(error, PlanError)
    assert field_of(error) == name


@pytest.mark.parametrize("in_one", [False, True])
@on_ranks(2)
def test_inputs_and_outputs_are_moved_by_name(in_one: bool) -> None:
    """By names of arguments, of outputs, and of what is None."""

    class Middle(nn.Module):
        def forward(self, x: Tensor, *, other: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
            assert mask is None
            assert x.shape[1] == TOKENS // 2
            return x * other, x.sum(-1, keepdim=True)

    torch.manual_seed(1)
    model = Layers(
        lambda m, x: torch.add(*m.middle(m.first(x), other=x, mask=None)),
        first=nn.Linear(4, 4),
        middle=Middle(),
    ).double()
    x, reference = torch.randn(2, TOKENS, 4).double(), deepcopy(model.first)
    y = reference(x)
    (y * x + y.sum(-1, keepdim=True)).square().sum().backward()
    by_name = {
        "input_kwarg_layouts": {"other": whole, "mask": whole},
        "desired_input_kwarg_layouts": {"other": tokens, "mask": tokens},
    }
    moves: Any = [
        taking((whole,), (tokens,), use_local_output=True, **by_name),
        giving((tokens, tokens), (whole, whole)),
    ]
    if in_one:
        moves = both(((whole,), (tokens,)), ((tokens, tokens), (whole, whole)), **by_name)
    parallelize(model, {"middle": moves}, mesh_of_ranks(2))
    model(x).square().sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 1e-13 * b.grad.norm()


@on_ranks(2)
def test_norm_and_dropout_run_on_own_tokens() -> None:
    """SequenceParallel of a norm and of a dropout, which has no parameters and here drops none."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)).double().eval()
    wanted, x = deepcopy(model), torch.randn(2, TOKENS, 4).double()
    wanted(x).square().sum().backward()
    plan = {
        "1": [taking(whole, tokens, use_local_output=True), SequenceParallel()],
        "2": [SequenceParallel(), giving(tokens, whole)],
    }
    widths: list[int] = []
    model[2].register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    parallelize(model, plan, mesh_of_ranks(2))
    found = of_buckets(model, lambda model: model(x).square().sum().backward())
    assert widths == [TOKENS // 2]
    assert errors(found, {name: each.grad for name, each in wanted.named_parameters()}) < 1e-13
