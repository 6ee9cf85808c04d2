"""Whether larger is better, in words derived from the numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import hypot
from operator import gt, lt
from typing import Any

from tools.page import decimal, percent, whole
from tools.paper.tables import error

Facts = Mapping[str, Any]
Better = Callable[[float, float], bool]
NOISE = 2.0  # standard errors by which two shares have to differ


def findings(runs: Sequence[Facts]) -> list[tuple[str, str]]:
    """(quantity, finding) pairs. runs: as report.describe() returns them, the smallest first."""
    names = [run["name"] for run in runs]
    ends = [run["validation_perplexity"] for run in runs]
    words = [run["wikitext103"]["word_perplexity"] for run in runs]
    last = [run["lambada"]["last_word_perplexity"] for run in runs]
    return [
        ("Validation perplexity at the end", of_order(names, ends, lt, decimal)),
        ("While training", f"{evaluations_in_order(runs)} {sooner(runs)}"),
        ("WikiText103, perplexity per word", of_order(names, words, lt, decimal)),
        ("LAMBADA, accuracy", of_lambada_order(names, [run["lambada"] for run in runs])),
        ("LAMBADA, perplexity of the last word, which table 3 does not have",
         of_order(names, last, lt, decimal)),
    ]  # fmt: skip


def of_order(
    names: Sequence[str], values: Sequence[float], better: Better, told: Callable[[float], str]
) -> str:
    """Says whether each value is better than the previous one."""
    row = ", ".join(f"{name} {told(value)}" for name, value in zip(names, values, strict=True))
    breaks = broken(names, values, better)
    seen = "larger is better, the paper's order" if not breaks else "not the paper's order: "
    return f"{row}: {seen}{', '.join(breaks)}."


def broken(names: Sequence[str], values: Sequence[float], better: Better) -> list[str]:
    """Neighbours of which the larger is no better; a value that is not finite never is."""
    pairs = pairwise(zip(names, values, strict=True))
    return [
        f"{larger} is no better than {smaller}"
        for (smaller, one), (larger, other) in pairs
        if not better(other, one)
    ]


def of_lambada_order(names: Sequence[str], records: Sequence[Facts]) -> str:
    """As of_order, for accuracies; names neighbours within NOISE standard errors."""
    shares = [record["strict_accuracy"] for record in records]
    if not any(shares):
        return f"none of {whole(records[0]['num_examples'])} passages by any: no order is seen."
    errors = [error(share, record["num_examples"])
              for share, record in zip(shares, records, strict=True)]  # fmt: skip
    both = zip(pairwise(names), pairwise(shares), pairwise(errors), strict=True)
    unclear = [
        f"{smaller} and {larger}"
        for (smaller, larger), (one, other), pair in both
        if abs(other - one) <= NOISE * hypot(*pair)
    ]
    said = of_order(names, shares, gt, percent)
    if unclear:
        said += f" Less than {NOISE:g} standard errors are between {', '.join(unclear)}."
    return said


def evaluations_in_order(runs: Sequence[Facts]) -> str:
    """Says at how many evaluations the order was the paper's."""
    curves = [dict(run["validation_curve"]) for run in runs]
    common = [step for step in curves[0] if all(step in curve for curve in curves)]
    names = [run["name"] for run in runs]
    ordered = [s for s in common if not broken(names, [curve[s] for curve in curves], lt)]
    return f"At {len(ordered)} of {len(common)} evaluations a larger model is below every smaller."


def sooner(runs: Sequence[Facts]) -> str:
    """Says when each size reached the final loss of the next smaller one."""
    return " ".join(
        f"{larger['name']} reaches the end of {smaller['name']} {told_step(smaller, larger)}."
        for smaller, larger in pairwise(runs)
    )


def told_step(smaller: Facts, larger: Facts) -> str:
    step = reached(larger["validation_curve"], smaller["validation_loss"])
    return "at no evaluation" if step is None else f"by step {step:,} of {larger['steps']:,}"


def reached(curve: Iterable[Sequence[float]], loss: float) -> float | None:
    """The first step of the curve with a loss as low as this; None if there is none."""
    return next((step for step, value in curve if value <= loss), None)
