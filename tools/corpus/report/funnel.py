"""The funnel: documents that each step read, wrote and dropped, as a picture and as tables."""

from collections.abc import Sequence
from html import escape

from tools.corpus.files import Count, Counts, documents
from tools.corpus.report.charts import Segment, bar_cells, flow, portion
from tools.corpus.report.steps import Loss, Passage, Step, text_bytes
from tools.page import NONE, table, whole

COLOURS = 6  # the largest sources have their own colours; the others share one
SIZES = ("kB", "MB", "GB", "TB")

STYLE = """
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .2rem 0 .9rem;
  font-size: .85rem; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: .15em;
  margin-right: .5em; }
.passage { display: grid; grid-template-columns: minmax(5.5rem, 1.1fr) minmax(0, 1fr);
  column-gap: 1.6rem; break-inside: avoid; }
.passage > div { padding: .9rem 0; border-top: 1px solid var(--line); }
.passage svg { position: absolute; inset: 0; width: 100%; height: calc(100% + 1px); }
.passage .stream { position: relative; padding: 0; border: 0; min-height: 5.2rem; }
.passage .stream.short { min-height: 2.6rem; }
.passage h3 { margin: 0; font-size: 1rem; display: flex; justify-content: space-between;
  gap: 1rem; }
.passage h3 span { font-weight: 400; }
.passage ul { list-style: none; margin: .35rem 0 0; padding: 0; font-size: .85rem; }
.passage li { display: grid; grid-template-columns: 1fr 5.2rem 4.8rem; gap: .6rem;
  font-variant-numeric: tabular-nums; }
.passage li span { text-align: right; white-space: nowrap; }
.passage .soft { font-variant-numeric: tabular-nums; }
@media (max-width: 38rem) { .passage { grid-template-columns: 4.5rem minmax(0, 1fr);
  column-gap: 1rem; } .passage li { grid-template-columns: 1fr auto; }
  .passage li span:last-child { display: none; } }
"""


