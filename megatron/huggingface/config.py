"""Models of transformers: the choice of one, the facts in its config.json, and the files beside
that in a folder, here or on the HuggingFace hub."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Self

import tyro

from megatron.config.model import HF_FILES, HF_PREFIX, KindConfig, RecomputeGranularity, hf_files
from megatron.errors import UsageError
from megatron.models.hf_folder import fetch, has_weights

# Keys of config.json that let layers differ, besides lists with an entry per layer.
OF_SOME_LAYERS = ("first_k_dense_replace", "num_kv_shared_layers", "per_layer_config")
LATENT = ("kv_lora_rank", "layers_block_type", "mamba_d_state", "conv_L_cache")
"""Keys of config.json of layers with latent heads, or without attention."""
Hidden = Annotated[str | None, tyro.conf.Suppress, tyro.conf.Fixed]
"""Type of a setting that checkpoints keep and that has no flag."""
# Keys of config.json for the sizes of a model.
NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig(KindConfig):
    """A model of transformers, unmodified, that predicts the next token."""

    kind: ClassVar[str] = "huggingface"
    is_unmodified: ClassVar[bool] = True
    can_compile = True
    has_grids: ClassVar[bool] = False
    granularities: ClassVar[tuple[RecomputeGranularity, ...]] = ("none", "full")

    hf_model: str = field(metadata={"resume": "free"})
    """A folder with the model's config.json, and its weights if training starts from them; or a
    name on the HuggingFace hub."""

    plan: str = field(default="auto", metadata={"resume": "free"})
    """How the model is sharded over tensor-parallel processes. auto: by the plan of the checkpoint
    that is resumed, by transformers' own plan, or by one of this project's. Otherwise: your own
    TOML file. A small model proves the plan first."""

    plan_text: Hidden = field(default=None, metadata={"resume": "effect"})
    """The content of the file of --plan."""

    hf_config: Hidden = field(default=None, metadata={"resume": "effect"})
    """The text of a config.json, in place of that of --hf-model."""

    random_weights: bool = field(default=False, metadata={"resume": "free"})
    """Start from the model's own initialisation, even if --hf-model has weights."""

    def __post_init__(self) -> None:
        if self.hf_config is None:
            with suppress(UsageError):  # a checkpoint may have it; if not, `described` raises
                object.__setattr__(self, "hf_config", read_hf_config(self.hf_model))
        if self.plan != "auto" and self.plan_text is None:
            try:
                text = Path(self.plan).read_text(encoding="utf-8")
                tomllib.loads(text)
            except (OSError, ValueError) as error:
                allowed = f"auto, or a TOML file ({error})"
                raise UsageError("--plan", self.plan, allowed, works="auto") from None
            object.__setattr__(self, "plan_text", text)

    @property
    def stated_plan(self) -> str:
        """A plan in TOML, or "auto"."""
        return "auto" if self.plan_text is None else self.plan_text

    def completed(self, saved: Mapping[str, Any] | None) -> Self:
        if saved is None:
            return self
        changes: dict[str, Any] = {}
        if self.hf_config is None:
            changes["hf_config"] = saved.get("hf_config")
        if self.plan == "auto" and saved.get("plan_text") is not None:
            changes |= {"plan": saved["plan"], "plan_text": saved["plan_text"]}
        return replace(self, **changes)

    def files(self, saved: Path | None) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        if saved is not None and not Path(self.hf_model).is_dir():
            found = hf_files(saved, HF_PREFIX)
        with suppress(UsageError):  # the hub may be out of reach
            found = found or hf_files(fetch(self.hf_model, HF_FILES))
        return {f"{HF_PREFIX}{name}": content for name, content in found.items()}

    def starts_from(self) -> str | None:
        folder = Path(self.hf_model)
        if self.random_weights or (folder.is_dir() and not has_weights(self.hf_model, folder)):
            return None
        return self.hf_model

    def prove(self, mesh: Any) -> list[str]:
        if mesh.tensor.size == 1:
            return []
        # By name, as in the registry: this file needs no torch.
        return [resolve_name("megatron.huggingface.proof:require_proof")(self, mesh)]

    def facts(self, model: Any, checkpoint: Any | None) -> dict[str, Any]:
        layouts = resolve_name("megatron.huggingface.weights:layouts_of")(model)
        if checkpoint is not None:
            self.check_layouts(layouts, checkpoint)
        return {"forms": layouts}

    def check_layouts(self, layouts: Mapping[str, Sequence[int]], checkpoint: Any) -> None:
        """Raise UsageError if the plan holds a tensor in another layout than the checkpoint: the
        shape of a square matrix does not show it. layouts: see weights.layouts_of."""
        saved = checkpoint.manifest.get("forms", {})
        for name in sorted(saved.keys() | layouts.keys()):
            if list(saved.get(name, ())) != list(layouts.get(name, ())):
                plan = checkpoint.manifest["config"]["model"].get("plan")
                tensor = name.removeprefix("model.")
                allowed = (
                    f"one that holds {tensor} in the layout of {checkpoint.path}, whose plan is"
                )
                raise UsageError("--plan", self.plan, f"{allowed} {plan}")

    def check(self) -> None:
        """Raise UsageError if config.json shows that the model is not of this kind."""
        whole = self.whole_config
        kind = whole.get("model_type")
        if kind is None:
            allowed = "one whose config.json has a model_type"
            raise UsageError("--hf-model", self.hf_model, allowed)
        if whole.get("is_encoder_decoder", kind in ENCODER_DECODERS):
            allowed = f"an encoder or a decoder, and {kind} is both, one after another"
            raise UsageError("--hf-model", self.hf_model, allowed)
        if (right := kind_of(whole)) not in (None, self.kind):
            name = " ".join(whole.get("architectures") or [kind])
            what = "masked tokens" if "masked" in right else "the next token"
            allowed = f"{right} for {name}, which predicts {what}"
            raise UsageError("--model", self.kind, allowed, works=right)

    def check_cut(self) -> None:
        """Raise UsageError for a model or plan that tensor-parallel processes cannot share."""
        if self.plan_text is not None:
            styles = tomllib.loads(self.plan_text).values()
            if all(each in ("whole", {"style": "whole"}) for each in styles):
                allowed = "one that cuts a module; this one cuts nothing"
                raise UsageError("--plan", self.plan, allowed, works="auto")
        if self.experts:
            name = "--tensor-model-parallel-size"
            allowed = f"1 of a model with experts, and config.json has {', '.join(self.experts)}"
            raise UsageError(name, None, allowed, works=1)

    @property
    def experts(self) -> list[str]:
        """The names in config.json by which a token uses only some weights of a layer."""
        is_known = self.described.get("is_moe") is not False
        return [name for name in EXPERTS if is_known and (self.described.get(name) or 0) > 1]

    @cached_property
    def whole_config(self) -> dict[str, Any]:
        """The model's config.json."""
        return json.loads(self.hf_config or read_hf_config(self.hf_model))

    @cached_property
    def described(self) -> dict[str, Any]:
        """The model's config.json; the part of the text model if it describes several models."""
        return self.whole_config.get("text_config") or self.whole_config

    def value(self, names: Iterable[str]) -> Any:
        """The value in config.json of the first of these names that it has; None if it has none."""
        return next((self.described[each] for each in names if each in self.described), None)

    def number(self, *names: str) -> int:
        """As `value`. Raises UsageError if it is no number."""
        found = self.value(names)
        if not isinstance(found, int):
            raise UsageError("--hf-model", self.hf_model, f"one whose config.json has {names[0]}")
        return found

    @property
    def num_layers(self) -> int:
        return self.number(*NAMES["layers"])

    def with_num_layers(self, layers: int) -> Self:
        """Raises UsageError if layers differ, because a few of them do not represent all."""
        described, whole = dict(self.described), self.num_layers
        described.update((name, layers) for name in NAMES["layers"] if name in described)
        for name, value in self.described.items() if layers != whole else ():
            by_layer = isinstance(value, list) and len(value) == whole > 1
            if (by_layer and value != value[:1] * whole) or (name in OF_SOME_LAYERS and value):
                allowed = f"one whose layers are alike, and config.json has {name}"
                raise UsageError("--hf-model", self.hf_model, allowed)
            if by_layer:
                described[name] = value[:1] * layers
        has_text = bool(self.whole_config.get("text_config"))
        found = self.whole_config | ({"text_config": described} if has_text else described)
        return replace(self, hf_config=json.dumps(found))

    @property
    def vocab_size(self) -> int:
        return self.number("vocab_size")

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model can read; None if config.json does not say."""
        found: int | None = self.value(NAMES["positions"])
        if found is not None and self.described.get("model_type") in OFFSET:
            if not isinstance(padding := self.described.get("pad_token_id", 1), int):
                allowed = "one whose config.json has a pad_token_id, after which positions begin"
                raise UsageError("--hf-model", self.hf_model, allowed)
            return found - 1 - padding
        return found

    @property
    def widths(self) -> dict[str, int]:
        if self.described.keys().isdisjoint(NAMES["heads"]):  # a model without attention
            return {}
        return {"num_attention_heads of --hf-model": self.num_attention_heads}

    @property
    def attention_width(self) -> int | None:
        """None if layers differ, attend to fewer tokens or cache other than heads."""
        described = self.described
        others = [name for name in (*OF_SOME_LAYERS, *LATENT) if described.get(name)]
        if others or self.experts or not self.widths or has_window(described):
            return None
        head = described.get("head_dim") or self.hidden_size // self.num_attention_heads
        return self.num_layers * self.num_attention_heads * int(head)

    @property
    def hidden_size(self) -> int:
        return self.number(*NAMES["hidden"])

    @property
    def num_attention_heads(self) -> int:
        return self.number(*NAMES["heads"])

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        known = [self.described.get(each) for each in NAMES["key_value_heads"]]
        return next(filter(None, known), self.num_attention_heads)

    @property
    def drops_attention(self) -> bool:
        names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        return any(self.described.get(name) for name in names)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMaskedConfig(HuggingFaceConfig):
    """A model of transformers, unmodified, that predicts masked tokens."""

    kind: ClassVar[str] = "huggingface-masked"
    is_causal: ClassVar[bool] = False

    @property
    def has_token_types(self) -> bool:
        return self.described.get("type_vocab_size", 0) > 1


# Model types of transformers that attend to all tokens unless is_decoder is set, and those with an
# encoder and a decoder. Hand-written config.json files say this nowhere else.
ENCODERS = frozenset(
    (
        *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
        *("deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert", "megatron-bert"),
        *("mobilebert", "modernbert", "mpnet", "nomic_bert", "rembert", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
ENCODER_DECODERS = frozenset(
    ("bart", "encoder-decoder", "led", "longt5", "m2m_100", "mbart", "mt5", "pegasus", "t5", "umt5")
)
# Model types whose positions count from pad_token_id + 1.
OFFSET = frozenset(
    (
        *("camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
NATIVE = ("gpt2", "llama")  # kinds that this project implements itself, too
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def kind_of(whole: Mapping[str, Any]) -> str | None:
    """Kind of a model with this config.json; None if that does not say."""
    kinds = " ".join(whole.get("architectures") or ())
    is_encoder = whole["model_type"] in ENCODERS and not whole.get("is_decoder")
    if is_encoder or "MaskedLM" in kinds:
        return "huggingface-masked"
    is_decoder = whole.get("is_decoder") or whole["model_type"] in NATIVE
    if is_decoder or "CausalLM" in kinds or "LMHeadModel" in kinds:
        return "huggingface"
    return None


def has_window(described: Mapping[str, Any]) -> bool:
    """Whether a layer of the model that config.json describes attends only to some of the previous
    tokens. A mask passed to the model replaces its own mask, and with it the window."""
    if {*(described.get("layer_types") or ())} - {"full_attention"}:
        return True
    sizes = {n: v for n, v in described.items() if "window" in n and type(v) is int and v > 0}
    return described.get("use_sliding_window") is not False and bool(
        sizes.keys() - {"max_window_layers"}
    )


def read_hf_config(name: str) -> str:
    """The text of a model's config.json, from a folder or the hub. Raises UsageError if there is
    none."""
    folder = Path(name)
    is_saved = any(folder.glob("step_*/manifest.json")) or (folder / "manifest.json").is_file()
    if is_saved and not (folder / "config.json").exists():
        allowed = "a folder of transformers, and this has checkpoints, which --load takes"
        raise UsageError("--hf-model", name, allowed)
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and name[0].isalnum()
    if is_name or folder.is_file():  # fetch refuses a file
        folder = fetch(name, ["config.json"])
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as error:
        allowed = f"a folder with a config.json, or a name on the hub ({error})"
        raise UsageError("--hf-model", name, allowed) from None
    return text
