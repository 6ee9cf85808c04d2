"""Ring attention in your own module: ranks hold other tokens of the same samples.

    torchrun --nproc-per-node 4 examples/long_context.py --cp-comm-type p2p

The second half of each sample repeats its first half, so the model has to look half a sequence
back, at tokens that other ranks hold. Layers of torch act on each token alone; only attention and
positions are of the factory. The numbers are those of one process.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import api

WORDS, HIDDEN, HEADS, BATCH, CLIP = 32, 64, 4, 8, 1.0


def draw(numbers: range, length: int) -> tuple[Tensor, Tensor]:
    """tokens and labels, int64 [b, s], of these samples; -100 where the next token is not known."""
    generators = [torch.Generator().manual_seed(number) for number in numbers]
    halves = [torch.randint(WORDS, (length // 2,), generator=each) for each in generators]
    tokens = torch.stack(halves).repeat(1, 2)
    labels = tokens.roll(-1, 1)
    labels[:, : length // 2 - 1] = labels[:, -1] = -100
    return tokens, labels


class Model(nn.Module):
    """Tokens, int64 [b, s/c], to logits [b, s/c, WORDS]."""

    def __init__(self, mesh: api.Mesh, length: int) -> None:
        super().__init__()
        factory = api.layer_factory(mesh)
        self.positions = factory.context.positions(length, mesh.device)  # of this rank's tokens
        self.length = length
        self.words, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(2 * HIDDEN)
        self.qkv = nn.Linear(2 * HIDDEN, 3 * HIDDEN)
        self.core = factory.attention_core(0.0, "core")  # attends to the tokens of all ranks
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        waves = self.length ** -torch.linspace(0, 1, HIDDEN // 2, device=tokens.device)
        angles = self.positions[:, None] * waves
        places = torch.cat([angles.sin(), angles.cos()], 1).expand(len(tokens), -1, -1)
        x = self.qkv(self.norm(torch.cat([self.words(tokens), places], 2)))
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in x.chunk(3, 2))
        heads = self.core(q, k, v, mask=None, is_causal=True)  # [b, heads, s/c, d]
        return self.head(heads.transpose(1, 2).flatten(2))


def train(mesh: api.Mesh, model: Model, steps: int) -> Iterator[tuple[float, float]]:
    """Yields (loss, gradient norm) of each step."""
    gradients = api.GradientBuckets(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in range(0, steps * BATCH, BATCH):
        # Ranks that share a sample have the same place along the batch axis.
        numbers = range(first + mesh.rank("batch"), first + BATCH, mesh.size("batch"))
        whole = (each.to(mesh.device) for each in draw(numbers, model.length))
        tokens, labels = (each[:, model.positions] for each in whole)
        with gradients.accumulate(is_last=True):
            logits = model(tokens).flatten(0, 1)
            # The sum over this rank's tokens / the number of all: the losses add up to the mean.
            total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            loss = total / (BATCH * model.length // 2)
            loss.backward()
        norm = api.clip_grad_norm(gradients, CLIP)
        optimizer.step()
        yield float(api.all_reduce(loss.detach(), mesh.axis("loss"))), float(norm)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context-parallel-size", type=int, default=ranks, help="(all ranks)")
    parser.add_argument("--cp-comm-type", choices=("a2a", "p2p"), default="a2a", help="(a2a)")
    parser.add_argument("--seq-length", type=int, default=512, help="(512)")
    parser.add_argument("--steps", type=int, default=100, help="(100)")
    flags = parser.parse_args()

    with api.user_errors(os.environ):  # bad input gives one line
        size, kind = flags.context_parallel_size, flags.cp_comm_type
        parallel = api.TrainingParallelConfig(context_parallel_size=size, cp_comm_type=kind)
        parallel.check(ranks, {"--num-attention-heads": HEADS}, flags.seq_length)
    torch.manual_seed(1)  # the same on every rank, so all have the same weights
    with api.launch(parallel) as mesh:
        model = Model(mesh, flags.seq_length).to(mesh.device)
        held = f"{len(model.positions)} of {flags.seq_length} tokens a rank"
        for step, (loss, norm) in enumerate(train(mesh, model, flags.steps), start=1):
            if mesh.is_first:
                print(f"step {step} | loss {loss:.4f} | gradient norm {norm:.4f} | {held}")


if __name__ == "__main__":
    main()
