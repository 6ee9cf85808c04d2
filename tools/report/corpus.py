"""The steps of tools.corpus on a page: what they dropped and why, duplicates, leakage, costs.

Its input are the manifests of the steps (manifest.json and run.json).
"""

import difflib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.corpus.files import Count, Counts, DocumentCounts, documents
from tools.corpus.language import UNKNOWN, names
from tools.report import sections
from tools.report.figures import PALETTE, SERIES, Axes, draw
from tools.report.numbers import NONE, decimal, duration, percent, size, whole
from tools.report.sections import Figure, Grid, Number, Page, Part, Section, Share, Table, Text

Facts = dict[str, Any]
TITLES = {"harvest": "Collect from this Python", "dedup": "De-duplicate", "urls": "URLs"}
# Keys of a manifest that have a place of their own on the page.
PLACED = {"step", "settings", "versions", "inputs", "input", "output", "dropped", "pieces",
          "shards", "languages", "lengths"}  # fmt: skip

# Numbers of what is shown.
LANGUAGES = 9
CLUSTERS = 12
CHARACTERS = 2000  # of each text of a cluster
WORDS = 500  # of each text that are compared
FILES = 40  # of a folder that are listed one by one
LEAST_SECONDS = 0.1  # CPU time from which a speed is shown
LEAST_SCALE = 0.01  # share that fills a bar of leakage, at the least: tiny shares have to look tiny


@dataclass(frozen=True)
class Folder:
    """The output folder of a step."""

    path: Path
    manifest: Facts
    run: Facts
    """run.json, with what the run took; empty if it is missing."""


@dataclass(frozen=True)
class Step:
    """One step of the pipeline; several folders if it was run on parts of the corpus."""

    name: str
    folders: tuple[Folder, ...]

    @functools.cached_property
    def counts(self) -> DocumentCounts:
        """The documents of all folders together."""
        total = DocumentCounts()
        for folder in self.folders:
            total.add(DocumentCounts.from_json(folder.manifest))
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


def find_losses(counts: DocumentCounts, before: Counts) -> list[Loss]:
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


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); the step run again writes it") from None


def step_facts(manifest: Path) -> Facts:
    """A step's manifest, without files and checksums, and the first rejected line."""
    content = read_json(manifest)
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
    """The documents that each step wrote, and under them those that it dropped and why."""
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
    head = ("step, and what it dropped", "documents", "text", "of its input")
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


def page(steps: Sequence[Step], faults: Sequence[str] | None) -> Page:
    """The whole page. faults: of the shards; None if they were not read again."""
    urls = [step for step in steps if step.name == "urls"]
    accounts = follow([step for step in steps if step.name != "urls"] or urls)
    start, end = accounts[0].before, accounts[-1].after
    sources = sum(count.documents > 0 for count in start.values())
    lead = (
        f"The steps kept {whole(documents(end))} of {whole(documents(start))} documents from "
        f"{sources} sources."
    )
    # Lists of URLs are no texts: they are accounted for on their own.
    of_urls = []
    if urls:
        of_urls = [Section("URLs", ["Each URL counts as a document.", accounting(follow(urls))])]
    return Page(
        "The corpus, step by step",
        lead,
        [
            *of_urls,
            Section(
                "Kept and dropped",
                [bytes_left(accounts), accounting(accounts), by_source(accounts)],
            ),
            Section("Left of each source", retention(accounts)),
            Section("Lengths and languages", [Grid([lengths(steps), languages(steps)])]),
            Section("Duplicates", duplicates(steps)),
            Section("Evaluation text in the corpus", leakage(steps)),
            Section("Time and memory", [costs(steps)]),
            Section("Settings, versions and checksums", provenance(steps, faults)),
        ],
        headline(steps, accounts),
    )


