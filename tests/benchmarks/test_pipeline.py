"""benchmarks/pipeline.py in miniature: both pipelines train the same model, what is in flight is
counted, and the program shows it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import pipeline
from benchmarks.harness import Contender, Figures, Flags, Rank
from tests.benchmarks.run import figures, run
from tests.dist import Pool

SMALL = """--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --vocab-size 512"""


def miniature(**settings: Any) -> list[Contender]:
    own: dict[str, Any] = {"micro_batches": 4, "dtypes": ("fp32",), "program_flags": SMALL}
    return list(pipeline.contenders(Flags(), **own | settings))


class Connected(Rank):
    """A rank of the pool."""

    def connect(self) -> None: ...


def turns(contenders: Sequence[Contender]) -> list[Figures | None]:
    """Of each its first turn on this rank of the pool."""
    rank = Connected(dist.get_rank(), dist.get_world_size())
    return [each.run(rank, **each.arguments)() for each in contenders]


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


def test_the_program_compares_and_shows(tmp_path: Path) -> None:
    words = ["--micro-batches", 2, "--dtypes", "fp32", f"--program-flags={SMALL}"]
    words += ["--schedules", "interleaved", "--scopes", pipeline.UPDATE]
    words += ["--bubble-schedules", "gpipe", "--bubble-micro-batches", 2, 1]
    record = run(tmp_path, "pipeline", *words)
    group = f"fp32, interleaved, m = 2, {pipeline.UPDATE}"
    ours, its = (figures(record, name, group) for name in (pipeline.OURS, pipeline.TORCH))
    time, memory = (its["wall"][0] / ours["wall"][0], its["peak_bytes"] / ours["peak_bytes"])
    shown = record["page"].splitlines()[2]
    assert f"{time:.2f} of the time and {memory:.2f} of the memory" in shown
    two, one = (figures(record, f"m = {m}", "bubble, gpipe")["wall"][0] for m in (2, 1))
    idle = (1 + 1) / (1 + 1 / 2)
    assert f"| {one / (two / 2):.3f} | {idle:.3f} | 1.000 |" in record["page"]
    assert (tmp_path / "page.png").stat().st_size > 0


def test_the_first_number_of_micro_batches_is_the_largest() -> None:
    with pytest.raises(ValueError, match="--bubble-micro-batches"):
        miniature(bubble_micro_batches=(2, 4))


def test_stages_cost_alike_at_the_sizes_of_the_page() -> None:
    """A head of one layer, so that the bubble is that of stages that cost alike."""
    (own, *_) = pipeline.contenders(Flags(), dtypes=("fp32",))
    for kind, sizes in (("1f1b", [4, 3]), ("interleaved", [2, 2, 2, 1])):
        config = pipeline.steps.read(own.arguments["flags"])
        assert [len(each) for each in pipeline.plan_of(config, 2, kind).layers] == sizes
        assert config.data.seq_length == 512
        h, v = config.model.hidden_size, pipeline.open_samples(config)[1]
        assert (h, pipeline.head_weight(h, 512, v)) == (768, 1.0)
