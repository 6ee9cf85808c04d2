"""Colossal-AI's engine and trainer on this project's step: output, label and loss, and hooks.

torchrun --nproc-per-node 2 examples/engine.py --tensor 2
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from megatron.api import (
    Batch,
    GPT2Config,
    ParallelConfig,
    RandomText,
    TrainState,
    build_state,
    launch,
    prefetch,
    train_step,
)

Hook = Callable[["Trainer"], None]
HOOKS: dict[str, Hook] = {}


def hook(function: Hook) -> Hook:
    """Registers a hook by its name: it is called after each step."""
    HOOKS[function.__name__] = function
    return function


class Engine:
    """The model, its optimizer and its parallelism as one function of the data."""

    def __init__(self, state: TrainState, lr: float) -> None:
        self.state, self.lr = state, lr

    def step(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor, float]:
        """(logits [b, s, v], labels [b, s], loss) of the global batch, the same on every rank,
        after forward, backward and update."""
        result = train_step(self.state, batches, self.lr, return_outputs=True)
        assert result.outputs is not None
        return result.outputs.logits, result.outputs.labels, result.loss


class Trainer:
    """Runs the engine on all data, and the hooks after each step."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self.engine, self.hooks = engine, [HOOKS[name] for name in names]

    def fit(self, data: Iterable[Sequence[Batch]]) -> None:
        for batches in data:
            self.output, self.label, self.loss = self.engine.step(batches)
            for each in self.hooks:
                each(self)


@hook
def log_loss(trainer: Trainer) -> None:
    state = trainer.engine.state
    accuracy = (trainer.output.argmax(-1) == trainer.label).double().mean()
    if state.mesh.is_first:
        print(f"step {state.step} | loss {trainer.loss:.4f} | accuracy {accuracy:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hooks", nargs="*", choices=HOOKS, default=["log_loss"])
    flags = parser.parse_args()

    model = GPT2Config(num_layers=2, hidden_size=64, num_attention_heads=4)
    data = RandomText(vocabulary=128, length=32, seed=1)
    with launch(ParallelConfig(tensor_model_parallel_size=flags.tensor)) as mesh:
        batches = prefetch(
            data,
            range(0, 8 * flags.steps, 8),
            micro_batch_size=4,
            data_rank=mesh.rank("batch"),
            data_size=mesh.size("batch"),
        )
        state = build_state(model, mesh, vocab_size=128, seed=1)
        Trainer(Engine(state, lr=1e-3), flags.hooks).fit(batches)


if __name__ == "__main__":
    main()
