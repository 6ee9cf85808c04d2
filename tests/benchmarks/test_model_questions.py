"""The questions about the model's steps, in miniature: figures that are known, or that must be in
a certain order."""

from pathlib import Path

import pytest

from benchmarks import activations, commits, growth, steps
from benchmarks.harness import Flags
from benchmarks.report import Results
from megatron.parallel.kernels import use_cpu_kernels
from tests.benchmarks.run import ROOT, figures, run
from tools.planning.trace import Step

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
    assert list(disk.iterdir()) == []  # everything is removed


def test_a_check_hashes_what_ranks_hold_in_common(tmp_path: Path) -> None:
    record = run(tmp_path, "safeguards", "--contenders", "step", "check")
    layouts = "t = 1, d = 2", "t = 2, d = 1"
    whole, common = (figures(record, "check", each) for each in layouts)
    h, layers, width = 256, 4, 14  # bytes of weight, master and moments
    weights = (4096 + 256) * h + layers * 12 * h**2
    assert whole["hashed"] == width * (weights + layers * 13 * h + 2 * h)
    # Positions, norms and the biases of row layers.
    assert common["hashed"] == width * (256 * h + layers * (4 + 2) * h + 2 * h)
    step, check = figures(record, "step", layouts[0])["wall"][0], whole["wall"][0]
    assert f"| {check / step:.3f} |" in record["page"]


def test_watched_steps_are_measured_beside_unwatched_ones(tmp_path: Path) -> None:
    names = "watched", "unwatched"
    record = run(tmp_path, "safeguards", "--contenders", *names)
    watched, unwatched = (figures(record, name, "100 steps") for name in names)
    assert watched["threads"] > unwatched["threads"]
    ratio = watched["wall"][0] / unwatched["wall"][0]
    assert f"watched steps take {ratio:.3f} times" in record["page"]


def test_the_output_layer_in_chunks_takes_less_memory(tmp_path: Path) -> None:
    words = ["--vocab-size", 8000, "--hidden-size", 16, "--tokens", 16_000]
    record = run(tmp_path, "output_layer", *words, "--tensor-parallel", "2")
    names = "logits in chunks", "all logits at once"
    chunked, at_once = (figures(record, name, "fp32, t = 2") for name in names)
    logits = 16_000 * 8_000 * 4  # bytes
    assert at_once["peak_bytes"] - at_once["held"] > logits
    assert chunked["peak_bytes"] - chunked["held"] < logits / 1.5
    assert chunked["held"] == 8192 * 16 * (4 + 4) + 2 * 2 * 16_000 * 16 * 4


def test_what_is_cut_is_kept_and_sent_in_parts(tmp_path: Path) -> None:
    names = "selective", "selective, sequence parallel"
    record = run(tmp_path, "activations", "--tensor-parallel", 1, 4, "--contenders", *names)
    whole = figures(record, names[0], "t = 1")
    cut, stream = (figures(record, name, "t = 4") for name in names)
    assert (whole["sent"], whole["formula"], stream["formula"]) == (0, 34, 34 / 4)
    assert stream["kept"] == pytest.approx(whole["kept"] / 4, rel=0.01)
    assert stream["kept"] < cut["kept"] < whole["kept"]
    # Four all-reduces of the stream in bf16; or reduce-scatters and gathers, one more each way.
    assert cut["sent"] == 4 * 2 * 2 * 3 / 4
    assert stream["sent"] > 5 / 4 * cut["sent"]
    ratios = [each["kept"] / each["formula"] for each in (whole, cut, stream)]
    said = f"{min(ratios):.2f} to {max(ratios):.2f} of what the formulas say"
    assert said in record["page"].splitlines()[2]


@pytest.mark.parametrize("reads", [1, 2])
def test_a_step_that_reads_more_than_once_is_a_failure(reads: int) -> None:
    only = {"group": "step", "name": "host reads", "first": "host reads", "reason": "", "facts": {}}
    record = {"contenders": [only | {"rounds": [{"reads": reads}]}]}
    found = Results(activations.QUESTION, record)
    assert bool(activations.QUESTION.failure(found)) is (reads > 1)
    assert activations.QUESTION.result(found) == f"Reads of a step: {reads}."