def headline(steps: Sequence[Step], accounts: Sequence[Accounting]) -> list[Number]:
    start, end = accounts[0].before, accounts[-1].after
    kept = percent(share(text_bytes(end), text_bytes(start)))
    numbers = [
        Number(whole(documents(end)), "documents left", f"of {whole(documents(start))}"),
        Number(size(text_bytes(end)), "of text left", f"{kept} of {size(text_bytes(start))}"),
    ]
    tokenised = [step for step in steps if find([step], "tokens")]
    if tokenised:
        tokens = sum(f.manifest.get("tokens", 0) for step in tokenised for f in step.folders)
        read = sum(text_bytes(step.counts.output) for step in tokenised)
        numbers.append(Number(whole(tokens), "tokens", f"{read / tokens:.2f} bytes of text each"))
    for step in steps:
        if step.name == "dedup":
            read = documents(step.counts.input)
            removed = share(read - documents(step.counts.output), read)
            note = f"of {whole(read)} documents"
            numbers.append(Number(percent(removed), "removed as duplicates", note))
    stages = [stage for step in steps for stage in stages_of(step)]
    if stages:
        whole_cost = total("", stages)
        wall, cpu = (duration(whole_cost[key]) for key in ("seconds", "cpu_seconds"))
        numbers.append(Number(cpu, "of CPU time", f"{wall} by the clock"))
        numbers.append(Number(size(whole_cost["peak_bytes"]), "peak memory", "of one process"))
    return numbers


def sources_of(accounts: Sequence[Accounting]) -> Counts:
    """The counts of each source when it first appeared, the largest first."""
    first: Counts = {}
    for account in accounts:
        first = account.after | account.before | first
    return dict(sorted(first.items(), key=lambda item: (-item[1].bytes, item[0])))


def bytes_left(accounts: Sequence[Accounting]) -> Figure:
    """Bars of the text after each step, by source, and of what the step took away."""
    largest = list(sources_of(accounts))[: len(SERIES)]
    bars = [("Raw", accounts[0].before, 0)]
    for account in accounts:
        lost = sum(loss.bytes for loss in account.losses)
        bars.append((account.step.title, account.after, lost))

    def paint(axes: Axes) -> None:
        for row, (_, counts, lost) in enumerate(bars):
            parts = [counts.get(source, Count()).bytes for source in largest]
            parts += [text_bytes(counts) - sum(parts), lost]
            left = 0
            for part, colour in zip(parts, colours, strict=True):
                axes.barh(row, part, left=left, color=colour, height=0.7)
                left += part
        axes.set_yticks(range(len(bars)), [title for title, _, _ in bars])
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda value, _: size(value))
        axes.grid(axis="x")

    colours = [*SERIES[: len(largest)], PALETTE["rest"], PALETTE["accent"]]
    legend_names = [*largest, "other sources", "taken away by the step"]
    legend = list(zip(colours, legend_names, strict=True))
    if len(largest) == len(sources_of(accounts)):
        del legend[-2]
    height = 0.6 + 0.35 * len(bars)
    return draw(paint, "Text after each step, in UTF-8 bytes", (5.4, height), legend)


def by_source(accounts: Sequence[Accounting]) -> Section:
    """For each step, one row per source: in, out, and dropped for each reason."""
    parts = []
    for account in accounts:
        counts = account.step.counts
        reasons = sorted(counts.dropped)
        rows = []
        for source in sources_of(accounts):
            if source not in counts.input and source not in counts.output:
                continue
            into = counts.input.get(source, Count())
            out = counts.output.get(source, Count())
            lost = [counts.dropped[reason].get(source, Count()).documents for reason in reasons]
            dropped = [whole(count) if count else NONE for count in lost]
            row = (whole(into.documents), whole(out.documents), *dropped)
            rows.append((source, *row, size(into.bytes), size(out.bytes)))
        head = ("source", "documents in", "out", *reasons, "text in", "out")
        parts.append(Section(account.step.title, [Table(head, rows)]))
    return Section("Every step by source", parts, folded=True)


def retention(accounts: Sequence[Accounting]) -> list[Part]:
    """Shares of the documents and bytes of each source that are left after each step."""
    tables: list[Part] = []
    for unit, shown in (("documents", whole), ("bytes", size)):
        rows = []
        for source, first in sources_of(accounts).items():
            start = getattr(first, unit)
            row: list[str | Share] = [source, shown(start)]
            for account in accounts:
                counts = account.step.counts
                is_read = source in counts.input or source in counts.output
                left = getattr(account.after.get(source, Count()), unit)
                row.append(Share(share(left, start)) if is_read else NONE)
            rows.append(row)
        start = sum(getattr(count, unit) for count in accounts[0].before.values())
        row = ["all", shown(start)]
        for account in accounts:
            left = sum(getattr(count, unit) for count in account.after.values())
            row.append(Share(share(left, start)))
        rows.append(row)
        head = (unit, "raw", *(account.step.title for account in accounts))
        tables.append(Table(head, rows, marked=[len(rows) - 1]))
    note = "A source that a step did not read passes it by."
    return [*tables, Text(note, "note")]


