"""benchmarks/pipeline.py in miniature: both pipelines train the same model (the harness compares
their losses), and what is in flight is counted."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline
from benchmarks.harness import Flags
from tests.benchmarks.run import figures, run, start

SMALL = """--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --vocab-size 512"""


def miniature(folder: Path, *words: object) -> dict[str, Any]:
    common = ["--micro-batches", 4, "--dtypes", "fp32", f"--program-flags={SMALL}"]
    return run(folder, "pipeline", *common, *words)


def test_both_pipelines_compute_the_same_losses(tmp_path: Path) -> None:
    names = pipeline.OURS, pipeline.TORCH, pipeline.ALONE, pipeline.PLAIN
    record = miniature(tmp_path, "--contenders", *names)
    measured = {(each["group"], each["name"]) for each in record["contenders"]}
    alone, updated, interleaved = (
        f"fp32, {kind}, m = 4, {pipeline.SCOPES[updates]}"
        for kind, updates in (("1f1b", False), ("1f1b", True), ("interleaved", False))
    )
    wanted = [(alone, name) for name in names]
    wanted += [(group, name) for group in (updated, interleaved) for name in names[:2]]
    assert measured == set(wanted)
    for group, name in wanted:
        found = figures(record, name, group)
        assert found["wall"][0] > 0
        assert found["peak_bytes"] > 0
    ours, its = (figures(record, name, alone)["wall"][0] for name in names[:2])
    assert f"{its / ours:.2f} of the time" in record["page"].splitlines()[2]


def test_what_is_kept_is_what_the_schedule_promises(tmp_path: Path) -> None:
    words = ["--bubble-schedules", "1f1b", "gpipe", "--bubble-micro-batches", 5, 2]
    record = miniature(tmp_path, *words, "--contenders", "m = 5", "m = 2")
    for kind, m in (("1f1b", 5), ("1f1b", 2), ("gpipe", 5), ("gpipe", 2)):
        found = figures(record, f"m = {m}", f"bubble, {kind}")
        kept = [found[f"kept_{rank}"] for rank in (0, 1)]
        assert kept == pytest.approx([m, m] if kind == "gpipe" else [2, 1], rel=0.01)
    assert (tmp_path / "page.png").stat().st_size > 0
    group = "bubble, 1f1b"
    one, five = (figures(record, name, group)["wall"][0] for name in ("m = 2", "m = 5"))
    idle = (1 + 1 / 2) / (1 + 1 / 5)
    assert f"| {one / 2 / (five / 5):.3f} | {idle:.3f} | 0.500 |" in record["page"]


def test_the_first_number_of_micro_batches_is_the_largest(tmp_path: Path) -> None:
    ended = start("benchmarks/pipeline.py", "--bubble-micro-batches", 2, 4)
    assert ended.returncode == 2
    assert "--bubble-micro-batches" in ended.stderr


def test_stages_cost_alike_at_the_sizes_of_the_page() -> None:
    """A head of one layer, so that the bubble is that of stages that cost alike."""
    (own, *_) = pipeline.contenders(Flags(), dtypes=("fp32",))
    for kind, sizes in (("1f1b", [4, 3]), ("interleaved", [2, 2, 2, 1])):
        config = pipeline.steps.read(own.arguments["flags"])
        assert [len(each) for each in pipeline.plan_of(config, 2, kind).layers] == sizes
        assert config.data.seq_length == 512
        h, v = config.model.hidden_size, pipeline.open_samples(config)[1]
        assert (h, pipeline.head_weight(h, 512, v)) == (768, 1.0)
