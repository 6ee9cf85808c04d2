"""The reports of scripts/paper, of made-up numbers: golden tables, a page that fetches nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.paper.figure7 import report as figure7
from tools.paper.figure7.plan import Run, metrics_file, parse_name
from tools.paper.miniature.tables import verdict


@pytest.mark.parametrize(
    ("accuracy", "questions", "said"),
    [(0.26, 4000, "not to be told from chance"), (0.27, 4000, "above chance"),
     (0.20, 400, "not to be told from chance")],
)  # fmt: skip
def test_chance_is_told_from_more_than_two_standard_errors(
    accuracy: float, questions: int, said: str
) -> None:
    assert f": {said}." in verdict({"accuracy": accuracy, "questions": questions})


def trained(output: Path, run: Run, end: float) -> None:
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
    for rate in (2e-3, 5e-4):
        for depth in (6, 48):
            for order, end in (("pre-ln", 3.0), ("post-ln", 3.0 + depth / 10)):
                run = Run(order, depth, rate)  # type: ignore[arg-type]
                assert parse_name(run.name) == run
                trained(tmp_path, run, end)
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
    runs = json.loads((tmp_path / "figure7.json").read_text())["runs"]
    assert [(run["order"], run["depth"], run["rate"]) for run in runs][:3] == [
        ("pre-ln", 6, 0.002),
        ("post-ln", 6, 0.002),
        ("pre-ln", 48, 0.002),
    ]
    assert len(runs[0]["curve"]) == 100


def test_a_last_evaluation_that_is_not_finite_is_told(tmp_path: Path) -> None:
    run = Run("pre-ln", 6, 2e-3)
    trained(tmp_path, run, 3.0)
    check = {"step": 1000, "validation_mlm_loss": None, "validation_sop_loss": None}
    with metrics_file(tmp_path, run).open("a") as file:
        file.write(json.dumps(check) + "\n")
    facts = figure7.describe(tmp_path, run)
    losses = [figure7.told_loss(facts, kind) for kind in ("train_loss", "validation_loss")]
    assert losses == ["5.000", "not finite"]
    assert facts["validation_curve"] == [(1000, 3.5)]


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    run = Run("pre-ln", 6, 2e-3)
    trained(tmp_path, run, 3.0)
    file = metrics_file(tmp_path, run)
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ValueError, match="no evaluation"):
        figure7.describe(tmp_path, run)
