"""What a training run holds: built here, changed by step.py, kept by megatron/checkpoint."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.load import TensorSlice, load, load_weights
from megatron.checkpoint.save import save
from megatron.config.model import ModelConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.models.registry import build_model
from megatron.optim.adam import MasterWeights
from megatron.optim.schedule import LossScaler
from megatron.parallel.gradients import GradientBuffers
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import RandomStreams
from megatron.parallel.sharding import sharding_specs
from megatron.train.compiled import compile_layers
from megatron.train.objectives import OBJECTIVES, Objective
from megatron.train.source import commit


@dataclass(kw_only=True)
class TrainState:
    """All that changes while training, and what it runs on."""

    mesh: Mesh
    model: nn.Module
    objective: Objective
    streams: RandomStreams
    gradients: GradientBuffers
    optimizer: MasterWeights
    scaler: LossScaler
    compiled: bool = False  # whether layers are, by torch.compile
    # Optimizer steps and samples behind this state, steps that fp16 skipped included.
    step: int = 0
    samples: int = 0
    skipped: int = 0

    @property
    def updates(self) -> int:
        """Steps that changed the weights: what the learning rate's schedule counts."""
        return self.step - self.skipped

    def pieces(self) -> Iterator[TensorSlice]:
        """Every tensor of a checkpoint: parameters, Adam's moments, masters of narrow weights."""
        yield from model_pieces(self.model)
        for kind, slot, local in self.optimizer.tensors():
            yield TensorSlice(f"{kind}.{slot.name}", slot.spec, local)

    def counters(self) -> dict[str, Any]:
        """All of a checkpoint that is no tensor, as JSON. No random state: streams are derived."""
        return {
            "step": self.step,
            "samples": self.samples,
            "skipped": self.skipped,
            "loss_scaler": self.scaler.counters(),
        }

    def facts(self) -> dict[str, Any]:
        """What a manifest says of this step: counters, precision, environment."""
        dtype = next(self.model.parameters()).dtype
        names = {wide: name for name, wide in DTYPES.items()}
        return {
            "counters": self.counters(),
            "precision": names.get(dtype, str(dtype).removeprefix("torch.")),
            "environment": environment(self.mesh),
        }

    def save(self, directory: str, facts: dict[str, Any]) -> None:
        """Write a checkpoint of this step into the --save directory; `facts` go with it."""
        facts = {"counters": self.counters(), **facts}
        save(directory, self.step, self.pieces(), facts, self.mesh)

    def load(self, path: Path, *, verified: bool = False) -> None:
        """Resume from the checkpoint at `path`, saved at any layout; verified: as of `load`."""
        counters = load(path, self.pieces(), self.mesh, verified=verified)["counters"]
        self.step, self.samples, self.skipped = (
            counters[name] for name in ("step", "samples", "skipped")
        )
        self.scaler.load(counters["loss_scaler"])
        self.optimizer.loaded(self.updates)

    def load_weights(
        self,
        path: Path,
        *,
        missing: Collection[str] = (),
        surplus: Collection[str] = (),
        verified: bool = False,
    ) -> None:
        """Start from the weights alone of the checkpoint at `path`, at whatever precision.

        missing, surplus, errors: as of megatron.checkpoint.load.load_weights.
        """
        weights = [
            TensorSlice(slot.name, slot.spec, slot.view(master.detach()))
            for slot, master in self.optimizer.views()
        ]
        load_weights(path, weights, self.mesh, missing=missing, surplus=surplus, verified=verified)
        self.optimizer.publish()

    def describe(self) -> dict[str, Any]:
        """Layout, size, device and code of the run, as JSON; the parameters of the whole model."""
        device = self.mesh.device
        return {
            "layout": {
                "tensor_parallel_size": self.mesh.tensor.size,
                "data_parallel_size": self.mesh.data.size,
            },
            "parameters": sum(prod(spec.shape) for spec in sharding_specs(self.model).values()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "compiled": self.compiled,
            "commit": commit(),
            "torch": torch.__version__,
        }


def model_pieces(model: nn.Module) -> Iterator[TensorSlice]:
    parameters = dict(model.named_parameters())
    for name, spec in sharding_specs(model).items():
        yield TensorSlice(f"model.{name}", spec, parameters[name].detach())


def environment(mesh: Mesh) -> dict[str, Any]:
    """The program, and what else decides the last bits of a sum: kept in every checkpoint."""
    device = mesh.device
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "layout": {axis.name: axis.size for axis in (mesh.data, mesh.tensor)},
    }


# Of weights and activations; masters and gradients are never narrower than fp32.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_state(
    model_section: ModelConfig,
    optimizer_section: OptimizerConfig,
    precision_section: PrecisionConfig,
    mesh: Mesh,
    vocab_size: int,
    *,
    seed: int | None,
    dtype: torch.dtype,
    compiled: bool = False,
) -> TrainState:
    """A run at step 0; dtype is that of weights and activations, and float16 scales the loss.

    seed: as of build_model.
    """
    model, streams = build_model(model_section, mesh, vocab_size, seed=seed, dtype=dtype)
    if compiled:
        compile_layers(model)
    gradients = GradientBuffers(model)
    return TrainState(
        mesh=mesh,
        model=model,
        objective=OBJECTIVES[model_section.kind],
        streams=streams,
        gradients=gradients,
        optimizer=MasterWeights(gradients, optimizer_section),
        scaler=LossScaler.of(precision_section, dtype),
        compiled=compiled,
    )
