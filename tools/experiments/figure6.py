"""Figure 6 and table 3 in miniature: GPT-2 at growing size, on the same tokens in the same order.

    python tools/experiments/figure6.py --data DATA
    python tools/experiments/figure6.py --data DATA --plan-only

Finished stages are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, hypot
from operator import gt, lt
from pathlib import Path
from typing import Any

from megatron.config.checks import positive
from megatron.config.presets import find_preset
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from megatron.libraries import Library
from megatron.train.metrics import read_metrics
from tools.experiments import results, runner, stages
from tools.experiments.results import Facts, millions, standard_error
from tools.experiments.runner import ROOT, Machine, Stage, Stamps, Word
from tools.report import figures
from tools.report.corpus import read_json
from tools.report.figures import Axes
from tools.report.numbers import decimal, duration, percent, whole
from tools.report.sections import Items, Page, Section, Table
from tools.train_tokenizer import check_vocab_size

ticker = Library("matplotlib.ticker")

PROGRAM = "scripts/paper/figure6.sh"
TASKS = ("wikitext103", "lambada")
DASHES = ("-", "--", "-.", ":")
NOISE = 2.0  # standard errors by which two shares have to differ


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    data: Path
    """Folder laid out as MEGATRON_TEST_DATA."""
    output: Path = ROOT / "runs" / "figure6"
    sizes: tuple[str, ...] = ("2x64", "4x128", "6x256")
    """Transformer layers and hidden size of each model, the smaller before the larger."""
    preset: Path = ROOT / "scripts" / "presets" / "figure6.toml"
    """Settings of model and training that all sizes share (TOML)."""
    vocab_size: int = 8192
    """Vocabulary size of the tokenizer that is trained."""
    overlapping_eval: int = 64
    """Stride of WikiText103's window; the paper's is 32."""


def run(settings: Settings) -> None:
    stages.check_files(settings.data, stages.FILES)
    positive(settings, "overlapping_eval")
    check_vocab_size(settings.vocab_size)
    runner.run_experiment(settings, PROGRAM, list_stages, report, "figure6")


def parse_size(name: str) -> tuple[int, int]:
    """Layers and hidden size of LxH."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", name):
        raise UsageError("--sizes", name, "layers and hidden size", works=("--sizes", "2x64"))
    layers, hidden = map(int, name.split("x"))
    return layers, hidden


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """The stages from the archives of RACE to the evaluations, in order.

    Raises UsageError for sizes that cannot be compared or trained.
    """
    output, sizes = settings.output, settings.sizes
    if len(sizes) < 2 or len(set(sizes)) < len(sizes):
        raise UsageError("--sizes", " ".join(sizes), "two or more, each once")
    parameters = [layers * hidden**2 for layers, hidden in map(parse_size, sizes)]
    if parameters != sorted(parameters):
        raise UsageError("--sizes", " ".join(sizes), "given the smaller before the larger")
    preset, corpus = find_preset(str(settings.preset)), output / "corpus"
    folder = output / "gpt2"
    data = stages.data_prefix(folder, "gpt2")
    trainings = []
    for name in sizes:
        layers, hidden = parse_size(name)
        flags: list[Word] = ["--num-layers", layers, "--hidden-size", hidden]
        run_folder = output / "runs" / name
        trainings.append(
            stages.pretrain_stage(name, "gpt2", preset, flags, data, run_folder, machine)
        )
    evaluations = []
    for task in TASKS:
        folders = [output / "runs" / name for name in sizes]
        records = {each / "checkpoints": each / f"{task}.json" for each in folders}
        evaluations.append(
            stages.zero_shot_stage(
                task, settings.data, settings.overlapping_eval, records, machine.cores
            )
        )
    text, cores = corpus / "split" / "train", machine.cores
    return [
        *stages.article_stages(settings.data, corpus, cores),
        stages.data_stage(folder, text, "gpt2", settings.vocab_size, cores),
        *trainings,
        *evaluations,
    ]


def report(settings: Settings, stamps: Stamps) -> str:
    """Write figure6.md, .html, .png and .json; returns the text."""
    output = settings.output
    runs = [
        {**describe(output / "runs" / name), "seconds": stamps[name]["seconds"]}
        for name in settings.sizes
    ]
    ours = [(run_title(run), run["wikitext103"], run["lambada"]) for run in runs]
    explained = [
        results.explain_wikitext(runs[0]["wikitext103"]),
        results.explain_lambada(runs[-1]["lambada"]),
    ]

    def paint(axes: Axes) -> None:
        draw_perplexities(axes, runs)

    caption = "Validation perplexity by iteration"
    page = Page(
        "Figure 6 and table 3 in miniature",
        "GPT-2 at growing size, on the same tokens in the same order.",
        [
            Section("Training", [figures.draw(paint, caption), training_table(runs)]),
            Section("Table 3", [results.table_3(ours)]),
            Section("Is larger better?", [order_table(runs), remarks(runs)]),
            Section("Conventions", [Items(explained)]),
        ],
    )
    facts = {"machine": results.machine_facts(), "runs": runs}
    write_atomically(output / "figure6.png", figures.picture(paint, "png"))
    return results.write_results(output, "figure6", page, facts)


