"""Llama as transformers' LlamaForCausalLM has it.

Theirs has dropout only in attention. An export omits any other dropout of a run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.config.model import LlamaConfig, ModelConfig
from megatron.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.errors import UsageError
from tools.convert.table import APART, Family, Key, Row, Tensor, any_of, number, only, same_as

OURS, THEIRS = "transformer.layers.{n}", "layers.{n}"

ROWS = (
    Row("word_embedding.weight", ("embed_tokens.weight",)),
    Row(f"{OURS}.attention_norm.weight", (f"{THEIRS}.input_layernorm.weight",)),
    Row(f"{OURS}.attention.qkv.query", (f"{THEIRS}.self_attn.q_proj.weight",)),
    Row(
        f"{OURS}.attention.qkv.key_value",
        (f"{THEIRS}.self_attn.k_proj.weight", f"{THEIRS}.self_attn.v_proj.weight"),
        APART,
    ),
    Row(f"{OURS}.attention.output.weight", (f"{THEIRS}.self_attn.o_proj.weight",)),
    Row(f"{OURS}.mlp_norm.weight", (f"{THEIRS}.post_attention_layernorm.weight",)),
    Row(
        f"{OURS}.mlp.up.weight",
        (f"{THEIRS}.mlp.gate_proj.weight", f"{THEIRS}.mlp.up_proj.weight"),
        APART,
    ),
    Row(f"{OURS}.mlp.down.weight", (f"{THEIRS}.mlp.down_proj.weight",)),
    Row("final_norm.weight", ("norm.weight",)),
    Row("head.weight", ("lm_head.weight",), is_optional=True),
)


def _falls_from_1(frequencies: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether [d/2] could be rotary frequencies, which config.json determines."""
    if frequencies.ndim != 1 or not len(frequencies) or frequencies[0] != 1:
        return False
    return bool((frequencies.diff() < 0).all() and (frequencies > 0).all())


BASE = 10_000.0  # if a configuration has none
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
TYPES = ("default", "llama3")
PARTIAL = "partial_rotary_factor"


def _rope_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name of the option, its value): as in transformers, rope_scaling of older files takes
    precedence over rope_parameters."""
    name = "rope_scaling" if options.get("rope_scaling") else "rope_parameters"
    value = options.get(name) or {}
    if not isinstance(value, dict):
        raise UsageError(name, json.dumps(value), "a JSON object")
    return name, value


class RotaryBase(Key):
    """Reads rope_theta, which takes precedence inside of the other options of rotary positions."""

    def to_ours(self, options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        name, rope = _rope_of(options)
        if "rope_theta" in rope:
            return {self.ours: number(f"{name}.rope_theta", rope["rope_theta"], BASE)}
        return {self.ours: number("rope_theta", options.get("rope_theta", BASE), BASE)}

    def to_theirs(self, config: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        base = getattr(config, self.ours)
        return {"rope_parameters": {"rope_type": TYPES[0], "rope_theta": base}}


class RopeScaling(Key):
    """Reads the scaling of rotary frequencies: none, or as in Llama 3."""

    def to_ours(self, options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        name, rope = _rope_of(options)
        kind = rope.get("rope_type", rope.get("type", TYPES[0]))
        if kind not in TYPES:
            allowed = f"{any_of(TYPES)} for this project"
            raise UsageError(f"{name}.rope_type", json.dumps(kind), allowed)
        known = {"rope_type", "type", "rope_theta", *SCALING}
        if rope.get(PARTIAL, 1) == 1:  # the whole of each head is rotated, as here
            known.add(PARTIAL)
        for strange in sorted(rope.keys() - known):
            allowed = "left out, as this project has no such scaling"
            raise UsageError(f"{name}.{strange}", json.dumps(rope[strange]), allowed)
        if kind == TYPES[0]:
            return {self.ours: None}
        rope = {SCALING[-1]: fields["max_position_embeddings"], **rope}
        return {self.ours: tuple(number(f"{name}.{each}", rope.get(each), 1.0) for each in SCALING)}

    def to_theirs(self, config: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        scaling = getattr(config, self.ours)
        if scaling is None:
            return {}
        *factors, positions = scaling
        numbers = (*factors, int(positions) if positions == int(positions) else positions)
        scaled = {"rope_type": TYPES[1], **dict(zip(SCALING, numbers, strict=True))}
        return {self.theirs: options[self.theirs] | scaled}


def _head_sizes(fields: Mapping[str, Any]) -> Mapping[Any, Any]:
    size = fields["hidden_size"] // max(1, fields["num_attention_heads"])
    return {size: None, None: None}


KEYS = (
    Key("num_hidden_layers", "num_layers", default=32),
    Key("hidden_size", "hidden_size", default=4096),
    Key("intermediate_size", "ffn_hidden_size", default=11008, implied="ffn_size"),
    Key("num_attention_heads", "num_attention_heads", default=32),
    Key("num_key_value_heads", "num_query_groups", implied="query_groups"),
    Key("max_position_embeddings", "max_position_embeddings", default=2048),
    Key("rms_norm_eps", "layernorm_epsilon", default=1e-6),
    Key("initializer_range", "init_method_std", default=0.02),
    Key("attention_dropout", "attention_dropout", default=0.0),
    Key("hidden_act", "activation", {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}),
    Key("tie_word_embeddings", "untie_embeddings_and_output_weights", {False: True, True: False}),
    RotaryBase("rope_parameters.rope_theta", "rotary_base"),
    RopeScaling("rope_parameters", "rope_scaling", older=("rope_scaling", "rope_theta")),
    Key("head_dim", values=_head_sizes),
    only("attention_bias", False),
    only("mlp_bias", False),
    only("pretraining_tp", 1, None),
    only("quantization_config", None),
)

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    auto_class="AutoModelForCausalLM",
    config=LlamaConfig,
    rows=ROWS,
    keys=KEYS,
    spares={
        "lm_head.weight": same_as("embed_tokens.weight"),
        f"{THEIRS}.self_attn.rotary_emb.inv_freq": _falls_from_1,
    },
    prefix="model.",
    bare=("lm_head.",),
    tokenizers=(HuggingFaceTokenizer.kind, GPT2BPETokenizer.kind),
    special={"bos_token_id": "bos_id", "eos_token_id": "eod", "pad_token_id": "pad_id"},
)
LLAMAS = (LLAMA,)
