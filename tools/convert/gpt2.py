"""GPT-2 as transformers' GPT2LMHeadModel has it."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.model import GPT2Config
from megatron.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from tools.convert.table import Family, Key, Row, Tensor, Transform, both, only, same_as

# Theirs is [in, out], ours [out, in]; the fused QKV is [in, 3h], columns [Q K V], and [3, h, in].
CONV1D = Transform(
    lambda ours: (ours.flatten(0, -2).t(),), lambda theirs, shape: theirs[0].t().reshape(shape)
)
FLAT = Transform(lambda ours: (ours.flatten(),), lambda theirs, shape: theirs[0].reshape(shape))

OURS, THEIRS = "transformer.layers.{n}", "h.{n}"
ROWS = (
    Row("word_embedding.weight", ("wte.weight",)),
    Row("position_embedding.weight", ("wpe.weight",)),
    *both(f"{OURS}.attention_norm", f"{THEIRS}.ln_1"),
    Row(f"{OURS}.attention.qkv.weight", (f"{THEIRS}.attn.c_attn.weight",), CONV1D),
    Row(f"{OURS}.attention.qkv.bias", (f"{THEIRS}.attn.c_attn.bias",), FLAT),
    *both(f"{OURS}.attention.output", f"{THEIRS}.attn.c_proj", CONV1D),
    *both(f"{OURS}.mlp_norm", f"{THEIRS}.ln_2"),
    *both(f"{OURS}.mlp.up", f"{THEIRS}.mlp.c_fc", CONV1D),
    *both(f"{OURS}.mlp.down", f"{THEIRS}.mlp.c_proj", CONV1D),
    *both("final_norm", "ln_f"),
    Row("head.weight", ("lm_head.weight",), is_optional=True),
)


def _is_causal_mask(mask: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether [1, 1, s, s] lets each position see only itself and earlier ones."""
    positions = tensors["wpe.weight"].shape[0]
    if mask.shape != (1, 1, positions, positions):
        return False
    return mask.equal(mask.new_ones(mask.shape).tril())


def _is_mask_value(value: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether it is the single number, far below all scores, that replaced masked scores."""
    return value.numel() == 1 and value.item() <= -1e4


ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
KEYS = (
    Key("n_layer", "num_layers", default=12),
    Key("n_embd", "hidden_size", default=768),
    Key("n_head", "num_attention_heads", default=12),
    Key("n_positions", "max_position_embeddings", default=1024),
    Key("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
    Key("initializer_range", "init_method_std", default=0.02),
    Key("attn_pdrop", "attention_dropout", default=0.1),
    Key("resid_pdrop", "hidden_dropout", default=0.1),
    Key("embd_pdrop", "embedding_dropout", default=0.1, implied="dropout_of_embeddings"),
    Key("n_inner", "ffn_hidden_size"),
    Key("activation_function", "activation", ACTIVATIONS),
    Key("tie_word_embeddings", "untie_embeddings_and_output_weights", {True: False, False: True}),
    only("scale_attn_weights", True),
    only("scale_attn_by_inverse_layer_idx", False),
    only("reorder_and_upcast_attn", False),
    only("add_cross_attention", False),
    only("quantization_config", None),
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    auto_class="AutoModelForCausalLM",
    config=GPT2Config,
    rows=ROWS,
    keys=KEYS,
    spares={
        "lm_head.weight": same_as("wte.weight"),
        "h.{n}.attn.bias": _is_causal_mask,
        "h.{n}.attn.masked_bias": _is_mask_value,
    },
    prefix="transformer.",
    bare=("lm_head.",),
    tokenizers=(GPT2BPETokenizer.kind, HuggingFaceTokenizer.kind),
    special={"bos_token_id": "eod", "eos_token_id": "eod"},
)
GPT2S = (GPT2,)
