"""Training with dropout by coordinates and with torch's own: whether both come to the same loss.

The quickstart's model with dropout 0.1, by the program itself, from the same weights on the same
samples; a seed changes weights, order of samples and dropout. The other model is GPT-2 with
F.dropout and what F.scaled_dot_product_attention draws, a kind of its own. The validation loss is
that of 400 samples after the last step, the training loss the mean of the last 100 steps.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import ClassVar

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Column, Contender, Figures, Flags, Question, ask, cli
from benchmarks.program import TEXT, training
from benchmarks.report import Results
from megatron.config.model import GPT2Config
from megatron.config.pretrain import PretrainTextConfig
from megatron.config.training import GPT2DataConfig
from megatron.data.sources import open_corpus
from megatron.models.gpt2 import GPT2
from megatron.models.registry import ModelKind
from megatron.parallel.dropout import Dropout
from megatron.parallel.factory import LayerFactory

OWN = "benchmarks.dropout_training"
TORCH = ModelKind(
    config=f"{OWN}:TorchConfig",
    model=f"{OWN}:GPT2WithTorchDropout",
    program=f"{OWN}:PretrainTorchConfig",
    inputs="megatron.train.inputs:open_gpt2_inputs",
    data="megatron.config.training:GPT2DataConfig",
)
ARMS = {"torch's": (f"{OWN}:TORCH", "kernel"), "by coordinates": ("gpt2", "coordinates")}


@dataclass(frozen=True, kw_only=True)
class TorchConfig(GPT2Config):
    kind: ClassVar[str] = f"{OWN}:TORCH"


@dataclass(frozen=True, kw_only=True)
class PretrainTorchConfig(PretrainTextConfig):
    model: TorchConfig
    data: GPT2DataConfig


class TorchDropout(Dropout):
    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        return F.dropout(x, self.p, self.training)


class GPT2WithTorchDropout(GPT2):
    def __init__(self, config: TorchConfig, factory: LayerFactory, vocab_size: int) -> None:
        super().__init__(config, factory, vocab_size)
        for module in self.modules():
            if isinstance(module, Dropout):
                module.__class__ = TorchDropout


def difference(own: Figures, first: Figures) -> float | None:
    return None if own is first else own["validation_loss"] - first["validation_loss"]


COLUMNS = (
    Column("validation loss", "validation_loss", "{:.4f}"),
    Column("difference", difference, "{:+.4f}"),
    Column("training loss", lambda own, _: mean(own["losses"][-100:]), "{:.4f}"),
)


def result(found: Results) -> str:
    said = []
    for title in ("validation loss", "training loss"):
        theirs, ours = ([found.median(*row, title) for row in found.rows[k::2]] for k in (0, 1))
        apart = [a - b for a, b in zip(ours, theirs, strict=True)]
        said.append(
            f"{title} {mean(ours):.3f} +- {stdev(ours):.3f} by coordinates, {mean(theirs):.3f} +- "
            f"{stdev(theirs):.3f} with torch's; a seed's difference is {mean(apart):+.3f} with "
            f"the standard error {stdev(apart) / len(apart) ** 0.5:.3f}"
        )
    return f"Over {len(ours)} seeds: {'; '.join(said)}."


def main(
    flags: Flags, data_path: Path = TEXT, seeds: int = 5, steps: int = 1000, eval_iters: int = 100
) -> None:
    """Compare losses.

    Args:
        data_path: prefix of a data set; by default that of a finished scripts/quickstart.sh.
        seeds: from 1 on, two or more.
        steps: of each run.
        eval_iters: batches of four validation samples.
    """
    if seeds < 2 or flags.contenders:
        raise ValueError("takes both contenders and two or more --seeds, to say how they spread")
    vocabulary = open_corpus([str(data_path)], tokenizer=None).vocab_size
    words = ["--preset", "quickstart", "--data-path", str(data_path.resolve())]
    words += ["--split", "90,10,0", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
    words += ["--train-iters", str(steps), "--lr-warmup-iters", str(min(100, steps))]
    words += ["--eval-interval", str(steps), "--eval-iters", str(eval_iters)]
    contenders = []
    for seed, (arm, (model, rng)) in product(range(1, seeds + 1), ARMS.items()):
        start = [*words, "--seed", str(seed), "--attention-dropout-rng", rng]
        arguments = {"starts": [(1, start)], "model": model}
        contenders.append(
            Contender(name=arm, group=f"seed {seed}", run=training, arguments=arguments)
        )
    ask(
        Question(
            title="Training with dropout by coordinates",
            method=__doc__,
            contenders=contenders,
            columns=COLUMNS,
            result=result,
            rounds=1,
            warm_up=0,
            together=False,
            packages=("torch",),
            settings={"vocabulary": vocabulary, "steps": steps},
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
