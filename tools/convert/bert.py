"""BERT as transformers has it: BertForPreTraining is post-LN, MegatronBertForPreTraining pre-LN.

The two differ in their norms and the names of these. A fine-tuned BERT has the head of a task in
place of the two heads of pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.model import TOKEN_TYPES, BertConfig, FinetunedConfig, ResidualOrder
from tools.convert.table import (
    APART,
    AS_IS,
    Choice,
    Family,
    Lacking,
    Option,
    Row,
    Setting,
    Spare,
    always,
    is_same,
)
from tools.convert.word_pieces import WORD_PIECES

if TYPE_CHECKING:
    from torch import Tensor


PARAMETERS = ("weight", "bias")


def _both(ours: str, theirs: str) -> tuple[Row, ...]:
    """Rows for the weight and bias of a module."""
    return tuple(Row(f"{ours}.{each}", (f"{theirs}.{each}",), AS_IS) for each in PARAMETERS)


OURS, THEIRS = "encoder.transformer.layers.{n}", "encoder.layer.{n}"

ENCODER = (
    Row("encoder.word_embedding.weight", ("embeddings.word_embeddings.weight",), AS_IS),
    Row("encoder.position_embedding.weight", ("embeddings.position_embeddings.weight",), AS_IS),
    Row("encoder.token_type_embedding.weight", ("embeddings.token_type_embeddings.weight",), AS_IS),
    *(
        Row(
            f"{OURS}.attention.qkv.{each}",
            tuple(f"{THEIRS}.attention.self.{part}.{each}" for part in ("query", "key", "value")),
            APART,
        )
        for each in PARAMETERS
    ),
    *_both(f"{OURS}.attention.output", f"{THEIRS}.attention.output.dense"),
    *_both(f"{OURS}.mlp.up", f"{THEIRS}.intermediate.dense"),
    *_both(f"{OURS}.mlp.down", f"{THEIRS}.output.dense"),
)
NORMS: dict[ResidualOrder, tuple[Row, ...]] = {
    "post-ln": (
        *_both("encoder.embedding_norm", "embeddings.LayerNorm"),
        *_both(f"{OURS}.attention_norm", f"{THEIRS}.attention.output.LayerNorm"),
        *_both(f"{OURS}.mlp_norm", f"{THEIRS}.output.LayerNorm"),
    ),
    "pre-ln": (
        *_both(f"{OURS}.attention_norm", f"{THEIRS}.attention.ln"),
        *_both(f"{OURS}.mlp_norm", f"{THEIRS}.ln"),
        *_both("encoder.final_norm", "encoder.ln"),
    ),
}
POOLER = _both("pooler.dense", "pooler.dense")
PRETRAINING = (
    *_both("mlm.dense", "cls.predictions.transform.dense"),
    *_both("mlm.norm", "cls.predictions.transform.LayerNorm"),
    Row("mlm.head.bias", ("cls.predictions.bias",), AS_IS),
    *_both("sop", "cls.seq_relationship"),
)


def _is_embedding(head: Tensor, weights: Mapping[str, Tensor]) -> bool:
    return is_same(head, weights["embeddings.word_embeddings.weight"])


def _is_bias(bias: Tensor, weights: Mapping[str, Tensor]) -> bool:
    return is_same(bias, weights["cls.predictions.bias"])


def _counts_up(numbers: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether [1, positions] are 0, 1, 2, ..."""
    import torch

    positions = len(weights["embeddings.position_embeddings.weight"])
    return numbers.shape == (1, positions) and numbers[0].equal(
        torch.arange(positions, dtype=numbers.dtype)
    )


POSITIONS = Spare(
    "embeddings.position_ids", _counts_up, "does not count up from 0; the positions of a BERT do"
)
DECODER = (
    Spare(
        "cls.predictions.decoder.weight",
        _is_embedding,
        "is not embeddings.word_embeddings.weight; the head of a BERT here is tied to it",
    ),
    Spare(
        "cls.predictions.decoder.bias",
        _is_bias,
        "is not cls.predictions.bias; the head of a BERT has one bias",
    ),
)


