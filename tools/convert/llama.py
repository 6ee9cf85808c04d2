"""Llama as transformers' LlamaForCausalLM has it.

Theirs has dropout only in attention. An export omits any other dropout of a run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.config.model import LlamaConfig
from tools.convert.byte_pairs import ANY_JSON
from tools.convert.table import (
    APART,
    AS_IS,
    Choice,
    Family,
    Nested,
    Option,
    Row,
    Setting,
    Spare,
    always,
    is_same,
)
from tools.convert.tokenizing import any_of

if TYPE_CHECKING:
    from torch import Tensor

OURS, THEIRS = "transformer.layers.{n}", "layers.{n}"

ROWS = (
    Row("word_embedding.weight", ("embed_tokens.weight",), AS_IS),
    Row(f"{OURS}.attention_norm.weight", (f"{THEIRS}.input_layernorm.weight",), AS_IS),
    Row(f"{OURS}.attention.qkv.query", (f"{THEIRS}.self_attn.q_proj.weight",), AS_IS),
    Row(
        f"{OURS}.attention.qkv.key_value",
        (f"{THEIRS}.self_attn.k_proj.weight", f"{THEIRS}.self_attn.v_proj.weight"),
        APART,
    ),
    Row(f"{OURS}.attention.output.weight", (f"{THEIRS}.self_attn.o_proj.weight",), AS_IS),
    Row(f"{OURS}.mlp_norm.weight", (f"{THEIRS}.post_attention_layernorm.weight",), AS_IS),
    Row(
        f"{OURS}.mlp.up.weight",
        (f"{THEIRS}.mlp.gate_proj.weight", f"{THEIRS}.mlp.up_proj.weight"),
        APART,
    ),
    Row(f"{OURS}.mlp.down.weight", (f"{THEIRS}.mlp.down_proj.weight",), AS_IS),
    Row("final_norm.weight", ("norm.weight",), AS_IS),
    Row("head.weight", ("lm_head.weight",), AS_IS, is_optional=True),
)


def _is_embedding(head: Tensor, weights: Mapping[str, Tensor]) -> bool:
    return is_same(head, weights["embed_tokens.weight"])


def _falls_from_1(frequencies: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether [d/2] could be rotary frequencies, which config.json determines."""
    if frequencies.ndim != 1 or not len(frequencies) or frequencies[0] != 1:
        return False
    return bool((frequencies.diff() < 0).all() and (frequencies > 0).all())


SPARES = (
    Spare(
        "lm_head.weight",
        _is_embedding,
        "is not the word embedding model.embed_tokens.weight, to which config.json ties it",
    ),
    Spare(
        f"{THEIRS}.self_attn.rotary_emb.inv_freq",
        _falls_from_1,
        "is no row of rotary frequencies, which fall from 1",
    ),
)

SETTINGS = (
    Setting("num_hidden_layers", "num_layers", 32),
    Setting("hidden_size", "hidden_size", 4096),
    Setting("intermediate_size", "ffn_hidden_size", 11008, meaning="ffn_size"),
    Setting("num_attention_heads", "num_attention_heads", 32),
    Setting("num_key_value_heads", "num_query_groups", None, meaning="query_groups"),
    Setting("max_position_embeddings", "max_position_embeddings", 2048),
    Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
    Setting("initializer_range", "init_method_std", 0.02),
    Setting("attention_dropout", "attention_dropout", 0.0),
)
CHOICES = (
    Choice("hidden_act", "activation", {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}),
    Choice(
        "tie_word_embeddings", "untie_embeddings_and_output_weights", {False: True, True: False}
    ),
)


def _head_sizes(numbers: Mapping[str, Any]) -> tuple[int | None, ...]:
    return numbers["hidden_size"] // max(1, numbers["num_attention_heads"]), None


OPTIONS = (
    Option("head_dim", _head_sizes, "heads of hidden_size / num_attention_heads"),
    Option("attention_bias", always(False), "attention without biases"),
    Option("mlp_bias", always(False), "an MLP without biases"),
    Option("pretraining_tp", always(1, None), "matmuls that are not cut into slices"),
    Option("quantization_config", always(None), "weights in fp32, bf16 or fp16"),
)

BASE = 10_000.0  # if a configuration has none
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
TYPES = ("default", "llama3")
PARTIAL = "partial_rotary_factor"


def _rope_to_ours(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields from rope_parameters, or in older files from rope_theta and rope_scaling. As in
    transformers, rope_scaling takes precedence over rope_parameters, and a theta inside either of
    them over rope_theta."""
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(place) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{place} is {any_of([given])}, and should be an object")
    kind = given.get("rope_type", given.get("type", TYPES[0]))
    if kind not in TYPES:
        raise ValueError(
            f"{place}.rope_type is {any_of([kind])}; this project has rotary frequencies as they "
            f"are or scaled as in Llama 3, {any_of(TYPES)}: this model cannot be converted"
        )
    known = {"rope_type", "type", "rope_theta", *SCALING}
    if given.get(PARTIAL, 1) == 1:  # the whole of each head is rotated, as here
        known.add(PARTIAL)
    if strange := sorted(given.keys() - known):
        value = any_of([given[strange[0]]])
        raise ValueError(
            f"{place}.{strange[0]} is {value}, which this project has not: this model cannot be "
            "converted"
        )

    def number(name: str, values: Mapping[str, Any], default: object = None) -> float:
        value = values.get(name, default)
        if type(value) not in (int, float):
            where = f"{place}.{name}" if values is given else name
            raise ValueError(f"{where} is {any_of([value])}, and should be a number")
        return float(value)  # type: ignore[arg-type]

    base = number("rope_theta", given if "rope_theta" in given else config, BASE)
    if kind == TYPES[0]:
        return {"rotary_base": base, "rope_scaling": None}
    trained = config.get("max_position_embeddings", 2048)
    defaults = {SCALING[-1]: trained}
    scaling = tuple(number(name, given, defaults.get(name)) for name in SCALING)
    return {"rotary_base": base, "rope_scaling": scaling}


def _rope_to_theirs(fields: Mapping[str, Any]) -> dict[str, Any]:
    scaling, base = fields["rope_scaling"], fields["rotary_base"]
    if scaling is None:
        return {"rope_parameters": {"rope_type": TYPES[0], "rope_theta": base}}
    *factors, positions = scaling
    numbers = (*factors, int(positions) if positions == int(positions) else positions)
    found = dict(zip(SCALING, numbers, strict=True))
    return {"rope_parameters": {"rope_type": TYPES[1], "rope_theta": base, **found}}


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    here="a Llama that predicts the next token",
    auto_class="AutoModelForCausalLM",
    section=LlamaConfig,
    fields={},
    rows=ROWS,
    spares=SPARES,
    settings=SETTINGS,
    options=OPTIONS,
    choices=CHOICES,
    nested=Nested(
        "rope_parameters",
        frozenset(("rope_scaling", "rope_theta")),
        {"rotary_base": "rope_parameters.rope_theta", "rope_scaling": "rope_parameters"},
        _rope_to_ours,
        _rope_to_theirs,
    ),
    prefix="model.",
    bare=("lm_head.",),
    old={},
    tokenizing=ANY_JSON,
    special={"bos_token_id": "bos_id", "eos_token_id": "eod", "pad_token_id": "pad_id"},
)
LLAMAS = (LLAMA,)