def lengths(steps: Sequence[Step]) -> Part:
    """Histogram of {"before" and "after" clean: {lower end of an octave: documents}}."""
    octaves = find(steps, "lengths") or {}
    if not any(octaves.values()):
        return Text("No length was counted.", "note")

    def paint(axes: Axes) -> None:
        for when, colour in (("before", PALETTE["rest"]), ("after", SERIES[0])):
            lows = [int(low) for low in octaves.get(when, {})]
            heights = list(octaves.get(when, {}).values())
            axes.bar(lows, heights, [0.94 * low for low in lows], align="edge", color=colour)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(
            lambda low, _: f"{low / 1024:,.0f}k" if low >= 1024 else f"{low:.0f}"
        )
        axes.set(xlabel="characters of a document", ylabel="documents")
        axes.grid(axis="y")

    return draw(paint, "Documents by length, after clean; grey, those that clean dropped")


def languages(steps: Sequence[Step]) -> Part:
    counts = find(steps, "languages")
    if not counts:
        return Text("No language was identified.", "note")
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown_counts = dict(ranked[:LANGUAGES])
    if rest := ranked[LANGUAGES:]:
        shown_counts[f"{len(rest)} more"] = sum(count for _, count in rest)
    total, titles = sum(counts.values()), names() | {UNKNOWN: "none found"}
    rows = []
    for code, count in shown_counts.items():
        title = titles.get(code, code).replace("_", " ").capitalize()
        rows.append((title, whole(count), Share(count / total)))
    return Table(("likeliest language", "documents", "share"), rows)


def duplicates(steps: Sequence[Step]) -> list[Part]:
    """How similar duplicates were, what the bands find, the largest clusters side by side."""
    parts: list[Part] = []
    for step in steps:
        if step.name != "dedup":
            continue
        rows = []
        for source, read in sorted(step.counts.input.items()):
            gone = read.documents - step.counts.output.get(source, Count()).documents
            part = Share(share(gone, read.documents))
            rows.append((source, whole(read.documents), whole(gone), part))
        removed = Table(("source", "documents", "removed", "share"), rows)
        parts.append(Grid(similarity(step)))
        parts.append(Grid([removed, *(counted_by(folder) for folder in step.folders)]))
        if clusters := find([step], "largest_clusters"):
            parts.append(largest_clusters(clusters))
        else:
            parts.append(Text("No two documents were similar enough.", "note"))
    return parts or [Text("No step is dedup.", "note")]


def similarity(step: Step) -> list[Part]:
    """Verified pairs, and the share that the bands are expected to find, by Jaccard similarity."""
    threshold = step.folders[0].manifest["settings"].get("jaccard")

    def finish(axes: Axes, what: str) -> None:
        if threshold is not None:
            axes.axvline(threshold, color=PALETTE["accent"], linestyle="--", linewidth=1)
        axes.set(xlabel="Jaccard similarity", ylabel=what)
        axes.grid(axis="y")

    def paint_pairs(axes: Axes) -> None:
        for each in bins:
            width = 0.94 * (each["to"] - each["from"])
            axes.bar(each["from"], each["pairs"], width, align="edge", color=SERIES[0])
        finish(axes, "pairs")

    def paint_recall(axes: Axes) -> None:
        places = [point["jaccard"] for point in points]
        axes.plot(places, [point["recall"] for point in points], color=SERIES[0])
        finish(axes, "recall")

    parts: list[Part] = []
    if bins := find([step], "jaccard_histogram"):
        parts.append(draw(paint_pairs, "Verified pairs by exact similarity"))
    if points := find([step], "recall_curve"):
        parts.append(draw(paint_recall, "Expected recall of the bands"))
    return parts


