"""Registry of the kinds of model, one entry for each. Needs no torch.

An entry names its parts as "module:name", so that listing the kinds needs neither torch nor the
parts of other kinds. A user's own kind is a `ModelKind`, too: `register` gives it a name, or
"module:name" of the entry serves as its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, get_type_hints

from megatron.config import help as helps
from megatron.config.launch import is_first
from megatron.config.parts import resolve
from megatron.config.presets import kind_of_presets
from megatron.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    config: str
    """A ModelConfig class whose `kind` is the name of the entry."""
    model: str
    """The class, built from (config, factory, vocabulary size); it is its own objective."""
    program: str | None = None
    """The config of a pretraining run, a PretrainConfig; None for a kind without pretraining."""
    inputs: str | None = None
    """Function from a run's config to its Inputs: opens the data, without torch."""
    samples: str = "megatron.train.inputs:random_text"
    """Function from a run's config to Samples that it could read, which need no data. Plans are
    made for them, and compare_layouts trains on them."""
    data: str = "megatron.config.training:TextDataConfig"
    """The DataConfig of checkpoints of a kind without a program."""
    writes_text: bool = False
    """Whether it continues a text, as a megatron.models.gpt.Decoder does. Text generation and
    the tasks without fine-tuning accept such kinds."""
    conversion: str | None = None
    """Tables for the conversion from and to HuggingFace: a sequence of Family."""

    @property
    def data_config(self) -> Any:
        """The DataConfig of its checkpoints: type of the program's field `data`, else `data`. Its
        defaults apply to checkpoints that are older than a setting."""
        if self.program is None:
            return resolve_name(self.data)
        return get_type_hints(resolve_name(self.program))["data"]


NO_END = 1 << 20  # positions of a model of transformers whose config.json has no limit

KINDS = {
    "gpt2": ModelKind(
        config="megatron.config.model:GPT2Config",
        model="megatron.models.gpt:GPT2",
        program="megatron.config.pretrain:PretrainGPT2Config",
        inputs="megatron.train.inputs:open_gpt2_inputs",
        writes_text=True,
        conversion="tools.convert.gpt2:GPT2S",
    ),
    "llama": ModelKind(
        config="megatron.config.model:LlamaConfig",
        model="megatron.models.llama:Llama",
        program="megatron.config.pretrain:PretrainLlamaConfig",
        inputs="megatron.train.inputs:open_gpt2_inputs",
        writes_text=True,
        conversion="tools.convert.llama:LLAMAS",
    ),
    "huggingface": ModelKind(
        config="megatron.huggingface.config:HuggingFaceConfig",
        model="megatron.huggingface.model:HuggingFace",
        program="megatron.huggingface.pretrain:PretrainHuggingFaceConfig",
        inputs="megatron.huggingface.pretrain:open_inputs",
        writes_text=True,
    ),
    "huggingface-masked": ModelKind(
        config="megatron.huggingface.config:HuggingFaceMaskedConfig",
        model="megatron.huggingface.model:HuggingFaceMasked",
        program="megatron.huggingface.pretrain:PretrainHuggingFaceMaskedConfig",
        inputs="megatron.huggingface.pretrain:open_masked_inputs",
        samples="megatron.train.inputs:random_pairs",
    ),
    "bert": ModelKind(
        config="megatron.config.model:BertConfig",
        model="megatron.models.bert:BERT",
        program="megatron.config.pretrain:PretrainBertConfig",
        inputs="megatron.train.inputs:open_bert_inputs",
        samples="megatron.train.inputs:random_pairs",
        conversion="tools.convert.bert:PRETRAINED",
    ),
    "vit": ModelKind(
        config="megatron.config.model:ViTConfig",
        model="megatron.models.vit:ViT",
        program="megatron.config.pretrain:PretrainViTConfig",
        inputs="megatron.train.inputs:open_image_inputs",
        samples="megatron.train.inputs:random_images",
        conversion="tools.convert.vit:VITS",
    ),
    "finetuned": ModelKind(
        config="megatron.config.model:FinetunedConfig",
        model="megatron.models.bert:FinetunedBert",
        data="megatron.config.training:BertDataConfig",
        conversion="tools.convert.bert:FINETUNED",
    ),
}


def register(name: str, kind: ModelKind) -> None:
    """Add a kind. Raises ValueError if the name is taken."""
    if name in KINDS:
        raise ValueError(f"a kind of model called {name!r} is registered already")
    KINDS[name] = kind


MODEL_HELP = """\
usage: pretrain.py --model KIND [flags]

Pretrain a model. --model KIND -h lists the flags of a kind.

    KIND    {kinds}
            or module:NAME, a megatron.models.registry.ModelKind of one's own
"""


def take_kind(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """(the kind of --model, or else of a preset's `kind` in its table [model]; the other
    arguments). Prints the kinds for --help without a kind."""
    rest, kind, presets = list[str](), None, list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--model", "--preset") and not equals:
            value = next(words, "")
        if name == "--model":
            kind = value
            continue
        rest.append(word)
        if name == "--preset":
            rest += [] if equals else [value]
            presets.append(value)
    try:  # with --model, too: the presets' folders may have its module
        of_preset = kind_of_presets(presets)
    except UsageError:
        if kind is None:
            raise
        of_preset = None  # `parse` raises it again, and knows this program's presets
    if of_preset is not None and kind is None:
        kind = str(of_preset.value)
        try:
            find_kind(kind)
        except UsageError as error:
            raise of_preset.error(error.allowed) from error
    kinds = [name for name, each in KINDS.items() if each.program is not None]
    if kind is None and helps.WORDS & set(rest):
        if is_first(environ):
            text = MODEL_HELP.format(kinds=", ".join(kinds))
            print(helps.with_examples(text, helps.examples()), end="")
        raise SystemExit(0)
    if kind is None:
        raise UsageError("--model", None, "given", works=kinds[0])
    return kind, rest


def find_kind(name: str, given: str = "--model") -> ModelKind:
    """The entry of this name, or at "module:name". given: the flag, for messages. Raises
    UsageError if there is none."""
    if name in KINDS:
        return KINDS[name]
    kind, wrong = resolve(name)
    if not isinstance(kind, ModelKind):
        allowed = f"{', '.join(KINDS)}, or module:name of a megatron.models.registry.ModelKind"
        allowed += f" ({wrong})" if wrong else ""
        raise UsageError(given, name, allowed, works=next(iter(KINDS)))
    return kind


def text_kinds() -> list[str]:
    """Names of the kinds that write text."""
    return [name for name, kind in KINDS.items() if kind.writes_text]


def positions_of(manifest: Mapping[str, Any]) -> int:
    """The longest sequence that the model of a checkpoint can read, in tokens."""
    settings = manifest["config"]["model"]
    if "max_position_embeddings" in settings:
        return int(settings["max_position_embeddings"])
    return config_of(manifest).positions or NO_END


def is_unmodified(kind: str) -> bool:
    """Whether it is the kind of an unmodified model of transformers."""
    return bool(resolve_name(find_kind(kind, "kind").config).is_unmodified)


def config_of(manifest: Mapping[str, Any]) -> Any:
    """The config of the model of a checkpoint, from its manifest."""
    config = resolve_name(find_kind(manifest["kind"], "kind").config)
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in manifest["config"]["model"].items()
    }
    # Name of the full granularity in the first checkpoints.
    if settings.pop("checkpoint_activations", False):
        settings["recompute_granularity"] = "full"
    try:
        return config(**settings)
    except TypeError as error:  # a setting is unknown here, or missing
        raise ValueError(
            f"the checkpoint's model is of another version of {config.kind}: {error}"
        ) from error