class Palette:
    """The colour of each source on the whole page."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        first = first_seen(passages)
        self.sources = sorted(first, key=lambda source: (-first[source].bytes, source))
        self._coloured = self.sources[:COLOURS]

    def colour(self, source: str) -> str:
        known = source in self._coloured
        return f"var(--c{self._coloured.index(source)})" if known else "var(--rest)"

    def segments(self, counts: Counts) -> list[Segment]:
        """Bytes of each source with a colour, and of the rest together."""
        rest = sum(c.bytes for source, c in counts.items() if source not in self._coloured)
        own = [
            Segment(counts.get(source, Count()).bytes, self.colour(source))
            for source in self._coloured
        ]
        return [*own, Segment(rest, "var(--rest)")]

    def name(self, source: str) -> str:
        return f"{key(self.colour(source))}{escape(source)}"

    def legend(self) -> str:
        names = [f"<span>{self.name(source)}</span>" for source in self._coloured]
        others = len(self.sources) - len(self._coloured)
        if others:
            names.append(f"<span>{key('var(--rest)')}{others} more</span>")
        names.append(f"<span>{key('var(--lost)')}taken away</span>")
        return f'<p class="legend">{"".join(names)}</p>'


def key(colour: str) -> str:
    return f'<i class="key" style="background:{colour}"></i>'


def picture(passages: Sequence[Passage], palette: Palette) -> str:
    """Bytes of text from the top to the bottom, step by step."""
    total = max(text_bytes(counts) for p in passages for counts in (p.before, p.after))
    start = passages[0].before
    first = palette.segments(start)
    rows = [
        _stream(flow(first, first, [], total), _heading("Raw", start, None), " short"),
        *(_passage(passage, palette, total) for passage in passages),
    ]
    return palette.legend() + "".join(rows)


def _stream(drawing: str, text: str, kind: str = "") -> str:
    return f'<div class="passage"><div class="stream{kind}">{drawing}</div><div>{text}</div></div>'


def _heading(name: str, counts: Counts, before: Counts | None) -> str:
    kept = portion(share(text_bytes(counts), text_bytes(before))) if before else ""
    return (
        f"<h3>{escape(name)}<span>{kept}</span></h3>"
        f'<p class="soft">{whole(documents(counts))} documents, {size(text_bytes(counts))}</p>'
    )


def _passage(passage: Passage, palette: Palette, total: float) -> str:
    colours = [lost_colour(k) for k in range(len(passage.losses))]
    losses = [
        Segment(loss.bytes, colour) for loss, colour in zip(passage.losses, colours, strict=True)
    ]
    drawing = flow(palette.segments(passage.before), palette.segments(passage.after), losses, total)
    items = "".join(
        f"<li><div>{key(colour)}{escape(loss.reason)}</div><span>{count_of(loss)}</span>"
        f"<span>{size(loss.bytes)}</span></li>"
        for loss, colour in zip(passage.losses, colours, strict=True)
    )
    heading = _heading(title(passage), passage.after, passage.before)
    remarks = "".join(f'<p class="soft">{escape(note)}</p>' for note in notes(passage.step))
    return _stream(drawing, heading + remarks + (f"<ul>{items}</ul>" if items else ""))


def notes(step: Step) -> list[str]:
    """Remarks on a step besides its losses."""
    lines = [
        f"{side}: {whole(count['documents'])} documents, {size(count['bytes'])}"
        for side, count in (step.find("sides") or {}).items()
    ]
    for key, what in (("repaired", "documents repaired"), ("tokens", "tokens")):
        total = sum(folder.manifest.get(key, 0) for folder in step.folders)
        if total:
            lines.append(f"{whole(total)} {what}")
    return lines


def lost_colour(rank: int) -> str:
    """The colour of a loss, paler from reason to reason."""
    return f"color-mix(in srgb, var(--lost) {max(100 - 25 * rank, 25)}%, var(--paper))"


def count_of(loss: Loss) -> str:
    return NONE if loss.documents is None else whole(loss.documents)


def title(passage: Passage) -> str:
    return passage.step.name.capitalize()


def totals(passages: Sequence[Passage]) -> str:
    """A row for each step: its own input, and its output."""
    rows = []
    for passage in passages:
        into, out = passage.funnel.input, passage.funnel.output
        cells = (
            escape(title(passage)),
            whole(documents(into)),
            whole(documents(out)),
            portion(share(documents(out), documents(into))),
            size(text_bytes(into)),
            size(text_bytes(out)),
            portion(share(text_bytes(out), text_bytes(into))),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return table(("step", "documents in", "out", "kept", "text in", "out", "kept"), rows)


def reasons(passages: Sequence[Passage]) -> str:
    """A row for each reason, with its share of what the step read."""
    found = [
        (title(passage), loss, share(loss.bytes, text_bytes(passage.funnel.input)) or 0.0)
        for passage in passages
        for loss in passage.losses
    ]
    if not found:
        return '<p class="soft">No step dropped anything.</p>'
    most = max(part for _, _, part in found)
    rows = []
    for name, loss, part in found:
        cells = (name, loss.reason, count_of(loss), size(loss.bytes))
        texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{texts}{bar_cells(part, most)}</tr>")
    return table(("step", "reason", "documents", "text", "of its input", ""), rows, "reasons")


def by_source(passages: Sequence[Passage], palette: Palette) -> str:
    """For each step, one row per source: in, out, and dropped for each reason."""
    parts = []
    for passage in passages:
        funnel = passage.funnel
        why = sorted(funnel.dropped)
        rows = []
        for source in palette.sources:
            if source not in funnel.input and source not in funnel.output:
                continue
            into, out = (each.get(source, Count()) for each in (funnel.input, funnel.output))
            lost = [funnel.dropped[reason].get(source, Count()) for reason in why]
            cells = (
                whole(into.documents),
                whole(out.documents),
                *(whole(count.documents) if count.documents else NONE for count in lost),
                size(into.bytes),
                size(out.bytes),
            )
            rows.append(
                f"<tr><td>{palette.name(source)}</td>"
                + "".join(f"<td>{cell}</td>" for cell in cells)
                + "</tr>"
            )
        head = ("source", "documents in", "out", *map(escape, why), "text in", "out")
        parts.append(f"<h3>{escape(title(passage))}</h3>{table(head, rows)}")
    return f"<details><summary>Every step by source</summary>{''.join(parts)}</details>"


def retention(passages: Sequence[Passage], palette: Palette) -> str:
    """Documents and bytes of each source that are left after each step."""
    return "".join(
        f"<h3>{unit.capitalize()} left</h3>{_left(passages, palette, unit)}"
        for unit in ("documents", "bytes")
    )


def _left(passages: Sequence[Passage], palette: Palette, unit: str) -> str:
    first = first_seen(passages)
    shown = size if unit == "bytes" else whole
    rows = []
    for source in palette.sources:
        start = getattr(first[source], unit)
        cells = [_left_cell(passage, source, unit, start) for passage in passages]
        rows.append(
            f"<tr><td>{palette.name(source)}</td><td>{shown(start)}</td>{''.join(cells)}</tr>"
        )
    start = sum(getattr(count, unit) for count in passages[0].before.values())
    left = [sum(getattr(count, unit) for count in p.after.values()) for p in passages]
    cells = [_shaded(share(each, start)) for each in left]
    rows.append(f'<tr class="all"><td>all</td><td>{shown(start)}</td>{"".join(cells)}</tr>')
    return table(("source", "raw", *(escape(title(p)) for p in passages)), rows)


def first_seen(passages: Sequence[Passage]) -> Counts:
    first: Counts = {}
    for passage in passages:
        first = passage.after | passage.before | first
    return first


def _left_cell(passage: Passage, source: str, unit: str, first: int) -> str:
    if source not in passage.funnel.input and source not in passage.funnel.output:
        return f"<td>{NONE}</td>"
    return _shaded(share(getattr(passage.after[source], unit), first))


def _shaded(part: float | None) -> str:
    tint = round(45 * min(part or 0, 1))
    return (
        f'<td style="background:color-mix(in srgb, var(--train) {tint}%, transparent)">'
        f"{portion(part)}</td>"
    )


def share(part: float, of: float) -> float | None:
    return part / of if of else None


def size(number: float) -> str:
    """Bytes with one decimal, in powers of a thousand."""
    if number < 1000:
        return f"{number:,.0f} B"
    for unit in SIZES:
        number /= 1000
        if number < 999.95 or unit == SIZES[-1]:
            break
    return f"{number:,.1f} {unit}"
