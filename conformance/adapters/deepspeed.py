"""DeepSpeed's ZeRO (data with zero=1 to 3), whose masters are fp32."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.adapters.torch import Base

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

# It would compile a faster collective, which changes no number.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Adapter(Base):
    trainer = "DeepSpeed"
    stages = (1, 2, 3)
    dtypes = (torch.float32,)

    def prepare(self) -> None:
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4 // self.sizes[0],
            "gradient_accumulation_steps": self.accumulated,
            "gradient_clipping": self.facts["optimizer"]["clip"],
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        deepspeed.init_distributed("gloo")
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.adamw(), config=settings
        )
        self.scale = self.sizes[0] * self.accumulated  # it divides by both

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()

    def update(self) -> float:
        self.recorded = {name: safe_get_full_grad(each) for name, each in self.parameters()}
        parts = self.optimizer.averaged_gradients.values()
        self.held = [each for part in parts for each in part or ()]  # the step frees them
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def weights(self) -> Mapping[str, Tensor]:
        return self.to_theirs({n: safe_get_full_fp32_param(p) for n, p in self.parameters()})

    def local_tensors(self) -> dict[str, list[Tensor]]:
        states = self.optimizer.optimizer.state.values()
        return {
            "parameters": [getattr(each, "ds_tensor", each) for _, each in self.parameters()],
            "gradients": self.held,
            "optimizer": [t for s in states for t in s.values() if torch.is_tensor(t)],
        }
