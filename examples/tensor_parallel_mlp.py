"""Our layers in your own module, training loop and optimizer.

    torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py --tensor 2

Each rank holds half of the columns of one weight and half of the rows of the other (section 3 of
the paper). With --tensor 1 each holds all and reads different samples: the numbers are the same.
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
    ColumnParallelLinear,
    GradientBuckets,
    Mesh,
    ParallelConfig,
    RowParallelLinear,
    all_reduce,
    clip_grad_norm,
    launch,
)

HIDDEN, SEQUENCE, BATCH, CLIP = 64, 16, 8, 0.05


class Residual(nn.Module):
    """x [b, s, h] to x + down(gelu(up(norm(x))))."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, device=mesh.device)  # torch's layers: whole on every rank
        self.up = ColumnParallelLinear(mesh, HIDDEN, 4 * HIDDEN)
        self.down = RowParallelLinear(mesh, 4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def draw(numbers: range) -> Tensor:
    """x [b, s, h] of these samples; each depends only on its number."""
    generators = [torch.Generator().manual_seed(number) for number in numbers]
    return torch.stack([torch.randn(SEQUENCE, HIDDEN, generator=each) for each in generators])


def train(mesh: Mesh, model: nn.Module, steps: int) -> Iterator[tuple[float, float]]:
    """Yields (loss, gradient norm) of each step."""
    gradients = GradientBuckets(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for first in range(0, steps * BATCH, BATCH):
        # Ranks of different models read different samples, ranks of one model the same ones.
        x = draw(range(first + mesh.rank("batch"), first + BATCH, mesh.size("batch")))
        x = x.to(mesh.device)
        with gradients.accumulate(is_last=True):
            # The sum over this rank's samples / the number of all: the losses add up to the mean.
            loss = F.mse_loss(model(x), x.flip(-1), reduction="sum") / (BATCH * SEQUENCE * HIDDEN)
            loss.backward()
        norm = clip_grad_norm(gradients, CLIP)  # torch's sees only the shards of this rank
        optimizer.step()
        yield float(all_reduce(loss.detach(), mesh.axis("batch"))), float(norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=20)
    flags = parser.parse_args()

    torch.manual_seed(1)  # the same on every rank: each draws whole weights and keeps its part
    with launch(ParallelConfig(tensor_model_parallel_size=flags.tensor)) as mesh:
        for step, (loss, norm) in enumerate(train(mesh, Residual(mesh), flags.steps), start=1):
            if mesh.is_first:
                print(f"step {step} | loss {loss:.4f} | gradient norm {norm:.4f}")


if __name__ == "__main__":
    main()