def _settings(num_layers: int, hidden_size: int, heads: int) -> tuple[Setting, ...]:
    """The settings of a BERT, with the defaults of one of transformers' config classes."""
    return (
        Setting("num_hidden_layers", "num_layers", num_layers),
        Setting("hidden_size", "hidden_size", hidden_size),
        Setting("num_attention_heads", "num_attention_heads", heads),
        Setting("max_position_embeddings", "max_position_embeddings", 512),
        Setting("layer_norm_eps", "layernorm_epsilon", 1e-12),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Setting("hidden_dropout_prob", "hidden_dropout", 0.1),
        Setting("hidden_dropout_prob", "embedding_dropout", 0.1, meaning="dropout_of_embeddings"),
        Setting("intermediate_size", "ffn_hidden_size", 4 * hidden_size, meaning="ffn_size"),
    )


OPTIONS = (
    Option("position_embedding_type", always(None, "absolute"), "an embedding of each position"),
    Option("type_vocab_size", always(TOKEN_TYPES), "two segments"),
    Option("is_decoder", always(False), "a BERT that sees both ways"),
    Option("add_cross_attention", always(False), "self-attention alone"),
    Option(
        "classifier_dropout",
        lambda numbers: (None, numbers["hidden_dropout_prob"]),
        "one dropout for the layers and the head of a task",
    ),
    Option("quantization_config", always(None), "weights in fp32, bf16 or fp16"),
)
# Theirs uses one function in both the MLP and the masked-token head; here the latter is GeLU.
ACTIVATION = Choice("hidden_act", "activation", {"gelu": "gelu"})
TIE = Choice("tie_word_embeddings", "untie_embeddings_and_output_weights", {True: False})
LACKING = Lacking(
    ("pooler.", "cls.seq_relationship."),
    "for BertForMaskedLM saves neither the pooler nor the head of sentence order",
)


def _pretrained(
    name: str, model_type: str, order: ResidualOrder, settings: tuple[Setting, ...]
) -> Family:
    """A BERT with its pretraining heads. name: the beginning of transformers' class names."""
    return Family(
        model_type=model_type,
        # Old files of the second class contain both heads.
        architectures=(f"{name}ForPreTraining", f"{name}ForMaskedLM"),
        here="a BERT with both heads of its pretraining",
        auto_class="AutoModelForPreTraining",
        section=BertConfig,
        fields={"residual_order": order},
        rows=(*ENCODER, *NORMS[order], *POOLER, *PRETRAINING),
        spares=(POSITIONS, *DECODER),
        settings=settings,
        options=OPTIONS,
        choices=(ACTIVATION, TIE),
        lacking=LACKING,
        prefix="bert.",
        bare=("cls.", "classifier.", "qa_outputs."),
        old={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        tokenizing=WORD_PIECES,
        special={"pad_token_id": "pad"},
    )


def _finetuned(family: Family, head: str, task: str, theirs: str, here: str) -> Family:
    """A BERT with the head of a task. task: end of the class name. theirs: name of the head."""
    pooler = () if head == "span" else POOLER
    return replace(
        family,
        architectures=(family.architectures[0].replace("PreTraining", task),),
        here=here,
        auto_class=f"AutoModelFor{task}",
        section=FinetunedConfig,
        fields={**family.fields, "head": head},
        rows=(*ENCODER, *NORMS[family.fields["residual_order"]], *pooler, *_both("head", theirs)),
        spares=(POSITIONS,),
        options=(*OPTIONS, *HEAD_OPTIONS[head]),
        choices=(ACTIVATION,),
        lacking=None,
    )


KIND_OF_LABELS = Option(
    "problem_type", always(None, "single_label_classification"), "one class for each text"
)
HEAD_OPTIONS: dict[str, tuple[Option, ...]] = {
    "classifier": (KIND_OF_LABELS,),
    "choice": (),
    "span": (),
}
HEADS = (
    ("classifier", "SequenceClassification", "classifier", "a classifier"),
    ("choice", "MultipleChoice", "classifier", "a choice between options"),
    ("span", "QuestionAnswering", "qa_outputs", "a BERT that tells spans"),
)
PRETRAINED = (
    _pretrained("Bert", "bert", "post-ln", _settings(12, 768, 12)),
    _pretrained("MegatronBert", "megatron-bert", "pre-ln", _settings(24, 1024, 16)),
)
FINETUNED = tuple(_finetuned(family, *head) for family in PRETRAINED for head in HEADS)
