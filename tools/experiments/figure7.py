"""Figure 7 in miniature: BERT with pre-LN and with post-LN at growing depth.

    python tools/experiments/figure7.py --data DATA
    python tools/experiments/figure7.py --data DATA --depths 2 8 --plan-only

Finished stages are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.config.presets import find_preset
from megatron.config.pretrain import PretrainBertConfig
from megatron.data.files import write_atomically
from megatron.errors import UsageError, flag
from megatron.libraries import Library
from megatron.train.metrics import read_metrics
from tools.experiments import results, runner, stages
from tools.experiments.results import Facts
from tools.experiments.runner import ROOT, Command, Machine, Stage, Stamps, Word, python
from tools.report import curves, figures
from tools.report.corpus import read_json
from tools.report.figures import Axes
from tools.report.sections import Page, Section, Table

lines = Library("matplotlib.lines")

PROGRAM = "scripts/paper/figure7.sh"
ORDERS = ("pre-ln", "post-ln")
DIVERGED = "NonFiniteError"  # in megatron/train/diagnose.py, which needs torch
LAST = 0.05  # share of a run's logged steps, whose mean is its final training loss
STYLES: Mapping[str, Mapping[str, Any]] = {
    "pre-ln": {"color": figures.SERIES[0], "linestyle": "-", "label": "pre-LN, the paper's order"},
    "post-ln": {
        "color": figures.PALETTE["accent"],
        "linestyle": "--",
        "label": "post-LN, the original order",
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    data: Path | None = None
    """Folder with the articles of RACE, laid out as MEGATRON_TEST_DATA; without it, the English
    text of this Python installation is used."""
    output: Path = ROOT / "runs" / "figure7"
    depths: tuple[int, ...] = (6, 12, 24, 48)
    """Transformer layers."""
    rates: tuple[float, ...] = (1e-3,)
    """Peak learning rates; each is trained at every depth."""
    preset: Path = ROOT / "scripts" / "presets" / "figure7_bert.toml"
    """Settings of model and training that all runs share (TOML)."""
    vocab_size: int = 2048
    """Size of the WordPiece vocabulary that is trained."""


def run(settings: Settings) -> None:
    if settings.data is not None:
        stages.check_files(settings.data, [stages.RACE_TRAIN])
    runner.run_experiment(settings, PROGRAM, list_stages, report, "figure7")


def run_folder(settings: Settings, order: str, depth: int, rate: float) -> Path:
    return settings.output / "runs" / f"{order}_{depth}_{rate:g}"


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """A data set, then both orders at the same time at every depth."""
    for name in ("depths", "rates"):
        values = getattr(settings, name)
        if not values or len(set(values)) < len(values) or min(values) <= 0:
            raise UsageError(flag(name), " ".join(map(str, values)), "above 0, and each given once")
    corpus, folder, cores = settings.output / "corpus", settings.output / "bert", machine.cores
    if settings.data is None:
        raw, inputs = corpus / "raw.jsonl", []
        collect = python("tools/corpus.py", "harvest", "--output", raw)
    else:
        raw, inputs = corpus / "extract", [settings.data / stages.RACE_TRAIN]
        collect = stages.extract_race(inputs[0], raw)
    preset = find_preset(str(settings.preset))
    trainings = []
    for rate, depth in product(settings.rates, settings.depths):
        commands = [pretrain(settings, preset, order, depth, rate, cores) for order in ORDERS]
        trainings.append(
            Stage(
                name=f"{depth} layers, rate {rate:g}",
                commands=commands,
                is_parallel=True,
                inputs=[preset],
                outputs=[run_folder(settings, order, depth, rate) for order in ORDERS],
            )
        )
    return [
        Stage(name="corpus", commands=[collect], inputs=inputs, outputs=[raw]),
        stages.clean_stage(raw, corpus, {"clean": [], "dedup": []}, cores),
        stages.data_stage(folder, corpus / "dedup", "bert", settings.vocab_size, cores),
        *trainings,
    ]


def pretrain(
    settings: Settings, preset: Path, order: str, depth: int, rate: float, cores: int
) -> Command:
    """One training. If it diverges, it is drawn up to that step and does not end the other one."""
    flags: list[Word] = ["--preset", preset, "--residual-order", order]
    flags += ["--num-layers", depth, "--lr", f"{rate:g}"]
    runner.parse_training(PretrainBertConfig, flags).check(1)
    metrics = run_folder(settings, order, depth, rate) / "metrics.jsonl"
    data = stages.data_prefix(settings.output / "bert", "bert")
    return python(
        "pretrain_bert.py", *flags, "--data-path", data, "--metrics-file", metrics,
        threads=max(1, cores // len(ORDERS)),
        label=f"{order} {depth}",
        accepts=partial(is_result, metrics),
    )  # fmt: skip


def diverged_at(metrics: Sequence[Facts]) -> int | None:
    """The step whose loss or gradient was not finite, from the lines of a record, or None."""
    last = metrics[-1] if metrics else {}
    # The line of an error has the number of the last completed step.
    return last["step"] + 1 if last.get("ended") == DIVERGED else None


def is_result(file: Path, status: int) -> bool:
    """Whether a training with this record and exit status completed or diverged."""
    if status == 0 or not file.exists():
        return status == 0
    metrics = read_metrics(file)
    return diverged_at(metrics) is not None and metrics[-1]["exit_code"] == status


def report(settings: Settings, _: Stamps | None = None) -> str:
    """Write figure7.md, .html, .png and .json; returns the text."""
    output = settings.output
    pairs = []  # the runs of both orders
    for rate, depth in product(settings.rates, settings.depths):
        pairs.append([describe(settings, order, depth, rate) for order in ORDERS])
    depths, rates = len(settings.depths), len(settings.rates)
    size = (2.9 * depths + 0.6, 2.8 * rates + 0.7)

    def paint(axes: Axes) -> None:
        draw_pairs(axes, pairs, rates, depths)

    figure = figures.draw(paint, "Masked-token loss by step", size)
    page = Page(
        "Figure 7 in miniature",
        "BERT with pre-LN and with post-LN: masked-token loss in nats.",
        [Section("Losses", [figure, loss_table(pairs)])],
    )
    runs = [run for pair in pairs for run in pair]
    facts = {"machine": results.machine_facts(), "runs": runs}
    write_atomically(output / "figure7.png", figures.picture(paint, "png", size))
    return results.write_results(output, "figure7", page, facts)


def describe(settings: Settings, order: str, depth: int, rate: float) -> dict[str, Any]:
    """Facts of a run, for JSON: its settings, its curves, and its results, null if it diverged.

    Raises ValueError if a run that did not diverge has no step or no evaluation.
    """
    folder = run_folder(settings, order, depth, rate)
    metrics = read_metrics(folder / "metrics.jsonl")
    steps = [line for line in metrics if line.get("mlm_loss") is not None]
    checks = [line for line in metrics if "validation_mlm_loss" in line]
    diverged = diverged_at(metrics)
    if diverged is None and not (steps and checks):
        raise ValueError(
            f"{folder / 'metrics.jsonl'}: no step, or no evaluation; run the script with --fresh"
        )
    last = [line["mlm_loss"] for line in steps[-max(1, round(LAST * len(steps))) :]]
    final = checks[-1] if diverged is None else {}
    norms = [line["grad_norm"] or float("inf") for line in steps]
    return {
        "order": order,
        "depth": depth,
        "rate": rate,
        **read_json(folder / "run.json"),
        "diverged_at": diverged,
        "steps": metrics[-1]["step"],
        "seconds": steps[-1]["elapsed_seconds"] if steps else None,
        "train_loss": fmean(last) if diverged is None else None,
        "validation_loss": final.get("validation_mlm_loss"),
        "validation_sop_loss": final.get("validation_sop_loss"),
        "largest_gradient_norm": max(norms, default=None),
        "curve": results.curve(steps, "mlm_loss"),
        "validation_curve": results.curve(checks, "validation_mlm_loss"),
    }


def loss_table(pairs: Sequence[Sequence[Facts]]) -> Table:
    """A row for each rate and depth, with both orders."""
    rows = []
    for pair in pairs:
        run = pair[0]
        losses = [
            loss_in_words(each, kind) for kind in ("train_loss", "validation_loss") for each in pair
        ]
        rows.append((f"{run['rate']:g}", str(run["depth"]), f"{run['parameters']:,}", *losses))
    kinds = ("train, pre-LN", "post-LN", "validation, pre-LN", "post-LN")
    return Table(("rate", "layers", "parameters", *kinds), rows, left=())


def loss_in_words(run: Facts, kind: str) -> str:
    if run["diverged_at"] is not None:
        return f"diverged at step {run['diverged_at']:,}"
    return "not finite" if run[kind] is None else f"{run[kind]:.3f}"


def draw_pairs(axes: Axes, pairs: Sequence[Sequence[Facts]], rates: int, depths: int) -> None:
    """A panel for each depth, a row for each rate, in place of the axes."""
    figure = axes.figure
    figure.clear()
    panels = figure.subplots(rates, depths, sharex=True, sharey=True, squeeze=False)
    for panel, pair in zip(panels.flat, pairs, strict=True):
        for run in pair:
            style = STYLES[run["order"]]
            steps, losses = columns(run["curve"])
            panel.plot(steps, curves.smooth(losses), linewidth=1.6, **style)
            panel.plot(*columns(run["validation_curve"]), "o", markersize=3.5, color=style["color"])
            if (step := run["diverged_at"]) is not None:
                panel.axvline(step, color=style["color"], linestyle=":", linewidth=1.2)
                text = f" {loss_in_words(run, 'train_loss')}"
                place = {"va": "top", "transform": panel.get_xaxis_transform()}
                panel.text(step, 0.98, text, color=style["color"], fontsize=8, rotation=90, **place)
        panel.set_title(f"{pair[0]['depth']} layers, rate {pair[0]['rate']:g}", fontsize=11)
        panel.grid(axis="y")
    for panel in panels[:, 0]:
        panel.set_ylabel("masked-token loss (nats)")
    for panel in panels[-1]:
        panel.set_xlabel("step")
    # The y-axis fits the completed runs, whatever a diverging one reached.
    runs = [run for pair in pairs for run in pair]
    completed = [run for run in runs if run["diverged_at"] is None]
    if 0 < len(completed) < len(runs):
        low = min(loss for run in runs for loss in drawn_losses(run))
        high = max(loss for run in completed for loss in drawn_losses(run))
        panels[0][0].set_ylim(0.95 * low, 1.1 * high)
    shown, _ = panels[0][0].get_legend_handles_labels()
    dots = lines.Line2D(
        [], [], color="0.4", marker="o", markersize=3.5, linestyle="", label="validation"
    )
    columns_of_legend = 3 if depths > 2 else 1
    figure.legend(handles=[*shown, dots], loc="outside upper center", ncols=columns_of_legend)


def columns(curve: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in curve], [loss for _, loss in curve]


def drawn_losses(run: Facts) -> list[float]:
    return curves.smooth(columns(run["curve"])[1]) + columns(run["validation_curve"])[1]


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