def describe(folder: Path) -> dict[str, Any]:
    """Facts of one size, for JSON: settings, curves, records of the evaluations.

    Raises ValueError if it has no step or no evaluation.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    losses = results.curve(lines, "loss")
    validation = results.curve(lines, "validation_loss")
    if not losses or not validation:
        raise ValueError(
            f"{folder / 'metrics.jsonl'}: no step, or no evaluation; a preset with log_interval "
            "and eval_interval within train_iters works"
        )
    records = {}
    for task in TASKS:
        record = read_json(folder / f"{task}.json")
        # Paths of the machine are no part of the result.
        data = [{**each, "file": Path(each["file"]).name} for each in record["data"]]
        kept = {key: record[key] for key in record if key not in ("command", "checkpoint")}
        records[task] = {**kept, "data": data}
    model = records["lambada"]["model"]
    embeddings = model["hidden_size"] * (model["vocab_size"] + model["max_position_embeddings"])
    logged = [line for line in lines if "loss" in line]
    layers, hidden = parse_size(folder.name)
    return {
        "name": folder.name,
        "layers": layers,
        "hidden": hidden,
        **read_json(folder / "run.json"),
        "parameters_without_embeddings": model["parameters"] - embeddings,
        "steps": logged[-1]["step"],
        "samples": logged[-1]["samples"],
        "train_loss": losses[-1][1],
        "validation_loss": validation[-1][1],
        "validation_perplexity": exp(validation[-1][1]),
        "curve": losses,
        "validation_curve": validation,
        **records,
    }


def run_title(run: Facts) -> str:
    return f"{run['name']}, {millions(run['parameters'])}"


def training_table(runs: Sequence[Facts]) -> Table:
    rows = []
    for run in runs:
        sizes = [run[key] for key in ("parameters", "parameters_without_embeddings", "steps")]
        losses = [decimal(run[key], 3) for key in ("train_loss", "validation_loss")]
        perplexity = decimal(run["validation_perplexity"])
        rows.append(
            [run["name"], *map(whole, sizes), *losses, perplexity, duration(run["seconds"])]
        )
    head = ("layers x hidden", "parameters", "without embeddings", "steps", "last training loss",
            "validation loss", "validation perplexity", "trained in")  # fmt: skip
    return Table(head, rows)


def draw_perplexities(axes: Axes, runs: Sequence[Facts]) -> None:
    """Validation perplexity over iterations, on a logarithmic scale."""
    for number, run in enumerate(runs):
        steps, losses = zip(*run["validation_curve"], strict=True)
        axes.plot(
            steps,
            [exp(loss) for loss in losses],
            label=run_title(run),
            marker="o",
            markersize=3,
            color=figures.SERIES[number % len(figures.SERIES)],
            linestyle=DASHES[number % len(DASHES)],
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set(xlabel="iteration", ylabel="validation perplexity")
    axes.grid(axis="y")
    axes.legend(title="GPT-2, layers x hidden")


def order_table(runs: Sequence[Facts]) -> Table:
    """Whether larger is better, by each quantity. runs: the smallest first."""
    names = [run["name"] for run in runs]
    words = [run["wikitext103"]["word_perplexity"] for run in runs]
    lambada = [run["lambada"] for run in runs]
    quantities: list[tuple[str, list[float], Callable[..., bool], Callable[..., str]]] = [
        ("validation perplexity", [run["validation_perplexity"] for run in runs], lt, decimal),
        ("WikiText103, perplexity per word", words, lt, decimal),
        ("LAMBADA, accuracy", [each["strict_accuracy"] for each in lambada], gt, percent),
        (
            "LAMBADA, perplexity of the last word, which table 3 does not have",
            [each["last_word_perplexity"] for each in lambada],
            lt,
            decimal,
        ),
    ]
    rows = [
        (title, *map(as_text, values), "; ".join(disordered(names, values, better)) or "yes")
        for title, values, better, as_text in quantities
    ]
    return Table(("at the end", *names, "larger is better"), rows, left=(0, len(names) + 1))


def disordered(
    names: Sequence[str], values: Sequence[float], is_better: Callable[[float, float], bool]
) -> list[str]:
    """Neighbours of which the larger is no better; a value that is not finite never is."""
    pairs = pairwise(zip(names, values, strict=True))
    return [
        f"{larger} is no better than {smaller}"
        for (smaller, one), (larger, other) in pairs
        if not is_better(other, one)
    ]


def remarks(runs: Sequence[Facts]) -> str:
    """Evaluations at which larger models are below, and when each reaches the end of the one
    before; which accuracies of LAMBADA are too near to tell."""
    # Evaluations that all sizes have, and those of them in the paper's order.
    names, curves = [run["name"] for run in runs], [dict(run["validation_curve"]) for run in runs]
    common = [step for step in curves[0] if all(step in curve for curve in curves)]
    ordered = [s for s in common if not disordered(names, [curve[s] for curve in curves], lt)]
    text = f"At {len(ordered)} of {len(common)} evaluations larger models are always below."
    for smaller, larger in pairwise(runs):
        step = first_step(larger["validation_curve"], smaller["validation_loss"])
        reached = f"by step {step:,} of {larger['steps']:,}" if step else "at no evaluation"
        text += f" {larger['name']} reaches the end of {smaller['name']} {reached}."
        count = smaller["lambada"]["num_examples"]
        one, other = (run["lambada"]["strict_accuracy"] for run in (smaller, larger))
        error = hypot(standard_error(one, count), standard_error(other, count))
        if abs(other - one) <= NOISE * error:
            text += f" On LAMBADA less than {NOISE:g} standard errors are between the two."
    return text


def first_step(curve: Iterable[Sequence[float]], loss: float) -> float | None:
    """The first step of the curve with a loss as low as this."""
    return next((step for step, value in curve if value <= loss), None)


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
