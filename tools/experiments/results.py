"""Results that several experiments report: the corpus, the training, table 3, the commands."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from megatron.data.files import write_atomically
from tools.report import plot
from tools.report.numbers import decimal, percent, size, whole
from tools.report.sections import Commands, Page, Part, Section, Table, Text

Facts = Mapping[str, Any]

# {step of tools.corpus: title of its rows}
STEPS = {
    "harvest": "Collect from this Python",
    "extract": "Extract",
    "clean": "Clean",
    "decontaminate": "Decontaminate",
    "dedup": "De-duplicate",
    "split": "Split",
}
LISTS = ("inputs", "shards", "versions")  # of a manifest, too long for a report


def write_results(
    output: Path, name: str, page: Page, facts: object, *, indent: int | None = None
) -> None:
    """NAME.json, NAME.md and NAME.html."""
    write_atomically(output / f"{name}.json", json.dumps(facts, indent=indent).encode() + b"\n")
    write_atomically(output / f"{name}.md", page.markdown())
    write_atomically(output / f"{name}.html", page.html())


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def step_facts(manifest: Path) -> Facts:
    """A corpus step's manifest without files and checksums, and its first rejected line."""
    facts = {key: value for key, value in read_json(manifest).items() if key not in LISTS}
    rejected = manifest.with_name("rejected.jsonl")
    lines = rejected.read_bytes().splitlines() if rejected.exists() else []
    return {**facts, "bad_lines": [json.loads(line) for line in lines[:1]]}


def corpus_parts(corpus: Mapping[str, Facts]) -> list[Part]:
    """A table with a row for each step and, under it, what it dropped and why.

    corpus: {name of the step: result of `step_facts`}, in order.
    """
    rows = []
    steps = []  # numbers of their rows
    notes: list[Part] = []
    for name, step in corpus.items():
        steps.append(len(rows))
        left = step["output"]
        rows.append((STEPS[name], whole(left["documents"]), size(left["bytes"])))
        for reason, dropped in step["dropped"].items():
            rows.append((reason, f"-{whole(dropped['documents'])}", f"-{size(dropped['bytes'])}"))
        parts = left["sources"] if name == "harvest" else step.get("sides", {})
        for part, count in parts.items():
            rows.append((part, whole(count["documents"]), size(count["bytes"])))
        if name == "clean":
            notes.append(Text(f"ftfy repaired {whole(step['repaired'])} documents.", "note"))
        if name == "decontaminate":
            cut = whole(step["documents_cut"])
            notes.append(Text(f"Evaluation text was cut from {cut} documents.", "note"))
        for line in step["bad_lines"]:
            bad = "first bad line of {}: {file}, byte {offset}: {reason}".format(name, **line)
            notes.append(Text(bad, "warning"))
    unit = corpus["clean"]["unit_of_length"]
    lengths = (
        f"Lengths are counted in {unit} of GPT-2's pre-tokenizer, as there is no tokenizer yet. "
        "Text is counted in UTF-8 bytes without the JSON around it."
    )
    table = Table(("left after each step", "documents", "text"), rows, marked=steps)
    return [table, Text(lengths, "note"), *notes]


def curve(lines: Sequence[Facts], key: str) -> list[tuple[int, float]]:
    """(step, value) of the lines of metrics.jsonl that have this value."""
    return list(zip(*plot.points(lines, key), strict=True))


def millions(parameters: float) -> str:
    return f"{parameters / 1e6:.1f} M"


def held_out_table(scores: Facts, title: str = "") -> Table:
    """Perplexities of HELDOUT, beside those of the baselines; with the cloze if it was asked."""
    token, word = decimal(scores["token_perplexity"]), whole(scores["word_perplexity"])
    bits, cloze = decimal(scores["bits_per_byte"], 3), percent(scores["cloze_accuracy"])
    rows = [
        ("GPT-2, this run", token, word, bits, cloze),
        ("bigram", decimal(scores["bigram_perplexity"]), "", "", ""),
        ("unigram", decimal(scores["unigram_perplexity"]), "", "", ""),
        ("xz -9", "", "", decimal(scores["xz_bits_per_byte"], 3), ""),
    ]
    head = (title, "perplexity per token", "per word", "bits per byte", "last-word cloze")
    return Table(head, rows)


def table_3(ours: Sequence[tuple[str, Facts, Facts]]) -> Table:
    """The paper's rows, then ours: (name, record of WikiText103, record of LAMBADA)."""
    _, wikitext, lambada = ours[0]
    rows = []
    for one, other in zip(wikitext["paper"]["rows"], lambada["paper"]["rows"], strict=True):
        rows.append((f"paper, {one['model']}", one, other))
    marked = range(len(rows), len(rows) + len(ours))
    cells = [
        (name, decimal(one["word_perplexity"]), percent(other["strict_accuracy"]))
        for name, one, other in [*rows, *ours]
    ]
    head = ("GPT-2", "WikiText103 perplexity per word", "LAMBADA accuracy")
    return Table(head, cells, marked)


def explain_wikitext(record: Facts) -> tuple[str, str]:
    tokens = whole(record["num_original_tokens"])
    return "WikiText103", (
        f"word_perplexity: {record['conventions']['word_perplexity']}. The text is the {tokens} "
        f"tokens of wiki.valid.tokens, in windows of {record['window']} with a stride of "
        f"{record['stride']}; {record['paper']['note']}."
    )


def explain_lambada(record: Facts) -> tuple[str, str]:
    count, accuracy = record["num_examples"], record["strict_accuracy"]
    return "LAMBADA", (
        f"strict_accuracy: {record['conventions']['strict_accuracy']}. The text is the first "
        f"{whole(count)} passages of the test set; the standard error is "
        f"{percent(standard_error(accuracy, count))}; {record['paper']['note']}."
    )


def standard_error(share: float, count: int) -> float:
    """Standard error of a share of `count` cases."""
    return sqrt(share * (1 - share) / count)


def command_section(commands: Mapping[str, Sequence[str]]) -> Section:
    """commands: by stage."""
    parts: list[Part] = [Text("From the root of the repository, in this order.", "note")]
    parts += [Section(name, [Commands(lines)]) for name, lines in commands.items() if lines]
    return Section("Commands", parts)


def machine_facts() -> Facts:
    return {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
