"""A whole checkpoint of two small files, made without torch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import FORMAT, seal

FILES = {"shard_00000.safetensors": b"first half", "shard_00001.safetensors": b"second"}


def make_checkpoint(
    directory: Path, step: int, attached: Mapping[str, bytes] | None = None, **facts: Any
) -> Path:
    """A folder in which `weight` [4, 2] is cut in two; its files hold anything. attached: files
    beside them."""
    path, files = directory / f"step_{step:08d}", FILES | dict(attached or {})
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    slices = [
        {"file": name, "offset": [row, 0], "shape": [2, 2]}
        for name, row in zip(FILES, (0, 2), strict=True)
    ]
    manifest = {
        "format": FORMAT,
        "counters": {"step": step, "samples": 4 * step},
        "run": "0123456789abcdef",
        "validation_loss": None,
        "precision": "fp32",
        "config": {"model": {"num_layers": 2}, "training": {"seed": 1234}},
        "environment": {"torch": "2.13.0", "layout": {"data": 1, "tensor": 2}},
        **facts,
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
        "tensors": {
            key: {"dtype": "float32", "shape": [4, 2], "slices": slices}
            for key in ("model.weight", "exp_avg.weight")
        },
    }
    (path / "manifest.json").write_text(json.dumps(seal(manifest), indent=1))
    return path
