"""Examples that a pretrained BERT is fine-tuned on; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.data.batch import ExampleBatch

Tokens: TypeAlias = Sequence[int] | NDArray[Any]


@dataclass(frozen=True)
class Encoding:
    """One sequence as BERT reads it: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

    tokens: Tokens  # [n]
    second: int  # token type 1 from here on, after a's [SEP]; n where there is no b


@dataclass(frozen=True)
class Example:
    """One sequence and its class or its span; or all options of a question and the right one."""

    options: tuple[Encoding, ...]
    label: tuple[int, ...]
    """(class,), (right option,), or (first token, last token) of the answer; () where it is not
    known, which can be evaluated alone."""

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(each.tokens) for each in self.options)


def make_batch(examples: Sequence[Example], counted: int | None = None) -> ExampleBatch:
    """The batch of these examples, all with as many options and numbers in their labels.

    counted: of how many of them, the first ones, the loss is taken; all if not given.
    """
    sequences = [each for example in examples for each in example.options]
    lengths = np.array([len(each.tokens) for each in sequences])[:, None]
    positions = np.arange(lengths.max())
    is_real = positions < lengths
    tokens = np.zeros(is_real.shape, np.int64)
    tokens[is_real] = np.concatenate([np.asarray(each.tokens) for each in sequences])
    is_second = positions >= np.array([each.second for each in sequences])[:, None]
    options = len(examples[0].options)
    assert len(sequences) == options * len(examples), "unequal numbers of options"
    shape = (len(examples), options, -1) if options > 1 else is_real.shape
    count = len(examples) if counted is None else counted
    return ExampleBatch(
        tokens=tokens.reshape(shape),
        token_types=(is_real & is_second).astype(np.int64).reshape(shape),
        is_real=is_real.reshape(shape),
        labels=np.array([each.label for each in examples], np.int64).reshape(len(examples), -1),
        counted=(np.arange(len(examples)) < count).astype(np.float32),
    )
