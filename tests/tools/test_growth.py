"""The benchmarks of growth and of recomputation: what is on paper, and whole runs in miniature."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import growth, on_paper
from benchmarks.cases import Case
from benchmarks.comparison import ROOT
from benchmarks.growth_report import bend, exponent
from megatron.parallel.kernels import use_cpu_kernels

CASE = Case(
    name="case", num_layers=3, hidden_size=64, heads=4, vocab_size=1024, batch=2, sequence=32
)
PRESET = """
num_layers = 2
hidden_size = 128
num_attention_heads = 4
seq_length = 32
max_position_embeddings = 32
micro_batch_size = 2
global_batch_size = 2
train_iters = 10
"""


@pytest.mark.parametrize("size", [1, 2, 8])
def test_arithmetic_with_recomputation_is_that_of_the_papers_authors(size: int) -> None:
    case = replace(growth.LARGEST, heads=24)
    b, s, layers, h, v = case.batch, case.sequence, case.num_layers, case.hidden_size, 51_200
    whole = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    full = on_paper.shape(case, size, "full", 2)
    ranks = on_paper.flops(full, causal=False), on_paper.flops(full)
    assert ranks[0] * size == pytest.approx(whole, rel=1e-12)
    assert (ranks[0] - ranks[1]) * size == pytest.approx(8 * b * s**2 * layers * h, rel=1e-9)
    none, selective = (
        on_paper.flops(on_paper.shape(case, size, each)) for each in ("none", "selective")
    )
    assert (selective - none) * size == pytest.approx(2 * b * s**2 * layers * h, rel=1e-9)


def test_communication_is_the_papers() -> None:
    stream = 2 * CASE.tokens * CASE.hidden_size
    for granularity, calls in (("none", 4), ("selective", 4), ("full", 5)):  # without dropout
        assert on_paper.sent(on_paper.shape(CASE, 1, granularity, 2)) == 0
        sent = on_paper.sent(on_paper.shape(CASE, 4, granularity, 2))
        loss = 3 * 4 * CASE.tokens + 24  # a maximum and two sums; what ranks agree on
        assert sent == ((calls * CASE.num_layers + 2) * stream + loss) * 2 * 3 / 4


def test_axes_change_one_size_alone() -> None:
    assert growth.at(CASE, "layers", 7) == replace(CASE, num_layers=7)
    assert growth.at(CASE, "width", 128) == replace(CASE, hidden_size=128, heads=8)
    assert growth.at(CASE, "sequence", 64) == replace(CASE, sequence=64)
    assert growth.at(CASE, "vocabulary", 512) == replace(CASE, vocab_size=512)
    assert growth.at(CASE, "ranks", 2) == CASE


def test_powers_and_bends() -> None:
    values = [1, 2, 4, 8]
    assert exponent(values, [3 * x**1.7 for x in values]) == pytest.approx(1.7)
    assert bend(values, [5 + 3 * x for x in values]) == pytest.approx(0, abs=1e-9)
    assert bend(values, [x**2 for x in values]) > 0.3


def run(script: str, tmp_path: Path, arguments: str) -> tuple[dict, str]:
    (tmp_path / "preset.toml").write_text(PRESET)
    written = tmp_path / "written.json"
    command = [sys.executable, f"benchmarks/{script}", "--preset", str(tmp_path / "preset.toml")]
    command += ["--threads", "1", "--vocab-size", "8192", "--rounds", "2", "--json", str(written)]
    done = subprocess.run(
        [*command, *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(written.read_text()), done.stdout


def test_every_axis_has_its_points_and_its_panels(tmp_path: Path) -> None:
    picture = tmp_path / "growth.png"
    record, text = run(
        "growth.py",
        tmp_path,
        f"--layers --width --sequence --vocabulary 4096 8192 --ranks 1 2 --picture {picture}",
    )
    assert list(record["axes"]) == list(record["on_cluster"]) == ["vocabulary", "ranks"]
    for points in record["axes"].values():
        for each in points:
            assert each["seconds"] > 0
            assert each["bytes"] > 2**20
            assert each["paper"]["flops"] > 0
    first, second = record["axes"]["vocabulary"]
    assert second["paper"]["seconds"] == pytest.approx(second["seconds"])
    assert first["paper"]["seconds"] < second["seconds"]
    alone, pair = record["axes"]["ranks"]
    assert (alone["paper"]["communicated"] > 0, pair["paper"]["communicated"] > 0) == (False, True)
    assert record["growth"]["ranks"]["seconds on paper"]["ratio"] == pytest.approx(0.5, rel=0.01)
    assert "| vocabulary, 4,096 to 8,192 | time |" in text
    assert picture.stat().st_size > 0


def test_recomputation_keeps_less_and_says_what_it_costs(tmp_path: Path) -> None:
    record, text = run("recomputation.py", tmp_path, "--dropout 0.1 --sequence 64")
    none, selective, full = record["settings"]
    assert none["kept_bytes"] > selective["kept_bytes"] > full["kept_bytes"] > 0
    probabilities = 2 * 2 * 4 * 64**2  # layers, batch, heads
    if use_cpu_kernels:  # torch's attention keeps other tensors
        keys, rows = probabilities // 64 * 8, 2 * 64 * 8  # of dropout; the core is given the rows
        saved = none["kept_bytes"] - selective["kept_bytes"]
        assert saved == probabilities * 4 + keys - rows
    assert 1 < selective["flops_over_none"] < full["flops_over_none"] < 4 / 3
    for each in record["settings"]:
        assert each["step_seconds"]["median"] > 0
        assert each["peak_memory_bytes"] > 0
    assert "| 0.1 | selective |" in text
