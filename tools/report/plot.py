"""Curves of one or several runs, as pictures and as a page."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from megatron.config.parse import parse_call, whole_program
from megatron.data.files import write_atomically
from megatron.errors import UsageError
from tools.report.curves import (
    Against,
    Runs,
    draw_curves,
    draw_losses,
    last_figures,
    left_out,
    loss_terms,
    picture_of,
    read_run,
    run_names,
    unit_of,
)
from tools.report.figures import draw, picture
from tools.report.numbers import NONE, whole
from tools.report.record import record_of
from tools.report.run import number_of, run_page
from tools.report.sections import Grid, Page, Section, Table, Text

PICTURES = (".png", ".svg", ".pdf")
PAGE = ".html"


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    output: Path | None = None,
    term: str | None = None,
    against: Against = "steps",
) -> None:
    """Draw the curves of runs: losses, learning rate, norm of the gradient, throughput, MFU and
    memory, as far as the runs have them; smoothed, with the raw values paler behind.

    Args:
        runs: folders of runs (their --save), or their files of metrics.
        output: .png, .svg, .pdf, or .html for a page that opens offline. By default plot.png and
            plot.html, in the folder of the run, or of several runs in the current folder.
        term: only this term of the loss; a BERT has mlm_loss and sop_loss beside loss, and the
            validation of a ViT top1 and top5.
        against: the x axis: steps, tokens (images) trained, or time of training, which counts no
            evaluations and saves and goes on where a run is resumed.
    """
    if not runs:
        raise UsageError("RUNS", None, "given: the folders of a --save")
    if output is not None and output.suffix not in (*PICTURES, PAGE):
        raise UsageError("--output", output, f"a name ending in {', '.join((*PICTURES, PAGE))}")
    files = {record_of(run).resolve(): run for run in runs}  # each once
    named = dict(zip(run_names([*files.values()]), files.values(), strict=True))
    read = {name: read_run(run) for name, run in named.items()}
    for name, run in named.items():
        terms = loss_terms(read[name])
        if term is not None and term not in terms:
            raise UsageError("--term", term, f"a term of {record_of(run)}: {', '.join(terms)}")
        for text in left_out(name, read[name]):
            print(text)
    if against == "tokens" and len(units := {unit_of(lines) for lines in read.values()}) > 1:
        allowed = f"steps or time with runs that count {' and '.join(map(str, units))}"
        raise UsageError("--against", against, allowed)
    folder = next(iter(files)).parent if len(read) == 1 else Path()
    contents = {}
    for file in [folder / "plot.png", folder / "plot.html"] if output is None else [output]:
        if file.suffix == PAGE:
            contents[file] = page_of(read, against, term).html()
        elif term is None:
            contents[file] = picture_of(read, file.suffix[1:], against)
        else:
            paint = partial(draw_losses, runs=read, term=term, against=against)
            contents[file] = picture(paint, file.suffix[1:], (8, 4.5))
    for file, content in contents.items():
        write_atomically(file, content)
        print(file)


def main() -> None:
    with whole_program(os.environ):
        parse_call(plot, sys.argv[1:], os.environ)()


def page_of(runs: Runs, against: Against, term: str | None) -> Page:
    """The page of a run, or the curves of several."""
    title = ", ".join(runs)
    texts = (text for name, lines in runs.items() for text in left_out(name, lines))
    lost = [Text(text, "warning") for text in texts]
    if term is not None:
        figure = draw(partial(draw_losses, runs=runs, term=term, against=against), term)
        return Page(title, f"{term} by {against}", [Section("Curves", [*lost, figure])])
    if len(runs) == 1:
        ((name, lines),) = runs.items()
        return run_page(name, lines, against)
    rows = []
    for name, lines in runs.items():
        facts, unit = last_figures(lines), unit_of(lines)
        is_validated = any("validation_loss" in line for line in lines)
        validation = number_of(facts["validation_loss"]) if is_validated else NONE
        rate = facts.get(f"{unit}_per_second")
        speed = NONE if rate is None else f"{whole(rate)} {unit}/s"
        loss = number_of(facts["train_loss"])
        rows.append((name, whole(facts["steps"]), loss, validation, speed))
    head = ("run", "steps", "last loss", "last validation loss", "median throughput")
    parts = [Table(head, rows), *lost, Grid(draw_curves(runs, against))]
    return Page(title, f"{len(runs)} runs by {against}.", [Section("Curves", parts)])
