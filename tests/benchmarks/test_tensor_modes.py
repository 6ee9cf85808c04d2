"""benchmarks/tensor_modes.py in miniature: every contender computes what plain torch does, and
sends what the formulas say."""

from typing import Any

import pytest

from benchmarks import tensor_modes
from benchmarks.harness import Contender, Flags
from benchmarks.tensor_modes import GATHERED, ONE, SUMMA
from tests.benchmarks.run import turns
from tests.dist import Pool

HIDDEN, TOKENS = 64, 128


def miniature(**settings: Any) -> list[Contender]:
    own: dict[str, Any] = {"hidden_sizes": (HIDDEN,), "tokens": TOKENS}
    return list(tensor_modes.contenders(Flags(), **own | settings))


def test_every_form_equals_plain_torch_and_sends_what_its_formula_says(gloo: Pool) -> None:
    compared = miniature()
    assert len(compared) == 2 * 3
    for rank in gloo.run(tensor_modes.RANKS, turns, compared):
        for each, found in zip(compared, rank, strict=True):
            assert found["difference"] < tensor_modes.TOLERANCES[each.arguments["dtype"]]
            assert found["sent"] == each.facts["formula"]
        # Two sums; or of each layer 6 gathers and sums, which SUMMA takes in two steps.
        assert [found["calls"] for found in rank] == 2 * [2, 24, 12]


def test_blocks_take_less_memory_than_what_is_gathered() -> None:
    facts = {each.name: each.facts for each in miniature(dtypes=("fp32",), tokens=64 * HIDDEN)}
    assert facts[ONE]["pair"] == pytest.approx(5, rel=0.01)  # x and dx; h wide inside, 3 times
    assert facts[SUMMA]["pair"] < 0.7 * facts[GATHERED]["pair"]
    assert facts[SUMMA]["layers"] < 0.8 * facts[GATHERED]["layers"]
