"""Pages of results: sections of text, tables and figures, as one HTML file and as Markdown.

    page = Page(
        "GPT-2 from raw text",
        "One sentence that says what was found.",
        [Section("Loss", [draw(paint, "By step"), Table(("model", "loss"), [("ours", "3.2")])])],
        numbers=[Number("3.2", "validation loss", "nats per token")],
    )
    write_atomically(file, page.html())

All texts are plain: the templates escape them. The HTML file has its style and figures inside and
loads nothing, so it opens offline; it follows the reader's light or dark mode. It runs no script
but that of a `Page`, which is of this project.
"""

import re
from base64 import b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from megatron.libraries import Library
from tools.report.numbers import percent

jinja2 = Library("jinja2")

# {name of a CSS variable: (light mode, dark mode)}. Figures are drawn in the light colours, which
# become the variables on a page; so no colour stands here twice.
COLOURS = {
    "ink": ("#1c1f23", "#e4e6e8"),
    "soft": ("#5d6570", "#9aa3ad"),
    "line": ("#d9dde2", "#3a4149"),
    "paper": ("#fdfdfc", "#15181b"),
    "card": ("#f4f5f3", "#1e2226"),
    "accent": ("#b4531a", "#eb9a5e"),
    "rest": ("#aab0b7", "#69717a"),
    "c0": ("#3b6ea5", "#7fb0e0"),
    "c1": ("#5b9a8b", "#5fae9d"),
    "c2": ("#c7a44a", "#c4a658"),
    "c3": ("#86709f", "#a18abd"),
    "c4": ("#8ba35c", "#93b062"),
    "c5": ("#6d8796", "#7d9cae"),
}


def themed(markup: str) -> str:
    """CSS or SVG with each light colour replaced by its variable."""
    for name, (light, _) in COLOURS.items():
        markup = markup.replace(light, f"var(--{name})")
    return markup


@dataclass(frozen=True)
class Number:
    """A large number at the head of a page."""

    value: str
    what: str
    note: str = ""


@dataclass(frozen=True)
class Share:
    """A table cell: a percentage over a bar.

    full: the share whose bar is as wide as the cell. before: a share that a paler bar shows.
    """

    share: float | None
    full: float = 1.0
    before: float = 0.0

    def __str__(self) -> str:
        return percent(self.share, 2)

    def width(self, share: float | None) -> str:
        return f"{100 * min((share or 0) / (self.full or 1), 1):.1f}%"


@dataclass(frozen=True)
class Table:
    """Rows of texts and shares; without a row it is not shown.

    marked: numbers of rows that stand out, such as this run's. left: numbers of columns of words,
    which start at the left and wrap; the others are numbers.
    """

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Share]]
    marked: Collection[int] = ()
    left: Collection[int] = (0,)
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing, as `figures.draw` makes it.

    svg: an SVG element, which is not escaped. legend: (colour, name) pairs, for names that come
    from data; they wrap on a narrow screen.
    """

    kind: ClassVar = "figure"
    svg: str
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Text:
    """A paragraph. style: "note" for small print, "warning" for what must not be overlooked."""

    kind: ClassVar = "text"
    text: str
    style: str = ""


@dataclass(frozen=True)
class Mark:
    """A part of a quotation that stands out."""

    text: str


@dataclass(frozen=True)
class Quote:
    """A text from the data or from a model, with its white space."""

    kind: ClassVar = "quote"
    parts: Sequence[str | Mark]
    title: str = ""
    source: str = ""


@dataclass(frozen=True)
class Commands:
    kind: ClassVar = "commands"
    lines: Sequence[str]


@dataclass(frozen=True)
class Items:
    """(name, explanation) pairs."""

    kind: ClassVar = "items"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Grid:
    """Parts that stand side by side where there is room."""

    kind: ClassVar = "beside"
    parts: Sequence["Part"]


@dataclass(frozen=True)
class Section:
    """A title with parts; within another section it is one level lower.

    folded: the reader opens it by a click on its title.
    """

    kind: ClassVar = "section"
    title: str
    parts: Sequence["Part"]
    folded: bool = False


Part = str | Text | Table | Figure | Quote | Commands | Items | Grid | Section
"""A string is a paragraph."""


def _markdown(text: object) -> str:
    """The text on one line, with the characters escaped that would start HTML or markup."""
    return re.sub(r"([\\`*<|\[])", r"\\\1", " ".join(str(text).split()))


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section]
    numbers: Sequence[Number] = ()
    script: str = ""
    """JavaScript that runs on the page and may ask the page's own server; it is not escaped."""

    @property
    def policy(self) -> str:
        """The policy that tells the browser what the page may do."""
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        if self.script:
            digest = b64encode(sha256(self.script.encode()).digest()).decode()
            policy += f"; script-src 'sha256-{digest}'; connect-src 'self'"
        return policy

    def html(self) -> bytes:
        return self._render("template.html", autoescape=True)

    def markdown(self) -> bytes:
        """The same in Markdown; a figure is its caption."""
        return re.sub(rb"\n{3,}", b"\n\n", self._render("template.md", autoescape=False))

    def _render(self, template: str, autoescape: bool) -> bytes:
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=autoescape,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(themed=themed, markdown=_markdown)
        content = environment.get_template(template).render(page=self, colours=COLOURS)
        # Half of a surrogate pair, which UTF-8 does not have, becomes "?".
        return (content.rstrip() + "\n").encode("utf-8", "replace")
