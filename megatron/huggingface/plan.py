"""Plans, which say how each module of a model is cut: their styles, their text, and those of
models of transformers. Needs no torch.

A plan is {pattern of module names: a style, or several}. In a pattern * matches anything; if
several patterns match a module, the last one counts. As a text, a plan is TOML:

    "*.attn.c_attn" = { style = "column", parts = 3 }
    "*.attn" = { style = "local", attributes = ["num_heads", "split_size"] }
    "*.attn.c_proj" = "row"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any


class PlanError(ValueError):
    """A plan does not fit the model. The message names the module, and says what would work."""


@dataclass(frozen=True)
class Column:
    """A matmul [.., in] to [.., out] that is sharded along its output features, or an embedding
    that is sharded along its channels.

    parts: number of matrices of one size stacked in the weight, each of which is cut. gather: the
    output is whole on every rank, otherwise it is this rank's columns. tokens: the input is this
    rank's tokens of each sample, [b, s/t, in]. heads: number of key or value heads. queries: number
    of query heads that share them. If t does not divide `heads`, every rank holds the whole weight
    and computes the heads that its queries need.
    """

    parts: int = 1
    gather: bool = False
    tokens: bool = False
    heads: int = 0
    queries: int = 0

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise PlanError(f"parts = {self.parts}: 1 and more work")
        if self.heads and (self.queries < self.heads or self.queries % self.heads):
            raise PlanError(f"queries = {self.queries} is no multiple of heads = {self.heads}")


@dataclass(frozen=True)
class Row:
    """A matmul [.., in] to [.., out] that is sharded along its input features; it splits an input
    that is whole. tokens: the output is this rank's tokens of each sample, [b, s/t, out]."""

    tokens: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """An embedding that is sharded along its rows. tokens: see Row."""

    tokens: bool = False


@dataclass(frozen=True)
class Summed:
    """Whole on every rank, but inside a cut region (a norm of heads) or applied to this rank's
    tokens: the gradients of its parameters are summed."""


@dataclass(frozen=True)
class Whole:
    """Left as it is."""


@dataclass(frozen=True, init=False)
class Local:
    """Numbers of which each rank has its share: attributes of the module, divided by t or, if given
    by keyword, set to their value on each rank: Local("num_heads", num_key_value_groups=1)."""

    attributes: tuple[str, ...]
    values: tuple[tuple[str, int], ...]

    def __init__(self, *attributes: str, **values: int) -> None:
        object.__setattr__(self, "attributes", attributes)
        object.__setattr__(self, "values", tuple(values.items()))


@dataclass(frozen=True)
class Redistribute:
    """Changes how tensors that enter or leave a module are cut: "whole", "tokens" [b, s/t, ..] or
    "channels" [.., h/t].

    inputs: (how it arrives, how it is needed), by position or name. outputs: by position.
    """

    inputs: Mapping[int | str, tuple[str, str]]
    outputs: Mapping[int, tuple[str, str]]


Style = Column | Row | Vocabulary | Summed | Whole | Local | Redistribute
Plan = Mapping[str, Any]
"""{pattern of module names: a Style, several, a style as written in TOML ("column"), or a style of
torch.distributed.tensor.parallel}. In a pattern * matches anything; if several patterns match a
module, the last one counts."""

# Styles by the words of plans: those of users' plans (OWN), and transformers' words, too (WORDS).
OWN: Mapping[str, Style] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "summed": Summed(),
    "whole": Whole(),
}
WORDS: Mapping[str, Style] = {
    **OWN,
    "colwise": Column(),
    "colwise_gather_output": Column(gather=True),
    "packed_colwise": Column(parts=2),
    "rowwise": Row(),
    "rowwise_split_input": Row(),
    "embedding_rowwise": Vocabulary(),
    "replicated_with_grad_allreduce": Summed(),
    "replicate": Whole(),
}
# Words of transformers' plans that have no style here, and the parameters that they cut.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "packed_rowwise"), "experts"),
    "mla_kv_a_proj": "latent attention",
    "local_params": "parameters of heads, such as attention sinks",
}
STYLES = {"column": Column, "row": Row, "vocabulary": Vocabulary, "local": Local}


def read_toml(text: str) -> dict[str, Any]:
    """The entries of a plan in TOML, by pattern. Raises PlanError if the text is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"no TOML: {error}") from None


def read_plan(text: str) -> dict[str, Style]:
    """The styles of a plan in TOML, by pattern. Raises PlanError if the text is no plan."""
    return {pattern: read_style(pattern, style) for pattern, style in read_toml(text).items()}


def read_style(pattern: str, said: Any) -> Style:
    """The style of an entry of a plan in TOML: a word, or {style = "column", parts = 3}. Raises
    PlanError for anything else."""
    if isinstance(said, str) and said in WORDS:
        return WORDS[said]
    if isinstance(said, Mapping) and "style" not in said:
        raise PlanError(
            f'{pattern} is a table without a style: a pattern is quoted ("*.up_proj" = "column" or '
            '{ style = "column", parts = 2 }), and stands outside of [tables]'
        )
    if isinstance(said, Mapping) and str(said["style"]) in STYLES:
        kind = STYLES[said["style"]]
        arguments = {name: value for name, value in said.items() if name != "style"}
        attributes = arguments.pop("attributes", []) if kind is Local else []
        known = {each.name: type(each.default) for each in fields(kind) if kind is not Local}
        try:
            for name, value in arguments.items():
                if known and name not in known:
                    raise TypeError(f"{said['style']} has {', '.join(known)}, and no {name}")
                if type(value) is not (wanted := known.get(name, int)):
                    raise TypeError(f"{name} is no {wanted.__name__}")
            if not isinstance(attributes, list):
                raise TypeError("attributes is no list")
            style: Style = kind(*attributes, **arguments)
        except (TypeError, PlanError) as error:
            raise PlanError(f"{pattern} = {dict(said)}: {error}") from None
        return style
    if isinstance(said, str) and said in REFUSED:
        raise PlanError(f"{pattern} is {said!r} in the plan: no layer here cuts {REFUSED[said]}")
    if isinstance(said, Mapping):
        said = said["style"]
    words = ", ".join([*OWN, "local", "and the words of transformers' plans"])
    raise PlanError(f"{pattern} is {said!r} in the plan, which is none of {words}")


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


def plan_of(model: Any, text: str = "auto") -> Plan:
    """The plan for a model of transformers. text: "auto", or a plan in TOML. Raises PlanError for a
    model without a plan, and for errors in the plan."""
    if text != "auto":
        return read_plan(text)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise PlanError(f"{type(model).__name__} is no model of transformers, which have plans")
    modules = dict(model.named_modules())
    own = getattr(model, "_tp_plan", None) or {}
    plan = {
        pattern: read_style(pattern, style)
        for pattern, style in own.items()
        if any(fnmatchcase(name, pattern) for name in modules)
    }
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


def plan_at(model: Any, text: str, ranks: int) -> Plan:
    """As plan_of, but a single rank also holds a model that there is no plan for."""
    try:
        return plan_of(model, text)
    except PlanError:
        if text != "auto" or ranks > 1:
            raise
    return _of_ends(model, dict(model.named_modules()))


def _of_norms(plan: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Style]:
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


def _of_ends(model: Any, modules: Mapping[str, Any]) -> dict[str, Style]:
    """Styles of the word embedding and the output layer."""
    names = {id(module): name for name, module in modules.items()}
    words, output = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Style] = {names[id(words)]: Vocabulary()}
    if output is not None:
        found[names[id(output)]] = Column(gather=True)
    return found
