"""The questions about the model's steps, in miniature: figures that are known, or that must be in
a certain order."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import commits, growth
from megatron.parallel.kernels import use_cpu_kernels
from tests.benchmarks.run import ROOT, figures, run

PRESET = """
num_layers = 2
hidden_size = 128
num_attention_heads = 4
seq_length = 64
max_position_embeddings = 64
vocab_size = 512
micro_batch_size = 2
global_batch_size = 2
train_iters = 10
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    file = tmp_path / "preset.toml"
    file.write_text(PRESET)
    return file


def test_every_way_to_save_writes_the_same_bytes(tmp_path: Path, preset: Path) -> None:
    disk = tmp_path / "disk"
    record = run(tmp_path, "checkpoints", "--preset", preset, "--directory", disk)
    h, layers = 128, 2
    parameters = layers * (12 * h**2 + 13 * h) + 2 * h + (512 + 64) * h
    for contender in record["contenders"]:
        (found,) = contender["rounds"]
        assert found["wall"][0] > 0
        # Weights and two moments of fp32, and the header with their names.
        assert found["bytes"] == pytest.approx(12 * parameters, rel=1e-2)
        assert ("on_disk" in found) == ("save" in contender["name"])
        assert ("first" in found) == (contender["name"] == "asynchronous save")
    assert list(disk.iterdir()) == []  # everything is removed


def test_a_check_hashes_what_ranks_hold_in_common(tmp_path: Path) -> None:
    words = ["--models", "quickstart", "--dtypes", "bf16", "--interval", "50"]
    record = run(tmp_path, "replicas", *words)
    layouts = "t = 1, d = 2", "t = 2, d = 1"
    whole, common = (figures(record, "check", f"quickstart, bf16, {each}") for each in layouts)
    h, layers, width = 256, 4, 14  # bytes of weight, master and moments
    weights = (4096 + 256) * h + layers * 12 * h**2
    assert whole["hashed"] == width * (weights + layers * 13 * h + 2 * h)
    # Positions, norms and the biases of row layers.
    assert common["hashed"] == width * (256 * h + layers * (4 + 2) * h + 2 * h)
    step, check = (figures(record, n, f"quickstart, bf16, {layouts[0]}") for n in ("step", "check"))
    share = 100 * check["wall"][0] / (50 * step["wall"][0] + check["wall"][0])
    assert f"{share:.3f}" in record["page"]


def test_watched_steps_are_measured_beside_unwatched_ones(tmp_path: Path) -> None:
    record = run(tmp_path, "watch", "--steps", "3")
    for name in ("watched", "unwatched"):
        assert figures(record, name)["wall"][0] > 0


def test_the_output_layer_in_chunks_takes_less_memory(tmp_path: Path) -> None:
    words = ["--vocab-size", 8000, "--hidden-size", 16, "--tokens", 16_000, "--dtypes", "fp32"]
    record = run(tmp_path, "output_layer", *words, "--tensor-parallel", "2")
    extra = {
        name: found["peak_bytes"] - found["held"]
        for name in ("logits in chunks", "all logits at once")
        for found in [figures(record, name, "fp32, t = 2")]
    }
    logits = 16_000 * 8_000 * 4  # bytes
    assert extra["all logits at once"] > logits
    assert extra["logits in chunks"] < logits / 1.5
    held = figures(record, "logits in chunks", "fp32, t = 2")["held"]
    assert held == 8192 * 16 * (4 + 4) + 2 * 2 * 16_000 * 16 * 4


def test_what_is_cut_is_kept_and_sent_in_parts(tmp_path: Path, preset: Path) -> None:
    words = ["--preset", preset, "--vocab-size", "64", "--dropout", "0", "--tensor-parallel", 1, 4]
    names = "selective", "selective, sequence parallel"
    record = run(tmp_path, "activations", *words, "--contenders", *names)
    whole = figures(record, names[0], "t = 1, dropout 0")
    cut, stream = (figures(record, name, "t = 4, dropout 0") for name in names)
    assert (whole["sent"], whole["formula"], stream["formula"]) == (0, 34, 34 / 4)
    assert stream["kept"] == pytest.approx(whole["kept"] / 4, rel=0.01)
    assert stream["kept"] < cut["kept"] < whole["kept"]
    # Four all-reduces of the stream in bf16; or reduce-scatters and gathers, one more each way.
    assert cut["sent"] == 4 * 2 * 2 * 3 / 4
    assert stream["sent"] > 5 / 4 * cut["sent"]
    assert "instead of" in record["page"].splitlines()[2]


def test_a_step_reads_once(tmp_path: Path) -> None:
    record = run(tmp_path, "host_reads", "--contenders", "4 micro-batches")
    assert [each["rounds"][0]["reads"] for each in record["contenders"]] == [1, 1]


def test_masks_of_dropout_have_a_page(tmp_path: Path) -> None:
    record = run(tmp_path, "dropout_quality", "--rows", "512", "--columns", "64")
    found = figures(record, "standard deviations")
    assert abs(found["rate"]) < 5
    assert f"| attention: keys | {found['attention: keys']:+.2f} |" in record["page"]


