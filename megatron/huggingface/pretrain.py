"""A pretraining run of an unmodified model: its settings, the checks across them, and its data.
Needs no torch."""

from dataclasses import dataclass, field

from megatron.config.checks import at_most, left_out
from megatron.config.pretrain import PretrainConfig
from megatron.config.training import (
    BertDataConfig,
    BertOptimizerConfig,
    GPT2DataConfig,
    TextDataConfig,
)
from megatron.errors import UsageError
from megatron.huggingface.config import HuggingFaceConfig, HuggingFaceMaskedConfig, has_window
from megatron.train.inputs import Inputs, open_bert_data, open_text


@dataclass(frozen=True, kw_only=True)
class PretrainUnmodifiedConfig(PretrainConfig):
    """Settings for unmodified models of transformers."""

    model: HuggingFaceConfig
    data: TextDataConfig

    def check(self, world_size: int) -> None:
        self.model.check()
        if self.parallel.tensor_model_parallel_size > 1:
            self.model.check_cut()
        native = self.model.described["model_type"]
        other = f"; --model {native} can" if native in ("gpt2", "llama", "bert") else ""
        reason = f"with an unmodified model, which cannot be cut into stages{other}"
        left_out(self.parallel, "pipeline_model_parallel_size", reason)
        reason = "with an unmodified model, which makes its masks and positions of whole sequences"
        reason += f", and cannot compute with a part of one{other}"
        left_out(self.parallel, "sequence_parallel", reason)
        super().check(world_size)
        if (positions := self.model.positions) is not None:
            at_most(self.data, "seq_length", positions, "--hf-model", "the positions of {},")
        resets = [
            getattr(self.data, f"reset_{each}", False)
            for each in ("position_ids", "attention_mask")
        ]
        if resets == [True, False]:
            name, works = "--reset-position-ids", ("--reset-position-ids", "--reset-attention-mask")
            allowed = "given with {}: transformers takes such positions for it"
            raise UsageError(name, None, allowed, "--reset-attention-mask", works=works)
        described, allowed = self.model.described, ""
        if has_window(described):
            allowed = "left out: the mask of documents would take the place of {}'s window"
        elif described.get("alibi", native == "bloom"):
            allowed = "left out: {} computes its ALiBi from a mask of padding alone"
        if resets[1] and allowed:
            works = ("--no-reset-attention-mask", "--no-reset-position-ids")
            raise UsageError("--reset-attention-mask", None, allowed, "--hf-model", works=works)


@dataclass(frozen=True, kw_only=True)
class PretrainHuggingFaceConfig(PretrainUnmodifiedConfig):
    data: GPT2DataConfig = field(default_factory=GPT2DataConfig)


@dataclass(frozen=True, kw_only=True)
class PretrainHuggingFaceMaskedConfig(PretrainUnmodifiedConfig):
    model: HuggingFaceMaskedConfig
    data: BertDataConfig = field(default_factory=BertDataConfig)
    optimizer: BertOptimizerConfig = field(default_factory=BertOptimizerConfig)


def open_inputs(config: PretrainHuggingFaceConfig) -> Inputs:
    """Like open_gpt2_inputs; the model's vocabulary may be larger than the tokenizer's."""
    inputs = open_text(config.data, config.training.seed, None, load=config.checkpoint)
    return _that_fit(config.model, inputs)


def open_masked_inputs(config: PretrainHuggingFaceMaskedConfig) -> Inputs:
    """Like open_bert_inputs; the model's vocabulary may be larger than the tokenizer's."""
    _, inputs = open_bert_data(config.data, config.training.seed, load=config.checkpoint)
    return _that_fit(config.model, inputs)


def _that_fit(model: HuggingFaceConfig, inputs: Inputs) -> Inputs:
    if (size := inputs.corpus.vocab_size) > model.vocab_size:
        allowed = f"a model with at least the {size} tokens of {{}}, and this has "
        allowed += str(model.vocab_size)
        raise UsageError("--hf-model", model.hf_model, allowed, "--data-path")
    return inputs
