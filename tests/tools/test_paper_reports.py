"""Reports of scripts/paper, of made-up numbers: tables, facts, files."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from math import log, nan
from operator import lt
from pathlib import Path
from typing import Any

import pytest

from tasks.paper import compare
from tests.refusals import refusal
from tools.paper.figure6 import report as figure6
from tools.paper.figure6.findings import broken, reached
from tools.paper.figure6.plan import parse_name as parse_size
from tools.paper.figure6.plan import result_file, run_folder
from tools.paper.figure7 import report as figure7
from tools.paper.figure7.plan import Run, metrics_file, parse_name
from tools.paper.miniature.tables import verdict

SIZES = ("2x64", "4x128", "6x256")
PARAMETERS = 1_000_000


@pytest.mark.parametrize(
    ("accuracy", "questions", "is_chance"),
    [(0.26, 4000, True), (0.27, 4000, False), (0.20, 400, True)],
)
def test_chance_is_told_from_more_than_two_standard_errors(
    accuracy: float, questions: int, is_chance: bool
) -> None:
    told = verdict({"accuracy": accuracy, "questions": questions})
    assert (": above chance" in told) != is_chance


def trained_figure7(output: Path, run: Run, end: float) -> None:
    """A run of 100 logged steps that falls to `end`."""
    file = metrics_file(output, run)
    file.parent.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "started": "now"}]
    for k in range(1, 101):
        line = {"step": 10 * k, "mlm_loss": end + 100 - k, "grad_norm": 1.0, "elapsed_seconds": k}
        lines.append(line)
    check = {"step": 1000, "validation_mlm_loss": end + 0.5, "validation_sop_loss": 0.6}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, check]))
    file.with_name("run.json").write_text(json.dumps({"parameters": 1000 * run.depth}))


def test_figure_7_has_a_line_for_each_rate_and_depth_and_a_picture(tmp_path: Path) -> None:
    names = []
    for rate, depth in product((2e-3, 5e-4), (6, 48)):
        for order, end in (("pre-ln", 3.0), ("post-ln", 3.0 + depth / 10)):
            run = Run(order, depth, rate)  # type: ignore[arg-type]
            assert parse_name(run.name) == run
            trained_figure7(tmp_path, run, end)
            names.append(run.name)
    figure7.report(tmp_path, tuple(names))
    # The last five of the hundred are 4, 3, 2, 1 and 0 above the end.
    assert (tmp_path / "figure7.md").read_text().splitlines()[2:] == [
        "| 0.002 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.002 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
        "| 0.0005 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.0005 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
    ]
    assert (tmp_path / "figure7.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_last_evaluation_that_is_not_finite_is_no_number(tmp_path: Path) -> None:
    run = Run("pre-ln", 6, 2e-3)
    trained_figure7(tmp_path, run, 3.0)
    check = {"step": 1000, "validation_mlm_loss": None, "validation_sop_loss": None}
    with metrics_file(tmp_path, run).open("a") as file:
        file.write(json.dumps(check) + "\n")
    facts = figure7.describe(tmp_path, run)
    assert figure7.told_loss(facts, "train_loss") == "5.000"
    assert not figure7.told_loss(facts, "validation_loss")[0].isdigit()
    assert facts["validation_curve"] == [(1000, 3.5)]


def evaluated(task: str, **figures: Any) -> dict[str, Any]:
    """A record of tasks/main.py."""
    return {
        "task": task,
        "paper": compare(task, {"this_model": figures}, PARAMETERS),
        "conventions": dict.fromkeys(figures, "by a convention"),
        "model": {"parameters": PARAMETERS, "hidden_size": 10, "vocab_size": 400,
                  "max_position_embeddings": 100},
        "data": [{"file": "/somewhere/else/file", "sha256": "0"}],
        "command": ["tasks/main.py", "--load", "/somewhere/else"],
        "checkpoint": "/somewhere/else/checkpoints",
        **figures,
    }  # fmt: skip


def trained_figure6(
    output: Path, name: str, losses: Sequence[float], words: float, share: float
) -> None:
    """A run of one size; losses: of the evaluations at steps 100, 200, ..."""
    size = parse_size(name)
    folder = run_folder(output, size)
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "started": "now"}]
    for number, loss in enumerate(losses, start=1):
        step = {"step": 100 * number, "samples": 400 * number}
        lines.append({**step, "loss": loss - 0.5, "elapsed_seconds": 60.0 * number})
        lines.append({**step, "validation_loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"parameters": PARAMETERS, "device": "cpu"}))
    records = {
        "wikitext103": evaluated("WIKITEXT103", word_perplexity=words, window=256, stride=64,
                                 num_original_tokens=217_642),
        "lambada": evaluated("LAMBADA", strict_accuracy=share, last_word_perplexity=9 * words,
                             num_examples=500),
    }  # fmt: skip
    for task, record in records.items():
        result_file(output, size, task).write_text(json.dumps(record))


@pytest.fixture
def figure6_runs(tmp_path: Path) -> Path:
    """Larger is better, but for LAMBADA between the first two."""
    trained_figure6(tmp_path, "2x64", [log(800), log(600), log(500)], 9000, 0.01)
    trained_figure6(tmp_path, "4x128", [log(900), log(450), log(400)], 7000, 0.012)
    trained_figure6(tmp_path, "6x256", [log(700), log(420), log(300)], 6000, 0.1)
    figure6.report(tmp_path, SIZES)
    return tmp_path


def test_figure_6_has_the_numbers_of_each_size_and_no_path_of_the_machine(
    figure6_runs: Path,
) -> None:
    text = (figure6_runs / "figure6.json").read_text()
    assert "somewhere" not in text
    runs = json.loads(text)["runs"]
    assert [run["name"] for run in runs] == list(SIZES)
    ends = [run["validation_perplexity"] for run in runs]
    assert ends == [pytest.approx(each) for each in (500, 400, 300)]
    assert runs[0]["lambada"]["data"] == [{"file": "file", "sha256": "0"}]
    page = (figure6_runs / "figure6.md").read_text()
    assert all(each in page for each in ("500.00", "400.00", "300.00", "10.0 %"))


def test_an_order_is_broken_where_a_larger_model_is_no_better() -> None:
    for values, count in (([3, 2, 1], 0), ([300, 300, 310], 2), ([3, 2, nan], 1)):
        assert len(broken(SIZES, values, lt)) == count
    curve = [(100, 6.0), (200, 4.0), (300, 3.0)]
    assert [reached(curve, loss) for loss in (6.5, 4.0, 2.0)] == [100, 200, None]


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    trained_figure6(tmp_path, "2x64", [], 1.0, 0.0)
    refusal(partial(figure6.describe, tmp_path, parse_size("2x64")))
    run = Run("pre-ln", 6, 2e-3)
    trained_figure7(tmp_path, run, 3.0)
    file = metrics_file(tmp_path, run)
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    refusal(partial(figure7.describe, tmp_path, run))
