"""What pretraining is worth: a task fine-tuned from a pretrained BERT and from random weights.

    python benchmarks/finetuning.py --pretrained checkpoints --output DIR -- \\
        --task MNLI --train-data train.tsv --valid-data dev_matched.tsv --seeds 3 --epochs 3

What follows -- goes to tasks/main.py as it is, once for each of the two models, which have the same
shape, vocabulary and settings. Prints the task's figures of the last epoch, the median over the
seeds and their range, beside the most frequent class.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts, markdown, told
from megatron.config.checkpoint import TrainedConfig
from megatron.config.model import BertConfig
from megatron.config.parse import user_errors
from megatron.config.training import ParallelConfig
from megatron.models.build import build_on_meta
from megatron.models.registry import config_of
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import initial_value, sharding_specs
from megatron.train.trained import open_trained
from tools.convert.writing import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
MAJORITY = "majority_accuracy"


def write_twin(pretrained: Path, to: Path, seed: int) -> None:
    """A checkpoint of the same model, tokenizer and all, with the weights that training began
    with."""
    trained = TrainedConfig(load=str(pretrained))
    _, tokenizer, manifest = open_trained(trained, ParallelConfig(), 1, (BertConfig.kind,))
    section, vocab_size = config_of(manifest), manifest["vocab_size"]
    weights = {
        name: initial_value(name, spec, seed)
        for name, spec in sharding_specs(build_on_meta(section, serial_mesh(), vocab_size)).items()
    }
    write_checkpoint(
        to, section, weights, vocab_size, tokenizer, "random weights", lambda path: None
    )


def fine_tune(load: Path, output: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The record of tasks/main.py; seeds that are finished in `output` are taken up."""
    record = output.with_suffix(".json")
    command = [sys.executable, "tasks/main.py", *arguments, "--load", str(load)]
    command += ["--save", str(output), "--output", str(record)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    content: dict[str, Any] = json.loads(record.read_bytes())
    return content


def table(records: dict[str, dict[str, Any]]) -> str:
    figures = [name for name in next(iter(records.values()))["last_epoch"] if MAJORITY not in name]
    rows = [
        [name, *(_spread(record["last_epoch"][figure]) for figure in figures)]
        for name, record in records.items()
    ]
    pretrained = records["pretrained"]["last_epoch"]
    chance = [pretrained.get(each.replace("accuracy", MAJORITY), {}) for each in figures]
    rows.append(["most frequent class", *(_spread(each) if each else "" for each in chance)])
    return markdown(["", *figures], rows)


def _spread(figure: dict[str, float]) -> str:
    low, high = figure["min"], figure["max"]
    return f"{figure['median']:.4f}" + (f" ({low:.4f} to {high:.4f})" if low != high else "")


def compare(pretrained: Path, output: Path, seed: int = 1234) -> None:
    """Fine-tune a pretrained BERT and its twin of random weights.

    Args:
        pretrained: directory of checkpoints of pretrain_bert.py.
        output: folder for the twin, the fine-tuned models and both records.
        seed: of the twin's weights.
    """
    arguments = sys.argv[sys.argv.index("--") + 1 :]
    twin = output / "random"
    if not twin.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_twin(pretrained, twin, seed)
    records = {
        name: fine_tune(load, output / f"{name}_finetuned", arguments)
        for name, load in (("pretrained", pretrained), ("random", twin))
    }
    print(told(facts("torch", "tokenizers")))
    print(f"tasks/main.py {' '.join(arguments)}")
    print(table(records))


if __name__ == "__main__":
    with user_errors(os.environ):
        if "--" not in sys.argv and not {"-h", "--help"} & {*sys.argv}:
            raise ValueError(
                "what tasks/main.py is to do is missing: -- --task MNLI ... would work"
            )
        tyro.cli(compare, args=sys.argv[1 : [*sys.argv, "--"].index("--")])
