"""A BERT small enough for tests, and its batches."""

from typing import Any

import numpy as np

from megatron.config.model import BertConfig
from megatron.data.bert import BertBatch
from tests.tiny import SEQUENCE, VOCABULARY, tiny_config

MASK = VOCABULARY - 1  # the id that stands for a hidden token


def bert_config(order: Any = "pre-ln", **changes: Any) -> BertConfig:
    settings = {**vars(tiny_config()), "activation": "gelu", "residual_order": order}
    return BertConfig(**(settings | changes))


def bert_samples(count: int, *, seed: int = 0, first: int = 0) -> BertBatch:
    """Samples first to first + count, each of a length and with masked places of its own."""
    shape = (count, SEQUENCE)
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    types, is_real = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    mask = np.zeros(shape, np.float32)
    is_swapped = np.zeros(count, np.int64)
    for row in range(count):
        random = np.random.default_rng([seed, first + row])
        length = SEQUENCE - row % 3 - int(random.integers(5))
        labels[row, :length] = tokens[row, :length] = random.integers(1, MASK, size=length)
        types[row, random.integers(2, length) : length] = 1
        is_real[row, :length] = True
        picked = random.permutation(length)[: random.integers(1, 6)]
        tokens[row, picked], mask[row, picked] = MASK, 1
        is_swapped[row] = random.integers(2)
    return BertBatch(
        tokens=tokens,
        token_types=types,
        is_real=is_real,
        labels=labels,
        loss_mask=mask,
        is_swapped=is_swapped,
        numbers=np.arange(first, first + count),
    )
