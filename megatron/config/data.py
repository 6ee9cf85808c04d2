"""What is read: data sets, tokenizer and how documents are cut into sequences."""

import math
from dataclasses import dataclass

from megatron.config.checks import SettingError, number, positive


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
        self._check_split()
        self._check_data_path()

    def _check_split(self) -> None:
        shares = [number(share) for share in self.split.split(",")]
        valid = [share for share in shares if share is not None and 0 <= share < math.inf]
        if len(shares) != 3 or len(valid) != 3 or sum(valid) <= 0:
            raise SettingError(
                f"--split {self.split} should be three shares of 0 or more, "
                "for training, validation and test; --split 29,1,0 would work"
            )

    def _check_data_path(self) -> None:
        if len(self.data_path) <= 1:
            return
        weights = [number(word) for word in self.data_path[::2]]
        wrong = any(weight is None or not 0 < weight < math.inf for weight in weights)
        if wrong or len(self.data_path) % 2:
            raise SettingError(
                f"--data-path {' '.join(self.data_path)} should be one prefix, or a positive "
                "weight before each prefix; --data-path 0.3 first 0.7 second would work"
            )
