"""Models of transformers small enough for tests: their configs, and plain copies of them."""

from __future__ import annotations

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatron.models.registry import find_kind
from tests.tiny import SEQUENCE, VOCABULARY

HIDDEN, HEADS, GROUPS, MLP, LAYERS = 32, 4, 2, 64, 2
WINDOW = 5  # of Mistral: shorter than the sequence
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": SEQUENCE,
}
_GROUPED = _SIZES | {"num_key_value_heads": GROUPS}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": SEQUENCE,
    "n_embd": HIDDEN,
    "n_inner": MLP,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MASKED = ("bert", "roberta", "data2vec-text")  # those that predict masked tokens
# By the name of the architecture: config.json.
DESCRIBED: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "llama": _GROUPED | {"tie_word_embeddings": False},
    "qwen3": _GROUPED | {"head_dim": HIDDEN // HEADS, "tie_word_embeddings": True},
    "mistral": _GROUPED | {"head_dim": HIDDEN // HEADS, "sliding_window": WINDOW},
    "phi3": _GROUPED,
    "olmo2": _GROUPED,
    "gpt_neox": _SIZES | {"hidden_dropout": 0.0},
    "bert": _SIZES | _NO_DROPOUT | {"type_vocab_size": 2},
    "roberta": _SIZES | _NO_DROPOUT | {"max_position_embeddings": SEQUENCE + 1},
    "data2vec-text": _SIZES | _NO_DROPOUT | {"max_position_embeddings": SEQUENCE + 1},
    "opt": _SIZES
    | {"ffn_dim": MLP, "word_embed_proj_dim": HIDDEN, "pad_token_id": 0}
    | {"dropout": 0.0, "attention_dropout": 0.0},
    "gemma2": _GROUPED
    | {"head_dim": HIDDEN // HEADS, "layer_types": ["full_attention"] * LAYERS}
    | {"attn_logit_softcapping": None},
    "bloom": _SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mixtral": _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "marian": {
        "vocab_size": VOCABULARY,
        "d_model": HIDDEN,
        "decoder_layers": LAYERS,
        "decoder_attention_heads": HEADS,
        "decoder_ffn_dim": MLP,
        "max_position_embeddings": SEQUENCE,
        "dropout": 0.0,
        "pad_token_id": 0,
        "is_encoder_decoder": False,
        "is_decoder": True,
    },
}
for _name, _each in DESCRIBED.items():
    _each.update({"model_type": _name} | _ENDS | _each)
# Plans of those that have none.
_ATTENTION = """
"*.[qkv]_proj" = "column"
"*.out_proj" = "row"
"""
PLANS = {
    "gptj": f"""{_ATTENTION}
"*.attn" = {{ style = "local", attributes = ["num_attention_heads"] }}
"*.fc_in" = "column"
"*.fc_out" = "row"
""",
    "marian": f"""{_ATTENTION}
"*.self_attn" = {{ style = "local", attributes = ["num_heads"] }}
"*.fc1" = "column"
"*.fc2" = "row"
""",
}
# A plan of GPT-2: every rank has all heads.
LITERAL = """
"*.attn.c_*" = { style = "column", gather = true }
"*.mlp.c_fc" = "column"
"*.mlp.c_proj" = "row"
"*.w[tp]e" = { style = "column", gather = true }
"""
# Keys of config.json for all the dropout that a model has.
DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
    "qwen3": {"attention_dropout": 0.1},
    "mistral": {"attention_dropout": 0.1},
    "phi3": {"attention_dropout": 0.1, "resid_pdrop": 0.1},
    "olmo2": {"attention_dropout": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
}


def described(name: str, **changes: Any) -> str:
    """The text of config.json."""
    return json.dumps(DESCRIBED[name] | changes)


def hf_config(name: str, of_hf: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The settings of a model; of_hf: changes of config.json."""
    kind = "huggingface-masked" if name in MASKED else "huggingface"
    make = resolve_name(find_kind(kind).config)
    plan = of_plan(settings.pop("plan", PLANS.get(name, "auto")))
    return make(hf_model=name, hf_config=described(name, **(of_hf or {})), **plan, **settings)


def of_plan(text: str) -> dict[str, Any]:
    """The settings that say it: "auto", or TOML."""
    return {} if text == "auto" else {"plan": "plan.toml", "plan_text": text}


def write_folder(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(described(name, **changes))
    return folder


def plain_model(config: Any, attention: str = "eager") -> Any:
    """As transformers builds it, its parameters in fp64: its buffers stay, as in a model of
    ours."""
    described = transformers.AutoConfig.for_model(**json.loads(config.hf_config or "{}"))
    is_masked = config.kind == "huggingface-masked"
    kind = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    kernels = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = kind.from_config(described, **kernels)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def by_their_names(model: nn.Module, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of a model of ours, as transformers writes them, by its names; held: as they
    are held, by ours."""
    found = {}
    for full_name, tensor in held.items():
        name, _, own = full_name.rpartition(".")
        module = model.get_submodule(name)
        layout = getattr(module, "layouts", {}).get(own)
        found[full_name.removeprefix("model.")] = (
            tensor if layout is None else layout.to_original(tensor)
        )
    return found


@torch.no_grad()
def load_plain(plain: nn.Module, weights: dict[str, Tensor]) -> None:
    """weights: of every parameter, by their names; the first of what is shared."""
    for name, parameter in plain.named_parameters():
        parameter.copy_(weights[name])
