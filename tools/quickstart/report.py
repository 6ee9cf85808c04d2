"""Write report.json and report.html from the stages' results: python -m tools.quickstart.report."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.parse import parse_call, user_errors
from megatron.data.files import atomic_writer
from megatron.data.json_lines import MANIFEST
from megatron.train.metrics import read_metrics
from tools.page import loss_curve, step_facts, training
from tools.quickstart.page import page
from tools.stages import finished_stamps

STAGES = ("corpus", "clean", "tokenizer", "preprocess", "pretrain", "evaluate", "sample")
CORPUS_STEPS = ("clean", "dedup", "split")
Facts = dict[str, Any]


def report(out: Path) -> None:
    """Write report.json and the page that shows it.

    Args:
        out: the folder of a run of the quickstart.
    """
    metrics = read_metrics(out / "metrics.jsonl")
    facts = gather(out, metrics)
    with atomic_writer(out / "report.json") as file:
        file.write(json.dumps(facts, indent=1).encode())
    with atomic_writer(out / "report.html") as file:
        file.write(page(facts, loss_curve(metrics)).encode())


def gather(out: Path, metrics: Sequence[Facts]) -> Facts:
    """The numbers of the run, by the names in the contract."""
    stamps = finished_stamps(out, STAGES, "--out", "run the quickstart")
    manifests = {step: out / "corpus" / step / MANIFEST for step in CORPUS_STEPS}
    extracted = out / "corpus" / "extract" / MANIFEST
    # An earlier run with other settings may have left a manifest that is no input of this run.
    if any(name.startswith("corpus/extract/") for name in stamps["clean"]["outputs"]):
        manifests = {"extract": extracted, **manifests}
    if stamps["corpus"]["commands"]:
        manifests = {"harvest": out / "corpus" / "harvest.json", **manifests}
    described = read_json(out / "run.json")
    return {
        "corpus": {step: step_facts(manifest) for step, manifest in manifests.items()},
        "layout": {
            **stamps["pretrain"]["facts"],
            **{key: value for key, value in described.items() if key != "layout"},
            **described["layout"],
        },
        "seconds": {name: stamp["seconds"] for name, stamp in stamps.items()},
        "training": training(metrics),
        "evaluation": read_json(out / "evaluation.json"),
        "samples": read_json(out / "samples.json"),
        "commands": {name: stamp["commands"] for name, stamp in stamps.items()},
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


if __name__ == "__main__":
    with user_errors({}):
        parse_call(report, sys.argv[1:], {})()
