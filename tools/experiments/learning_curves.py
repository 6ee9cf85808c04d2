"""Learning curves: how far the losses of one training drift apart by layout, format and library.

    python tools/experiments/learning_curves.py
    python tools/experiments/learning_curves.py --plan-only --data-path P_text_document

Runs of this project use the program itself: sharded over tensor-parallel ranks (t); with data
parallelism (d) in addition; resumed at another layout; and with a smaller model, as CPUs multiply
fp16 matrices slowly, in bf16 and fp16, with and without dropout. The independent loop is
transformers' model and schedule with torch's AdamW and clipping, by a norm with squares summed in
fp64. All runs of a group have the same weights, batches and learning rates; a gap is the absolute
difference from the first run's loss at the same step. In fp32 only the rounding of sums differs.
The tolerance of the largest gap is 2^-6 in bf16 and 2^-9 in fp16: half the distance of adjacent
numbers of the format between 4 and 8, where the losses are; that of the mean is a quarter of it.

The quickstart's model with dropout 0.1 by coordinates is compared with the same with torch's masks,
by the validation loss over 400 samples after 1,000 steps, for five seeds of weights and samples:
--steps 1000 --seeds 5 --runs "torch's dropout" "dropout by coordinates".

Finished runs are reused.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.config.checks import positive
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from megatron.train.metrics import read_metrics
from tools.experiments import results, runner, stages
from tools.experiments.results import Facts
from tools.experiments.runner import ROOT, Command, Machine, Processes, Stage, StageError, Word
from tools.report import figures
from tools.report.figures import Axes
from tools.report.sections import Figure, Page, Section, Table

PROGRAM = "tools/experiments/learning_curves.py"
COMMON = """--split 1,0,0 --min-lr 1e-4 --lr-warmup-iters 50 --micro-batch-size 4
--global-batch-size 8 --eval-iters 0"""
LAYOUTS = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 128
--seq-length 128 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --no-bf16"""
# At higher rates, or the default beta of 0.999, gradients of this small model spike on some texts,
# and any rounding grows there.
FORMATS = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --max-position-embeddings 64
--seq-length 64 --lr 5e-4 --adam-beta2 0.95"""
DROPOUT = """--preset quickstart --split 90,10,0 --attention-dropout 0.1 --hidden-dropout 0.1
--train-iters {0} --eval-interval {0} --lr-warmup-iters {1} --eval-iters {1}"""
# Masks by F.dropout, and by F.scaled_dot_product_attention.
TORCHS = """import runpy
from torch.nn.functional import dropout
from megatron.parallel.dropout import Dropout
Dropout.forward = lambda self, x, rows: dropout(x, self.p, self.training)
runpy.run_path("pretrain_gpt2.py", run_name="__main__")"""
FILE = ("pretrain_gpt2.py",)
MASKS = {
    "torch's dropout": ("kernel", ("-c", TORCHS)),
    "dropout by coordinates": ("coordinates", FILE),
}
T = "--tensor-model-parallel-size"
TOLERANCES = {"no-bf16": None, "bf16": 2**-6, "fp16": 2**-9}
COLUMNS: dict[str, tuple[str, Callable[[Any], Any], str]] = {  # title: key, figure of it, format
    "first loss": ("losses", lambda losses: losses[0], ".3f"),
    "last loss": ("losses", lambda losses: losses[-1], ".4f"),
    "largest gap": ("gaps", max, ".1e"),
    "at step": ("gaps", lambda gaps: gaps.index(max(gaps)) + 1, "d"),
    "mean gap": ("gaps", fmean, ".1e"),
    "share of the tolerance": ("share", float, ".2f"),
    "validation loss": ("validation_loss", float, ".4f"),
    "its validation loss / the first's": ("ratio", float, ".4f"),
    "steps skipped": ("skipped_steps", float, ".0f"),
    "loss scale at the end": ("loss_scale", float, "g"),
}
RATE_TOLERANCE = 1e-9  # relative; schedules of several libraries compute the same rates


@dataclass(frozen=True, kw_only=True)
class Settings(runner.Settings):
    data_path: Path = ROOT / "runs" / "quickstart" / "data" / "train_text_document"
    """Prefix of the data set; by default, that of a finished scripts/quickstart.sh."""
    output: Path = ROOT / "runs" / "learning_curves"
    steps: int = 500
    """Steps of every run."""
    seeds: int = 1
    """Number of seeds for which masks of dropout are compared."""
    runs: tuple[str, ...] = ()
    """Names of the runs; all if not given. The first of a group is what the others are compared
    with."""


@dataclass(frozen=True)
class Run:
    """starts: (processes, flags); later ones resume. program: words; none for transformers' loop.
    tolerance: of the largest gap."""

    group: str
    name: str
    starts: Sequence[tuple[int, Sequence[Word]]]
    program: Sequence[str] = FILE
    tolerance: float | None = None

    @property
    def title(self) -> str:
        return f"{self.group}, {self.name}"


def run(settings: Settings) -> None:
    positive(settings, "steps", "seeds")
    names = dict.fromkeys(each.name for each in every_run(settings))
    for name in settings.runs:
        if name not in names:
            raise UsageError("--runs", name, f"names among: {'; '.join(names)}")
    runner.check_inputs(data_path=binary_of(settings))
    runner.run_experiment(settings, PROGRAM, list_stages, report, "learning_curves")


def every_run(settings: Settings) -> Iterator[Run]:
    steps, data = settings.steps, ["--data-path", settings.data_path.absolute()]
    common = [*COMMON.split(), "--train-iters", steps, *data]
    serial, half = [*common, *LAYOUTS.split()], ["--exit-interval", steps // 2]
    two = [*serial, T, 2]
    for name, starts in {
        "serial": [(1, serial)],
        "t = 2": [(2, two)],
        "t = 4": [(4, [*serial, T, 4])],
        "t = 2, d = 2": [(4, two)],
        "t = 2, resumed as d = 2": [(2, [*two, *half]), (2, serial)],
    }.items():
        yield Run("layouts", name, starts)
    yield Run("layouts", "transformers", [(1, [*serial, "--micro-batch-size", 8])], program=())
    for p, kind, t in product(("0", "0.1"), TOLERANCES, (1, 2)):
        words = f"{FORMATS} --{kind} {T} {t} --attention-dropout {p} --hidden-dropout {p}"
        name, tolerance = f"{kind.replace('no-bf16', 'fp32')}, t = {t}", TOLERANCES[kind]
        yield Run(f"dropout {p}", name, [(t, [*common, *words.split()])], tolerance=tolerance)
    for seed, (name, (rng, program)) in product(range(1, settings.seeds + 1), MASKS.items()):
        words = f"{DROPOUT} --attention-dropout-rng {rng} --seed {seed}".format(steps, steps // 10)
        flags = [*words.split(), *data]
        yield Run(f"masks of dropout, seed {seed}", name, [(1, flags)], program)


def chosen_runs(settings: Settings) -> list[Run]:
    return [each for each in every_run(settings) if each.name in settings.runs or not settings.runs]


def folder_of(settings: Settings, run: Run) -> Path:
    return settings.output / "runs" / run.title.replace(", ", "_").replace(" ", "_")


def list_stages(settings: Settings, machine: Machine) -> list[Stage]:
    """A stage for each run, in the order of their groups."""
    found = []
    for each in chosen_runs(settings):
        folder = folder_of(settings, each)
        commands = [command(each, *start, folder, machine.cores) for start in each.starts]
        found.append(
            Stage(
                name=each.title,
                commands=commands,
                inputs=[binary_of(settings)],
                outputs=[folder],
                is_independent=True,
            )
        )
    return found


def binary_of(settings: Settings) -> Path:
    return settings.data_path.with_name(f"{settings.data_path.name}.bin")


def command(run: Run, processes: int, flags: Sequence[Word], folder: Path, cores: int) -> Command:
    metrics = ["--log-interval", 1, "--metrics-file", folder / "metrics.jsonl"]
    if not run.program:
        words = [*flags, *metrics]
        module = "tools.experiments.learning_curves"
        return runner.call(module, "train_transformers", *words, threads=cores)
    words = [*run.program, *flags, *metrics, "--save", folder, "--load", folder]
    if processes == 1:
        return runner.python(*words, threads=cores)
    return runner.torchrun(Processes(processes, 1, max(1, cores // processes)), *words)


def train_transformers(*flags: str) -> None:
    """Trains transformers' GPT-2 by the flags of pretrain_gpt2.py; writes their --metrics-file."""
    import torch
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    from transformers import get_cosine_with_min_lr_schedule_with_warmup as cosine

    from tools.convert.weights import model_of_transformers
    from tools.layouts.job import open_samples

    config = runner.parse_training(PretrainGPT2Config, flags)
    own, steps, size = config.optimizer, config.training.train_iters, config.global_batch_size(1)
    samples, vocab_size = open_samples(config)
    weights = stages.initial_weights(config.model, vocab_size, config.training.seed)
    model = model_of_transformers(config.model, vocab_size, weights)
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.dim() > 1]
    others = {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0}
    groups = [{"params": matrices, "weight_decay": own.weight_decay}, others]
    adamw = torch.optim.AdamW(groups, own.lr, (own.adam_beta1, own.adam_beta2), own.adam_eps)
    for group in adamw.param_groups:
        group["initial_lr"] = own.lr
    # The rate of step 0 would be 0; the schedule starts at that of step 1.
    schedule = cosine(adamw, own.lr_warmup_iters, steps, last_epoch=0, min_lr=own.min_lr)
    lines: list[Facts] = []
    for step in range(steps):
        batch = samples.batch(range(step * size, (step + 1) * size))
        tokens, labels = (torch.from_numpy(x).long() for x in (batch.tokens, batch.labels))
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        adamw.zero_grad()
        loss.backward()
        # torch's fp32 norm of a long tensor drops digits on a CPU.
        norm = get_total_norm([each.grad.double() for each in parameters]).float()
        clip_grads_with_norm_(parameters, own.clip_grad, norm)
        lines.append({"step": step + 1, "loss": loss.item(), "lr": schedule.get_last_lr()[0]})
        adamw.step()
        schedule.step()
    lines.append({"step": steps, "ended": "train_iters"})
    content = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(Path(config.logging.metrics_file), content.encode())


