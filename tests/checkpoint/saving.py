"""A small state and its saver, for tests of what saves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver, SaveReport
from megatron.config.checkpoint import CheckpointConfig
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_config, tiny_state

SHARD = "shard_00000.safetensors"
SAVE_FILE = "megatron.checkpoint.save.save_file"  # of safetensors, which opens the file itself
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def fresh(tensor_size: int = 1, zero_stage: int = 0, **changes: Any) -> TrainState:
    mesh, config = mesh_of_ranks(tensor_size), tiny_config(**changes)
    return tiny_state(mesh, config, dtype=torch.bfloat16, zero_stage=zero_stage)


def saver_into(
    directory: Path,
    state: TrainState,
    *,
    asynchronous: bool = False,
    keep: int | None = None,
    start_step: int = 0,
    run: str = "tiny",
    attached: dict[str, bytes] | None = None,
) -> Saver:
    config = CheckpointConfig(save=str(directory), async_save=asynchronous, keep_checkpoints=keep)
    return Saver(state.mesh, config, {"run": run}, start_step=start_step, attached=attached or {})


def train(state: TrainState, steps: int = 1) -> list[float]:
    """The losses of these steps."""
    losses = []
    for _ in range(steps):
        batch = samples(4, first=state.samples)
        losses.append(train_step(state, micro_batches(batch, state.mesh, 1), 1e-2).loss)
    return losses


def save(saver: Saver, state: TrainState, validation_loss: float | None = None) -> None:
    saver.save(state.step, state.slices(), state.facts(), validation_loss)


def load(state: TrainState, path: Path) -> None:
    state.load(verify(path, state.mesh))


def save_steps(
    saver: Saver, state: TrainState, steps: list[int], losses: dict[int, float] | None = None
) -> list[SaveReport]:
    for step in steps:
        state.step = step
        save(saver, state, (losses or {}).get(step))
    saver.close()
    return saver.reports()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def flip(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
