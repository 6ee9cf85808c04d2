"""What the reports have in common: a page that is one file, runs nothing and asks no network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5d6570; --line: #d9dde2;
  --paper: #fdfdfc; --card: #f4f5f3; --accent: #b4531a; --train: #3b6ea5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --soft: #9aa3ad; --line: #3a4149;
  --paper: #15181b; --card: #1e2226; --accent: #eb9a5e; --train: #7fb0e0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 54rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.8rem 0 .7rem; padding-top: .9rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .9rem; margin: 1.1rem 0 .2rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: .7rem; margin: 1.5rem 0 0; }
@media (max-width: 38rem) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 1rem 2rem;
  align-items: start; }
.tile { background: var(--card); border-radius: .5rem; padding: .8rem .9rem; }
.tile b { display: block; font-size: 1.55rem; font-weight: 600; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .82rem; }
.tile .soft { font-size: .78rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .4rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
th { font-weight: 500; font-size: .82rem; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { background: var(--card); border-radius: .4rem; padding: .7rem .9rem; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""

NONE = "\N{EN DASH}"  # an empty cell


def document(title: str, style: str, body: str) -> str:
    """The whole page.  style: of its own, after what is common.  title: escaped here."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers.  facts: (number, what it is, what stands beside it), escaped here."""
    cells = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(name)}</span>'
        f'<span class="soft">{escape(beside)}</span></div>'
        for number, name, beside in facts
    )
    return f'<div class="tiles">{cells}</div>'


def table(head: Sequence[str], rows: Iterable[str], kind: str = "") -> str:
    """head: HTML."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f'<div class="scroll {kind}"><table><tr>{titles}</tr>{"".join(rows)}</table></div>'


def row(cells: Iterable[str], kind: str = "") -> str:
    """A table row of texts, escaped here."""
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"


def commands(by_stage: Mapping[str, Sequence[str]]) -> str:
    note = '<p class="soft">From the root of the repository, in this order.</p>'
    return note + "".join(
        f"<h3>{escape(stage)}</h3>" + "".join(f"<pre>{escape(line)}</pre>" for line in lines)
        for stage, lines in by_stage.items()
        if lines
    )


def whole(number: float) -> str:
    return f"{number:,.0f}"


def decimal(number: float, places: int = 2) -> str:
    return f"{number:,.{places}f}"


def percent(share: float | None) -> str:
    """None: nothing was asked."""
    return NONE if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def megabytes(number: int) -> str:
    return f"{number / 1e6:.2f} MB"
