"""Duplicates: how similar they were, what the bands find, the largest clusters side by side."""

import difflib
import re
from collections.abc import Sequence
from html import escape

from tools.corpus.files import Count
from tools.corpus.report.charts import Axis, Bar, curve, histogram, portion
from tools.corpus.report.funnel import share
from tools.corpus.report.steps import Facts, Step, Steps
from tools.corpus.report.texts import draw, figure, missing, own_facts
from tools.page import decimal, table, whole

SHOWN = 12  # clusters
CHARACTERS = 2000  # shown of each text
WORDS = 500  # of each text that are compared

STYLE = """
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr));
  gap: .8rem; margin: .6rem 0 1rem; }
.texts.of-4 { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.text { background: var(--card); border-radius: .4rem; padding: .6rem .8rem; min-width: 0; }
.text header { font-size: .78rem; color: var(--soft); overflow-wrap: anywhere;
  border-bottom: 1px solid var(--line); padding-bottom: .35rem; margin-bottom: .45rem; }
.text header b { color: var(--ink); font-weight: 600; }
.text div { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20rem; overflow-y: auto;
  font: .82rem/1.5 ui-serif, Georgia, serif; unicode-bidi: isolate; }
mark { background: color-mix(in srgb, var(--lost) 30%, transparent); color: inherit;
  border-radius: .15em; }
"""


def duplicates(steps: Steps) -> str:
    found = [step for step in steps if step.name == "dedup"]
    if not found:
        return missing("No step of these is dedup.")
    return "".join(_duplicates(step) for step in found)


def _duplicates(step: Step) -> str:
    threshold = step.folders[0].manifest["settings"].get("jaccard")
    nothing = "No two documents were alike enough."
    pairs = draw(step, "jaccard_histogram", nothing, lambda bins: similarities(bins, threshold))
    found = draw(step, "recall_curve", nothing, lambda points: recall(points, threshold))
    return (
        f'<div class="pair">{pairs}{found}</div>'
        f'<div class="pair">{_removal(step)}{own_facts(step.folders[0])}</div>'
        f"<h3>The largest clusters</h3>{draw(step, 'largest_clusters', nothing, largest)}"
    )


def _removal(step: Step) -> str:
    rows = []
    for source in sorted(step.funnel.input):
        into = step.funnel.input[source]
        gone = into.documents - step.funnel.output.get(source, Count()).documents
        rows.append(
            f"<tr><td>{escape(source)}</td><td>{whole(into.documents)}</td>"
            f"<td>{whole(gone)}</td><td>{portion(share(gone, into.documents))}</td></tr>"
        )
    return table(("source", "documents", "removed", "share"), rows)


def similarities(bins: Sequence[Facts], threshold: float | None) -> str:
    """Histogram of the exact Jaccard similarity of verified pairs."""
    bars = [
        Bar(
            b["from"], b["to"], b["pairs"],
            f"{b['from']:.2f} to {b['to']:.2f}: {whole(b['pairs'])} pairs",
        )
        for b in bins
    ]  # fmt: skip
    low, high = bars[0].start, bars[-1].stop
    drawing = histogram(bars, _share_axis(low, high, "Jaccard similarity"), "pairs", threshold)
    return figure("Verified pairs by exact similarity", drawing)


def recall(points: Sequence[Facts], threshold: float | None) -> str:
    """The expected share of pairs that the bands find."""
    values = [(point["jaccard"], point["recall"]) for point in points]
    across = _share_axis(values[0][0], values[-1][0], "Jaccard similarity")
    drawing = curve(values, across, _share_axis(0.0, 1.0, "recall"), threshold)
    return figure("Expected recall of the bands", drawing)


def _share_axis(low: float, high: float, title: str) -> Axis:
    step = 0.05 if high - low < 0.35 else 0.1 if high - low < 0.7 else 0.2
    ticks = [k * step for k in range(round(1 / step) + 1) if low - 1e-9 <= k * step <= high + 1e-9]
    return Axis(low, high, ticks, [f"{tick:.2f}".rstrip("0").rstrip(".") for tick in ticks], title)


def largest(clusters: Sequence[Facts]) -> str:
    """Each cluster in a box that unfolds; the first one is open."""
    parts = []
    for number, cluster in enumerate(clusters[:SHOWN]):
        sources = sorted({str(member["source"]) for member in cluster["members"]})
        about = escape(f"{whole(cluster['size'])} documents, {', '.join(sources)}")
        parts.append(
            f"<details{' open' if number == 0 else ''}><summary>{about}</summary>"
            f"{side_by_side(cluster)}</details>"
        )
    return CLUSTERS + "".join(parts)


CLUSTERS = (
    '<p class="soft">The document that was kept stands first.  Marked are words that it does not '
    "have, and in it those that half of the others or more do not have.  Of each text the first "
    "2,000 characters.</p>"
)


def side_by_side(cluster: Facts) -> str:
    """The texts of a cluster, the document that was kept first.

    Words that it lacks are marked; in it, words that half of the others or more lack are marked.
    """
    members = sorted(cluster["members"], key=lambda member: member["id"] != cluster["kept_id"])
    words = [split_words(str(member["text"])) for member in members]
    compared = [differences(words[0], other) for other in words[1:]]
    lacking = [sum(each) for each in zip(*(gone for gone, _ in compared), strict=True)]
    marks = [
        [2 * count >= len(compared) for count in lacking] if compared else [False] * len(words[0]),
        *(new for _, new in compared),
    ]
    columns = [
        _column(*each, cluster["kept_id"]) for each in zip(members, words, marks, strict=True)
    ]
    return f'<div class="texts of-{len(columns)}">{"".join(columns)}</div>'


def split_words(text: str) -> list[str]:
    """Words, each with the white space after it, so that joined again they are the text."""
    return re.findall(r"\s*\S+\s*", text[:CHARACTERS])


def differences(first: Sequence[str], other: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """Whether the other text lacks each word, in order; compares the first WORDS of both."""
    a, b = ([word.strip() for word in words[:WORDS]] for words in (first, other))
    gone, new = [True] * len(a), [True] * len(b)
    for i, j, n in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        gone[i : i + n] = [False] * n
        new[j : j + n] = [False] * n
    return (
        gone + [False] * (len(first) - len(gone)),
        new + [False] * (len(other) - len(new)),
    )


def _column(member: Facts, words: Sequence[str], marked: Sequence[bool], kept_id: str) -> str:
    kept = member["id"] == kept_id
    fate = "kept" if kept else f"Jaccard {_similarity(member.get('jaccard'))}"
    about = f"<b>{fate}</b> {escape(str(member['id']))}, {escape(str(member['source']))}"
    return (
        f'<article class="text"><header>{about}</header>'
        f'<div dir="auto">{mark(words, marked)}</div></article>'
    )


def _similarity(jaccard: float | None) -> str:
    return decimal(jaccard, 3) if jaccard is not None else "not given"


def mark(words: Sequence[str], marked: Sequence[bool]) -> str:
    """The text, escaped, with runs of marked words in one <mark>."""
    parts, inside = [], False
    for word, differs in zip(words, marked, strict=True):
        if differs != inside:
            parts.append("<mark>" if differs else "</mark>")
            inside = differs
        parts.append(escape(word))
    marked_text = "".join(parts) + ("</mark>" if inside else "")
    return re.sub(r"(\s+)</mark>", r"</mark>\1", marked_text)
