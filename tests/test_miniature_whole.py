"""scripts/paper, whole, at toy size, as a user types them; on text that Python itself holds."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tools.papers import write_folder
from tools.experiments.miniature import MINUTES
from tools.experiments.runner import ROOT

SMALL = {
    "num_layers": "2",
    "hidden_size": "32",
    "seq_length": "64",
    "max_position_embeddings": "64",
    "train_iters": "20",
    "lr_warmup_iters": "2",
    "log_interval": "5",
    "eval_interval": "10",
    "eval_iters": "2",
}

pytestmark = pytest.mark.slow


def shell(*words: object) -> str:
    """What the command prints; it has to end well."""
    command = ["bash", *map(str, words)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stderr}"
    return ended.stdout


def small_preset(folder: Path, name: str) -> Path:
    """The preset of this name with a toy's sizes."""
    text = (ROOT / "scripts" / "presets" / f"{name}.toml").read_text()
    for key, value in SMALL.items():
        names = r"lr_warmup_\w+" if key == "lr_warmup_iters" else key
        text, count = re.subn(rf"(?m)^{names} = .*$", f"{key} = {value}", text)
        assert count == 1, key
    preset = folder / f"{name}.toml"
    preset.write_text(text)
    return preset


def test_the_miniature_goes_from_archives_to_the_papers_tables(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    presets = [small_preset(tmp_path, f"miniature_{model}") for model in ("gpt2", "bert")]
    command = [
        "scripts/paper/miniature.sh", "--data", data, "--output", output,
        "--gpt2-preset", presets[0], "--bert-preset", presets[1],
        "--vocab-size", 400, "--race-train", 12, "--race-dev", 6,
    ]  # fmt: skip
    shell(*command)
    report = json.loads((output / "report.json").read_text())
    assert report["results"]["race"]["questions"] == 12
    assert report["results"]["race"]["notes"]["input"]["train"]["questions"] == 24
    assert report["results"]["lambada"]["num_examples"] == 2
    assert report["results"]["wikitext103"]["word_perplexity"] > 1
    assert report["corpus"]["split"]["output"]["documents"] > 100
    assert report["training"]["bert"]["steps"] == 20
    assert "<svg" in (output / "report.html").read_text()

    (output / "report.json").unlink()
    again = shell(*command)
    assert again.count("reused") == len(MINUTES)


def test_figure_7_draws_both_orders(tmp_path: Path) -> None:
    data, output = write_folder(tmp_path / "data"), tmp_path / "out"
    command = [
        "scripts/paper/figure7.sh", "--data", data, "--output", output,
        "--preset", small_preset(tmp_path, "figure7_bert"), "--depths", 1,
        "--rates", "1e-3", "1e30", "--vocab-size", 400,
    ]  # fmt: skip
    shell(*command)
    lines = (output / "figure7.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| 0.001", "| 1e+30"))]
    assert [row[1] for row in rows] == ["1"] * 2
    diverged = [["diverged at step" in cell for cell in row[3:]] for row in rows]
    assert diverged == [[False] * 4, [True] * 4]
    assert (output / "figure7.png").stat().st_size > 10_000
    assert shell(*command).count("reused") == len(list((output / "stages").glob("*.json")))
