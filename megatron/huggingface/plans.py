"""Plans for models of transformers: its own, completed, and plans for models it has none for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from megatron.huggingface.plan import (
    Column,
    Local,
    Plan,
    PlanError,
    Row,
    Style,
    Summed,
    Vocabulary,
    Whole,
    read_plan,
    read_style,
)

# Models with the modules of BERT.
BERTS = (
    *("bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_OF_BERT: Plan = {
    "*.attention.self.query": Column(),
    "*.attention.self.key": Column(),
    "*.attention.self.value": Column(),
    "*.attention.output.dense": Row(),
    "*.intermediate.dense": Column(),
    "*.layer.*.output.dense": Row(),
}
# Plans for models that transformers has none for.
PLANS: Mapping[str, Plan] = {
    "gpt2": {
        "*.attn": Local("num_heads", "split_size"),
        "*.attn.c_attn": Column(parts=3),
        "*.attn.c_proj": Row(),
        "*.mlp.c_fc": Column(),
        "*.mlp.c_proj": Row(),
    },
    **dict.fromkeys(BERTS, _OF_BERT),
    "opt": {
        "*.self_attn": Local("num_heads"),
        "*.self_attn.?_proj": Column(),
        "*.self_attn.out_proj": Row(),
        "*.fc1": Column(),
        "*.fc2": Row(),
    },
}
# Corrections of architectures for which transformers' own plan is wrong.
_WHOLE_GATES: Mapping[str, Style] = {  # the gates' mean and deviation decide which ones stay
    "*.language_model.layers.*.mlp.gate_proj": Column(gather=True),
    "*.language_model.layers.*.mlp.up_proj": Column(gather=True),
}
MENDED: Mapping[str, Mapping[str, Style]] = {
    "apertus": {"*.mlp.act_fn": Summed()},  # parameters of an activation on cut columns
    # Masks of all heads are computed from all values.
    "doge": {"*.self_attn.*_proj": Whole()},
    # The model reads a row of the embedding, and the output layer is tied to it.
    "gemma4": {"*.embed_tokens": Whole(), "lm_head": Whole()},
    "neomme": {"*.self_attn.*_proj": Whole()},  # numbers of heads from the config
    "gemma3n": _WHOLE_GATES,
    "gemma3n_text": {
        each.replace("*.language_model", "model"): style for each, style in _WHOLE_GATES.items()
    },
}
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")  # norms of queries and keys


def plan_of(model: nn.Module, text: str = "auto") -> Plan:
    """The plan for a model of transformers. text: "auto", or a plan in TOML. Raises PlanError for a
    model without a plan, and for errors in the plan."""
    if text != "auto":
        return read_plan(text)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise PlanError(f"{type(model).__name__} is no model of transformers, which have plans")
    modules = dict(model.named_modules())
    own = getattr(model, "_tp_plan", None) or {}
    plan = {each: read_style(each, value) for each, value in own.items() if _fits(each, modules)}
    mended = dict(MENDED.get(config.model_type, {}) if plan else {})
    mended = _of_norms(plan | mended, modules) | mended
    ends = _of_ends(model, modules)
    if not plan.keys() - ends.keys():
        if config.model_type not in PLANS:
            raise PlanError(
                f"neither transformers nor this project has a plan for {type(model).__name__}: "
                "--plan FILE.toml says how it is cut"
            )
        plan = dict(PLANS[config.model_type])
    return plan | ends | mended


def plan_at(model: nn.Module, text: str, ranks: int) -> Plan:
    """As plan_of, but a single rank also holds a model that there is no plan for."""
    try:
        return plan_of(model, text)
    except PlanError:
        if text != "auto" or ranks > 1:
            raise
    return _of_ends(model, dict(model.named_modules()))


def _fits(pattern: str, modules: Mapping[str, nn.Module]) -> bool:
    return any(fnmatchcase(name, pattern) for name in modules)


def _of_norms(plan: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Styles for norms of queries and keys that the plan does not name. A norm with the same
    parameters for all heads runs on each rank's heads; for any other, each rank has all heads."""
    found: dict[str, Style] = {}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        queries = _style_of(f"{parent}.q_proj", plan)
        is_cut = isinstance(queries, Column) and not queries.gather
        if last in NORMS and is_cut and _style_of(name, plan) is None and [*module.parameters()]:
            size = getattr(modules[parent], "head_dim", None)
            of_heads = all(each.shape == (size,) for each in module.parameters())
            end, style = (last, Summed()) if of_heads else ("[qkv]_proj", Column(gather=True))
            found[re.sub(r"(?<=\.)\d+(?=\.)", "*", f"{parent}.{end}")] = style
    return found


def _style_of(name: str, plan: Mapping[str, Any]) -> Any:
    fitting = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
    return fitting[-1] if fitting else None


def _of_ends(model: Any, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Styles of the word embedding and the output layer."""
    names = {id(module): name for name, module in modules.items()}
    words, output = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Style] = {names[id(words)]: Vocabulary()}
    if output is not None:
        found[names[id(output)]] = Column(gather=True)
    return found
