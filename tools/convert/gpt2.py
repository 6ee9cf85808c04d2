"""GPT-2 as transformers' GPT2LMHeadModel has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.config.model import GPT2Config
from tools.convert.byte_pairs import BYTE_PAIRS
from tools.convert.table import (
    AS_IS,
    Choice,
    Family,
    Option,
    Row,
    Setting,
    Spare,
    Transform,
    always,
    is_same,
)

if TYPE_CHECKING:
    from torch import Tensor

# Theirs is [in, out], ours [out, in]; the fused QKV is [in, 3h], columns [Q K V], and [3, h, in].
CONV1D = Transform(
    lambda ours: (ours.flatten(0, -2).t(),), lambda theirs, shape: theirs[0].t().reshape(shape)
)
FLAT = Transform(lambda ours: (ours.flatten(),), lambda theirs, shape: theirs[0].reshape(shape))

ROWS = (
    Row("word_embedding.weight", ("wte.weight",), AS_IS),
    Row("position_embedding.weight", ("wpe.weight",), AS_IS),
    Row("transformer.layers.{n}.attention_norm.weight", ("h.{n}.ln_1.weight",), AS_IS),
    Row("transformer.layers.{n}.attention_norm.bias", ("h.{n}.ln_1.bias",), AS_IS),
    Row("transformer.layers.{n}.attention.qkv.weight", ("h.{n}.attn.c_attn.weight",), CONV1D),
    Row("transformer.layers.{n}.attention.qkv.bias", ("h.{n}.attn.c_attn.bias",), FLAT),
    Row("transformer.layers.{n}.attention.output.weight", ("h.{n}.attn.c_proj.weight",), CONV1D),
    Row("transformer.layers.{n}.attention.output.bias", ("h.{n}.attn.c_proj.bias",), AS_IS),
    Row("transformer.layers.{n}.mlp_norm.weight", ("h.{n}.ln_2.weight",), AS_IS),
    Row("transformer.layers.{n}.mlp_norm.bias", ("h.{n}.ln_2.bias",), AS_IS),
    Row("transformer.layers.{n}.mlp.up.weight", ("h.{n}.mlp.c_fc.weight",), CONV1D),
    Row("transformer.layers.{n}.mlp.up.bias", ("h.{n}.mlp.c_fc.bias",), AS_IS),
    Row("transformer.layers.{n}.mlp.down.weight", ("h.{n}.mlp.c_proj.weight",), CONV1D),
    Row("transformer.layers.{n}.mlp.down.bias", ("h.{n}.mlp.c_proj.bias",), AS_IS),
    Row("final_norm.weight", ("ln_f.weight",), AS_IS),
    Row("final_norm.bias", ("ln_f.bias",), AS_IS),
    Row("head.weight", ("lm_head.weight",), AS_IS, is_optional=True),
)


def _is_embedding(head: Tensor, weights: Mapping[str, Tensor]) -> bool:
    return is_same(head, weights["wte.weight"])


def _is_causal_mask(mask: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether [1, 1, s, s] lets each position see only itself and earlier ones."""
    positions = weights["wpe.weight"].shape[0]
    if mask.shape != (1, 1, positions, positions):
        return False
    return mask.equal(mask.new_ones(mask.shape).tril())


def _is_mask_value(value: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether it is the single number, far below all scores, that replaced masked scores."""
    return value.numel() == 1 and value.item() <= -1e4


SPARES = (
    Spare(
        "lm_head.weight",
        _is_embedding,
        "is not the word embedding wte.weight, to which config.json ties it",
    ),
    Spare("h.{n}.attn.bias", _is_causal_mask, "is no causal mask; attention here is causal"),
    Spare("h.{n}.attn.masked_bias", _is_mask_value, "is no mask value, that is one below -1e4"),
)

SETTINGS = (
    Setting("n_layer", "num_layers", 12),
    Setting("n_embd", "hidden_size", 768),
    Setting("n_head", "num_attention_heads", 12),
    Setting("n_positions", "max_position_embeddings", 1024),
    Setting("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
    Setting("initializer_range", "init_method_std", 0.02),
    Setting("attn_pdrop", "attention_dropout", 0.1),
    Setting("resid_pdrop", "hidden_dropout", 0.1),
    Setting("embd_pdrop", "embedding_dropout", 0.1, meaning="dropout_of_embeddings"),
    Setting("n_inner", "ffn_hidden_size", None),
)
CHOICES = (
    Choice(
        "activation_function",
        "activation",
        {
            "gelu_new": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu": "gelu",
            "relu": "relu",
            "silu": "silu",
            "swish": "silu",
        },
    ),
    Choice(
        "tie_word_embeddings", "untie_embeddings_and_output_weights", {True: False, False: True}
    ),
)

OPTIONS = (
    Option("scale_attn_weights", always(True), "scores divided by the root of the head size"),
    Option("scale_attn_by_inverse_layer_idx", always(False), "the same scale in every layer"),
    Option("reorder_and_upcast_attn", always(False), "attention in the dtype of the model"),
    Option("add_cross_attention", always(False), "self-attention alone"),
    Option("quantization_config", always(None), "weights in fp32, bf16 or fp16"),
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    here="a GPT-2 that predicts the next token",
    auto_class="AutoModelForCausalLM",
    section=GPT2Config,
    fields={},
    rows=ROWS,
    spares=SPARES,
    settings=SETTINGS,
    options=OPTIONS,
    choices=CHOICES,
    prefix="transformer.",
    bare=("lm_head.",),
    old={},
    tokenizing=BYTE_PAIRS,
    special={"bos_token_id": "eod", "eos_token_id": "eod"},
)
GPT2S = (GPT2,)