def test_recomputation_keeps_less_and_says_what_it_costs(tmp_path: Path, preset: Path) -> None:
    words = ["--preset", preset, "--vocab-size", "512", "--dropout", "0.1"]
    record = run(tmp_path, "recomputation", *words)
    none, selective, full = (
        figures(record, each, "dropout 0.1") for each in ("none", "selective", "full")
    )
    assert none["kept_bytes"] > selective["kept_bytes"] > full["kept_bytes"] > 0
    probabilities = 2 * 2 * 4 * 64**2  # layers, batch, heads
    if use_cpu_kernels:  # torch's attention keeps other tensors
        keys, rows = probabilities // 64 * 8, 2 * 64 * 8  # of dropout; the core is given the rows
        saved = none["kept_bytes"] - selective["kept_bytes"]
        assert saved == probabilities * 4 + keys - rows
    assert 1 < selective["flops"] / none["flops"] < full["flops"] / none["flops"] < 4 / 3


def test_flops_with_recomputation_are_those_of_the_papers_authors() -> None:
    flags = ["--preset", "gpt2_30m", "--vocab-size", "8192", "--recompute-granularity", "full"]
    b, s, layers, h, v = 2, 256, 8, 512, 8192
    whole = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    causal = whole - 8 * b * s**2 * layers * h  # half of attention's
    assert growth.on_paper([*flags, "--no-bf16"], 1)["flops"] == pytest.approx(causal, rel=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_rank_does_on_paper_is_the_papers(preset: Path, size: int) -> None:
    flags = ["--preset", str(preset), "--tensor-model-parallel-size", str(size), "--no-bf16"]
    found = growth.on_paper([*flags, "--attention-dropout", "0", "--hidden-dropout", "0"], size)
    n, h, s, layers = 128, 128, 64, 2
    linear, attention = 6 * n * (12 * layers * h**2 + 512 * h), 12 * n * s * h * layers
    assert found["flops"] * size == pytest.approx(linear + attention / 2)
    loss = 3 * 4 * n + 24  # a maximum and two sums; what ranks agree on
    stream = 4 * n * h
    assert found["sent"] == ((4 * layers + 2) * stream + loss) * 2 * (size - 1) / size


def test_axes_change_one_size_alone_and_begin_with_the_model_as_it_is(preset: Path) -> None:
    def flags(axis: str, *values: int) -> list[list[str]]:
        return [c.arguments["flags"] for c in growth.axis(axis, values, ["--preset", str(preset)])]

    assert [each[2:] for each in flags("layers", 1, 2, 4)] == [
        ["--num-layers", "2"],
        ["--num-layers", "1"],
        ["--num-layers", "4"],
    ]
    assert flags("width", 256)[0][2:] == ["--hidden-size", "256", "--num-attention-heads", "8"]
    assert flags("vocabulary", 8192, 600)[0][2:] == ["--vocab-size", "600"]
    assert flags("layers") == []


def test_powers() -> None:
    assert growth.exponent({x: 3 * x**1.7 for x in (1, 2, 4, 8)}) == pytest.approx(1.7)


def test_every_axis_has_its_points_and_its_panels(tmp_path: Path, preset: Path) -> None:
    words = ["--preset", preset, "--layers", "--width", "--sequence"]
    record = run(tmp_path, "growth", *words, "--vocabulary", 1024, 2048, "--ranks", 1, 2)
    whole, half = (figures(record, each, "vocabulary") for each in ("2,048", "1,024"))
    assert whole["flops"] > half["flops"]
    alone, pair = (figures(record, each, "ranks") for each in ("1", "2"))
    assert (alone["sent"] > 0, pair["sent"] > 0) == (False, True)
    assert alone["flops"] == pytest.approx(2 * pair["flops"], rel=0.01)
    for each in (whole, half, alone, pair):
        assert each["rank_bytes"] > 2**20
    assert "| vocabulary, 1,024 to 2,048 | time |" in record["page"]
    assert (tmp_path / "page.png").stat().st_size > 0


def test_this_tree_beside_itself_has_the_same_losses(tmp_path: Path) -> None:
    words = ["--against", ROOT, "--presets", "quickstart", "--dtypes", "fp32"]
    record = run(tmp_path, "commits", *words, "--layouts", "t2", "--steps", "2")
    one, other = (each["rounds"][0] for each in record["contenders"])
    assert one["losses"] == other["losses"]
    assert len(one["losses"]) == 2 + commits.BEFORE + commits.BEHIND
    for each in (one, other):
        assert each["wall"][0] > 0
        assert each["cpu"][0] > 0
        assert each["peak_bytes"] > 2 * 10 * 2**20  # of two ranks
    assert "largest difference of a loss" in record["page"]


def test_a_commit_that_is_not_there_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/commits.py", "--against", "no-such-commit"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "--against no-such-commit" in ended.stderr


def test_losses_that_differ_are_a_failure() -> None:
    ours, its = {"losses": [1.0, 2.0]}, {"losses": [1.0, 2.5]}
    assert commits.difference(its, ours) == 0.5
    assert commits.difference({**ours}, ours) == 0
    assert commits.difference(ours, ours) is None


def test_a_process_is_measured_with_all_that_it_has_started() -> None:
    burn = "sum(range(5_000_000))"
    script = f"import subprocess, sys; {burn}; print('done', flush=True); "
    script += (
        f"subprocess.run([sys.executable, '-c', \"{burn}; print('done', flush=True); input()\"])"
    )
    command = [sys.executable, "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["done\n", "done\n"]
        family = list(commits.family(process.pid))
        seconds = [commits.cpu_seconds(each) for each in family]
        process.communicate("\n")
    assert len(family) == 2
    assert family[0] == str(process.pid)
    assert np.min(seconds) > 0.02
