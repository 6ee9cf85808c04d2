"""What is read: data sets, tokenizer and how documents are cut into sequences."""

from dataclasses import dataclass, fields

from megatron.config.checks import fraction, positive


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What all pretraining programs read."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair, or weights and prefixes in turn: 0.3 first 0.7 second."""

    split: str = "29,1,0"
    """Shares of the documents for training, validation and test."""

    seq_length: int = 1024
    """Tokens of a sample."""

    tokenizer_type: str = "GPT2BPETokenizer"
    """Kind of tokenizer that made the data set."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary (vocab.json, or vocab.txt of a WordPiece)."""

    merge_file: str | None = None
    """The byte-pair encoding's merges (merges.txt)."""

    def __post_init__(self) -> None:
        positive(self, "seq_length")


@dataclass(frozen=True, kw_only=True)
class GPT2DataConfig(DataConfig):
    reset_position_ids: bool = False
    """Count positions from 0 again after each end-of-document mark."""

    reset_attention_mask: bool = False
    """Let no token attend to an earlier document."""

    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document mark."""


@dataclass(frozen=True, kw_only=True)
class BertDataConfig(DataConfig):
    seq_length: int = 512
    """Tokens of a sample, padding and marks included."""

    tokenizer_type: str = "BertWordPieceLowerCase"
    """Kind of tokenizer that made the data set."""

    mask_prob: float = 0.15
    """Share of the tokens that are to be predicted."""

    short_seq_prob: float = 0.1
    """Probability of a sample that is shorter than --seq-length would allow."""

    max_ngram_size: int = 3
    """Words that are masked together at most; n of them with probability in proportion to 1/n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(self, "short_seq_prob")


# Where the data lies and what made it, of which a data set's own identity tells.
_PLACES = ("data_path", "tokenizer_type", "vocab_file", "merge_file")


def sample_settings(section: DataConfig) -> list[str]:
    """The fields that decide, beside the data sets themselves, which sample comes when."""
    return [field.name for field in fields(section) if field.name not in _PLACES]
