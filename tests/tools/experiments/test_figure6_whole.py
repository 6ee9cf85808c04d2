"""scripts/paper/figure6.sh, whole, at toy size, as a user types it; on text that Python holds."""

import json
from pathlib import Path

import pytest

from tests.test_miniature_whole import shell, small_preset
from tests.tools.papers import write_folder

pytestmark = pytest.mark.slow


def test_figure_6_goes_from_archives_to_curves_and_table_3(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    command = [
        "scripts/paper/figure6.sh", "--data", data, "--output", output, "--vocab-size", 400,
        "--preset", small_preset(tmp_path, "figure6"), "--sizes", "1x16", "2x32",
    ]  # fmt: skip
    assert "| paper, 8.3B | 10.81 | 66.5 % |" in shell(*command)
    runs = json.loads((output / "figure6.json").read_text())["runs"]
    assert [(run["name"], run["steps"], run["samples"]) for run in runs] == [
        ("1x16", 20, 80), ("2x32", 20, 80),
    ]  # fmt: skip
    for run in runs:
        assert [step for step, _ in run["validation_curve"]] == [10, 20]
        assert run["wikitext103"]["word_perplexity"] > 1
        assert run["lambada"]["num_examples"] == 2
    assert (output / "figure6.png").stat().st_size > 10_000
    assert shell(*command).count("reused") == 7
