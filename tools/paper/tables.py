"""Results beside the paper's, as tables and text for a page and for a terminal; table 3."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from tools.page import decimal, percent, row, table, whole

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells are plain text. marked: numbers of the rows that are this run's."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()

    def html(self) -> str:
        rows = [row(cells, "ours" if k in self.marked else "") for k, cells in enumerate(self.rows)]
        return table(self.head, rows)

    def markdown(self) -> str:
        rows = [
            [f"**{cell}**" for cell in cells] if k in self.marked else cells
            for k, cells in enumerate(self.rows)
        ]
        lines = [self.head, ["---"] * len(self.head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def millions(parameters: float) -> str:
    return f"{parameters / 1e6:.1f} M"


def table_3(ours: Sequence[tuple[str, Facts, Facts]]) -> Table:
    """The paper's rows, then ours, from (name, record of WikiText103, record of LAMBADA)."""
    _, wikitext, lambada = ours[0]
    paper = [
        (f"paper, {one['model']}", one, other)
        for one, other in zip(wikitext["paper"]["rows"], lambada["paper"]["rows"], strict=True)
    ]
    rows = [
        [name, decimal(one["word_perplexity"]), percent(other["strict_accuracy"])]
        for name, one, other in [*paper, *ours]
    ]
    head = ("GPT-2", "WikiText103 perplexity per word", "LAMBADA accuracy")
    return Table(head, rows, frozenset(range(len(paper), len(rows))))


def of_wikitext(result: Facts) -> str:
    """Explains what its perplexity measures, and by which convention."""
    tokens = whole(result["num_original_tokens"])
    return (
        f"word_perplexity: {result['conventions']['word_perplexity']}. Of the {tokens} tokens of "
        f"wiki.valid.tokens, in windows of {result['window']} with a stride of {result['stride']}; "
        f"{result['paper']['note']}."
    )


def of_lambada(result: Facts) -> str:
    """Explains what its accuracy measures, and by which convention."""
    count, accuracy = result["num_examples"], result["strict_accuracy"]
    return (
        f"strict_accuracy: {result['conventions']['strict_accuracy']}. Of the first {whole(count)} "
        f"passages of the test set, with a standard error of {percent(error(accuracy, count))}; "
        f"{result['paper']['note']}."
    )


def error(share: float, count: int) -> float:
    """Standard error of a share of `count` cases."""
    return sqrt(share * (1 - share) / count)


def listed(items: Iterable[tuple[str, str]]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- **{name}**: {text}" for name, text in items)
