"""How good the keep-masks of dropout by coordinates are: rates, bytes and correlations.

    python benchmarks/dropout_quality.py [--rows 4096] [--columns 4096] [--json FILE]

Each figure is a number of standard deviations from what independent draws would give. Those of
rates of rows, columns and places, and of bytes, are chi-squares less their mean, over their
deviation. megatron/parallel/dropout.py says what a mask is a function of.
"""

import sys
from collections.abc import Mapping
from math import sqrt
from pathlib import Path

import torch
import tyro
from torch import Tensor

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, told, write_json
from megatron.parallel import dropout
from megatron.parallel.dropout import fold, head_keys, layer_key, row_keys

P = 0.1


def kept(keys: Tensor, columns: int) -> Tensor:
    """The mask less its mean, in standard deviations, [rows, columns]."""
    mask = dropout.is_kept(keys, 0, columns, P, torch.bool)
    p = 1 - round(P * dropout.STEPS) / dropout.STEPS
    return (mask.float() - p) / sqrt(p * (1 - p))


def of_sums(standard: Tensor, dim: int) -> float:
    """Of the sums along dim, of which each should be a draw from a normal distribution."""
    sums = standard.double().sum(dim) / sqrt(standard.shape[dim])
    return float((sums.square() - 1).sum() / sqrt(2 * len(sums)))


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


def quality(rows: int, columns: int) -> dict[str, float]:
    """{what: standard deviations} of a layer of the stream, with `rows` rows in samples of 256, and
    of attention's probabilities."""
    places, samples = torch.arange(256), torch.arange(rows // 256)
    stream, key = row_keys(samples, places), layer_key(1, "layers.0.mlp")
    own = kept(fold(key, stream), columns)
    by_sample = own.view(len(samples), 256, columns)
    other_layer = kept(fold(layer_key(1, "layers.1.mlp"), stream), columns)
    other_seed = kept(fold(layer_key(2, "layers.0.mlp"), stream), columns)
    heads = head_keys(stream, key, range(4), len(samples))
    scores = kept(heads.flatten(), 256).view(len(samples), 4, 256, 256)
    return {
        "rate": float(own.double().sum() / sqrt(own.numel())),
        "rates of rows": of_sums(own, 1),
        "rates of columns": of_sums(own, 0),
        "rates of places": of_sums(by_sample.transpose(0, 1).flatten(1), 1),
        "bytes": of_bytes(dropout.hash_pairs(fold(key, stream), torch.arange(columns // 2).int())),
        "neighbouring channels": correlation(own[:, 1:], own[:, :-1]),
        "channels two apart": correlation(own[:, 2:], own[:, :-2]),
        "neighbouring places": correlation(by_sample[:, 1:], by_sample[:, :-1]),
        "neighbouring samples": correlation(by_sample[1:], by_sample[:-1]),
        "layers": correlation(own, other_layer),
        "seeds": correlation(own, other_seed),
        "attention: rate": float(scores.double().sum() / sqrt(scores.numel())),
        "attention: heads": correlation(scores[:, 1:], scores[:, :-1]),
        "attention: queries": correlation(scores[:, :, 1:], scores[:, :, :-1]),
        "attention: keys": correlation(scores[..., 1:], scores[..., :-1]),
        "attention: samples": correlation(scores[1:], scores[:-1]),
    }


def main(rows: int = 4096, columns: int = 4096, json: JsonFile = None) -> None:
    """rows, columns: of the stream's mask; attention's has 1024 x rows elements.

    json: file for the figures.
    """
    print(told(facts()))
    found: Mapping[str, float] = quality(rows, columns)
    print(f"\n| {rows} x {columns} elements, p = {P} | standard deviations |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:+.2f} |")
    write_json(json, facts() | {"rows": rows, "columns": columns, "quality": found})


if __name__ == "__main__":
    tyro.cli(main)
