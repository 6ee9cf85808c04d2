"""benchmarks/tensor_modes.py in miniature: every contender computes what plain torch does, and
sends what the formulas say."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import tensor_modes
from benchmarks.harness import Contender, Figures, Flags, Rank
from benchmarks.tensor_modes import GATHERED, ONE, SUMMA
from tests.benchmarks.run import figures, run
from tests.dist import Pool

HIDDEN, TOKENS = 64, 128


class Connected(Rank):
    """A rank of the pool."""

    def connect(self) -> None: ...


def miniature(**settings: Any) -> list[Contender]:
    own: dict[str, Any] = {"hidden_sizes": (HIDDEN,), "tokens": TOKENS}
    return list(tensor_modes.contenders(Flags(), **own | settings))


def turns(contenders: list[Contender]) -> list[Figures | None]:
    """Of each its first turn on this rank of the pool."""
    rank = Connected(dist.get_rank(), dist.get_world_size())
    return [each.run(rank, **each.arguments)() for each in contenders]


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


@pytest.mark.slow
def test_the_page_has_ratios_and_counts(tmp_path: Path) -> None:
    words = ["--hidden-sizes", HIDDEN, "--tokens", TOKENS, "--dtypes", "fp32"]
    record = run(tmp_path, "tensor_modes", *words)
    group = f"fp32, hidden {HIDDEN}"
    one, summa = (figures(record, name, group) for name in (ONE, SUMMA))
    ratio = summa["wall"][0] / one["wall"][0]
    assert f"{SUMMA} {ratio:.2f}" in record["page"].splitlines()[2]
