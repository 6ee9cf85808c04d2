"""Which architectures of transformers are exact when they are sharded by their plans.

    python tools/experiments/architectures.py
    python tools/experiments/architectures.py --output runs/mine

Covers every one that predicts the next token and has a plan, from transformers or this project. A
tiny model is sharded over 2 and over 4 ranks and compared in fp64 with the unmodified one, as
tools.prove_plan does. Those with few key/value heads have 2, so 4 ranks share them.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.huggingface.config import HuggingFaceConfig, HuggingFaceMaskedConfig
from tools.experiments import results, runner
from tools.experiments.runner import ROOT
from tools.report.numbers import percent
from tools.report.sections import Page, Section, Table

PROGRAM = "tools/experiments/architectures.py"
SIZES = (2, 4)
MASKED = "masked words"
NO_LAYER = "no layer here cuts "
UNGROUPED = ("esmc",)  # keys and values have as many heads as queries

# Two unusual variants of config.json for each dense architecture: fewer key/value heads, biases,
# norms of heads, tied and untied output layers, scaling, windows, partial rotary embeddings, and
# settings that only this architecture has.
Changes = Mapping[str, Any]
ONE: Changes = {"num_key_value_heads": 1}
BIASES: Changes = {"attention_bias": True, "mlp_bias": True}
BIASED: Changes = {"attention_bias": True}
TIED: Changes = {"tie_word_embeddings": True}
UNTIED: Changes = {"tie_word_embeddings": False}
WINDOW: Changes = {"sliding_window": 4096}
NO_WINDOW: Changes = {"sliding_window": None}
SHALLOW: Changes = {"num_layers_per_stack": 2}
FULL: Changes = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
NO_CAPS: Changes = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def _rope(kind: str = "default", **others: Any) -> Changes:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **others}}


LINEAR = _rope("linear", factor=4.0)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=2048)
LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
QUARTER, ALL = (_rope(partial_rotary_factor=share) for share in (0.25, 1.0))
MULTIPLIERS: Changes = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.02,
}


def _of_text(*changes: Changes) -> tuple[Changes, ...]:
    return tuple({"text_config": each} for each in changes)


_BERT: tuple[Changes, ...] = (
    UNTIED | {"hidden_act": "relu"},
    {"type_vocab_size": 1, "attention_probs_dropout_prob": 0.3},
)
_LLAMA: tuple[Changes, ...] = (ONE | BIASES, TIED | YARN)
_GEMMA2: tuple[Changes, ...] = (ONE | BIASED, UNTIED | NO_CAPS | FULL)
_GEMMA3: tuple[Changes, ...] = (
    ONE | BIASED,
    UNTIED | {"final_logit_softcapping": 30.0, "use_bidirectional_attention": False},
)
_GEMMA4: tuple[Changes, ...] = (
    ONE | BIASED,
    UNTIED | {"attention_k_eq_v": True, "final_logit_softcapping": 30.0},
)
_GLM: tuple[Changes, ...] = (ONE | {"attention_bias": False} | ALL, TIED | QUARTER)
_PHI3: tuple[Changes, ...] = (ONE | _rope(partial_rotary_factor=0.5), TIED | WINDOW)
_QWEN3_5: tuple[Changes, ...] = (ONE | BIASED, TIED | _rope(partial_rotary_factor=0.5))
UNUSUAL: Mapping[str, tuple[Changes, ...]] = {
    **dict.fromkeys(
        (
            *("bert", "camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
            *("xlm-roberta", "xlm-roberta-xl"),
        ),
        _BERT,
    ),
    **dict.fromkeys(
        (
            *("arcee", "eurobert", "helium", "internlm3", "iquestcoder", "apertus"),
            *("flint", "olmo2"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("gemma2", "vaultgemma"), _GEMMA2),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _of_text(*_GEMMA4)),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(("phi3", "phi4_multimodal"), _PHI3),
    "cohere": (ONE | BIASED, UNTIED | {"use_qk_norm": True}),
    "cohere2": (ONE | BIASED, UNTIED | FULL | {"logit_scale": 1.0}),
    "cohere_compass_text": (ONE | BIASED, UNTIED | FULL),
    "cwm": (ONE | {"mlp_bias": True}, TIED | LINEAR),
    "doge": (ONE | BIASES, TIED | {"keep_window_size": 4}),
    "electra": (UNTIED | {"embedding_size": 256}, _BERT[1]),
    "ernie": (_BERT[0], {"use_task_id": True}),
    "ernie4_5": (ONE | {"use_bias": True}, UNTIED | LINEAR),
    "esmc": (BIASES, TIED),
    "exaone4": (ONE | TIED, FULL | LINEAR),
    "gemma": (ONE | BIASED, UNTIED | LINEAR),
    "gemma3": _of_text(*_GEMMA3),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": (ONE | BIASED, UNTIED | {"num_kv_shared_layers": 0, "laurel_rank": 32}),
    "gpt2": (
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        UNTIED | {"n_inner": 1024, "activation_function": "relu"},
    ),
    "gpt_neox": (
        {"attention_bias": False, "use_parallel_residual": False, "attention_dropout": 0.1},
        TIED | ALL,
    ),
    "granite": (ONE | BIASES, TIED | MULTIPLIERS),
    "hrm_text": (BIASES | SHALLOW, TIED | SHALLOW | {"L_cycles": 2}),
    "hyperclovax": (ONE | BIASES, TIED | MULTIPLIERS | {"use_post_norm": False}),
    "jais2": (ONE | {"attention_bias": False, "mlp_bias": False}, TIED | LINEAR),
    "llama": (ONE | BIASES | {"attention_dropout": 0.1}, TIED | LLAMA3 | {"head_dim": 64}),
    "ministral": (ONE | FULL, TIED | LINEAR),
    "ministral3": (ONE, TIED | WINDOW),
    "mistral": (ONE | NO_WINDOW, TIED | LINEAR),
    "nanochat": (ONE | BIASED, TIED | {"final_logit_softcapping": None}),
    "nemotron": (ONE | BIASES, TIED | QUARTER),
    "neomme": (ONE | BIASES, UNTIED | {"residual_multiplier": 1.0}),
    "olmo": (ONE | BIASED, TIED | {"clip_qkv": 0.1}),
    "olmo3": (ONE | BIASED, TIED | FULL),
    "olmo_hybrid": (ONE | BIASED, TIED | {"linear_allow_neg_eigval": False}),
    "opt": (
        {"do_layer_norm_before": False, "word_embed_proj_dim": 512},
        UNTIED | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "phi": (ONE | {"qk_layernorm": True}, TIED | ALL | {"qk_layernorm": True}),
    "qwen2": (
        ONE | YARN,
        TIED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (
        ONE | BIASED | {"attention_dropout": 0.1},
        TIED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3_5": _of_text(*_QWEN3_5),
    "qwen3_5_text": _QWEN3_5,
    "seed_oss": (
        ONE | {"mlp_bias": True, "attention_out_bias": True},
        TIED | {"attention_bias": False},
    ),
    "smollm3": (ONE | BIASES, UNTIED | WINDOW | {"use_sliding_window": True}),
    "starcoder2": (ONE | {"use_bias": False}, UNTIED | WINDOW),
    "ultrabert": (ONE | BIASES, TIED | FULL),
    "xmod": ({"default_language": "en_XX"}, {"default_language": "en_XX", "pre_norm": True}),
    "youtu": ({"q_lora_rank": None}, UNTIED | BIASED | {"rope_interleave": False}),
}


METHOD = (
    "Hybrids of linear attention (olmo_hybrid, qwen3_5) leave it whole on every rank, as their "
    "plans say; in a model as small as this it is nearly all of the FLOPs. Where there are 2 "
    "key/value heads each of 4 ranks computes one, so its share is above 25 %.",
    "Some plans of transformers are wrong, and are corrected here (MENDED and _of_norms in "
    "megatron/huggingface/plan.py): apertus (parameters of an activation between sharded layers), "
    "gemma3n (the mean and the deviation of sharded gates: logits off by 0.025 without an error), "
    "phi (norms of heads, whose gradients are not summed: off by twice their norm without an "
    "error), doge, esmc, neomme and cohere with use_qk_norm (attention that needs all heads), "
    "gemma4 (which reads a row of its embedding; that and its output layer are left whole).",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    output: Path = ROOT / "runs" / "architectures"
    """Folder for the result."""


@dataclass(frozen=True)
class Row:
    """Result of an architecture; difference and shares (of matmul FLOPs) only if it is exact."""

    name: str
    outcome: str  # exact, refused, or wrong: ends with an error, or differs
    reason: str = ""
    difference: float | None = None
    shares: tuple[float, ...] = ()  # of the busiest rank, by tensor size
    changes: str = ""  # changes to config.json, for an unusual configuration


def architectures() -> tuple[dict[tuple[str, str], HuggingFaceConfig], list[str]]:
    """({(name, changes to its config.json): its config}, names of those without a plan)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    from transformers.utils.logging import set_verbosity_error

    from megatron.huggingface.plan import PLANS

    set_verbosity_error()  # no warnings about inconsistent defaults
    found: dict[tuple[str, str], HuggingFaceConfig] = {}
    without = []
    for kind, names in (
        (HuggingFaceConfig, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (HuggingFaceMaskedConfig, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        is_masked = kind is HuggingFaceMaskedConfig
        for name in names:
            is_encoder = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
            if is_encoder != is_masked or (f"{name}, {MASKED}", "") in found or (name, "") in found:
                continue
            if not (words_of(CONFIG_MAPPING[name]) or name in PLANS):
                without.append(name)
                continue
            full_name = f"{name}, {MASKED}" if is_masked else name
            for changes in ({}, *UNUSUAL.get(name, ())):
                text = json.dumps(described(name) | dict(changes))
                said = json.dumps(changes)[1:-1]
                found[full_name, said] = kind(hf_model=name, hf_config=text)
    return found, without


def words_of(config_class: Any) -> set[str]:
    """Words in transformers' own plans of this architecture and its sub-models."""
    inside = (getattr(config_class, "sub_configs", None) or {}).values()
    plans = [getattr(each, "base_model_tp_plan", None) for each in (config_class, *inside)]
    return {word for plan in plans for word in (plan or {}).values()}


def described(name: str) -> dict[str, Any]:
    """A config.json with the values that a real one sets and the defaults leave open."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = CONFIG_MAPPING[name]().to_dict()
    found: dict[str, Any] = {"model_type": name}
    heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int)) or heads < 4:
        return found
    if "num_key_value_heads" in given and name not in UNGROUPED and "kv_lora_rank" not in given:
        found["num_key_value_heads"] = 2
    if given.get("head_dim", 0) is None:
        found["head_dim"] = hidden // heads
    if given.get("layer_types") and not given.get("rope_parameters"):
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        found["rope_parameters"] = dict.fromkeys(given["layer_types"], rope)
    return found


def rows() -> Iterator[Row]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from megatron.huggingface.plan import REFUSED
    from megatron.huggingface.proof import Proof, TinyModelError
    from tools.layouts.processes import on_ranks
    from tools.layouts.proofs import prove_at

    configs, _ = architectures()
    found, *_ = on_ranks(max(SIZES), prove_at, [*configs.values()], SIZES)
    for ((name, changes), config), outcomes in zip(configs.items(), found, strict=True):
        row = partial(Row, name, changes=changes)
        proofs = [each for each in outcomes if isinstance(each, Proof)]
        errors = [each for each in outcomes if isinstance(each, Exception)]
        words = words_of(CONFIG_MAPPING[config.hf_model])
        refused = sorted({REFUSED[word] for word in words if word in REFUSED})
        if wrong := [each for each in proofs if each.wrong]:
            yield row("wrong", wrong[0].wrong[0])
        elif errors and refused and isinstance(errors[0], TinyModelError):
            yield row("refused", f"{NO_LAYER}{' or '.join(refused)}")
        elif errors:
            yield row("refused", str(errors[0]))
        else:
            shares = tuple(each.flops[0] / each.flops[1] for each in proofs)
            worst = max(each.worst for each in proofs)
            yield row("exact", difference=worst, shares=shares)


def result(found: list[Row]) -> str:
    unusual = [row for row in found if row.changes]
    of_unusual = Counter(row.outcome for row in unusual)
    outcomes = ", ".join(f"{count} are {outcome}" for outcome, count in sorted(of_unusual.items()))
    found = [row for row in found if not row.changes]
    exact = [row for row in found if row.outcome == "exact"]
    worst = max((row.difference or 0.0 for row in exact), default=0.0)
    refused = Counter(
        row.reason.partition(NO_LAYER)[2].partition(",")[0]
        for row in found
        if row.outcome == "refused"
    )
    wrong = sum(row.outcome == "wrong" for row in found)
    others = refused.pop("", 0) + wrong
    each = ", ".join(f"{count} with {what}" for what, count in sorted(refused.items()))
    split = f"{wrong} wrong, {others - wrong} refused; the table has the reasons"
    rest = f" (of the other {others}: {split})" if others else ""
    return (
        f"{len(exact)} of {len(exact) + others} dense architectures that have a plan are exact at "
        f"t = 2 and 4{rest}.\nLoss, logits and every gradient equal the unmodified model's within "
        f"{worst:.0e} of their norm, in fp64.\nTwo unusual configurations of each dense "
        f"architecture, {len(unusual)} in all: {outcomes}.\nPlans that name layers which this "
        f"project does not shard are refused: {each}."
    )


def report(found: Sequence[Row], without: Sequence[str], settings: Settings) -> str:
    """Write architectures.json, .md and .html; returns the text. without: names of architectures
    that have no plan."""
    plain, unusual = ([row for row in found if bool(row.changes) is each] for each in (False, True))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    page = Page(
        "Unmodified models of transformers, sharded by their plans",
        result(list(found)),
        [
            Section("Architectures", [table(plain), *METHOD]),
            Section("Unusual configurations", [table(unusual)]),
            Section(
                "Without a plan",
                [
                    f"These need `--plan FILE.toml`, as none has a plan: {', '.join(without)}.",
                    versions,
                ],
            ),
        ],
    )
    facts = {"architectures": [vars(row) for row in found]}
    return results.write_measured(settings.output, "architectures", page, facts, PROGRAM, indent=1)


def table(rows: Sequence[Row]) -> Table:
    """The rows by outcome. Unusual ones have what config.json has in place of its defaults."""
    flops = [f"matmul FLOPs of a rank, t = {size}" for size in SIZES]
    head = ("architecture", "config.json", "outcome", "largest difference", *flops, "reason")
    lines = []
    for row in sorted(rows, key=lambda row: (row.outcome, row.name)):
        difference = "" if row.difference is None else f"{row.difference:.0e}"
        shares = [percent(share, 0) for share in row.shares] or [""] * len(SIZES)
        lines.append((row.name, row.changes, row.outcome, difference, *shares, row.reason))
    return Table(head, lines, left=(0, 1, 2, len(head) - 1))


def run(settings: Settings) -> None:
    _, without = architectures()
    print(report([*rows()], without, settings))


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
