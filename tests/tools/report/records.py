"""Records of runs, written by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.tools.report.pages import HOSTILE

START = {
    "step": 0,
    "started": "2026-11-29T10:20:04+00:00",
    "layout": {"pipeline_parallel_size": 2, "data_parallel_size": 1, "tensor_parallel_size": 2},
    "command": f"pretrain_gpt2.py {HOSTILE}",
    "config": {
        "model": {"num_layers": 2},
        "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "training": {"train_iters": 40, "seed": 1234},
        "data": {"data_path": [HOSTILE], "vocab_file": HOSTILE},
    },
}


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    """A logged step: a quarter of a second, 400 tokens a second."""
    about = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 400.0, "step_seconds": 0.25}
    return {"step": number, "samples": 4 * number, "loss": loss, **about, **more}


def write(folder: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """The folder, with these lines added to its record."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder
