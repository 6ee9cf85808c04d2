"""The record of a result: one JSON object, words first and numbers last."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from hashlib import sha256 as digest_of
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import Checkpoint, step_of
from megatron.data.files import sha256, write_atomically
from tasks import paper
from tasks.protocol import ReportConfig

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
# Only some kinds of model have these.
FURTHER = ("residual_order", "head", "labels", "num_query_groups", "rotary_base", "rope_scaling")
FURTHER += ("hf_model", "image_size", "patch_size", "pooling")


def identify(path: Path) -> dict[str, Any]:
    """Path, size and SHA-256 of an input, to compare records. The hash of a folder covers the name
    and content of all files in it."""
    if path.is_file():
        return {"file": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)}
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = "".join(f"{sha256(each)}  {each.relative_to(path).as_posix()}\n" for each in files)
    return {
        "folder": str(path),
        "files": len(files),
        "bytes": sum(each.stat().st_size for each in files),
        "sha256": digest_of(lines.encode()).hexdigest(),
    }


def arrange(name: str, figures: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record: words first, and numbers last, where a screen shows them."""
    words = {key: figures[key] for key in ("conventions", "protocol") if key in figures}
    return {"task": name, **words, **facts, **figures}


def describe(checkpoint: Checkpoint, model: Any, mesh: Mesh, dtype: str) -> dict[str, Any]:
    """Facts about the evaluated model and the environment."""
    from megatron.parallel.sharding import sharding_specs
    from megatron.train.machine import environment

    manifest = checkpoint.manifest
    config = manifest["config"]["model"]
    return {
        "model": {
            **{key: config[key] for key in (*SHAPE, *FURTHER) if key in config},
            "vocab_size": model.vocab_size,
            "parameters": sum(prod(each.shape) for each in sharding_specs(model).values()),
        },
        "checkpoint": str(checkpoint.path),
        "checkpoint_hash": manifest["checksum"],
        "step": step_of(checkpoint.path),
        "tokenizer": manifest["tokenizer"],
        "dtype": dtype,
        "version": version(),
        **environment(mesh),
    }


def version() -> str:
    """The project's version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def publish(
    record: dict[str, Any],
    report: ReportConfig,
    task: str = "",
    here: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Print the record, then the comparison with the paper, and write the record atomically.

    task, here: see `paper.compare`; without `here` nothing is compared.
    """
    comparison = None
    if report.compare_paper and here is not None:
        comparison = paper.compare(task, here, record["model"]["parameters"])
        record = {"paper": comparison, **record}
    text = json.dumps(record, indent=1, ensure_ascii=False)
    print(text, flush=True)
    if comparison is not None:
        print(paper.as_text(comparison, record["model"]["parameters"]), file=sys.stderr)
    if report.output is not None:
        write_atomically(report.output, text.encode() + b"\n")
