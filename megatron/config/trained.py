"""A model that has been trained, for programs that evaluate or use it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainedConfig:
    load: str
    """Directory of checkpoints; the newest one is used."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer that made the training data."""

    vocab_file: str
    """The tokenizer's vocabulary (vocab.json)."""

    merge_file: str
    """The byte-pair encoding's merges (merges.txt)."""
