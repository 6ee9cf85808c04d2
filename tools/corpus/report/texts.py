"""Facts of the manifests about the texts: lengths, languages, overlap with test sets, counters."""

import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from tools.corpus.language import UNKNOWN, names
from tools.corpus.report.charts import Axis, Bar, bar_cells, histogram, portion
from tools.corpus.report.steps import Facts, Folder, Step, Steps
from tools.page import decimal, row, table, whole

LANGUAGES = 9  # shown one by one
# Keys of a manifest that have a place of their own on the page.
PLACED = {"step", "settings", "versions", "inputs", "input", "output", "dropped", "pieces",
          "shards", "languages", "lengths"}  # fmt: skip


def figure(caption: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}</figure>"


def missing(sentence: str) -> str:
    """The reason why there is no picture."""
    return f'<p class="missing">{escape(sentence)}</p>'


def pictures(steps: Steps) -> str:
    lengths = draw(steps, "lengths", "No length was counted.", length_histogram)
    languages = draw(steps, "languages", "No language was identified.", language_table)
    return f'<div class="pair">{lengths}{languages}</div>'


def draw(where: Steps | Step, key: str, nothing: str, drawing: Callable[[Any], str]) -> str:
    """The picture of a key of a manifest, or why there is none."""
    found = where.find(key)
    if found is None:
        return missing(f"No manifest of these has {key!r}.")
    anything = any(found.values()) if isinstance(found, dict) else found
    return drawing(found) if anything else missing(nothing)


def length_histogram(lengths: Mapping[str, Mapping[str, int]]) -> str:
    """lengths: {"before", "after"}, each {octave: documents}, an octave by its lower end."""
    before, after = (
        [_octave(int(low), count, when) for low, count in lengths.get(when, {}).items()]
        for when in ("before", "after")
    )
    every = [*before, *after]
    low, high = min(bar.start for bar in every), max(bar.stop for bar in every)
    ticks = [*range(int(low), int(high) + 1, max(1, round((high - low) / 6)))]
    axis = Axis(low, high, ticks, [binary(2**tick) for tick in ticks], "characters of a document")
    caption = "Documents by length, after clean; paler, those that clean dropped"
    return figure(caption, histogram(after, axis, "documents", behind=before))


def _octave(low: int, count: int, when: str) -> Bar:
    note = f"{whole(low)} to {whole(2 * low - 1)} characters: {whole(count)} documents {when} clean"
    return Bar(math.log2(low), math.log2(low) + 1, count, note)


def binary(number: int) -> str:
    """A power of two for a tick: 2048 as 2k."""
    for power, letter in ((30, "G"), (20, "M"), (10, "k")):
        if number >> power:
            return f"{number >> power}{letter}"
    return str(number)


def language_table(languages: Mapping[str, int]) -> str:
    """The most frequent languages, and the others together."""
    total = sum(languages.values())
    ranked = sorted(languages.items(), key=lambda item: (-item[1], item[0]))
    shown, rest = ranked[:LANGUAGES], ranked[LANGUAGES:]
    if rest:
        shown.append((f"{len(rest)} more", sum(count for _, count in rest)))
    rows = [
        f"<tr><td>{escape(language_name(name))}</td><td>{whole(count)}</td>"
        f"{bar_cells(count / total)}</tr>"
        for name, count in shown
    ]
    return table(("likeliest language", "documents", "share", ""), rows)


def language_name(code: str) -> str:
    if code == UNKNOWN:
        return "none found"
    name = names().get(code)
    return name.replace("_", " ").capitalize() if name else code


def leakage(steps: Steps) -> str:
    """Shares of the evaluation sets in the corpus, and counts of the cuts."""
    drawn = draw(steps, "leakage", "No evaluation set was given.", leakage_table)
    folders = [folder for folder in steps.folders if "leakage" in folder.manifest]
    return drawn + "".join(searched(folder) + own_facts(folder) for folder in folders)


def leakage_table(found: Mapping[str, Facts]) -> str:
    """Share of each evaluation set's n-grams that are in the corpus, before and after."""
    return _shares(found, "", "n-grams") + _shares(found, "_distinct", "distinct n-grams") + LEAKAGE


def _shares(found: Mapping[str, Facts], kind: str, title: str) -> str:
    before, after = f"before{kind}", f"after{kind}"
    count = "distinct_ngrams" if kind else "ngrams"
    most = max(LEAST_SCALE, *(facts[before] for facts in found.values()))
    rows = [
        f"<tr><td>{escape(name)}</td><td>{whole(facts[count])}</td>"
        f"<td>{portion(facts[before])}</td>{bar_cells(facts[after], most, facts[before])}</tr>"
        for name, facts in found.items()
    ]
    return table(("evaluation set", title, "found before", "after", ""), rows, "sets")


LEAST_SCALE = 0.01  # share that fills a bar, at the least: tiny shares have to look tiny
LEAKAGE = (
    '<p class="soft">Shares of the n-grams of each evaluation set that the corpus holds, before '
    "the step took them out and after.</p>"
)


def searched(folder: Folder) -> str:
    """The evaluation sets, and their passages that are too short to be searched for."""
    keys = ("passages", "not_searched", "words")
    rows = [
        row((str(each["name"]), *(shown(each[key]) for key in keys)))
        for each in folder.manifest.get("evaluation", [])
    ]
    if not rows:
        return ""
    return table(("evaluation set", "passages", "of them not searched", "words"), rows, "sets")


def own_facts(folder: Folder) -> str:
    """The step's own numbers, such as its counters."""
    facts: dict[str, Any] = {}
    for key, value in folder.manifest.items():
        if key in PLACED:
            continue
        each = (
            {f"{key}: {k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        facts |= {name: v for name, v in each.items() if isinstance(v, int | float | str)}
    rows = [row((name.replace("_", " "), shown(value))) for name, value in facts.items()]
    return table(("counted by the step", ""), rows) if rows else ""


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return whole(value) if isinstance(value, int) else decimal(value, 4)
