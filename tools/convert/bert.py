"""BERT as transformers has it: BertForPreTraining is post-LN, MegatronBertForPreTraining pre-LN.

The two differ in their norms and the names of these. A fine-tuned BERT has the head of a task in
place of the two heads of pretraining.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.config.model import (
    TOKEN_TYPES,
    BertConfig,
    FinetunedConfig,
    ModelConfig,
    ResidualOrder,
)
from megatron.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase
from megatron.errors import UsageError
from tools.convert.table import APART, Family, IsRedundant, Key, Row, Tensor, both, only, same_as

OURS, THEIRS = "encoder.transformer.layers.{n}", "encoder.layer.{n}"


def layer_rows(ours: str, attention: str) -> tuple[Row, ...]:
    """Rows of a layer without its norms, which a ViT has, too. attention: their module with the
    matrices of Q, K and V."""
    return (
        *(
            Row(
                f"{ours}.attention.qkv.{each}",
                tuple(f"{attention}.{part}.{each}" for part in ("query", "key", "value")),
                APART,
            )
            for each in ("weight", "bias")
        ),
        *both(f"{ours}.attention.output", f"{THEIRS}.attention.output.dense"),
        *both(f"{ours}.mlp.up", f"{THEIRS}.intermediate.dense"),
        *both(f"{ours}.mlp.down", f"{THEIRS}.output.dense"),
    )


ENCODER = (
    Row("encoder.word_embedding.weight", ("embeddings.word_embeddings.weight",)),
    Row("encoder.position_embedding.weight", ("embeddings.position_embeddings.weight",)),
    Row("encoder.token_type_embedding.weight", ("embeddings.token_type_embeddings.weight",)),
    *layer_rows(OURS, f"{THEIRS}.attention.self"),
)
NORMS: dict[ResidualOrder, tuple[Row, ...]] = {
    "post-ln": (
        *both("encoder.embedding_norm", "embeddings.LayerNorm"),
        *both(f"{OURS}.attention_norm", f"{THEIRS}.attention.output.LayerNorm"),
        *both(f"{OURS}.mlp_norm", f"{THEIRS}.output.LayerNorm"),
    ),
    "pre-ln": (
        *both(f"{OURS}.attention_norm", f"{THEIRS}.attention.ln"),
        *both(f"{OURS}.mlp_norm", f"{THEIRS}.ln"),
        *both("encoder.final_norm", "encoder.ln"),
    ),
}
POOLER = both("pooler.dense", "pooler.dense")
PRETRAINING = (
    *both("mlm.dense", "cls.predictions.transform.dense"),
    *both("mlm.norm", "cls.predictions.transform.LayerNorm"),
    Row("mlm.head.bias", ("cls.predictions.bias",)),
    *both("sop", "cls.seq_relationship"),
)


def _counts_up(numbers: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether [1, positions] are 0, 1, 2, ..."""
    import torch

    positions = len(tensors["embeddings.position_embeddings.weight"])
    return numbers.shape == (1, positions) and numbers[0].equal(
        torch.arange(positions, dtype=numbers.dtype)
    )


POSITIONS: dict[str, IsRedundant] = {"embeddings.position_ids": _counts_up}
DECODER = {
    "cls.predictions.decoder.weight": same_as("embeddings.word_embeddings.weight"),
    "cls.predictions.decoder.bias": same_as("cls.predictions.bias"),
}


