"""How random dropout by coordinates is.

Keep-masks of a layer on hidden states [rows, columns], in samples of 256 tokens, and of attention
[samples, 4 heads, 256, 256]; megatron/parallel/dropout.py says what a mask depends on. Each figure
is a deviation from independent draws, in standard deviations. The figures for the rates of rows,
columns and places, and for bytes, are (chi-square - its mean) / its standard deviation.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from collections.abc import Iterator
from math import sqrt
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.parallel import dropout
from megatron.parallel.dropout import fold, head_keys, layer_key, row_keys

P, UNIT = 0.1, "standard deviations"


def kept(keys: Tensor, columns: int) -> Tensor:
    """The mask minus its mean, in standard deviations, [rows, columns]."""
    p = 1 - round(P * dropout.STEPS) / dropout.STEPS
    return (dropout.kept_mask(keys, 0, columns, P, torch.bool).float() - p) / sqrt(p * (1 - p))


def quality(rows: int, columns: int) -> dict[str, float]:
    """{property: standard deviations}. rows: a multiple of 256, at least two samples."""
    places, samples = torch.arange(256), torch.arange(rows // 256)
    stream, key = row_keys(samples, places), layer_key(1, "layers.0.mlp")
    mask = kept(fold(key, stream), columns)
    cut = mask.view(len(samples), 256, columns)
    heads = head_keys(stream, key, range(4), len(samples)).flatten()
    scores = kept(heads, 256).view(len(samples), 4, 256, 256)
    words = dropout.hash_pairs(fold(key, stream)[:, None], torch.arange(columns // 2).int())
    products = {
        "rate": (mask, torch.ones(())),
        "neighbouring channels": (mask[:, 1:], mask[:, :-1]),
        "channels two apart": (mask[:, 2:], mask[:, :-2]),
        "neighbouring places": (cut[:, 1:], cut[:, :-1]),
        "neighbouring samples": (cut[1:], cut[:-1]),
        "layers": (mask, kept(fold(layer_key(1, "layers.1.mlp"), stream), columns)),
        "seeds": (mask, kept(fold(layer_key(2, "layers.0.mlp"), stream), columns)),
        "attention: rate": (scores, torch.ones(())),
        "attention: heads": (scores[:, 1:], scores[:, :-1]),
        "attention: queries": (scores[:, :, 1:], scores[:, :, :-1]),
        "attention: keys": (scores[..., 1:], scores[..., :-1]),
        "attention: samples": (scores[1:], scores[:-1]),
    }
    found = {name: (x.double() * y).sum() / sqrt(x.numel()) for name, (x, y) in products.items()}
    sums = {"rows": mask, "columns": mask.T, "places": cut.transpose(0, 1).flatten(1)}
    for name, lines in sums.items():
        squares = lines.double().sum(1).square() / lines.shape[1]
        found[f"rates of {name}"] = (squares - 1).sum() / sqrt(2 * len(squares))
    expected = words.numel() / 256
    found["bytes"] = torch.zeros(())
    for place in words.view(torch.uint8).view(-1, 4).long().unbind(1):
        square = ((torch.bincount(place, minlength=256) - expected) ** 2 / expected).sum()
        found["bytes"] = max(found["bytes"], (square - 255) / sqrt(2 * 255), key=torch.abs)
    return {name: float(each) for name, each in found.items()}


def contender(rank: Rank, rows: int, columns: int) -> Turn:
    return lambda: quality(rows, columns)


def contenders(flags: Flags, rows: int = 8192, columns: int = 4096) -> Iterator[Contender]:
    """Compute the figures; attention masks have 1024 x rows elements."""
    yield Contender(UNIT, contender, {"rows": rows, "columns": columns}, threads=2)


def result(found: Results) -> str:
    worst = max(abs(found.median("", UNIT, title)) for title in found.columns)
    return f"None of the figures is further than {worst:.1f} {UNIT} from independent draws."


COLUMNS = [Column(name, name, "{:+.2f}") for name in quality(512, 4)]  # a moment's work
QUESTION = Question(contenders, COLUMNS, result, rounds=1, warm_up=0, picture="")

if __name__ == "__main__":
    QUESTION.run()
