"""Your own model in pipeline stages, with a torch optimizer.

    torchrun --nproc-per-node 4 examples/own_pipeline.py --pipeline 4

Stages 1 and 2 share a linear layer; stages 1, 2 and 3 a norm; the first and the last stage the
table of words. With --pipeline 2 each rank has two stages, and two models read different samples;
with --pipeline 1 each rank has all stages. The numbers are the same.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import api

WORDS, SEQUENCE, HIDDEN, MICRO_BATCHES, CLIP = 101, 16, 32, 8, 1.0


@dataclass(frozen=True, kw_only=True)
class Text(api.Batch):
    tokens: Any  # int64 [b, s]; the model predicts, at each token, the one before it


class Embed(api.PipelineStage):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x = self.words(batch.tokens)
        return x, x.cumsum(1)  # a stage may return any number of tensors


class Block(api.PipelineStage):
    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        self.norm, self.same = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.into, self.out = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, next_width)

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, memory = inputs  # [b, s, HIDDEN], [b, s, width]
        x = x + F.gelu(self.same(self.norm(x + self.into(memory))))
        return x, self.out(x).cumsum(1)  # of any shape


class Head(api.PipelineStage):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, batch: Any, *inputs: Tensor) -> Any:
        x, memory = inputs  # [b, s, HIDDEN], [b, s, 1]
        return self.logits(self.norm(x) + memory)


STAGES = [Embed, lambda: Block(HIDDEN, 48), lambda: Block(48, 1), Head]
TIES = [
    api.tie("same", "1.same", "2.same"),
    api.tie("norm", "1.norm", "2.norm", "3.norm"),
    api.tie("words", "0.words.weight", "3.logits.weight"),
]


def loss(logits: Tensor, batch: Any) -> Tensor:
    before = batch.tokens.roll(1, 1).flatten()
    return F.cross_entropy(logits.flatten(0, 1), before, reduction="sum")


def draw(step: int, number: int) -> Text:
    """A micro-batch; it depends only on the step and its number."""
    return Text(tokens=np.random.default_rng([step, number]).integers(WORDS, size=(2, SEQUENCE)))


def train(model: api.PipelineModel, steps: int) -> Iterator[tuple[float, float]]:
    """Yields (loss, gradient norm) of each step."""
    mesh, gradients = model.mesh, api.GradientBuckets(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        # All stages of one model read the same samples.
        numbers = range(mesh.rank("batch"), MICRO_BATCHES, mesh.size("batch"))
        mean = api.run_pipeline(model, gradients, [draw(step, number) for number in numbers])
        norm = api.clip_grad_norm(gradients, CLIP)
        optimizer.step()
        yield float(mean), float(norm)


def build(mesh: api.Mesh) -> api.PipelineModel:
    # The loss is a sum; its mean is over the tokens of the global batch.
    return api.PipelineModel(mesh, STAGES, loss, lambda batch: batch.tokens.size, seed=1, ties=TIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()

    with api.user_errors(os.environ):  # bad input gives one line
        parallel = api.TrainingParallelConfig(pipeline_model_parallel_size=flags.pipeline)
        parallel.check(int(os.environ.get("WORLD_SIZE", "1")))
    with api.launch(parallel) as mesh:
        for step, (mean, norm) in enumerate(train(build(mesh), flags.steps), start=1):
            if mesh.is_first:
                print(f"step {step} | loss {mean:.4f} | gradient norm {norm:.4f}")


if __name__ == "__main__":
    main()
