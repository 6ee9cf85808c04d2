"""Training with dropout by coordinates and with torch's own: whether both come to the same loss.

    python benchmarks/dropout_training.py [--data-path PREFIX] [--seeds 5] [--json FILE]

The quickstart's model with dropout 0.1, from the same weights on the same samples; a seed changes
weights, order of samples and dropout. The other model is GPT-2 with F.dropout and what
F.scaled_dot_product_attention draws, a kind of its own. By default on the text of a finished
scripts/quickstart.sh.
"""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import ClassVar

import torch.nn.functional as F
import tyro
from torch import Tensor, nn

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import JsonFile, facts, markdown, told, write_json
from benchmarks.program import ROOT, pretrain
from megatron.config.model import GPT2Config
from megatron.config.pretrain import PretrainTextConfig
from megatron.config.training import GPT2DataConfig
from megatron.models.gpt2 import GPT2
from megatron.models.registry import ModelKind
from megatron.parallel.dropout import Dropout
from megatron.parallel.factory import LayerFactory
from megatron.train.metrics import read_metrics

TORCH = ModelKind(
    config="benchmarks.dropout_training:TorchConfig",
    model="benchmarks.dropout_training:GPT2WithTorchDropout",
    program="benchmarks.dropout_training:PretrainTorchConfig",
    inputs="megatron.train.inputs:open_gpt2_inputs",
    data="megatron.config.training:GPT2DataConfig",
)
ARMS = {
    "by coordinates": ("gpt2", "coordinates"),
    "torch's": ("benchmarks.dropout_training:TORCH", "kernel"),
}
LAST = 100  # steps whose training loss is averaged


@dataclass(frozen=True, kw_only=True)
class TorchConfig(GPT2Config):
    kind: ClassVar[str] = ARMS["torch's"][0]


@dataclass(frozen=True, kw_only=True)
class PretrainTorchConfig(PretrainTextConfig):
    model: TorchConfig
    data: GPT2DataConfig


class TorchDropout(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, _rows: Tensor | None) -> Tensor:
        return F.dropout(x, self.p, self.training)


class GPT2WithTorchDropout(GPT2):
    def __init__(self, config: TorchConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__(config, factory, vocab_size)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, Dropout):
                    setattr(module, name, TorchDropout(child.p))


def losses(case: tuple[str, int], data_path: Path, steps: int, folder: str) -> tuple[float, float]:
    """(of the validation data after the last step, mean of the last training steps)."""
    arm, seed = case
    model, attention = ARMS[arm]
    file = Path(folder, f"{model}_{seed}.jsonl")
    preset = ROOT / "scripts" / "presets" / "quickstart.toml"
    words = [
        *("--preset", str(preset), "--data-path", str(data_path), "--split", "90,10,0"),
        *("--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
        *("--attention-dropout-rng", attention, "--seed", str(seed)),
        *("--train-iters", str(steps), "--eval-interval", str(steps), "--eval-iters", "100"),
        *("--log-interval", "1", "--metrics-file", str(file)),
    ]
    pretrain(words, model=model)
    lines = read_metrics(file)
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    training = [line["loss"] for line in lines if "loss" in line]
    assert len(training) == steps
    print(f"{arm}, seed {seed}: {validation[-1]:.4f}", flush=True)
    return validation[-1], mean(training[-LAST:])


def dropout_training(
    data_path: Path = Path("runs/quickstart/data/train_text_document"),
    seeds: int = 5,
    steps: int = 1000,
    cores: int = os.cpu_count() or 1,
    json_file: JsonFile = None,
) -> None:
    """Train all and print the table.

    Args:
        data_path: prefix of a data set that tools/preprocess_data.py has written.
        seeds: of each, from 1 on.
        steps: of each run.
        cores: runs at a time.
        json_file: where every loss is written.
    """
    record = facts("torch") | {"steps": steps}
    print(told(record))
    cases = [(arm, seed) for seed in range(1, seeds + 1) for arm in ARMS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        run = partial(losses, data_path=data_path.resolve(), steps=steps, folder=folder)
        found = dict(zip(cases, pool.map(run, cases), strict=True))
    rows = []
    for which, name in enumerate(("validation", f"last {LAST} steps")):
        of_arms = [[found[arm, seed][which] for seed in range(1, seeds + 1)] for arm in ARMS]
        differences = [ours - theirs for ours, theirs in zip(*of_arms, strict=True)]
        rows.append([name, *(f"{mean(each):.4f} +- {stdev(each):.4f}" for each in of_arms)])
        rows[-1].append(f"{mean(differences):+.4f} +- {stdev(differences) / seeds**0.5:.4f}")
    header = ["loss", *ARMS, "difference of a seed, mean and its standard error"]
    print(markdown(header, rows))
    by_name = {f"{arm}, seed {seed}": each for (arm, seed), each in found.items()}
    write_json(json_file, record | {"losses": by_name})


if __name__ == "__main__":
    tyro.cli(dropout_training)
