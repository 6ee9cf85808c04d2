"""What a model of transformers runs on here: attention and norms on our kernels, dropout by
coordinates, fp64 that stays so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron.parallel.dropout import Dropout
from megatron.parallel.kernels import attention, layer_norm, rms_norm
from megatron.parallel.layers import AttentionCore


class Wide(TorchFunctionMode):
    """Under it no tensor of fp64 is narrowed to fp32, as transformers' models do in an RMSNorm, of
    rotary positions, in a softmax: of models that are equal results would differ by 1e-7."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_wide and func is Tensor.float:
            return args[0]
        if is_wide and func in (Tensor.to, Tensor.type, Tensor.softmax, torch.softmax, F.softmax):

            def widened(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            args = tuple(map(widened, args))
            kwargs = {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


SMALL = 1 << 18  # elements of a parameter that is kept as its constructor makes it


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have parameters on meta, without memory, until `materialize`
    gives it; their buffers have values, which nothing else would give them: those of rotary
    positions are in no state_dict, and torch.device("meta") would lose them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            value = param.detach()
            param = nn.Parameter(value.to("meta"), requires_grad=param.requires_grad)
            is_small = value.numel() <= SMALL
            param.made = value.clone() if is_small else value.flatten()[:1].clone()  # type: ignore[attr-defined]
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class BatchRows:
    """What layers of ours inside such a model know of the batch: keys of its rows, for dropout."""

    keys: Tensor | None = None


class PlannedDropout(nn.Module):
    """In the place of torch's Dropout: by coordinates, the same at every layout."""

    def __init__(self, dropout: Any, rows: BatchRows, widths: Collection[int], ranks: int) -> None:
        """widths: of what is whole on each of so many ranks."""
        super().__init__()
        self.dropout, self.p, self.rows = dropout, dropout.p, rows
        self.widths, self.ranks = widths, ranks

    def forward(self, x: Tensor) -> Tensor:
        keys, is_known = self.rows.keys, self.ranks == 1 or x.shape[-1] in self.widths
        is_known &= keys is None or len(keys) == x.shape[:-1].numel()
        if self.training and not is_known:
            raise RuntimeError(
                f"{self.dropout.name} drops {self.p} of {list(x.shape)}, which are not the rows of "
                "the batch, or not all channels: a config.json without this dropout works"
            )
        dropped: Tensor = self.dropout(x, keys)
        return dropped


class KernelLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class KernelRMSNorm(nn.Module):
    """Of transformers' classes that are RMSNorm as Llama has it, which compose it of seven
    operations."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        y = rms_norm(rows, self.weight, self.variance_epsilon, rounds_before_weight=True)
        return y.view(x.shape)


class KernelGELU(nn.Module):
    """GELU by tanh, of which transformers' NewGELUActivation keeps five tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def use_own_kernels(model: nn.Module) -> None:
    """Let norms and activations of classes that are known compute the same in one operation."""
    from transformers.activations import NewGELUActivation
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def code(kind: type) -> tuple[Any, ...]:
        found = unwrap(kind.forward).__code__  # type: ignore[attr-defined]
        return found.co_code, found.co_names, found.co_consts

    for module in model.modules():
        own = type(module)
        kind: type[nn.Module] | None = None
        if own is nn.LayerNorm and module.elementwise_affine and module.bias is not None:
            kind = KernelLayerNorm
        elif own is NewGELUActivation:
            kind = KernelGELU
        elif code(own) == code(LlamaRMSNorm):
            kind = KernelRMSNorm
        if kind is not None:
            module.__class__ = type(kind.__name__, (kind, own), {})


def run_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it, on our kernels: q [b, a, s, d], k and v
    [b, g, m, d], mask bool or added to the scores, to [b, s, a, d]."""
    if others.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__}: attention with position_bias")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    size, softcap, sinks = query.shape[-1], others.get("softcap"), others.get("s_aux")
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)
    if causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    is_added = attention_mask is not None and attention_mask.is_floating_point()
    if softcap is not None or sinks is not None or is_added:
        if dropout:
            what = "capped scores, sinks or a mask that is added to scores"
            raise NotImplementedError(f"{type(module).__name__}: attention dropout with {what}")
        if causal:
            attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        heads = attention_by_scores(query, key, value, attention_mask, softcap, sinks)
        return heads.transpose(1, 2).contiguous(), None
    core: Any = getattr(module, "megatron_core", None)
    if core is None and dropout:
        raise NotImplementedError(f"{type(module).__name__}: attention dropout of such a class")
    own = query.shape[1]
    if dropout and core.heads not in (None, own, own * core.mesh.tensor.size):
        raise RuntimeError(
            f"{core.name} drops {dropout} of {own} heads on each rank, which are no share of "
            f"{core.heads}: a config.json without this dropout works"
        )
    if core is None:
        heads = attention(query, key, value, attention_mask, dropout, causal)
    else:
        core.dropout = dropout
        heads = core(query, key, value, attention_mask, causal, core.rows.keys)
    return heads.transpose(1, 2).contiguous(), None


def attention_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[b, a, s, d], with scores c tanh(scores / c) of softcap c: what no fused kernel computes.
    mask: bool, or added to the scores. sinks: [a], a score more of each head, of no value."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=wide)[..., : key.shape[2]]
    return shares.to(query.dtype) @ value


# What the attention of a model calls the probability that it gives to run_attention.
OF_ATTENTION = ("attention_dropout", "attn_dropout", "attn_pdrop", "dropout", "dropout_prob")

DROPPING = ("dropout", "layerdrop", "drop_path", "drop_prob")


def other_dropout(model: nn.Module) -> list[str]:
    """What drops at random and is neither torch's Dropout nor of attention's probabilities, once
    for each class of module: "decoder.layers.0.dropout = 0.1"."""
    found: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_attention = hasattr(module, "megatron_core")
        for attribute, value in vars(module).items():
            is_named = any(word in attribute for word in DROPPING) or "Dropout" in kind
            is_own = isinstance(module, PlannedDropout | Dropout | AttentionCore)
            is_own |= is_attention and attribute in OF_ATTENTION
            if is_named and not is_own and isinstance(value, float) and value > 0:
                found.setdefault((kind, attribute), f"{name}.{attribute} = {value:g}")
    return [*found.values()]


def register_attention() -> None:
    """Make `run_attention` known to transformers as "megatron"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("megatron", run_attention)
    AttentionMaskInterface.register("megatron", sdpa_mask)
