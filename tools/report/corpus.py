"""The steps of tools.corpus on a page: what they dropped and why, duplicates, leakage, costs.

Its input are the manifests of the steps (manifest.json and run.json).
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.corpus.records import Count, Counts, Funnel, documents
from tools.report.numbers import NONE, size, whole
from tools.report.sections import (
    Share,
    Table,
)

Facts = dict[str, Any]
TITLES = {
    "harvest": "Collect from this Python",
    "dedup": "De-duplicate",
    "urls": "URLs",
}


@dataclass(frozen=True)
class Folder:
    """The output folder of a step."""

    path: Path
    manifest: Facts
    run: Facts
    """run.json, with what the run took; empty if it is missing."""

    @property
    def shards(self) -> list[Facts]:
        return list(self.manifest.get("shards", []))


@dataclass(frozen=True)
class Step:
    """One step of the pipeline; several folders if it was run on parts of the corpus."""

    name: str
    folders: tuple[Folder, ...]

    @functools.cached_property
    def counts(self) -> Funnel:
        """The documents of all folders together."""
        total = Funnel()
        for folder in self.folders:
            total.add(Funnel.from_json(folder.manifest))
        return total

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.capitalize())


def find(steps: Iterable[Step], key: str) -> Any | None:
    """The value of a key of the manifests, from the first that has it."""
    for step in steps:
        for folder in step.folders:
            if key in folder.manifest:
                return folder.manifest[key]
    return None


class Loss(NamedTuple):
    """Text that a step removed from the corpus."""

    reason: str
    documents: int | None
    """None if text was lost within documents."""
    bytes: int


class Accounting(NamedTuple):
    """The whole corpus before and after a step; sources that it did not read are unchanged."""

    step: Step
    before: Counts
    after: Counts
    losses: list[Loss]


def follow(steps: Sequence[Step]) -> list[Accounting]:
    """The corpus through all steps; a source counts from the start, wherever it first appears."""
    corpus: Counts = {}
    written: set[str] = set()
    for step in steps:
        for source in step.counts.input.keys() - written:
            corpus.setdefault(source, step.counts.input[source])
        written |= step.counts.output.keys()
    accounts = []
    for step in steps:
        before, counts = dict(corpus), step.counts
        for source in {**counts.input, **counts.output}:
            corpus[source] = counts.output.get(source, Count())
        accounts.append(Accounting(step, before, dict(corpus), find_losses(counts, before)))
    return accounts


def find_losses(counts: Funnel, before: Counts) -> list[Loss]:
    """Losses by reason, the largest first; then text that was lost without being dropped."""
    losses = [
        Loss(reason, documents(dropped), text_bytes(dropped))
        for reason, dropped in counts.dropped.items()
    ]
    losses.sort(key=lambda loss: (-loss.bytes, loss.reason))
    changed = text_bytes(counts.input) - sum(loss.bytes for loss in losses)
    changed -= text_bytes(counts.output)
    if changed > 0:
        losses.append(Loss("cut or repaired within documents", None, changed))
    offered = {source: before.get(source, Count()) for source in counts.input}
    unread = documents(offered) - documents(counts.input)
    if unread > 0:
        left = text_bytes(offered) - text_bytes(counts.input)
        losses.append(Loss("not given to this step", unread, left))
    return losses


def text_bytes(counts: Counts) -> int:
    return sum(count.bytes for count in counts.values())


def share(part: float, of: float) -> float | None:
    return part / of if of else None


def step_facts(manifest: Path) -> Facts:
    """A step's manifest, without files and checksums, and the first rejected line."""
    content = json.loads(manifest.read_bytes())
    facts = {
        key: value for key, value in content.items() if key not in ("inputs", "shards", "versions")
    }
    rejected = manifest.with_name("rejected.jsonl")
    lines = rejected.read_bytes().splitlines() if rejected.exists() else []
    return {**facts, "bad_lines": [json.loads(line) for line in lines[:1]]}


def accounting_of(corpus: Mapping[str, Facts]) -> Table:
    """corpus: {name of the step: result of `step_facts`}, in order."""
    steps = [Step(name, (Folder(Path(name), facts, {}),)) for name, facts in corpus.items()]
    return accounting(follow(steps))


def accounting(accounts: Sequence[Accounting]) -> Table:
    """What each step wrote, and under it what the step dropped and why."""
    first = accounts[0].before
    rows: list[tuple[str | Share, ...]] = [
        ("Raw", whole(documents(first)), size(text_bytes(first)), NONE)
    ]
    marked = [0]
    for step, _, _, losses in accounts:
        read, left = text_bytes(step.counts.input), step.counts.output
        marked.append(len(rows))
        kept = Share(share(text_bytes(left), read))
        rows.append((step.title, whole(documents(left)), size(text_bytes(left)), kept))
        for loss in losses:
            count = NONE if loss.documents is None else f"\N{MINUS SIGN}{whole(loss.documents)}"
            lost = f"\N{MINUS SIGN}{size(loss.bytes)}"
            rows.append((loss.reason, count, lost, Share(share(loss.bytes, read))))
        rows += remarks(step)
    head = ("step, and what it dropped", "documents", "text", "of the text it read")
    note = (
        "Text is counted in UTF-8 bytes, without the JSON around it. A line that holds no document "
        "counts as a document, with the bytes of the line."
    )
    if unit := find([account.step for account in accounts], "unit_of_length"):
        note += (
            f" Lengths are in {unit} of GPT-2's pre-tokenizer: there are no tokens before there is "
            "a tokenizer."
        )
    return Table(head, rows, marked, note=note)


def remarks(step: Step) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a step besides its losses."""
    parts = find([step], "sides") or {}
    if step.name == "harvest":
        parts = find([step], "output")["sources"]
    for name, count in parts.items():
        yield f"{name}:", whole(count["documents"]), size(count["bytes"]), ""
    for key, what in (
        ("repaired", "documents repaired"),
        ("documents_cut", "documents cut where evaluation text stood"),
        ("tokens", "tokens"),
    ):
        total = sum(folder.manifest.get(key, 0) for folder in step.folders)
        if total:
            yield f"{whole(total)} {what}", "", "", ""
    for bad in find([step], "bad_lines") or []:
        yield "first bad line: {file}, byte {offset}: {reason}".format(**bad), "", "", ""
