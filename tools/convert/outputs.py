"""Logits of the same prompt, head by head, from our model and from the class of transformers.

b sequences   s tokens per sequence   v vocabulary   m tokens that are not padding
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.data.bert import BertBatch
from megatron.parallel.collectives import gather_from
from megatron.parallel.mesh import Mesh
from megatron.train.evaluate import whole_logits

Logits = dict[str, Tensor]  # by the head's name in words


@dataclass(frozen=True)
class Prompt:
    """tokens, token_types: int64 [b, s]. is_real: bool [b, s], False for padding."""

    tokens: Tensor
    token_types: Tensor
    is_real: Tensor

    def batch(self) -> BertBatch:
        return BertBatch(tokens=self.tokens, token_types=self.token_types, is_real=self.is_real)

    def for_transformers(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens,
            "token_type_ids": self.token_types,
            "attention_mask": self.is_real.long(),
        }


@dataclass(frozen=True)
class Outputs:
    """Functions to the logits of a prompt without its padding. padded: whether it may have any."""

    ours: Callable[[Any, Mesh, Prompt], Logits]
    theirs: Callable[[Any, Prompt], Logits]
    padded: bool = True


def _our_next(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    return {"next tokens": whole_logits(model, mesh, prompt.tokens)}


def _their_next(model: Any, prompt: Prompt) -> Logits:
    return {"next tokens": model(prompt.tokens).logits}


def _our_pretraining(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    masked, order = model(prompt.batch())
    masked = gather_from(masked, -1, mesh.tensor)[:, : model.vocab_size]
    return {"masked tokens": masked[prompt.is_real.flatten()], "the order of segments": order}


def _their_pretraining(model: Any, prompt: Prompt) -> Logits:
    found = model(**prompt.for_transformers())
    masked, order = found.prediction_logits, found.seq_relationship_logits
    return {"masked tokens": masked[prompt.is_real], "the order of segments": order}


def _our_scores(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    return {"the task": model(prompt.batch()).flatten(1)}


def _their_classes(model: Any, prompt: Prompt) -> Logits:
    return {"the task": model(**prompt.for_transformers()).logits}


def _their_options(model: Any, prompt: Prompt) -> Logits:
    """Reads each sequence as the only option of a question."""
    arguments = {name: each[:, None] for name, each in prompt.for_transformers().items()}
    return {"the task": model(**arguments).logits}


def _our_spans(model: Any, mesh: Mesh, prompt: Prompt) -> Logits:
    return {"the task": model(prompt.batch())[prompt.is_real]}


def _their_spans(model: Any, prompt: Prompt) -> Logits:
    found = model(**prompt.for_transformers())
    both = torch.stack([found.start_logits, found.end_logits], -1)
    return {"the task": both[prompt.is_real]}


OUTPUTS: Mapping[str, Outputs] = {
    "AutoModelForCausalLM": Outputs(_our_next, _their_next, padded=False),
    "AutoModelForPreTraining": Outputs(_our_pretraining, _their_pretraining),
    "AutoModelForSequenceClassification": Outputs(_our_scores, _their_classes),
    "AutoModelForMultipleChoice": Outputs(_our_scores, _their_options),
    "AutoModelForQuestionAnswering": Outputs(_our_spans, _their_spans),
}
"""Keys are classes of transformers (Family.auto_class)."""