def largest_clusters(clusters: Sequence[Facts]) -> Section:
    """Each cluster unfolds; the first is open."""
    parts: list[Part] = [
        Text(
            "The document that was kept comes first. In the others, words that it lacks are "
            "marked; in it, words that at least half of the others lack. Each text is cut at "
            f"{CHARACTERS:,} characters.",
            "note",
        )
    ]
    for number, cluster in enumerate(clusters[:CLUSTERS]):
        sources = sorted({str(member["source"]) for member in cluster["members"]})
        title = f"{whole(cluster['size'])} documents, {', '.join(sources)}"
        parts.append(Section(title, [side_by_side(cluster)], folded=number > 0))
    return Section("The largest clusters", parts)


def side_by_side(cluster: Facts) -> Grid:
    """The texts of a cluster, the document that was kept first, with marks on words that differ."""
    members = sorted(cluster["members"], key=lambda member: member["id"] != cluster["kept_id"])
    # Each word has the white space around it, so that joined again they are the text.
    texts = [re.findall(r"\s*\S+\s*", str(member["text"])[:CHARACTERS]) for member in members]
    compared = [differences(texts[0], other) for other in texts[1:]]
    absent = [0] * len(texts[0])  # in how many of the others each word of the first is
    for only_first, _ in compared:
        absent = [count + is_absent for count, is_absent in zip(absent, only_first, strict=True)]
    marks = [[bool(compared) and 2 * count >= len(compared) for count in absent]]
    marks += [only_other for _, only_other in compared]
    quotes = []
    for member, words, marked in zip(members, texts, marks, strict=True):
        jaccard = member.get("jaccard")
        title = "Jaccard not given" if jaccard is None else f"Jaccard {decimal(jaccard, 3)}"
        if member["id"] == cluster["kept_id"]:
            title = "kept"
        parts: list[str | sections.Mark] = []
        pairs = zip(words, marked, strict=True)
        for is_marked, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            text = "".join(word for word, _ in run)
            parts.append(sections.Mark(text) if is_marked else text)
        quotes.append(sections.Quote(parts, title, f"{member['id']}, {member['source']}"))
    return Grid(quotes)


