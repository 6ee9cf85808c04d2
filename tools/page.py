"""Common parts of the reports: a page that is one file without scripts or network access; the table
of what the steps of tools.corpus did; the loss curve and last figures of a training run."""

import io
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron.libraries import Library

matplotlib, plt = Library("matplotlib"), Library("matplotlib.pyplot")

Facts = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5d6570; --line: #d9dde2;
  --paper: #fdfdfc; --card: #f4f5f3; --accent: #b4531a; --train: #3b6ea5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --soft: #9aa3ad; --line: #3a4149;
  --paper: #15181b; --card: #1e2226; --accent: #eb9a5e; --train: #7fb0e0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 54rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.8rem 0 .7rem; padding-top: .9rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .9rem; margin: 1.1rem 0 .2rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: .7rem; margin: 1.5rem 0 0; }
@media (max-width: 38rem) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 1rem 2rem;
  align-items: start; }
.tile { background: var(--card); border-radius: .5rem; padding: .8rem .9rem; }
.tile b { display: block; font-size: 1.55rem; font-weight: 600; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .82rem; }
.tile .soft { font-size: .78rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .4rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th { font-weight: 500; font-size: .82rem; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { background: var(--card); border-radius: .4rem; padding: .7rem .9rem; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""

NONE = "\N{EN DASH}"  # an empty cell


def document(title: str, style: str, body: str) -> str:
    """The whole page.  style: the page's own CSS, after the common one.  title: escaped here."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Tiles with large numbers.  facts: (number, its name, a remark), escaped here."""
    cells = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(name)}</span>'
        f'<span class="soft">{escape(beside)}</span></div>'
        for number, name, beside in facts
    )
    return f'<div class="tiles">{cells}</div>'


def table(head: Sequence[str], rows: Iterable[str], kind: str = "") -> str:
    """A table.  head: HTML of the column titles."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f'<div class="scroll {kind}"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'


def row(cells: Iterable[str], kind: str = "") -> str:
    """A table row of texts, escaped here."""
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"


def commands(by_stage: Mapping[str, Sequence[str]]) -> str:
    note = '<p class="soft">From the root of the repository, in this order.</p>'
    return note + "".join(
        f"<h3>{escape(stage)}</h3>" + "".join(f"<pre>{escape(line)}</pre>" for line in lines)
        for stage, lines in by_stage.items()
        if lines
    )


def whole(number: float) -> str:
    return f"{number:,.0f}"


def decimal(number: float, places: int = 2) -> str:
    return f"{number:,.{places}f}"


def percent(share: float | None) -> str:
    """The share in percent; a dash for None, which means that nothing was asked."""
    return NONE if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def megabytes(number: int) -> str:
    return f"{number / 1e6:.2f} MB"


LISTS = ("inputs", "shards", "versions")  # lists in a manifest
# {name of a step: title of its row}
STEPS = {
    "harvest": "Collect from this Python",
    "extract": "Extract",
    "clean": "Clean",
    "decontaminate": "Decontaminate",
    "dedup": "De-duplicate",
    "split": "Split",
}
FUNNEL_STYLE = """
.funnel th:last-child, .funnel td:last-child { text-align: left; }
.funnel td:first-child { white-space: normal; min-width: 9rem; }
.funnel td:last-child { font-size: .88rem; color: var(--soft); white-space: normal;
  min-width: 14rem; }
.bar { height: .35rem; margin-top: .3rem; background: var(--train); border-radius: .2rem; }
"""


def step_facts(manifest: Path) -> Facts:
    """A step's manifest, without files and checksums, and the first rejected line."""
    whole_manifest = json.loads(manifest.read_bytes())
    facts = {key: value for key, value in whole_manifest.items() if key not in LISTS}
    rejected = manifest.with_name("rejected.jsonl")
    return {**facts, "bad_lines": read_lines(rejected)[:1] if rejected.exists() else []}


def read_lines(path: Path) -> list[Facts]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def funnel(corpus: Facts) -> str:
    """The table of steps.  corpus: {name of the step: result of `step_facts`}, in order."""
    largest = max(step["input"]["bytes"] for step in corpus.values()) or 1
    rows = []
    for name, step in corpus.items():
        before, after = step["input"], step["output"]
        width = 100 * after["bytes"] / largest
        rows.append(
            f'<tr><td>{STEPS[name]}<div class="bar" style="width:{width:.1f}%"></div></td>'
            f"<td>{whole(before['documents'])}</td><td>{whole(after['documents'])}</td>"
            f"<td>{megabytes(before['bytes'])}</td><td>{megabytes(after['bytes'])}</td>"
            f"<td>{'<br>'.join(map(escape, remarks(name, step)))}</td></tr>"
        )
    head = ("step", "documents in", "out", "text in", "out", "why")
    unit = corpus["clean"]["unit_of_length"]
    note = (
        f"Lengths are counted in {unit} of GPT-2's pre-tokenizer: there are no tokens before there "
        "is a tokenizer. Text is counted in UTF-8 bytes, without the jsonl around it; ftfy's "
        "repairs change it a little."
    )
    return table(head, rows, "funnel") + f'<p class="soft">{escape(note)}</p>'


def remarks(name: str, step: Facts) -> list[str]:
    """Remarks about what a step dropped and why, or how it split the documents."""
    lines = [
        f"{reason}: {whole(count['documents'])} ({megabytes(count['bytes'])})"
        for reason, count in step["dropped"].items()
    ]
    lines += ["first: {file}, byte {offset}: {reason}".format(**bad) for bad in step["bad_lines"]]
    if name == "harvest":
        sources = step["output"]["sources"]
        lines += [f"{source}: {whole(count['documents'])}" for source, count in sources.items()]
    if name == "clean":
        lines.append(f"repaired by ftfy: {whole(step['repaired'])}")
    if name == "decontaminate":
        lines.append(f"cut where evaluation text stood: {whole(step['documents_cut'])}")
    if name == "split":
        lines += [
            f"{side}: {whole(count['documents'])} ({megabytes(count['bytes'])})"
            for side, count in step["sides"].items()
        ]
    return lines


CURVE_STYLE = """
svg { width: 100%; min-width: 32rem; height: auto; display: block; }
"""


def training(metrics: Sequence[Facts]) -> Facts:
    """The last losses, and the median of the logged tokens per second."""
    logged = [line for line in metrics if "loss" in line]
    validated = [line for line in metrics if "validation_loss" in line]
    if not logged:
        raise ValueError("metrics.jsonl has no step; train for at least --log-interval steps")
    return {
        "steps": logged[-1]["step"],
        "samples": logged[-1]["samples"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in logged),
        "train_loss": logged[-1]["loss"],
        "validation_loss": validated[-1]["validation_loss"] if validated else None,
    }


INK, MUTED, TRAIN, VALIDATION = "#010101", "#020202", "#030303", "#040404"
VARIABLES = {INK: "--ink", MUTED: "--line", TRAIN: "--train", VALIDATION: "--accent"}


def loss_curve(
    metrics: Sequence[Facts], term: str = "loss", unit: str = "loss (nats per token)"
) -> str:
    """Training and validation loss over steps as inline SVG in the page's own colours.

    term: name of the loss term in the metrics.
    """
    matplotlib.use("svg")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "quickstart", "font.family": "sans-serif",
                "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED,
                "xtick.color": INK, "ytick.color": INK, "grid.color": MUTED, "font.size": 11,
                "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
        for key, label, style in (
            (term, "training", {"color": TRAIN, "linewidth": 1.2}),
            (f"validation_{term}", "validation", {"color": VALIDATION, "marker": "o"}),
        ):
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(axis="y", linewidth=0.6)
        axes.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True)
        plt.close(figure)
    return in_page(drawing.getvalue())


def in_page(svg: str) -> str:
    """Only the <svg> element, without document type, metadata and size, in the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    )
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", '<svg role="img" aria-label="loss over steps"', 1)
