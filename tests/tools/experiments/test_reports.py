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
from tests.tools.experiments.test_commands import SIZES
from tools.experiments import figure6, figure7
from tools.experiments.miniature import judge_race

PARAMETERS = 1_000_000
PNG = b"\x89PNG\r\n\x1a\n"
CHECK = {"step": 1000, "validation_mlm_loss": 3.5, "validation_sop_loss": 0.6}


@pytest.mark.parametrize(
    ("accuracy", "questions", "is_chance"),
    [(0.26, 4000, True), (0.27, 4000, False), (0.20, 400, True)],
)
def test_chance_is_told_from_more_than_two_standard_errors(
    accuracy: float, questions: int, is_chance: bool
) -> None:
    text = judge_race({"accuracy": accuracy, "questions": questions})
    assert (": above chance" in text) != is_chance


def write_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def trained_figure7(
    settings: figure7.Settings, run: tuple[str, int, float], end: float, *more: dict[str, Any]
) -> None:
    """A run of 100 logged steps that falls to `end`."""
    folder = figure7.run_folder(settings, *run)
    lines: list[dict[str, Any]] = [{"step": 0, "started": "now"}]
    for k in range(1, 101):
        line = {"step": 10 * k, "mlm_loss": end + 100 - k, "grad_norm": 1.0, "elapsed_seconds": k}
        lines.append(line)
    write_lines(folder / "metrics.jsonl", [*lines, *more])
    (folder / "run.json").write_text(json.dumps({"parameters": 1000 * run[1]}))


def test_figure_7_has_a_line_for_each_rate_and_depth_and_pictures(tmp_path: Path) -> None:
    settings = figure7.Settings(output=tmp_path, rates=(2e-3, 5e-4), depths=(6, 48))
    for rate, depth in product(settings.rates, settings.depths):
        for order, end in (("pre-ln", 3.0), ("post-ln", 3.0 + depth / 10)):
            check = {**CHECK, "validation_mlm_loss": end + 0.5}
            trained_figure7(settings, (order, depth, rate), end, check)
    figure7.report(settings)
    rows = [line for line in (tmp_path / "figure7.md").read_text().splitlines() if "| 0.0" in line]
    # The last five of the hundred are 4, 3, 2, 1 and 0 above the end.
    assert rows == [
        "| 0.002 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.002 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
        "| 0.0005 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.0005 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
    ]
    assert (tmp_path / "figure7.png").read_bytes()[:8] == PNG
    assert "<svg" in (tmp_path / "figure7.html").read_text()


def test_figure_7_draws_a_run_that_diverges_before_its_first_evaluation(tmp_path: Path) -> None:
    settings = figure7.Settings(output=tmp_path, depths=(6,))
    ended = {"step": 1000, "ended": figure7.DIVERGED, "exit_code": 1}
    trained_figure7(settings, ("pre-ln", 6, 1e-3), 3.0, CHECK)
    trained_figure7(settings, ("post-ln", 6, 1e-3), 3.0, ended)
    figure7.report(settings)
    runs = json.loads((tmp_path / "figure7.json").read_text())["runs"]
    assert [run["diverged_at"] for run in runs] == [None, 1001]
    assert [run["train_loss"] for run in runs] == [5, None]


def test_a_last_evaluation_that_is_not_finite_is_no_number(tmp_path: Path) -> None:
    settings, run = figure7.Settings(output=tmp_path), ("pre-ln", 6, 2e-3)
    last = {"step": 1000, "validation_mlm_loss": None, "validation_sop_loss": None}
    trained_figure7(settings, run, 3.0, CHECK, last)
    facts = figure7.describe(settings, *run)
    assert figure7.loss_in_words(facts, "train_loss") == "5.000"
    assert not figure7.loss_in_words(facts, "validation_loss")[0].isdigit()
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


def trained_figure6(folder: Path, losses: Sequence[float], words: float, share: float) -> None:
    """A run of one size; losses: of the evaluations at steps 100, 200, ..."""
    lines: list[dict[str, Any]] = [{"step": 0, "started": "now"}]
    for number, loss in enumerate(losses, start=1):
        step = {"step": 100 * number, "samples": 400 * number}
        lines.append({**step, "loss": loss - 0.5, "elapsed_seconds": 60.0 * number})
        lines.append({**step, "validation_loss": loss})
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "run.json").write_text(json.dumps({"parameters": PARAMETERS, "device": "cpu"}))
    records = {
        "wikitext103": evaluated("WIKITEXT103", word_perplexity=words, window=256, stride=64,
                                 num_original_tokens=217_642),
        "lambada": evaluated("LAMBADA", strict_accuracy=share, last_word_perplexity=9 * words,
                             num_examples=500),
    }  # fmt: skip
    for task, record in records.items():
        (folder / f"{task}.json").write_text(json.dumps(record))


def test_figure_6_has_the_numbers_of_each_size_and_no_path_of_the_machine(tmp_path: Path) -> None:
    """Larger is better, but for LAMBADA between the first two."""
    folders = [tmp_path / "runs" / name for name in SIZES]
    trained_figure6(folders[0], [log(800), log(600), log(500)], 9000, 0.01)
    trained_figure6(folders[1], [log(900), log(450), log(400)], 7000, 0.012)
    trained_figure6(folders[2], [log(700), log(420), log(300)], 6000, 0.1)
    figure6.report(figure6.Settings(data=tmp_path, output=tmp_path))
    text = (tmp_path / "figure6.json").read_text()
    assert "somewhere" not in text
    runs = json.loads(text)["runs"]
    assert [run["name"] for run in runs] == list(SIZES)
    ends = [run["validation_perplexity"] for run in runs]
    assert ends == [pytest.approx(each) for each in (500, 400, 300)]
    assert runs[0]["lambada"]["data"] == [{"file": "file", "sha256": "0"}]
    page = (tmp_path / "figure6.md").read_text()
    assert all(each in page for each in ("500.00", "400.00", "300.00", "10.0 %"))
    assert (tmp_path / "figure6.png").read_bytes()[:8] == PNG


def test_an_order_is_broken_if_a_larger_model_is_no_better() -> None:
    for values, count in (([3, 2, 1], 0), ([300, 300, 310], 2), ([3, 2, nan], 1)):
        assert len(figure6.disordered(SIZES, values, lt)) == count
    curve = [(100, 6.0), (200, 4.0), (300, 3.0)]
    assert [figure6.first_step(curve, loss) for loss in (6.5, 4.0, 2.0)] == [100, 200, None]


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    trained_figure6(tmp_path / "2x64", [], 1.0, 0.0)
    refusal(partial(figure6.describe, tmp_path / "2x64"))
    settings, run = figure7.Settings(output=tmp_path), ("pre-ln", 6, 2e-3)
    trained_figure7(settings, run, 3.0)
    refusal(partial(figure7.describe, settings, *run))
