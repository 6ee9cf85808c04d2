"""BERT's shape, and that of a BERT with the head of a task (paper, section 5.2)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron.config.model import ModelConfig

ResidualOrder = Literal["pre-ln", "post-ln"]
Head = Literal["classifier", "choice", "span"]
TOKEN_TYPES = 2  # of the first and of the second segment


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    kind: ClassVar[str] = "bert"

    max_position_embeddings: int = 512
    """Rows of the position embedding: the longest sequence that the model can read."""

    residual_order: ResidualOrder = "pre-ln"
    """pre-ln: norm before attention and MLP, off the residual path, as the paper rearranged it;
    post-ln: after each residual add, as in the original BERT."""


@dataclass(frozen=True, kw_only=True)
class FinetunedConfig(BertConfig):
    """A BERT whose pretraining heads have given way to the head of a task; no program's flags."""

    kind: ClassVar[str] = "finetuned"

    head: Head
    """Scores of classes, of each option of a question, or of each token as first and last one."""

    labels: tuple[str, ...] = ()
    """Names of a classifier's classes, in the order of their ids."""