def test_masks_of_dropout_have_a_page(tmp_path: Path) -> None:
    record = run(tmp_path, "dropout_quality", "--rows", "512", "--columns", "64")
    found = figures(record, "standard deviations")
    assert f"| attention: keys | {found['attention: keys']:+.2f} |" in record["page"]


def test_recomputation_keeps_less_and_says_what_it_costs(tmp_path: Path, preset: Path) -> None:
    ours = "this project"
    names = ours, f"{ours}, selective recomputation", f"{ours}, full recomputation"
    words = ["--presets", preset, "--dtypes", "fp32", "--tensor-parallel", "1"]
    words.append("--program-flags=--attention-dropout 0.1 --hidden-dropout 0.1")
    record = run(tmp_path, "train_step", *words, "--contenders", *names)
    facts = [each["facts"] for each in record["contenders"]]
    none, selective, full = (each["kept"] for each in facts)
    assert none > selective > full > 0
    probabilities = 2 * 2 * 4 * 64**2  # layers, batch, heads
    if use_cpu_kernels:  # torch's attention keeps other tensors
        keys, rows = probabilities // 64 * 8, 2 * 64 * 8  # of dropout; the core is given the rows
        assert none - selective == probabilities * 4 + keys - rows
    flops = [each["executed"] for each in facts]
    assert 1 < flops[1] / flops[0] < flops[2] / flops[0] < 4 / 3
    assert f"| {selective / 2**20:,.0f} | {flops[1] / flops[0]:.3f} |" in record["page"]


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_rank_does_on_paper_is_the_papers(preset: Path, size: int) -> None:
    flags = ["--preset", str(preset), "--tensor-model-parallel-size", str(size), "--no-bf16"]
    flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    found = growth.on_paper(flags, size, "cpu")
    n, h, s, layers = 128, 128, 64, 2
    linear, attention = 6 * n * (12 * layers * h**2 + 512 * h), 12 * n * s * h * layers
    assert found["flops"] * size == pytest.approx(linear + attention / 2)
    loss = 3 * 4 * n + 24  # a maximum and two sums; what ranks agree on
    stream = 4 * n * h
    step = Step(steps.read(flags, size), size, "fp32", "cpu")
    assert step.sent("tensor") == ((4 * layers + 2) * stream + loss) * 2 * (size - 1) / size
    assert found["paper_bytes"] == step.memory["total"]


def test_every_axis_has_its_points_and_its_panels(tmp_path: Path, preset: Path) -> None:
    words = ["--axes", "vocabulary", "ranks", "--contenders", "4,096", "1,024", "1", "2"]
    record = run(tmp_path, "growth", "--preset", preset, *words)
    flops = [each["facts"]["flops"] for each in record["contenders"]]
    whole, half, alone, pair = (each["rounds"][0] for each in record["contenders"])
    assert flops[0] > flops[1]
    assert flops[2] == pytest.approx(2 * flops[3], rel=0.01)
    for each in (whole, half, alone, pair):
        assert each["rank_bytes"] > 2**20
    paper = whole["wall"][0] * flops[1] / flops[0]
    cells = f"| {half['wall'][0]:.3f} | {paper:.3f} | {half['wall'][0] / paper:.2f} |"
    assert cells in record["page"]
    assert (tmp_path / "page.png").stat().st_size > 0


def test_this_tree_beside_itself_has_the_same_losses(tmp_path: Path) -> None:
    """Others are an error (test_harness.py)."""
    words = ["--against", ROOT, "--groups", "quickstart, fp32, t = 2", "--steps", "2"]
    record = run(tmp_path, "commits", *words)
    for each in record["contenders"]:
        (found,) = each["rounds"]
        assert min(found["wall"][0], found["cpu"][0]) > 0
        assert found["peak_bytes"] > 2 * 10 * 2**20  # of two ranks
    assert "of the CPU time of" in record["page"]


def test_losses_of_a_commit_are_compared_unless_elements_are_dropped() -> None:
    for dropout, same in ((0.0, {"losses": 0}), (0.1, {})):
        found = commits.contenders(Flags(), str(ROOT), commits.GROUPS[:1], dropout)
        assert [each.same for each in found] == [same, same]
    with pytest.raises(ValueError, match="--against no-such-commit"):
        next(commits.contenders(Flags(), "no-such-commit"))
