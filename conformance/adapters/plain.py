"""The shortest adapter: the plain trainer, whose batches are divided among data ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.adapters import Refused
from conformance.fixture import Fixture, MicroBatch, ranks
from conformance.plain import DataRank, Trainer, Weights


class DataParallel(DataRank):
    """Each rank takes its samples of every micro-batch; losses and gradients are added up."""

    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        self.rank = dist.get_rank()
        loss, gradients = super().loss_and_gradients(micro_batches)
        total = torch.tensor(loss, dtype=torch.float64)
        for each in (total, *gradients.values()):
            dist.all_reduce(each)
        return float(total), gradients


class Adapter:
    trainer_class: type[Trainer] = DataParallel

    def __init__(self, fixture: Fixture, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        if others := layout.keys() - {"data"}:
            raise Refused(f"it divides among data ranks alone, not {min(others)}")
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group("gloo")
        self.trainer = self.trainer_class(fixture, dtype, ranks(layout))
        self.last: Weights = {}

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        number = self.trainer.step_count
        self.trainer.batches[number] = list(micro_batches)
        loss, norm, self.last = self.trainer.step(number)
        return loss, norm

    def gradients(self) -> Mapping[str, Tensor]:
        return self.trainer.whole(self.last)

    def weights(self) -> Mapping[str, Tensor]:
        return self.trainer.whole(self.trainer.weights)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": list(self.trainer.weights.values()),
            "gradients": list(self.last.values()),
            "optimizer": [each for pair in self.trainer.moments.values() for each in pair],
        }

    def save(self, folder: Path) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors = {f"weight.{name}": each for name, each in self.trainer.weights.items()}
            for name, (m, v) in self.trainer.moments.items():
                tensors |= {f"m.{name}": m, f"v.{name}": v}
            tensors["steps"] = torch.tensor(self.trainer.step_count)
            save_file(tensors, folder / "plain.safetensors")

    def load(self, folder: Path) -> None:
        tensors, trainer = load_file(folder / "plain.safetensors"), self.trainer
        trainer.step_count = int(tensors["steps"])
        for name in trainer.weights:
            trainer.weights[name] = tensors[f"weight.{name}"]
            trainer.moments[name] = tensors[f"m.{name}"], tensors[f"v.{name}"]
