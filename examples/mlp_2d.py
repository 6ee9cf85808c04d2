"""Colossal-AI's MLP (listing 1 of its paper, 1024 -> 8192 -> norm -> 1024) in 1D, 2D, 2.5D and 3D
tensor parallelism, beside plain torch. (For data x tensor parallelism see llama_2d.py.)

    torchrun --nproc-per-node 4 examples/mlp_2d.py --mode 2d
    torchrun --nproc-per-node 8 examples/mlp_2d.py --mode 2.5d --depth 2
    torchrun --nproc-per-node 8 examples/mlp_2d.py --mode 3d

Layers of a single mode have names, too: Linear2D(mesh, 1024, 8192), LayerNorm2D(mesh, 8192).
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

INSIDE = 8  # times the width between layers
BATCH, SEQUENCE = 8, 4


def build(mesh: api.Mesh, width: int) -> nn.Sequential:
    """The sizes are whole ones; the factory of the mesh's mode cuts the layers."""
    make = api.layer_factory(mesh)
    return nn.Sequential(
        make.column(width, INSIDE * width),  # into the parallel region: Linear2D, Linear3D
        make.inner_layer_norm(INSIDE * width),  # of rows whose columns are cut over ranks
        nn.GELU(),
        make.row(INSIDE * width, width),  # out of it
    )


def plain_twin(model: nn.Sequential, width: int) -> nn.Sequential:
    """The same model with torch's layers, whole on every rank."""
    inner = INSIDE * width
    twin = nn.Sequential(
        nn.Linear(width, inner), nn.LayerNorm(inner), nn.GELU(), nn.Linear(inner, width)
    )
    specs, parameters = api.sharding_specs(model), model.named_parameters()
    twin.load_state_dict({n: api.gather_whole(each, specs[n]) for n, each in parameters})
    return twin.to(next(model.parameters()))


def kept(model: nn.Module, x: Tensor) -> int:
    """Number of elements that this rank keeps for the backward, without weights."""
    found = {each.data_ptr(): 0 for each in model.parameters()}

    def note(each: Tensor) -> Tensor:
        found.setdefault(each.data_ptr(), each.numel())
        return each

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        model(x)
    return sum(found.values())


def train(
    mesh: api.Mesh, model: nn.Module, twin: nn.Module, width: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Yields (loss, loss of plain torch, which reads all samples by itself) of each step."""
    gradients = api.GradientBuckets(model)
    ours, plain = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (model, twin))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, SEQUENCE, width, generator=generator).to(next(twin.parameters()))
        # Ranks of different models read different samples, and in 2D those of different rows.
        own = x[mesh.rank("batch") :: mesh.size("batch")]
        own, wanted = (api.split_stream(each, mesh) for each in (own, own.flip(-1)))
        with gradients.accumulate(is_last=True):
            # The sum over this rank's numbers / the number of all: the losses add up to the mean.
            loss = F.mse_loss(model(own), wanted, reduction="sum") / x.numel()
            loss.backward()
        ours.step()
        plain.zero_grad()
        its_loss = F.mse_loss(twin(x), x.flip(-1))
        its_loss.backward()
        plain.step()
        terms = loss.detach()
        for axis in ("batch", "hidden"):  # the ranks have different samples or different columns
            api.all_reduce(terms, mesh.axis(axis))
        yield terms.item(), its_loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mode", choices=("1d", "2d", "2.5d", "3d"), default="1d")
    parser.add_argument("--tensor", type=int, help="ranks that share the model (all)")
    parser.add_argument("--depth", type=int, default=1, help="squares of --mode 2.5d (1)")
    parser.add_argument("--width", type=int, default=1024, help="between layers (1024)")
    parser.add_argument("--steps", type=int, default=4, help="(4)")
    flags = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    with api.user_errors(os.environ):  # bad input gives one line
        parallel = api.ParallelConfig(
            tensor_model_parallel_size=flags.tensor or world,
            tensor_parallel_mode=flags.mode,
            tensor_parallel_depth=flags.depth,
        )
        parallel.check(world, {"--width": flags.width})
    torch.manual_seed(1)  # the same on every rank: each draws whole weights and keeps its part
    with api.launch(parallel) as mesh:
        model = build(mesh, flags.width)
        twin = plain_twin(model, flags.width)
        for step, (loss, its_loss) in enumerate(
            train(mesh, model, twin, flags.width, flags.steps), start=1
        ):
            if mesh.is_first:
                print(f"step {step} | loss {loss:.4f} | plain torch {its_loss:.4f}")
        # Parameters and activations of each rank.
        x = torch.zeros(BATCH // mesh.size("batch"), SEQUENCE, flags.width, device=mesh.device)
        held = [sum(p.numel() for p in model.parameters()), kept(model, api.split_stream(x, mesh))]
        for rank, (weights, activations) in enumerate(mesh.control.gather(held)):
            if mesh.is_first:
                print(f"rank {rank} holds {weights} parameters, {activations} activations")


if __name__ == "__main__":
    main()
