"""Results that several experiments report: the training, table 3, the commands, the machine."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import sqrt
from pathlib import Path
from typing import Any

from megatron.data.files import write_atomically
from tools.experiments.runner import to_open
from tools.report import curves
from tools.report.numbers import decimal, percent, whole
from tools.report.sections import Commands, Page, Part, Section, Table, Text

Facts = Mapping[str, Any]
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "lm_eval", "accelerate")


def write_results(
    output: Path, name: str, page: Page, facts: object, *, indent: int | None = None
) -> str:
    """Write NAME.json, NAME.md and NAME.html; returns the text, and the command to open it."""
    write_atomically(output / f"{name}.json", json.dumps(facts, indent=indent).encode() + b"\n")
    write_atomically(output / f"{name}.md", page.markdown())
    write_atomically(output / f"{name}.html", page.html())
    return f"{page.markdown().decode()}\nopen {to_open(output / f'{name}.html')}"


def write_measured(
    output: Path, name: str, page: Page, facts: Facts, program: str, *, indent: int | None = None
) -> str:
    """`write_results`, with `origin_facts` as "machine" of NAME.json and at the end of the page."""
    command, *others = origin_facts(program).items()
    parts: list[Part] = [
        Commands([command[1]]),
        ", ".join(f"{name} {value}" for name, value in others) + ".",
        Text("This is as the page was written: a stage that was reused ran earlier.", "note"),
    ]
    whole_page = replace(page, sections=[*page.sections, Section("Machine and command", parts)])
    whole_facts = {"machine": dict([command, *others]), **facts}
    return write_results(output, name, whole_page, whole_facts, indent=indent)


def curve(lines: Sequence[Facts], key: str) -> list[tuple[int, float]]:
    """(step, value) of the lines of metrics.jsonl that have this value."""
    return list(zip(*curves.points(lines, key), strict=True))


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


def origin_facts(program: str) -> Facts:
    """Where figures are from: the command first, with absolute paths reduced to the file's name;
    date, commit, processor, versions. program: as its user types it."""
    import torch

    from megatron.train.machine import commit
    from tools.doctor.machine import processor

    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    whole = commit() or "none"
    found: dict[str, Any] = {
        "command": f"python {program} {shlex.join(words)}".rstrip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": whole[:9] + ("-dirty" if whole.endswith("-dirty") else ""),
        "processor": processor(),
        **machine_facts(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
