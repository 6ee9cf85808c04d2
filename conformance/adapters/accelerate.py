"""accelerate: DDP (data), FSDP2 (data with zero=3)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import accelerate

from conformance.adapters.torch import Base, Layer


class Adapter(Base):
    trainer = "accelerate"
    stages = (0, 3)

    def prepare(self) -> None:
        plugin = None
        if self.zero:
            plugin = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[Layer.__name__],
                cpu_ram_efficient_loading=False,
            )
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=self.accumulated, fsdp_plugin=plugin
        )
        self.shard(plugin)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.adamw())
        self.scale = self.sizes[0] * self.accumulated  # it divides by both

    def shard(self, plugin: Any) -> None:
        """accelerate keeps the plugin for GPUs alone."""

    def accumulating(self, more: bool) -> AbstractContextManager[Any]:
        return self.accelerator.accumulate(self.model)

    def backward(self, loss: Any) -> None:
        self.accelerator.backward(loss)

    def clip(self, most: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), most))


class Forced(Adapter):
    """FSDP2 on a CPU, by the two attributes that accelerate sets on a GPU."""

    def shard(self, plugin: Any) -> None:
        if plugin is not None:
            self.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
