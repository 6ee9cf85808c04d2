"""The leakage table: how much of the evaluation sets is found in a corpus (section 4.1)."""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.files import atomic_writer
from tools.corpus.evaluation import Evaluation
from tools.corpus.settings import say


class Marks(NamedTuple):
    """Whether each n-gram of the leakage table was found: arrays [number of n-grams]."""

    before: NDArray[np.bool_]
    after: NDArray[np.bool_]

    @classmethod
    def empty(cls, evaluation: Evaluation) -> "Marks":
        size = len(evaluation.leak)
        return cls(np.zeros(size, np.bool_), np.zeros(size, np.bool_))

    def write(self, file: Path) -> None:
        with atomic_writer(file) as stream:
            stream.write(zlib.compress(np.packbits(self).tobytes(), 1))

    def add_file(self, file: Path) -> None:
        bits = np.frombuffer(zlib.decompress(file.read_bytes()), np.uint8)
        size = len(self.before)
        found = np.unpackbits(bits, count=2 * size).reshape(2, size)
        for mine, other in zip(self, found, strict=True):
            mine |= other.astype(np.bool_)


def leakage_table(evaluation: Evaluation, marks: Marks) -> dict[str, dict[str, float]]:
    """By evaluation set: its n-grams, and the shares of them that were found."""
    table: dict[str, dict[str, float]] = {}
    for each in evaluation.sets:
        before, before_distinct = each.leakage(marks.before)
        after, after_distinct = each.leakage(marks.after)
        table[each.name] = {
            "ngrams": int(each.leak_counts.sum()),
            "distinct_ngrams": len(each.leak_ids),
            "before": before,
            "before_distinct": before_distinct,
            "after": after,
            "after_distinct": after_distinct,
        }
    return table


def show(leakage: dict[str, dict[str, float]], n: int) -> None:
    columns = ("before", "before_distinct", "after", "after_distinct")
    width = max(map(len, leakage))
    say(f"share of {n}-grams found in the corpus, of all and of the distinct ones:")
    say(f"  {'':{width}}" + "".join(f"{column.replace('_', ' '):>17}" for column in columns))
    for name, facts in leakage.items():
        say(f"  {name:{width}}" + "".join(f"{facts[column]:>17.3%}" for column in columns))
