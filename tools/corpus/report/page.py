"""The report as one HTML page: its sections, in the order of a reader's questions."""

from collections.abc import Sequence

from tools.corpus.files import documents
from tools.corpus.report import clusters, costs, funnel, texts
from tools.corpus.report.funnel import Palette, share, size
from tools.corpus.report.steps import Passage, Steps, follow, text_bytes
from tools.page import document, percent, section, tiles, whole

TITLE = "What became of the corpus"

STYLE = """
:root { --c0: #3b6ea5; --c1: #5b9a8b; --c2: #c7a44a; --c3: #86709f; --c4: #8ba35c; --c5: #6d8796;
  --rest: #aab0b7; --lost: #b4531a; }
@media (prefers-color-scheme: dark) { :root { --c0: #4f7fb0; --c1: #4d8d7f; --c2: #ad914a;
  --c3: #816c9c; --c4: #7f9557; --c5: #668090; --rest: #69717a; --lost: #d9793a; } }
body { max-width: 60rem; }
.pair { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
section .scroll + .scroll { margin-top: 1rem; }
figure { margin: .6rem 0; } figcaption { font-size: .85rem; margin-bottom: .3rem; }
.chart { width: 100%; max-width: 27rem; height: auto; display: block; }
.chart text { font-size: 10.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .title { fill: var(--ink); }
.chart .grid { stroke: var(--line); stroke-width: .7; fill: none; }
.chart .bar { fill: var(--train); }
.chart .pale { fill: var(--rest); opacity: .55; }
.chart .curve { stroke: var(--train); stroke-width: 1.8; fill: none; stroke-linejoin: round; }
.chart .mark { stroke: var(--accent); stroke-width: 1.2; stroke-dasharray: 3 3; fill: none; }
tr.all td, tr.step td { font-weight: 600; }
.costs tr:not(.step) td { color: var(--soft); border-bottom-style: dotted; }
.costs tr:not(.step) td:first-child { padding-left: 1rem; }
td.barred { width: 9rem; min-width: 4rem; vertical-align: middle; padding-right: 0; }
td.barred b { position: relative; display: block; height: .5rem; }
td.barred i { position: absolute; inset: 0 auto 0 0; background: var(--train); min-width: 1px;
  border-radius: .12rem; }
td.barred i.pale { background: color-mix(in srgb, var(--train) 35%, transparent); }
.sets td:first-child { white-space: normal; overflow-wrap: anywhere; width: 40%; min-width: 8rem; }
.reasons td:nth-child(2), .reasons th:nth-child(2) { text-align: left; white-space: normal;
  min-width: 9rem; }
.reasons .barred i { background: var(--lost); }
details { margin: .6rem 0; } summary { cursor: pointer; padding: .25rem 0; }
details h3 { margin-top: 1.2rem; }
.mono td { font: .78rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: normal;
  overflow-wrap: anywhere; }
.missing { color: var(--soft); font-style: italic; }
.fault { border-left: 3px solid var(--accent); padding-left: .8rem; }
@media (max-width: 38rem) { table { font-size: .85rem; } th { font-size: .75rem; }
  th, td { padding: .35rem .45rem; } .tile b { font-size: 1.2rem; white-space: nowrap; } }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 85%; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .scroll { overflow: visible; } .text div { max-height: none; } h2, h3 { break-after: avoid; }
  tr, figure, .tile { break-inside: avoid; } }
"""


def page(steps: Steps, faults: Sequence[str] | None) -> str:
    """The whole page.  faults: those of the shards, None if they were not read again."""
    urls = Steps(step for step in steps if step.name == "urls")
    passages = follow(Steps(step for step in steps if step.name != "urls") or urls)
    palette = Palette(passages)
    sections = [
        *([("URLs", of_urls(urls))] if urls else []),
        ("The funnel", funnel.picture(passages, palette) + CONVENTIONS),
        ("In numbers", in_numbers(passages, palette)),
        ("What is left of each source", funnel.retention(passages, palette)),
        ("Lengths and languages", texts.pictures(steps)),
        ("Duplicates", clusters.duplicates(steps)),
        ("Leakage", texts.leakage(steps)),
        ("Time and memory", costs.costs(steps)),
        ("Settings, versions and checksums", costs.provenance(steps, faults)),
    ]
    body = headline(steps, passages) + "".join(section(*each) for each in sections)
    style = STYLE + funnel.STYLE + clusters.STYLE
    return document(TITLE, style, body)


CONVENTIONS = (
    '<p class="soft">Widths are bytes of text in UTF-8, without the JSON around it; the '
    "percentage is of what stood before the step.  A source that a step did not read passes it "
    "by.  Lines that hold no document count as documents, with the bytes of the line.</p>"
)


def headline(steps: Steps, passages: Sequence[Passage]) -> str:
    start, end = passages[0].before, passages[-1].after
    kept = percent(share(text_bytes(end), text_bytes(start)))
    sources = sum(count.documents > 0 for count in passages[0].after.values())
    numbers = [
        (whole(documents(end)), "documents left", f"of {whole(documents(start))}"),
        (size(text_bytes(end)), "of text left", f"{kept} of {size(text_bytes(start))}"),
        *tokenised(passages),
        *removed(passages),
        *costs.headline(steps),
    ]
    return (
        f"<p>{counted(len(passages), 'step')} read {counted(documents(start), 'document')} of "
        f"{counted(sources, 'source')}, {size(text_bytes(start))} of text, and left "
        f"{whole(documents(end))} documents, {size(text_bytes(end))}.</p>" + tiles(numbers)
    )


def tokenised(passages: Sequence[Passage]) -> list[tuple[str, str, str]]:
    """The number of tokens, if the text was tokenised."""
    read = count = 0
    for passage in passages:
        tokens = [f.manifest["tokens"] for f in passage.step.folders if "tokens" in f.manifest]
        count += sum(tokens)
        read += text_bytes(passage.funnel.output) if tokens else 0
    if not count:
        return []
    return [(rounded(count), "tokens", f"{read / count:.2f} bytes of text each")]


def rounded(number: int) -> str:
    for power, name in ((10**9, "billion"), (10**6, "million")):
        if number >= power:
            return f"{number / power:,.1f} {name}"
    return whole(number)


def counted(number: int, noun: str) -> str:
    return f"{whole(number)} {noun}{'' if number == 1 else 's'}"


def removed(passages: Sequence[Passage]) -> list[tuple[str, str, str]]:
    """The share that de-duplication removed, if it was done."""
    return [
        (
            percent(share(documents(p.funnel.input) - documents(p.funnel.output),
                          documents(p.funnel.input))),
            "removed as duplicates",
            f"of {whole(documents(p.funnel.input))} documents",
        )
        for p in passages
        if p.step.name == "dedup"
    ][:1]  # fmt: skip


def of_urls(urls: Steps) -> str:
    """Lists of URLs are not texts: they have a funnel of their own."""
    passages = follow(urls)
    return (
        '<p class="soft">Counted as documents are URLs, a line each.</p>'
        + funnel.totals(passages)
        + funnel.reasons(passages)
    )


def in_numbers(passages: Sequence[Passage], palette: Palette) -> str:
    return (
        funnel.totals(passages)
        + "<h3>What was dropped, and why</h3>"
        + funnel.reasons(passages)
        + funnel.by_source(passages, palette)
    )
