"""How random dropout by coordinates is.

    python tools/experiments/dropout_quality.py
    python tools/experiments/dropout_quality.py --rows 1024 --columns 256

Keep-masks of a layer on hidden states [rows, columns], in samples of 256 tokens, and of attention
[samples, 4 heads, 256, 256]; megatron/parallel/dropout.py says what a mask depends on. Each figure
is a deviation from independent draws, in standard deviations. The figures for the rates of rows,
columns and places, and for bytes, are (chi-square - its mean) / its standard deviation.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from megatron.errors import UsageError
from tools.experiments import results, runner
from tools.experiments.runner import ROOT
from tools.report.sections import Page, Section, Table

PROGRAM = "tools/experiments/dropout_quality.py"
P = 0.1  # of dropout


@dataclass(frozen=True, kw_only=True)
class Settings:
    rows: int = 8192
    """Rows of the masks: a multiple of 256, at least 512; masks of attention have 1024 times as
    many elements."""
    columns: int = 4096
    """Columns of the masks of hidden states, at least 4."""
    output: Path = ROOT / "runs" / "dropout_quality"
    """Folder for the result."""


def kept(keys: Any, columns: int) -> Any:
    """The mask of these keys [rows] minus its mean, in standard deviations, [rows, columns]."""
    import torch

    from megatron.parallel import dropout

    p = 1 - round(P * dropout.STEPS) / dropout.STEPS
    return (dropout.kept_mask(keys, 0, columns, P, torch.bool).float() - p) / sqrt(p * (1 - p))


def quality(rows: int, columns: int) -> dict[str, float]:
    """{property: standard deviations}. rows: a multiple of 256, at least two samples."""
    import torch

    from megatron.parallel.dropout import fold, hash_pairs, head_keys, layer_key, row_keys

    places, samples = torch.arange(256), torch.arange(rows // 256)
    stream, key = row_keys(samples, places), layer_key(1, "layers.0.mlp")
    mask = kept(fold(key, stream), columns)
    cut = mask.view(len(samples), 256, columns)
    heads = head_keys(stream, key, range(4), len(samples)).flatten()
    scores = kept(heads, 256).view(len(samples), 4, 256, 256)
    words = hash_pairs(fold(key, stream)[:, None], torch.arange(columns // 2).int())
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


def run(settings: Settings) -> None:
    if settings.rows % 256 or settings.rows < 512:
        raise UsageError("--rows", settings.rows, "a multiple of 256 from 512 on")
    if settings.columns < 4:
        raise UsageError("--columns", settings.columns, "4 or more")
    print(report(settings))


def report(settings: Settings) -> str:
    """Write dropout_quality.json, .md and .html; returns the text. Raises ValueError for a figure
    that is not finite."""
    found = quality(settings.rows, settings.columns)
    if wrong := [name for name, value in found.items() if not isfinite(value)]:
        raise ValueError(f"figures that are not finite: {', '.join(wrong)}")
    worst = max(map(abs, found.values()))
    title = f"{settings.rows} x {settings.columns} elements, p = {P}"
    rows = [(name, f"{value:+.2f}") for name, value in found.items()]
    page = Page(
        "How random dropout by coordinates is",
        f"None of the figures is further than {worst:.1f} standard deviations from independent "
        "draws.",
        [Section("Figures", [Table((title, "standard deviations"), rows)])],
    )
    facts = {"figures": found}
    return results.write_measured(
        settings.output, "dropout_quality", page, facts, PROGRAM, indent=1
    )


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
