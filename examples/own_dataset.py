"""Your own data set, on which the project's GPT-2 is trained.

    torchrun --nproc-per-node 2 examples/own_dataset.py --text README.md

A data set returns samples by their numbers. Each sample depends only on its number. So every layout
reads the same samples, nothing is built at the start, and a resumed run continues where it was.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.api import (
    GPT2Batch,
    GPT2Config,
    ParallelConfig,
    StepResult,
    TrainState,
    build_state,
    launch,
    prefetch,
    train_step,
)

SEQUENCE, BATCH = 64, 8
MODEL = GPT2Config(num_layers=2, hidden_size=64, num_attention_heads=4)


class Characters:
    """Windows at random places of a text, one token per byte; training calls only batch()."""

    def __init__(self, text: bytes, seed: int) -> None:
        self.ids, self.seed = np.frombuffer(text, np.uint8).astype(np.int64), seed
        self.samples_per_epoch = len(self.ids) - SEQUENCE

    def batch(self, numbers: Sequence[int]) -> GPT2Batch:
        """tokens, labels, positions int64 [b, s]; loss_mask float32 [b, s], 1 where it counts."""
        starts = [
            np.random.default_rng([self.seed, n]).integers(self.samples_per_epoch) for n in numbers
        ]
        windows = np.stack([self.ids[start : start + SEQUENCE + 1] for start in starts])
        shape = len(windows), SEQUENCE
        return GPT2Batch(
            tokens=windows[:, :-1],
            labels=windows[:, 1:],
            positions=np.tile(np.arange(SEQUENCE), (len(windows), 1)),
            loss_mask=np.ones(shape, np.float32),
        )


def train(state: TrainState, data: Characters, steps: int) -> Iterator[StepResult]:
    for micro_batches in prefetch(
        data,
        range(0, steps * BATCH, BATCH),
        micro_batch_size=BATCH // state.mesh.size("batch"),
        data_rank=state.mesh.rank("batch"),
        data_size=state.mesh.size("batch"),
    ):
        yield train_step(state, micro_batches, lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file to learn from")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=50)
    flags = parser.parse_args()

    data = Characters(flags.text.read_bytes(), seed=1)
    with launch(ParallelConfig(tensor_model_parallel_size=flags.tensor)) as mesh:
        state = build_state(MODEL, mesh, vocab_size=256, seed=1)
        for step, result in enumerate(train(state, data, flags.steps), start=1):
            if mesh.is_first:
                print(f"step {step} | loss {result.loss:.4f} | {result.tokens} tokens")


if __name__ == "__main__":
    main()
