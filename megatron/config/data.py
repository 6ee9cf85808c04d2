"""What is read: data sets, tokenizer and how documents are cut into sequences."""

from dataclasses import dataclass

from megatron.config.checks import positive


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair, or weights and prefixes in turn: 0.3 first 0.7 second."""

    split: str = "29,1,0"
    """Shares of the documents for training, validation and test."""

    seq_length: int = 1024
    """Tokens of a sample."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer that made the data set."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary (vocab.json)."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end-of-document mark."""

    reset_attention_mask: bool = False
    """Let no token attend to an earlier document."""

    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document mark."""

    def __post_init__(self) -> None:
        positive(self, "seq_length")
