"""ZeRO with your own model: plain torch layers, at any stage.

    torchrun --nproc-per-node 2 examples/zero_own_model.py --zero-stage 3 --save checkpoints
    torchrun --nproc-per-node 4 examples/zero_own_model.py --zero-stage 1 --save checkpoints \\
        --steps 40

Ranks read different samples and divide moments and masters (stage 1), gradients (2) and weights
(3); the numbers are the same. The second command resumes where the first ended.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.api import (
    GradientBuckets,
    MasterWeights,
    Mesh,
    OptimizerConfig,
    ParallelConfig,
    all_reduce,
    clip_grad_norm,
    launch,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)

WORDS, SEQUENCE, HIDDEN, BATCH, MICRO_BATCHES, CLIP = 101, 16, 64, 64, 2, 0.5


class Block(nn.Module):
    """x [b, s, h] to x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens, int64 [b, s], to logits [b, s, WORDS]. Stage 3 gathers the weights of one block while
    the previous one computes: it finds the blocks because they are the elements of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, mesh: Mesh, numbers: range) -> Tensor:
    """This rank's part of the mean over these samples; each depends only on its number."""
    own = numbers[mesh.rank("batch") :: mesh.size("batch")]
    generators = [torch.Generator().manual_seed(number) for number in own]
    draws = [torch.randint(WORDS, (SEQUENCE,), generator=each) for each in generators]
    tokens = torch.stack(draws).to(mesh.device)
    labels = tokens.cumsum(1) % WORDS
    # The sum over this rank's samples / the number of all: the ranks' losses add up to the mean.
    total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (len(numbers) * SEQUENCE)


def train(
    mesh: Mesh, model: nn.Module, zero_stage: int, steps: int, save: str | None = None
) -> Iterator[tuple[int, float, float]]:
    """Yields (step, loss, gradient norm), from the newest checkpoint on; saves the last step."""
    gradients = GradientBuckets.for_master_weights(model, mesh=mesh, zero_stage=zero_stage)
    optimizer = MasterWeights(gradients, OptimizerConfig(weight_decay=0.1))
    begun = 0
    if save and (found := newest_checkpoint(save, mesh)):
        begun = found.manifest["step"]
        load_checkpoint(found, optimizer.slices())  # saved at any stage, on any number of ranks
        optimizer.loaded(updates=begun)
    size = BATCH // MICRO_BATCHES
    for step in range(begun, steps):
        parts = list[Tensor]()
        for number in range(MICRO_BATCHES):
            first = step * BATCH + number * size
            with gradients.accumulate(is_last=number == MICRO_BATCHES - 1):
                part = loss_of(model, mesh, range(first, first + size)) / MICRO_BATCHES
                part.backward()
            parts.append(part.detach())
        norm = clip_grad_norm(gradients, CLIP)
        optimizer.step(lr=1e-3)
        loss = all_reduce(torch.stack(parts).sum(), mesh.axis("batch"))
        yield step + 1, float(loss), float(norm)
    if save and steps > begun:
        save_checkpoint(save, steps, optimizer.slices(), {"step": steps}, mesh)


@torch.no_grad()
def evaluate(mesh: Mesh, model: nn.Module) -> float:
    """Mean loss of samples that training does not see. In stage 3 all ranks have to run the model
    equally often, because each has a part of the weights."""
    return float(all_reduce(loss_of(model, mesh, range(-BATCH, 0)), mesh.axis("batch")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=3, help="(3)")
    parser.add_argument("--steps", type=int, default=20, help="of the whole run (20)")
    parser.add_argument("--save", help="directory of checkpoints, to resume from and to save in")
    flags = parser.parse_args()

    torch.manual_seed(1)  # the same on every rank, so all have the same weights
    with launch(ParallelConfig()) as mesh:
        model = Model().to(mesh.device)
        for step, loss, norm in train(mesh, model, flags.zero_stage, flags.steps, flags.save):
            if mesh.is_first:
                print(f"step {step} | loss {loss:.4f} | gradient norm {norm:.4f}")
        loss = evaluate(mesh, model)
        if mesh.is_first:
            print(f"loss of unseen samples {loss:.4f}")


if __name__ == "__main__":
    main()
