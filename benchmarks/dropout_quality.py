"""How good the keep-masks of dropout by coordinates are: rates, bytes and correlations.

Each figure is a number of standard deviations from what independent draws would give. Those of
rates of rows, columns and places, and of bytes, are chi-squares less their mean, over their
deviation. megatron/parallel/dropout.py says what a mask is a function of.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from megatron.parallel import dropout
from megatron.parallel.dropout import fold, head_keys, layer_key, row_keys

P, UNIT = 0.1, "standard deviations"


def kept(keys: Tensor, columns: int) -> Tensor:
    """The mask less its mean, in standard deviations, [rows, columns]."""
    mask = dropout.is_kept(keys, 0, columns, P, torch.bool)
    p = 1 - round(P * dropout.STEPS) / dropout.STEPS
    return (mask.float() - p) / sqrt(p * (1 - p))


def of_sums(standard: Tensor, dim: int) -> float:
    """Of the sums along dim, of which each should be a draw from a normal distribution."""
    sums = standard.double().sum(dim) / sqrt(standard.shape[dim])
    return float((sums.square() - 1).sum() / sqrt(2 * len(sums)))


def rate(standard: Tensor) -> float:
    return float(standard.double().sum() / sqrt(standard.numel()))


def correlation(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other).sum() / sqrt(one.numel()))


def of_bytes(words: Tensor) -> float:
    """The largest of chi-square of each of the four bytes of the words."""
    found = []
    for byte in words.view(torch.uint8).view(-1, 4).unbind(1):
        counts = torch.bincount(byte.long(), minlength=256).double()
        expected = byte.numel() / 256
        square = float(((counts - expected) ** 2 / expected).sum())
        found.append((square - 255) / sqrt(2 * 255))
    return max(found, key=abs)


@dataclass(frozen=True)
class Masks:
    """Of a layer of the stream [rows, columns], the same by samples of 256 places, those of another
    layer and seed, of attention [samples, 4 heads, 256, 256], and the words that they are made of.
    """

    own: Tensor
    by_sample: Tensor
    other_layer: Tensor
    other_seed: Tensor
    scores: Tensor
    words: Tensor


FIGURES: dict[str, Callable[[Masks], float]] = {
    "rate": lambda m: rate(m.own),
    "rates of rows": lambda m: of_sums(m.own, 1),
    "rates of columns": lambda m: of_sums(m.own, 0),
    "rates of places": lambda m: of_sums(m.by_sample.transpose(0, 1).flatten(1), 1),
    "bytes": lambda m: of_bytes(m.words),
    "neighbouring channels": lambda m: correlation(m.own[:, 1:], m.own[:, :-1]),
    "channels two apart": lambda m: correlation(m.own[:, 2:], m.own[:, :-2]),
    "neighbouring places": lambda m: correlation(m.by_sample[:, 1:], m.by_sample[:, :-1]),
    "neighbouring samples": lambda m: correlation(m.by_sample[1:], m.by_sample[:-1]),
    "layers": lambda m: correlation(m.own, m.other_layer),
    "seeds": lambda m: correlation(m.own, m.other_seed),
    "attention: rate": lambda m: rate(m.scores),
    "attention: heads": lambda m: correlation(m.scores[:, 1:], m.scores[:, :-1]),
    "attention: queries": lambda m: correlation(m.scores[:, :, 1:], m.scores[:, :, :-1]),
    "attention: keys": lambda m: correlation(m.scores[..., 1:], m.scores[..., :-1]),
    "attention: samples": lambda m: correlation(m.scores[1:], m.scores[:-1]),
}


def quality(rows: int, columns: int) -> dict[str, float]:
    """{what: standard deviations}; a multiple of 256 rows, of two samples or more."""
    places, samples = torch.arange(256), torch.arange(rows // 256)
    stream, key = row_keys(samples, places), layer_key(1, "layers.0.mlp")
    own = kept(fold(key, stream), columns)
    heads = head_keys(stream, key, range(4), len(samples))
    masks = Masks(
        own=own,
        by_sample=own.view(len(samples), 256, columns),
        other_layer=kept(fold(layer_key(1, "layers.1.mlp"), stream), columns),
        other_seed=kept(fold(layer_key(2, "layers.0.mlp"), stream), columns),
        scores=kept(heads.flatten(), 256).view(len(samples), 4, 256, 256),
        words=dropout.hash_pairs(fold(key, stream), torch.arange(columns // 2).int()),
    )
    return {name: figure(masks) for name, figure in FIGURES.items()}


def contender(rank: Rank, rows: int, columns: int) -> Turn:
    return lambda: quality(rows, columns)


def main(flags: Flags, rows: int = 8192, columns: int = 4096) -> None:
    """Compute the figures.

    Args:
        rows: of the mask of the stream; that of attention has 1024 x rows elements.
        columns: of the mask of the stream.
    """
    sizes = {"rows": rows, "columns": columns}
    ask(
        Question(
            title="How random dropout by coordinates is",
            method=__doc__,
            contenders=[Contender(name=UNIT, run=contender, arguments=sizes, threads=2)],
            columns=[Column(name, name, "{:+.2f}") for name in FIGURES],
            result=lambda found: (
                f"Of {len(FIGURES)} figures of {rows:,} x {columns:,} elements, p = {P}, none is "
                f"further than {max(abs(found.median('', UNIT, each)) for each in FIGURES):.1f} "
                "standard deviations from what independent draws would give."
            ),
            rounds=1,
            warm_up=0,
            packages=("torch",),
            settings=sizes,
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
