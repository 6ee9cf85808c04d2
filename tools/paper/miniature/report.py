"""Writes report.json, report.md and report.html from the results of the stages."""

import json
import sys
from pathlib import Path
from typing import Any

from megatron.config.parse import parse_call, user_errors
from megatron.data.files import atomic_writer
from megatron.data.json_lines import MANIFEST
from megatron.train.metrics import read_metrics
from tools.page import loss_curve, step_facts, training
from tools.paper.corpus import CORPUS_STEPS, DEV_SHARD
from tools.paper.miniature import tables
from tools.paper.miniature.page import page
from tools.paper.miniature.plan import BUDGET, RESULTS, result_file
from tools.paper.tables import listed
from tools.stages import finished_stamps

CURVES = {"gpt2": "loss", "bert": "mlm_loss"}  # the term of each model's loss that is drawn
SETS = {DEV_SHARD: "RACE, development set"}
Facts = dict[str, Any]


def report(output: Path) -> None:
    """Write the three files.

    Args:
        output: the folder of a run of scripts/paper/miniature.sh.
    """
    facts = gather(output)
    curves = {
        model: loss_curve(read_metrics(output / model / "metrics.jsonl"), term)
        for model, term in CURVES.items()
    }
    contents = {
        "json": json.dumps(facts, indent=1),
        "md": markdown(facts),
        "html": page(facts, curves, SETS),
    }
    for ending, content in contents.items():
        with atomic_writer(output / f"report.{ending}") as file:
            file.write(content.encode())


def gather(output: Path) -> Facts:
    """All numbers of the run, for JSON."""
    names = [name for name in BUDGET if name != "report"]
    stamps = finished_stamps(output, names, "--output", "run scripts/paper/miniature.sh")
    manifests = {step: output / "corpus" / step / MANIFEST for step in CORPUS_STEPS}
    return {
        "corpus": {step: step_facts(manifest) for step, manifest in manifests.items()},
        "training": {model: learnt(output / model, term) for model, term in CURVES.items()},
        "results": {name: read_json(result_file(output, name)) for name in RESULTS},
        "seconds": {name: stamp["seconds"] for name, stamp in stamps.items()},
        "budget": BUDGET,
        "commands": {name: stamp["commands"] for name, stamp in stamps.items()},
    }


def learnt(folder: Path, term: str) -> Facts:
    """Facts from a model's metrics.jsonl and run.json; validation: of the term that is drawn."""
    metrics = read_metrics(folder / "metrics.jsonl")
    key = f"validation_{term}"
    validated = [line[key] for line in metrics if key in line]
    if not validated:
        raise ValueError(
            f"{folder / 'metrics.jsonl'} has no evaluation; a preset with eval_iters would work"
        )
    return {**training(metrics), **read_json(folder / "run.json"), "validation": validated[-1]}


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def markdown(facts: Facts) -> str:
    """The tables and what they mean, for a terminal."""
    results = facts["results"]
    parts = [
        "# The paper in miniature",
        tables.zero_shot(results).markdown(),
        tables.race(results["race"]).markdown(),
        tables.verdict(results["race"]),
        tables.held_out(results["heldout"]).markdown(),
        "## What each number is of",
        listed(tables.meanings(results)),
        "## Training",
        tables.training(facts["training"]).markdown(),
        "## Evaluation text in the corpus",
        tables.leakage(facts["corpus"]["decontaminate"]["leakage"], SETS).markdown(),
        "## Time",
        tables.times(facts["seconds"], facts["budget"]).markdown(),
        "## Commands",
        "From the root of the repository, in this order.",
        *(
            f"{stage}:\n\n" + "\n".join(f"    {line}" for line in lines)
            for stage, lines in facts["commands"].items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    with user_errors({}):
        parse_call(report, sys.argv[1:], {})()
