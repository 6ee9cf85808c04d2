"""A model that has been trained, for programs that evaluate or use it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainedConfig:
    load: str
    """Directory of checkpoints, of which the newest one is used; or one of its subdirectories."""

    tokenizer_type: str | None = None
    """Kind of tokenizer that made the training data; the checkpoint's own if not given."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary (vocab.json); the checkpoint's own if not given."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt); the checkpoint's own if not given."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Weights and activations are computed in it."""
