"""Which documents are for training, which for validation, which for test."""

from fractions import Fraction
from itertools import pairwise
from math import floor

SPLITS = ("training", "validation", "test")


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Ranges of documents, in file order, in proportion to the three weights of --split.

    A weight of 0 gives an empty range. Raises ValueError, naming --split, for weights that are
    none, and where a split of positive weight would get no document.
    """
    weights = _weights(split)
    bounds = [floor(documents * sum(weights[:end]) / sum(weights)) for end in range(4)]
    ranges = [range(start, stop) for start, stop in pairwise(bounds)]
    for name, weight, documents_of in zip(SPLITS, weights, ranges, strict=True):
        if weight and not documents_of:
            raise ValueError(
                f"--split {split} leaves no document for {name}: there are only {documents}; "
                "give it a larger weight, a weight of 0, or more documents"
            )
    return ranges[0], ranges[1], ranges[2]


def _weights(split: str) -> list[Fraction]:
    try:
        weights = [Fraction(weight) for weight in split.split(",")]
    except (ValueError, ZeroDivisionError):
        weights = []
    if len(weights) != 3 or min(weights) < 0 or sum(weights) == 0:
        raise ValueError(
            f"--split {split} should be three weights of 0 or more, for training, validation and "
            "test; --split 29,1,0 would work"
        )
    return weights
