"""The report of scripts/paper/figure6.sh, of made-up numbers: tables, words, picture."""

import json
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import pytest

from tasks.paper import compare
from tools.page import decimal
from tools.paper.figure6 import report as figure6
from tools.paper.figure6.findings import NOISE, findings, of_order
from tools.paper.figure6.plan import parse_name, result_file, run_folder

SIZES = ("2x64", "4x128", "6x256")
PARAMETERS = 1_000_000


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


def trained(output: Path, name: str, losses: Sequence[float], words: float, share: float) -> None:
    """A run of one size; losses: of the evaluations at steps 100, 200, ..."""
    size = parse_name(name)
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
def whole_run(tmp_path: Path) -> Path:
    """Larger is better, but for LAMBADA between the first two."""
    trained(tmp_path, "2x64", [log(800), log(600), log(500)], 9000, 0.01)
    trained(tmp_path, "4x128", [log(900), log(450), log(400)], 7000, 0.012)
    trained(tmp_path, "6x256", [log(700), log(420), log(300)], 6000, 0.1)
    figure6.report(tmp_path, SIZES)
    return tmp_path


def test_what_is_seen_is_told_from_the_numbers(whole_run: Path) -> None:
    runs = json.loads((whole_run / "figure6.json").read_text())["runs"]
    said = dict(findings(runs))
    better = "larger is better, the paper's order."
    assert said["Validation perplexity at the end"] == (
        f"2x64 500.00, 4x128 400.00, 6x256 300.00: {better}"
    )
    assert said["While training"] == (
        "At 2 of 3 evaluations a larger model is below every smaller. 4x128 reaches the end of "
        "2x64 by step 200 of 300. 6x256 reaches the end of 4x128 by step 300 of 300."
    )
    assert said["WikiText103, perplexity per word"].endswith(better)
    assert said["LAMBADA, accuracy"] == (
        f"2x64 1.0 %, 4x128 1.2 %, 6x256 10.0 %: {better} "
        f"Less than {NOISE:g} standard errors are between 2x64 and 4x128."
    )
    text = (whole_run / "figure6.md").read_text()
    assert all(f"- **{name}**: {words}" in text for name, words in said.items())


def test_another_order_is_told() -> None:
    def less(one: float, other: float) -> bool:
        return one < other

    assert of_order(SIZES, [300.0, 300.0, 310.0], less, decimal) == (
        "2x64 300.00, 4x128 300.00, 6x256 310.00: not the paper's order: "
        "4x128 is no better than 2x64, 6x256 is no better than 4x128."
    )
    assert "6x256 is no better" in of_order(SIZES, [3.0, 2.0, float("nan")], less, decimal)


def test_the_numbers_name_no_path_of_the_machine(whole_run: Path) -> None:
    text = (whole_run / "figure6.json").read_text()
    assert "somewhere" not in text
    runs = json.loads(text)["runs"]
    assert [run["name"] for run in runs] == list(SIZES)
    assert runs[0]["lambada"]["data"] == [{"file": "file", "sha256": "0"}]


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "2x64", [], 1.0, 0.0)
    with pytest.raises(ValueError, match="no evaluation"):
        figure6.describe(tmp_path, parse_name("2x64"))
