"""Source C: an unmodified Llama with the tutorial's dictionary of torch's styles is the model of
one process, in fp64. torch's own parallelism is in tests/tools/convert/legacy/test_dcp.py."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from megatron.huggingface.parallelize import parallelize
from megatron.huggingface.plan import PlanError
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.sharding import gather_whole
from tests import plain
from tests.dist import on_ranks
from tests.parallel.test_parallelize import Layers, errors
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tools.layouts.meters import counting

WORDS, HIDDEN, HEADS, KV_HEADS, LAYERS, SAMPLES, TOKENS = 24, 32, 8, 4, 2, 2, 8
whole, tokens, channels = Replicate(), Shard(1), Shard(-1)
# The tutorial's dictionaries, of a block and of the model: first without sequence parallelism.
TENSOR_LAYER: dict[str, Any] = {
    "self_attn": PrepareModuleInput(
        input_layouts=(whole, None), desired_input_layouts=(whole, None)
    ),
    "self_attn.q_proj": ColwiseParallel(use_local_output=False),
    "self_attn.k_proj": ColwiseParallel(use_local_output=False),
    "self_attn.v_proj": ColwiseParallel(use_local_output=False),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
TENSOR_MODEL: dict[str, Any] = {
    "embed_tokens": RowwiseParallel(input_layouts=whole),
    "lm_head": ColwiseParallel(output_layouts=whole),
}
SEQUENCE_LAYER = TENSOR_LAYER | {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_layouts=(tokens, None), desired_input_layouts=(whole, None)
    ),
    "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
    "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
}
SEQUENCE_MODEL: dict[str, Any] = {
    "embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
    "norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
}
PLANS = {"tensor": (TENSOR_LAYER, TENSOR_MODEL), "sequence": (SEQUENCE_LAYER, SEQUENCE_MODEL)}


def of_model(name: str, has_own_heads: bool = False) -> dict[str, Any]:
    """One dictionary. has_own_heads: the class sees the heads of this rank, and not all."""
    layer, model = PLANS[name]
    if has_own_heads:
        layer = layer | {f"self_attn.{each}_proj": ColwiseParallel() for each in "qkv"}
    return model | {f"layers.*.{name}": style for name, style in layer.items()}


def built(layers: int = LAYERS) -> plain.Llama:
    torch.manual_seed(1)
    sizes = {"heads": HEADS, "groups": KV_HEADS, "inner": 2 * HIDDEN}
    return plain.Llama(WORDS, HIDDEN, layers, **sizes).double()


IDS = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))


def backward(model: nn.Module) -> Tensor:
    logits = model(IDS)
    F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
    return logits.detach()


def of_buckets(
    model: nn.Module, run: Callable[[nn.Module], Tensor | None] = backward
) -> dict[str, Tensor]:
    """Whole gradients, and the logits if `run` returns any."""
    buckets = GradientBuckets(model)
    with buckets.accumulate(is_last=True):
        logits = run(model)
    found = {view.name: gather_whole(view.gradient, view.spec) for view in buckets.views}
    return found if logits is None else {"logits": logits, **found}


@pytest.mark.parametrize("name", PLANS)
@on_ranks(2)
def test_the_tutorial_s_dictionary_is_one_process(name: str) -> None:
    """In one call, block by block as the tutorial has it, and with heads that ranks divide."""
    mesh, alone, by_blocks = mesh_of_ranks(2), built(), built()
    layer, model = PLANS[name]
    parallelize(by_blocks, model, mesh)
    for block in by_blocks.layers:
        parallelize(block, layer, mesh)
    plans = (of_model(name), of_model(name, has_own_heads=True))
    parallel = [by_blocks, *(parallelize(built(), plan, mesh, [IDS]) for plan in plans)]
    wanted: Mapping[str, Any] = {"logits": backward(alone)}
    wanted |= {n: p.grad for n, p in alone.named_parameters()}
    for way, each in zip(("by blocks", "in one call", "own heads"), parallel, strict=True):
        assert errors(of_buckets(each), wanted) < 1e-13, way


@pytest.mark.parametrize(("name", "calls"), [("tensor", 4), ("sequence", 8)])
@on_ranks(2)
def test_a_layer_sends_what_its_form_has_to(name: str, calls: int) -> None:
    """Four all-reduces of b s h; or four gathers and four reduce-scatters, half as long each. With
    whole heads, q, k and v (half of q each) are gathered in the forward, and in the backward the
    input of the row layer."""
    mesh, stream = mesh_of_ranks(2), SAMPLES * TOKENS * HIDDEN * 8
    whole_heads = (calls + 4, 8 + 1 + 2 * KV_HEADS // HEADS + 1)
    for has_own_heads, (more, passes) in ((True, (calls, 8)), (False, whole_heads)):
        counts = []
        for layers in (1, 2):
            model = parallelize(built(layers), of_model(name, has_own_heads), mesh, [IDS])
            with counting(mesh) as found:
                backward(model)
            counts.append((found.calls["tensor"], found.sent_bytes["tensor"]))
        (one, sent), (two, sent_by_two) = counts
        assert (two - one, sent_by_two - sent) == (more, passes * stream // 2), has_own_heads


class Mine(ColwiseParallel):
    """It could do anything."""


GLOBAL = {"use_local_output": False}


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
    ("lm_head", ColwiseParallel(output_layouts=tokens)),
    ("lm_head", ColwiseParallel(input_layouts=Shard(0))),
    ("lm_head", ColwiseParallel(input_layouts=channels)),
    ("lm_head", ColwiseParallel(output_layouts=Partial())),
    ("lm_head", RowwiseParallel(input_layouts=tokens)),
    ("lm_head", RowwiseParallel(output_layouts=channels)),
    ("lm_head", RowwiseParallel(output_layouts=Partial())),
    ("lm_head", RowwiseParallel(output_layouts=tokens, **GLOBAL)),
    ("norm", SequenceParallel(sequence_dim=0)),
    ("norm", SequenceParallel(sequence_dim=2)),
    ("norm", taking(whole, tokens, **GLOBAL)),
    ("norm", taking(Shard(0), whole)),
    ("norm", taking(tokens, channels, use_local_output=True)),
    ("norm", giving(whole, tokens, **GLOBAL)),
    ("norm", both((tokens, whole), (whole, tokens), **GLOBAL)),
    ("lm_head", Mine()),
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
