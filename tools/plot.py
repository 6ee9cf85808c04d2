"""Draw training and validation losses of runs from their metrics.jsonl.

python tools/plot.py runs/mine/own --output runs/mine/own/loss.png
python tools/plot.py runs/small runs/large --term mlm_loss --output losses.svg
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
from pathlib import Path
from typing import Annotated

import tyro

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.parse import parse_call, user_errors
from megatron.errors import UsageError
from megatron.libraries import Library
from megatron.train.metrics import read_metrics

matplotlib, plt = Library("matplotlib"), Library("matplotlib.pyplot")

FORMATS = (".png", ".svg", ".pdf")


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path,
    term: str = "loss",
) -> None:
    """Draw a solid line of training losses and a dashed one of validation losses for each run.

    Args:
        runs: folders of runs (their --save), or their files of metrics.
        output: the picture: .png, .svg or .pdf.
        term: name of the loss term in metrics.jsonl; a BERT also has mlm_loss and sop_loss.
    """
    if output.suffix not in FORMATS:
        works = ("--output", str(output.with_suffix(".png")))
        raise UsageError("--output", output, f"a name ending in {', '.join(FORMATS)}", works=works)
    if not runs:
        raise UsageError("RUNS", None, "given: the folders of a --save")
    found = {file: read_metrics(file) for file in map(_metrics_file, runs)}

    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (file, lines) in enumerate(found.items()):
        drawn = False
        for key, style in ((term, "-"), (f"validation_{term}", "o--")):
            points = [(line["step"], line[key]) for line in lines if key in line]
            if points:
                label = f"{file.parent.name}, {'validation' if key != term else 'training'}"
                axes.plot(*zip(*points, strict=True), style, label=label, color=f"C{number}")
                drawn = True
        if not drawn:
            terms = {key for line in lines for key in line if key.endswith("loss")}
            known = sorted({key.removeprefix("validation_") for key in terms})
            allowed = f"a loss of {file}: {', '.join(known) or 'it has none'}"
            raise UsageError("--term", term, allowed, works=("--term", known[0]) if known else ())
    axes.set(xlabel="step", ylabel=f"{term} (nats per token)" if term == "loss" else term)
    axes.grid(axis="y", linewidth=0.5)
    axes.legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    plt.close(figure)


def _metrics_file(run: Path) -> Path:
    file = run / "metrics.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; the folder of a --save works")
    return file


if __name__ == "__main__":
    with user_errors(os.environ):
        parse_call(plot, sys.argv[1:], os.environ)()
