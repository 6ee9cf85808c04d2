"""The report as one HTML page that needs no other file."""

from collections.abc import Mapping
from html import escape
from typing import Any

from tools.page import (
    CURVE_STYLE,
    FUNNEL_STYLE,
    commands,
    decimal,
    document,
    duration,
    funnel,
    percent,
    section,
    tiles,
)
from tools.paper.miniature import tables
from tools.paper.tables import millions

Facts = dict[str, Any]
STYLE = (
    f"{FUNNEL_STYLE}{CURVE_STYLE}"
    """
tr.ours td { font-weight: 600; }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0; font-size: .9rem; }
"""
)
NAMES = {"gpt2": "GPT-2", "bert": "BERT, masked tokens"}


def page(facts: Facts, curves: Mapping[str, str], sets: Mapping[str, str]) -> str:
    """curves: an SVG element by model; sets: names of evaluation sets by file."""
    results, found = facts["results"], facts["corpus"]["decontaminate"]["leakage"]
    sections = [
        ("Zero-shot, table 3 of the paper", tables.zero_shot(results).html()),
        ("Fine-tuned, table 5 of the paper", fine_tuned(results["race"])),
        ("On held-out text of its own kind", tables.held_out(results["heldout"]).html()),
        ("What each number is of", meanings(results)),
        ("Training", training(facts["training"], curves)),
        ("Corpus", funnel(facts["corpus"])),
        ("Evaluation text in the corpus", tables.leakage(found, sets).html()),
        ("Time", tables.times(facts["seconds"], facts["budget"]).html()),
        ("Commands", commands(facts["commands"])),
    ]
    body = "".join(section(title, content) for title, content in sections)
    return document("The paper in miniature", STYLE, headline(facts) + body)


def headline(facts: Facts) -> str:
    results = facts["results"]
    race = results["race"]
    numbers = [
        (decimal(results["wikitext103"]["word_perplexity"]), "WikiText103, per word",
         "8.3B of the paper: 10.81"),
        (percent(results["lambada"]["strict_accuracy"]), "LAMBADA, strict",
         "8.3B of the paper: 66.5 %"),
        (percent(race["accuracy"]), "RACE", f"chance: {percent(tables.CHANCE)}"),
        (millions(results["lambada"]["model"]["parameters"]), "parameters of GPT-2",
         f"of BERT {millions(race['model']['parameters'])}"),
        (decimal(results["heldout"]["token_perplexity"]), "perplexity on held-out articles",
         f"bigram {decimal(results['heldout']['bigram_perplexity'])}"),
        (duration(sum(facts["seconds"].values())), "in all", f"{race['device']}"),
    ]  # fmt: skip
    return (
        "<p>Every step of the paper, from raw text to its tables, with models of a few million "
        "parameters that are trained for minutes. The paper's rows show the form of its results, "
        "and are not to be reached here.</p>" + tiles(numbers)
    )


def fine_tuned(result: Facts) -> str:
    return tables.race(result).html() + f"<p>{escape(tables.verdict(result))}</p>"


def meanings(results: Facts) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in tables.meanings(results)
    )
    return f"<dl>{items}</dl>"


def training(runs: Facts, curves: Mapping[str, str]) -> str:
    drawings = "".join(
        f'<h3>{NAMES[model]}</h3><div class="scroll">{curve}</div>'
        for model, curve in curves.items()
    )
    return tables.training(runs).html() + drawings