def report(settings: Settings, _: object = None) -> str:
    """Write learning_curves.json, .md and .html; returns the text.

    Raises StageError where a run is outside its tolerance, has other learning rates than the first
    of its group, or has figures that prove nothing.
    """
    groups: dict[str, list[Facts]] = {}
    for each in chosen_runs(settings):
        groups.setdefault(each.group, []).append(describe(each, folder_of(settings, each)))
    sections = []
    for group, (first, *others) in groups.items():
        for each in others:
            compare(each, first)
        drawn = [each for each in others if "gaps" in each]
        figure = [draw_gaps(drawn)] if drawn else []
        sections.append(Section(group, [*figure, table([first, *others])]))
    found = [each for group in groups.values() for each in group]
    page = Page("Learning curves", lead(found, settings.steps), sections)
    facts = {"steps": settings.steps, "runs": found}
    text = results.write_measured(settings.output, "learning_curves", page, facts, PROGRAM)
    if wrong := [f"{x['group']}, {x['name']}" for x in found if x.get("share", 0.0) > 1]:
        raise StageError(f"outside the tolerance: {'; '.join(wrong)}")
    return text


def describe(run: Run, folder: Path) -> dict[str, Any]:
    """Facts of a run. losses: of each step, before its update. Raises ValueError if it is not
    complete."""
    lines = read_metrics(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    if lines[-1].get("ended") != "train_iters" or steps[-1]["step"] != len(steps):
        raise ValueError(f"{folder / 'metrics.jsonl'}: the run is not complete; --fresh works")
    last = {key: value for line in lines for key, value in line.items()}
    kept = ("validation_loss", "skipped_steps", "loss_scale")
    return {
        "group": run.group,
        "name": run.name,
        "tolerance": run.tolerance,
        "losses": [line["loss"] for line in steps],
        "rates": [line["lr"] for line in steps],
        **{key: last[key] for key in kept if last.get(key) is not None},
    }


def check_figures(run: Facts) -> None:
    """Raises StageError if a loss or a rate is not finite (None, in metrics.jsonl), or if all rates
    are 0."""
    values = [*run["losses"], *run["rates"]]
    if run["group"].startswith("masks"):
        values.append(run.get("validation_loss"))
    if any(value is None or not isfinite(value) for value in values):
        raise StageError(f"{run['group']}, {run['name']}: a loss or a learning rate is not finite")
    if not any(run["rates"]):
        raise StageError(f"{run['group']}, {run['name']}: all learning rates are 0")


def compare(own: dict[str, Any], first: Facts) -> None:
    """Add to a run's facts how it differs from the first run of its group: the ratio of validation
    losses, or the gaps of training losses and their share of the tolerance."""
    for each in (first, own):
        check_figures(each)
    pairs = zip(own["rates"], first["rates"], strict=True)
    # A step that fp16 skips does not advance the schedule.
    skip_alike = own.get("skipped_steps", 0) == first.get("skipped_steps", 0)
    if skip_alike and any(abs(a - b) > RATE_TOLERANCE * b for a, b in pairs):
        raise StageError(f"{first['name']} and {own['name']} have other learning rates")
    if own["group"].startswith("masks"):  # gaps between runs with different masks mean nothing
        own["ratio"] = own["validation_loss"] / first["validation_loss"]
        return
    own["gaps"] = [abs(a - b) for a, b in zip(own["losses"], first["losses"], strict=True)]
    if own["tolerance"] is not None:
        own["share"] = max(max(own["gaps"]), 4 * fmean(own["gaps"])) / own["tolerance"]


def table(runs: Sequence[Facts]) -> Table:
    """A row for each run; a column only where one of them has a figure."""
    rows = []
    for each in runs:
        row = {"": each["name"]}
        for title, (key, figure, form) in COLUMNS.items():
            if key in each:
                row[title] = format(figure(each[key]), form)
        rows.append(row)
    head = ["", *(title for title in COLUMNS if any(title in row for row in rows))]
    return Table(head, [[row.get(title, "") for title in head] for row in rows])


def lead(runs: Sequence[Facts], steps: int) -> str:
    """The result in a sentence."""
    layouts = [max(x["gaps"]) for x in runs if x["group"] == "layouts" and "gaps" in x]
    shares = [each["share"] for each in runs if "share" in each]
    ratios = [each["ratio"] for each in runs if "ratio" in each]
    parts = []
    if layouts:
        parts.append(f"no loss leaves the serial one by more than {max(layouts):.1e}")
    if shares:
        parts.append(f"bf16 and fp16 take up to {max(shares):.2f} of their tolerance")
    if ratios:
        extremes = f"{min(ratios):.4f} to {max(ratios):.4f}"
        parts.append(
            f"the validation loss is {fmean(ratios):.4f} times ({extremes}) that with torch's "
            "masks of dropout"
        )
    return f"In {steps} steps {'; '.join(parts) or 'nothing was compared'}."


def draw_gaps(runs: Sequence[Facts]) -> Figure:
    def paint(axes: Axes) -> None:
        for number, each in enumerate(runs):
            gaps = list(accumulate(each["gaps"], max))
            colour = figures.SERIES[number % len(figures.SERIES)]
            axes.plot(range(1, len(gaps) + 1), gaps, color=colour, label=each["name"])
        axes.set(xlabel="step", ylabel="nats")
        axes.grid(axis="y")
        axes.legend()

    return figures.draw(paint, "Largest gap so far")


if __name__ == "__main__":
    runner.main(Settings, run, PROGRAM, __doc__)
