"""Lightning Fabric: DDP (data), and its FSDP (data with zero=3), which it refuses on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric import Fabric

from conformance.adapters.torch import Base


class Adapter(Base):
    trainer = "Lightning Fabric"
    stages = (0, 3)

    def prepare(self) -> None:
        dtype = next(self.model.parameters()).dtype
        self.fabric = Fabric(
            accelerator="cpu",
            devices=self.ranks,
            strategy="fsdp" if self.zero else "ddp" if self.ranks > 1 else "auto",
            precision="64-true" if dtype == torch.float64 else "32-true",
        )
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(self.model, self.adamw())

    def parameters(self) -> list[tuple[str, Any]]:
        return list(getattr(self.model, "module", self.model).named_parameters())

    def accumulating(self, more: bool) -> AbstractContextManager[Any]:
        return self.fabric.no_backward_sync(self.model, enabled=more and self.ranks > 1)

    def backward(self, loss: Any) -> None:
        self.fabric.backward(loss)

    def clip(self, most: float) -> float:
        return float(self.fabric.clip_gradients(self.model, self.optimizer, max_norm=most))


class Double(Adapter):
    """As it should be in fp64: Fabric rounds a model's outputs to torch's default dtype."""

    def prepare(self) -> None:
        torch.set_default_dtype(torch.float64)
        super().prepare()
