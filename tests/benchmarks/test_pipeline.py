"""benchmarks/pipeline.py in miniature: both pipelines train one model, and what is in flight is
counted."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import pipeline
from benchmarks.harness import Contender, Flags
from tests.benchmarks.run import turns
from tests.dist import Pool
from tests.refusals import field_of, refusal

SMALL = """--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --vocab-size 512"""


def miniature(**settings: Any) -> list[Contender]:
    own: dict[str, Any] = {"micro_batches": 4, "dtypes": ("fp32",), "program_flags": SMALL}
    return list(pipeline.contenders(Flags(), **own | settings))


def of_first_ranks(gloo: Pool, contenders: Sequence[Contender]) -> list[Any]:
    found: list[Any] = gloo.run(contenders[0].ranks, turns, contenders)[0]
    return found


def test_both_pipelines_compute_the_same_losses(gloo: Pool) -> None:
    compared = miniature(bubble_schedules=())
    names = pipeline.OURS, pipeline.TORCH, pipeline.ALONE, pipeline.PLAIN
    assert [each.name for each in compared] == [*names, *names[:2], *names[:2]]
    losses: dict[str, list[float]] = {}
    for ranks in (1, 2):
        own = [each for each in compared if each.ranks == ranks]
        for each, found in zip(own, of_first_ranks(gloo, own), strict=True):
            losses.setdefault(each.group, []).append(found["loss"])
    assert len(losses) == 3
    for several in losses.values():
        assert several == pytest.approx(several[:1] * len(several), rel=pipeline.TOLERANCES["fp32"])


def test_what_is_kept_is_what_the_schedule_promises(gloo: Pool) -> None:
    kinds = ("1f1b", "gpipe")
    bubbles = miniature(schedules=(), bubble_schedules=kinds, bubble_micro_batches=(5, 2))
    assert [each.x for each in bubbles] == [5, 2, 5, 2]
    for each, found in zip(bubbles, of_first_ranks(gloo, bubbles), strict=True):
        kept, promised = (
            [of[f"{key}_{rank}"] for rank in (0, 1)]
            for of, key in ((found, "kept"), (each.facts, "in_flight"))
        )
        assert promised == ([each.x] * 2 if "gpipe" in each.group else [2, 1])
        assert kept == pytest.approx(promised, rel=0.01)


def test_the_first_number_of_micro_batches_is_the_largest() -> None:
    error = refusal(lambda: miniature(bubble_micro_batches=(2, 4)))
    assert field_of(error) == "--bubble-micro-batches"