class Labels(Key):
    """Names of a classifier's classes; by default those of transformers."""

    def to_ours(self, options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        names = options.get(self.theirs, {"0": "LABEL_0", "1": "LABEL_1"})
        try:
            labels = tuple(names[str(number)] for number in range(len(names)))
        except (KeyError, TypeError):
            labels = ()
        if not labels or not all(isinstance(label, str) for label in labels):
            raise UsageError(self.theirs, json.dumps(names), '{"0": "a name", "1": ...}')
        return {self.ours: labels}

    def to_theirs(self, config: ModelConfig, options: Mapping[str, Any]) -> dict[str, Any]:
        labels = getattr(config, self.ours)
        numbers = {label: number for number, label in enumerate(labels)}
        return {self.theirs: dict(enumerate(labels)), "label2id": numbers}


def encoder_keys(num_layers: int, hidden_size: int, heads: int, dropout: float) -> tuple[Key, ...]:
    """Options that a ViT has, too, with the defaults of one of transformers' config classes."""
    return (
        Key("num_hidden_layers", "num_layers", default=num_layers),
        Key("hidden_size", "hidden_size", default=hidden_size),
        Key("num_attention_heads", "num_attention_heads", default=heads),
        Key("layer_norm_eps", "layernorm_epsilon", default=1e-12),
        Key("initializer_range", "init_method_std", default=0.02),
        Key("attention_probs_dropout_prob", "attention_dropout", default=dropout),
        Key("hidden_dropout_prob", "hidden_dropout", default=dropout),
        # Theirs has one dropout for embeddings and layers.
        Key(
            "hidden_dropout_prob",
            "embedding_dropout",
            default=dropout,
            implied="dropout_of_embeddings",
        ),
        Key("intermediate_size", "ffn_hidden_size", default=4 * hidden_size, implied="ffn_size"),
        only("quantization_config", None),
    )


def _keys(num_layers: int, hidden_size: int, heads: int) -> tuple[Key, ...]:
    return (
        *encoder_keys(num_layers, hidden_size, heads, 0.1),
        Key("max_position_embeddings", "max_position_embeddings", default=512),
        # Theirs uses one function in both the MLP and the masked-token head; here the latter is
        # GeLU.
        Key("hidden_act", "activation", {"gelu": "gelu"}),
        only("position_embedding_type", None, "absolute"),
        only("type_vocab_size", TOKEN_TYPES),
        only("is_decoder", False),
        only("add_cross_attention", False),
        # One dropout for the layers and the head of a task.
        Key(
            "classifier_dropout", values=lambda fields: {None: None, fields["hidden_dropout"]: None}
        ),
    )


# The heads of pretraining share the word embedding's weight; a task's head has none to share.
TIE = Key("tie_word_embeddings", "untie_embeddings_and_output_weights", {True: False})


def _pretrained(name: str, model_type: str, order: ResidualOrder, keys: tuple[Key, ...]) -> Family:
    """A BERT with its pretraining heads. name: the beginning of transformers' class names."""
    return Family(
        model_type=model_type,
        # Old files of the second class contain both heads.
        architectures=(f"{name}ForPreTraining", f"{name}ForMaskedLM"),
        auto_class="AutoModelForPreTraining",
        config=BertConfig,
        fields={"residual_order": order},
        rows=(*ENCODER, *NORMS[order], *POOLER, *PRETRAINING),
        keys=(*keys, TIE),
        spares=POSITIONS | DECODER,
        prefix="bert.",
        bare=("cls.", "classifier.", "qa_outputs."),
        old={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        tokenizers=(BertWordPieceLowerCase.kind, BertWordPieceCase.kind),
        special={"pad_token_id": "pad"},
    )


def _finetuned(
    family: Family, head: str, task: str, theirs: str, more: tuple[Key, ...] = ()
) -> Family:
    """A BERT with the head of a task. task: end of the class name. theirs: name of the head. more:
    options that only this class has."""
    pooler = () if head == "span" else POOLER
    return replace(
        family,
        architectures=(family.architectures[0].replace("PreTraining", task),),
        auto_class=f"AutoModelFor{task}",
        config=FinetunedConfig,
        fields={**family.fields, "head": head},
        rows=(*ENCODER, *NORMS[family.fields["residual_order"]], *pooler, *both("head", theirs)),
        keys=(*(key for key in family.keys if key is not TIE), *more),
        spares=POSITIONS,
    )


CLASSES = (Labels("id2label", "labels"), only("problem_type", None, "single_label_classification"))
PRETRAINED = (
    _pretrained("Bert", "bert", "post-ln", _keys(12, 768, 12)),
    _pretrained("MegatronBert", "megatron-bert", "pre-ln", _keys(24, 1024, 16)),
)
FINETUNED = tuple(
    head
    for family in PRETRAINED
    for head in (
        _finetuned(family, "classifier", "SequenceClassification", "classifier", CLASSES),
        _finetuned(family, "choice", "MultipleChoice", "classifier"),
        _finetuned(family, "span", "QuestionAnswering", "qa_outputs"),
    )
)
