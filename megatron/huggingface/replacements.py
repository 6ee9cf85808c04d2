"""Replacements inside a model of transformers: attention and norms on our kernels, dropout by
coordinates, and fp64 arithmetic that is never narrowed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.huggingface.config import HuggingFaceConfig
from megatron.parallel.dropout import Dropout
from megatron.parallel.kernels import attention, layer_norm, rms_norm
from megatron.parallel.layers import AttentionCore


def unmodified(config: HuggingFaceConfig, auto_class: str) -> Any:
    """The model as transformers builds it, with its parameters on meta."""
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    transformers.utils.logging.set_verbosity_error()
    # Models call the attention of this name; its masks are bool, or None, as for torch's.
    AttentionInterface.register("megatron", run_attention)
    AttentionMaskInterface.register("megatron", sdpa_mask)
    described = transformers.AutoConfig.for_model(**json.loads(config.hf_config or "{}"))
    described.use_cache, described.dtype = False, "float32"  # initial values are drawn in fp32
    maker = getattr(transformers, auto_class)
    with torch.device("cpu"), parameters_on_meta():
        model = maker.from_config(described, attn_implementation="eager")
    model.set_attn_implementation("megatron")  # except models with their own attention code
    return model


SMALL = 1 << 18  # elements; up to this size a parameter's value from its constructor is kept whole


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters on meta, without memory until `materialize`. Their
    buffers keep their values, since nothing else would restore them: those of rotary positions are
    in no state_dict, and torch.device("meta") would lose them."""
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
class DropoutKeys:
    """Dropout keys of the batch's rows, for our layers inside a model of transformers."""

    keys: Tensor | None = None


class KernelDropout(nn.Module):
    """Replaces torch's Dropout: a function of coordinates, the same at every layout."""

    def __init__(
        self, dropout: Any, keys: DropoutKeys, widths: Collection[int], ranks: int
    ) -> None:
        """widths: last dims of activations that are whole on each rank. ranks: their number."""
        super().__init__()
        self.dropout, self.p, self.batch_keys = dropout, dropout.p, keys
        self.widths, self.ranks = widths, ranks

    def forward(self, x: Tensor) -> Tensor:
        keys, is_known = self.batch_keys.keys, self.ranks == 1 or x.shape[-1] in self.widths
        is_known &= keys is None or len(keys) == x.shape[:-1].numel()
        if self.training and not is_known:
            raise RuntimeError(
                f"{self.dropout.name} drops {self.p} of {list(x.shape)}, which are not the rows of "
                "the batch, or not all channels: a config.json without this dropout works"
            )
        return self.dropout(x, keys)


class KernelLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class KernelRMSNorm(nn.Module):
    """RMSNorm on our kernel, for classes of transformers that compute the same in seven operations,
    as Llama's does."""

    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    @torch.no_grad()
    def equals(cls, module: nn.Module) -> bool:
        """Whether a module, possibly on meta, computes the same; judged by its values."""
        names, arguments = [*module._parameters], signature(type(module).forward).parameters
        has_epsilon = isinstance(getattr(module, "variance_epsilon", None), float)
        if names != ["weight"] or not has_epsilon or len(arguments) != 2:
            return False
        weight = module._parameters["weight"]
        if weight is None or weight.dim() != 1:
            return False
        with torch.device("cpu"):
            draw = torch.Generator().manual_seed(0)
            values = torch.rand(weight.shape, generator=draw) + 0.5
            x = torch.randn(1, 16, len(weight), generator=draw)
            x *= torch.logspace(-4, 2, 16)[:, None]  # rows in which epsilon counts, and others
            probe = copy(module)
            for dtype in (torch.float32, torch.bfloat16):
                probe._parameters = {"weight": nn.Parameter(values.to(dtype))}
                theirs = type(module).forward(probe, x.to(dtype))
                ours = cls.forward(cast(Any, probe), x.to(dtype))
                # Another formula, such as 1 + weight, is off in fp32. Rounding at another place is
                # off in bf16; another order of additions alone turns less than 0.1 % of its values.
                tolerance = 1e-5 if dtype == torch.float32 else 0.0
                is_close = (theirs - ours).abs() <= tolerance * ours.abs()
                if theirs.dtype != dtype or is_close.float().mean() < 0.99:
                    return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        y = rms_norm(rows, self.weight, self.variance_epsilon, rounds_before_weight=True)
        return y.view(x.shape)


class KernelGELU(nn.Module):
    """GELU by tanh; transformers' NewGELUActivation keeps five tensors for it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


@cache  # one class for all modules of a class, so that their layers share a compiled graph
def _joined(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind, own), {})


def use_own_kernels(model: nn.Module) -> None:
    """Make norms and activations of known classes compute the same result in one operation."""
    from transformers.activations import NewGELUActivation

    for module in model.modules():
        own = type(module)
        kind: type[nn.Module] | None = None
        if own is nn.LayerNorm and module.elementwise_affine and module.bias is not None:
            kind = KernelLayerNorm
        elif own is NewGELUActivation:
            kind = KernelGELU
        elif KernelRMSNorm.equals(module):
            kind = KernelRMSNorm
        if kind is not None:
            module.__class__ = _joined(kind, own)  # type: ignore[arg-type]


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
    """Attention on our kernels, as models of transformers call it: q [b, a, s, d], k and v
    [b, g, m, d], mask bool or added to the scores; returns [b, s, a, d]."""
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
        # No fused kernel computes these: softcap c makes scores c tanh(scores / c), and each of
        # sinks [a] is one more score of its head, without a value.
        shared, count = query.shape[1] // key.shape[1], key.shape[2]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = query @ key.transpose(2, 3) * size**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        elif attention_mask is not None:
            scores = scores + attention_mask
        if sinks is not None:
            more = sinks.view(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, more], -1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(-1, dtype=wide)[..., :count].to(query.dtype)
        return (probabilities @ value).transpose(1, 2).contiguous(), None
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
        heads = core(query, key, value, attention_mask, causal, core.batch_keys.keys)
    return heads.transpose(1, 2).contiguous(), None


# Attributes of attention modules with the dropout probability that they pass to run_attention.
OF_ATTENTION = ("attention_dropout", "attn_dropout", "attn_pdrop", "dropout", "dropout_prob")

DROPPING = ("dropout", "layerdrop", "drop_path", "drop_prob")


def other_dropout(model: nn.Module) -> list[str]:
    """Dropout that is neither torch's Dropout nor on attention's probabilities, listed once for
    each class of module: "decoder.layers.0.dropout = 0.1"."""
    found: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_attention = hasattr(module, "megatron_core")
        for attribute, value in vars(module).items():
            is_named = any(word in attribute for word in DROPPING) or "Dropout" in kind
            is_own = isinstance(module, KernelDropout | Dropout | AttentionCore)
            is_own |= is_attention and attribute in OF_ATTENTION
            if is_named and not is_own and isinstance(value, float) and value > 0:
                found.setdefault((kind, attribute), f"{name}.{attribute} = {value:g}")
    return [*found.values()]
