"""Adapters that go wrong: the plain trainer, with one thing changed."""

from collections.abc import Sequence
from pathlib import Path

import torch

from conformance.adapters import Refused, plain
from conformance.fixture import MicroBatch
from conformance.plain import Trainer, Weights


class Serial(plain.Adapter):
    """Every rank does all the work, whatever the layout is."""

    trainer_class = Trainer


class Raises(Serial):
    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        raise ZeroDivisionError("a rank has no samples")


class Refuses(Serial):
    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        raise Refused("no kernel\nfor this head")


class NotResumable:
    def __init__(self, *arguments: object) -> None: ...


class LosesMoments(Serial):
    def load(self, folder: Path) -> None:
        super().load(folder)
        for name, (m, v) in self.trainer.moments.items():
            self.trainer.moments[name] = torch.zeros_like(m), torch.zeros_like(v)
        self.trainer.step_count = 0


class DeadTrainer(Trainer):
    def loss_and_gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, Weights]:
        loss, gradients = super().loss_and_gradients(micro_batches)
        return loss, {name: torch.zeros_like(each) for name, each in gradients.items()}

    def update(self, gradients: Weights) -> None:
        self.step_count += 1


class Dead(plain.Adapter):
    trainer_class = DeadTrainer
