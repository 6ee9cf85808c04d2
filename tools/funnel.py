"""What the steps of tools.corpus did to a corpus, as a table of a page."""

import json
from html import escape
from pathlib import Path
from typing import Any

from tools.page import megabytes, table, whole

Facts = dict[str, Any]
LISTS = ("inputs", "shards", "versions")  # of a manifest
# name of a step, title of its row
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
    """What a step's manifest says, without files and checksums, and the first line set aside."""
    whole_manifest = json.loads(manifest.read_bytes())
    facts = {key: value for key, value in whole_manifest.items() if key not in LISTS}
    rejected = manifest.with_name("rejected.jsonl")
    return {**facts, "bad_lines": read_lines(rejected)[:1] if rejected.exists() else []}


def read_lines(path: Path) -> list[Facts]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def funnel(corpus: Facts) -> str:
    """corpus: of each step in order, by its name, what `step_facts` gave."""
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
    """What a step dropped and why, or how it dealt the documents."""
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