def differences(first: Sequence[str], other: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """Whether the other text lacks each word, in order; compares the first WORDS of both."""
    a, b = ([word.strip() for word in words[:WORDS]] for words in (first, other))
    only_first = [place < WORDS for place in range(len(first))]
    only_other = [place < WORDS for place in range(len(other))]
    for i, j, n in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        only_first[i : i + n] = [False] * n
        only_other[j : j + n] = [False] * n
    return only_first, only_other


def leakage(steps: Sequence[Step]) -> list[Part]:
    """Shares of the n-grams of evaluation sets in the corpus, and counts of the cuts."""
    found = find(steps, "leakage")
    parts: list[Part] = [leaked(found) if found else Text("No evaluation set was given.", "note")]
    for folder in (folder for step in steps for folder in step.folders):
        if "leakage" not in folder.manifest:
            continue
        rows = []
        for each in folder.manifest.get("evaluation", []):
            counts = [shown(each[key]) for key in ("passages", "not_searched", "words")]
            rows.append((str(each["name"]), *counts))
        head = ("evaluation set", "passages", "too short to be searched for", "words")
        parts += [Table(head, rows), counted_by(folder)]
    return parts


def leaked(found: Mapping[str, Facts]) -> Table:
    rows = []
    for kind, title in (("", "n-grams"), ("_distinct", "distinct n-grams")):
        before, after = f"before{kind}", f"after{kind}"
        most = max(LEAST_SCALE, *(facts[before] for facts in found.values()))
        for name, facts in found.items():
            count = whole(facts["distinct_ngrams" if kind else "ngrams"])
            left = Share(facts[after], most, facts[before])
            rows.append((name, f"{count} {title}", percent(facts[before], 2), left))
    note = (
        "Shares of the n-grams of each evaluation set that the corpus holds, before the step took "
        "them out and after."
    )
    return Table(("evaluation set", "it has", "found before", "after"), rows, note=note)


def counted_by(folder: Folder) -> Table:
    """The step's own numbers, such as its counters."""
    rows = []
    for key, value in folder.manifest.items():
        if key in PLACED:
            continue
        inner = value if isinstance(value, dict) else {"": value}
        for name, number in inner.items():
            if isinstance(number, int | float | str):
                title = f"{key}: {name}" if name else key
                rows.append((title.replace("_", " "), shown(number)))
    return Table(("counted by the step", ""), rows)


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return whole(value) if isinstance(value, int) else decimal(value, 4)


def stages_of(step: Step) -> list[Facts]:
    """The stages of all folders of the step, merged by name."""
    by_name: dict[str, list[Facts]] = {}
    for folder in step.folders:
        for stage in folder.run.get("stages", []):
            if stage["tasks"]:
                by_name.setdefault(stage["stage"], []).append(stage)
    return [total(name, stages) for name, stages in by_name.items()]


def total(name: str, stages: Sequence[Facts]) -> Facts:
    """The costs of some stages together."""
    sums = {key: sum(each[key] for each in stages) for key in ("seconds", "cpu_seconds")}
    return {"stage": name, **sums, "peak_bytes": max(each["peak_bytes"] for each in stages)}


def costs(steps: Sequence[Step]) -> Table:
    """A row for each step, and under it one for each stage."""
    everything = sum(stage["cpu_seconds"] for step in steps for stage in stages_of(step))
    rows: list[tuple[str | Share, ...]] = []
    marked = []
    for step in steps:
        stages, read = stages_of(step), text_bytes(step.counts.input)
        marked.append(len(rows))
        if not stages:
            rows.append((f"{step.title}: no run.json", NONE, NONE, NONE, NONE, NONE))
            continue
        for cost in (total(step.title, stages), *stages):
            cpu = cost["cpu_seconds"]
            speed = decimal(read / 1e6 / cpu, 1) if cpu >= LEAST_SECONDS else NONE
            times = (duration(cost["seconds"]), duration(cpu))
            part = Share(share(cpu, everything))
            rows.append((cost["stage"], *times, speed, size(cost["peak_bytes"]), part))
    head = ("step, and its stages", "wall", "CPU", "MB / CPU s", "peak memory", "of all CPU")
    note = (
        "Wall: of the run that ended the step. CPU: of all its tasks, in whichever run they were "
        "done. MB / CPU s: text that the step read, for each second of one core. Memory: the "
        "largest process."
    )
    return Table(head, rows, marked, note=note)


def provenance(steps: Sequence[Step], faults: Sequence[str] | None) -> list[Part]:
    """Sections that unfold, with all that is needed to make the same output and to check it."""
    if faults is None:
        note = "The shards were not read again for this page; --verify does it."
        parts: list[Part] = [Text(note, "note")]
    elif faults:
        parts = [Text(f"{len(faults)} shards are not as they were written:", "warning")]
        parts += [Text(fault, "warning") for fault in faults]
    else:
        parts = ["Every shard of every step is there and has the checksum in its manifest."]
    for step in steps:
        parts += [origin_of(folder, step.title) for folder in step.folders]
    return parts


def origin_of(folder: Folder, title: str) -> Section:
    """Settings, versions, counters and files of a folder."""
    manifest, run = folder.manifest, folder.run
    settings = manifest["settings"] | run.get("settings", {}) | run.get("machine", {})
    tables: list[Part] = []
    for name, facts in (("setting", settings), ("version of", manifest.get("versions", {}))):
        rows = [
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in facts.items()
        ]
        tables.append(Table((name, ""), rows, left=(0, 1)))
    parts: list[Part] = [Grid([*tables, counted_by(folder)])]
    for key, name in (("inputs", "read"), ("shards", "written")):
        files = manifest.get(key, [])
        rows = [
            (str(each["name"]), f"{each['bytes']:,}", str(each["sha256"])) for each in files[:FILES]
        ]
        more = len(files) - FILES
        note = f"and {whole(more)} more, in manifest.json" if more > 0 else ""
        parts.append(Table((f"file {name}", "bytes", "SHA-256"), rows, left=(0, 2), note=note))
    return Section(f"{title}, {folder.path.name}", parts, folded=True)
