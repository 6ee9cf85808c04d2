"""What the tokenizers over the `tokenizers` library share."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.encoders import Encoder, build_encoder


class LibraryTokenizer:
    """Encodes and decodes with a tokenizers.Tokenizer, or encodes with a faster library."""

    def __init__(self, library: Any, encoder: str) -> None:
        """library: a tokenizers.Tokenizer.  encoder: which library encodes; see encoders.py."""
        self._library = library
        self._choice = encoder

    @cached_property
    def encoder(self) -> Encoder:
        """Made when it is first asked for: who decodes, or compares fingerprints, needs none."""
        return build_encoder(self._choice, self._library)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encoder.lists(texts)

    def encode_arrays(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        return self.encoder.arrays(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(ids)))


def read_given(flag: str, file: str | None) -> bytes:
    """The file that the flag names; ValueError without one, FileNotFoundError if it is not there"""
    if file is None:
        raise ValueError(f"{flag} is missing: it names a file of the tokenizer")
    if not Path(file).is_file():
        raise FileNotFoundError(f"{flag} {file}: no such file")
    return Path(file).read_bytes()
