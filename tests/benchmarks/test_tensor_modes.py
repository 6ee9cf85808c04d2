"""benchmarks/tensor_modes.py in miniature: every contender computes what plain torch does, and
sends what the formulas say."""

from typing import Any

from benchmarks import tensor_modes
from benchmarks.harness import Contender, Flags
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
