"""The state of a training run: built here, changed by step.py, saved by megatron/checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.load import load_checkpoint, load_weights
from megatron.config.model import KindConfig
from megatron.config.parts import PARTS
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.errors import UsageError
from megatron.models.build import build_on_meta
from megatron.optim.adam import LossScaler, MasterWeights
from megatron.optim.by_name import check_whole
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import all_reduce
from megatron.parallel.initialize import give_memory, materialize, set_values
from megatron.parallel.mesh import Mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan, measure
from megatron.parallel.sharding import ShardingSpec, TensorSlice, sharding_specs
from megatron.parallel.zero3 import offload_activations, untrained_memory
from megatron.train.compiled import StepGraph, choose_graph, compile_layers, use_own_stream
from megatron.train.machine import environment, keep_freed_memory
from megatron.train.objectives import Objective

# Dtypes of weights and activations. Masters, moments and gradients are fp32 or wider, except with
# --pure-bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class TrainState:
    """All that changes during training, and the mesh, model and pipeline that it runs on."""

    mesh: Mesh
    model: nn.Module
    objective: Objective
    gradients: GradientBuckets
    optimizer: MasterWeights
    scaler: LossScaler
    compiled: bool = False  # whether layers use torch.compile
    kernel_seed: int | None = None  # if attention's kernel draws its dropout
    pipeline: PipelinePlan = WHOLE_MODEL
    graph: StepGraph | None = None  # replays forward and backward
    # Phases.mark in a step that is timed; in others a function without effect.
    mark: Callable[[str], object] = str
    # Micro-batch now running, and the index of its stage in the order F0..F(p-1), B(p-1)..B0 of p
    # stages; diagnose.py sorts by both.
    micro_batch: int = 0
    stage_index: int = 0
    # Optimizer steps and samples so far, including steps that fp16 skipped.
    step: int = 0
    samples: int = 0
    skipped: int = 0

    @property
    def updates(self) -> int:
        """Steps that changed the weights; the learning rate's schedule counts only these."""
        return self.step - self.skipped

    @property
    def precision(self) -> str:
        """The key of the weights' dtype in DTYPES."""
        dtype = next(self.model.parameters()).dtype
        return next((name for name, each in DTYPES.items() if each == dtype), str(dtype))

    def slices(self) -> Iterator[TensorSlice]:
        """Every tensor of a checkpoint: parameters, Adam's moments, masters of half weights."""
        return self.optimizer.slices()

    def weights(self) -> Iterator[TensorSlice]:
        """This rank's part of every parameter, with key model.NAME."""
        return self.optimizer.weights()

    def counters(self) -> dict[str, Any]:
        """The state of a run besides its tensors, as JSON. Random numbers have no state to save."""
        return {
            "step": self.step,
            "samples": self.samples,
            "skipped": self.skipped,
            "loss_scaler": self.scaler.counters(),
        }

    def facts(self) -> dict[str, Any]:
        """Facts about this step for a checkpoint's manifest."""
        return {
            "counters": self.counters(),
            "precision": self.precision,
            "environment": environment(self.mesh),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Resume from a whole checkpoint, saved at any layout. Raises ValueError if its moments are
        fp32 (or wider) and this run's are half, or the other way round."""
        counters = checkpoint.manifest["counters"]
        self.optimizer.make_state(counters["step"] - counters["skipped"])
        slices = list(self.slices())
        saved = checkpoint.manifest["tensors"]
        for each in slices:
            if each.key.partition(".")[0] not in ("model", "master") and each.key in saved:
                saved_dtype, dtype = getattr(torch, saved[each.key]["dtype"]), each.local.dtype
                if (saved_dtype.itemsize < 4) != (dtype.itemsize < 4):
                    raise ValueError(
                        f"{checkpoint.path} has moments of {saved_dtype}, and this run of {dtype}: "
                        "the same --pure-bf16, or none, would work"
                    )
        kinds = {each.key.partition(".")[0] for each in slices} | {"master"}
        if left := {key.partition(".")[0] for key in saved} - kinds:
            raise ValueError(
                f"{checkpoint.path} has {min(left)} of an optimizer, which that of this run lacks"
            )
        load_checkpoint(checkpoint, slices, mesh=self.mesh)
        self.step, self.samples, self.skipped = (
            counters[name] for name in ("step", "samples", "skipped")
        )
        self.scaler.load(counters["loss_scaler"])
        self.optimizer.loaded(self.updates)

    def shards(self) -> dict[str, tuple[ShardingSpec, Tensor]]:
        """{name: (spec, this rank's part)} of each parameter, of its master if it is trained."""
        parameters = dict(self.model.named_parameters())
        shards = {
            name: (spec, parameters[name].detach())
            for name, spec in sharding_specs(self.model).items()
        }
        return shards | {each.key: (each.spec, each.local) for each in self.optimizer.masters()}

    def load_weights(
        self,
        checkpoint: Checkpoint,
        *,
        missing: Collection[str] = (),
        surplus: Collection[str] = (),
    ) -> None:
        """Start from only the weights of a whole checkpoint, saved at any precision.

        missing, surplus, errors: see megatron.checkpoint.load.load_weights.
        """
        weights = [TensorSlice(name, *shard) for name, shard in self.shards().items()]
        load_weights(checkpoint, weights, missing=missing, surplus=surplus, mesh=self.mesh)
        self.optimizer.publish()

    def load_folder(self, name: str) -> list[str]:
        """Start an unmodified model of transformers from the weights of a folder, or of a name on
        the hub; masters get the values of its files.

        Returns messages to the user. Raises UsageError as the model's `load_folder` does.
        """
        model: Any = self.model
        messages = model.load_folder(name, self.shards())
        self.optimizer.publish()
        return messages

    def describe_stages(self, micro_batches: int) -> list[str]:
        """A line for the schedule of so many micro-batches, and one per pipeline rank with its
        layers and parameters; none without a pipeline (every rank calls this)."""
        mesh, plan = self.mesh, self.pipeline
        if mesh.pipeline.size == 1:
            return []
        ranges = plan.layers[mesh.pipeline.rank :: plan.ranks]
        layers = ", ".join(f"{x[0]} to {x[-1]}" if x[1:] else f"{x[0]}" for x in ranges)
        size = sum(each.numel() for each in self.model.parameters())
        line = f"pipeline {mesh.pipeline.rank}: layers {layers}, {size:,} parameters on each rank"
        lines = [line for _, line in sorted({*mesh.control.gather((mesh.pipeline.rank, line))})]
        facts = measure(plan.lists(micro_batches), plan.virtual)
        return [
            f"schedule {plan.kind}: {micro_batches} micro-batches, at most {max(facts.in_flight)} "
            f"in flight on a rank, which idles {100 * facts.idle_share:.0f} % of its work's time",
            *lines,
        ]

    def describe(self) -> dict[str, Any]:
        """Facts about the model and its environment for the run's record, as JSON (every rank calls
        this). parameters: of the whole model."""
        mesh, machine = self.mesh, environment(self.mesh)
        # Whole shapes; a tied parameter counts at the first pipeline stage that has it.
        specs = [spec for spec in sharding_specs(self.model).values() if spec.is_owner()]
        count = torch.tensor(float(sum(prod(spec.shape) for spec in specs)), dtype=torch.float64)
        return {
            "layout": {f"{name}_parallel_size": size for name, size in mesh.sizes.items()},
            "parameters": int(all_reduce(count.to(mesh.device), mesh.pipeline)),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "compiled": self.compiled,
            **{name: machine[name] for name in ("device", "commit", "torch")},
        }


def build_state(
    config: KindConfig,
    mesh: Mesh,
    vocab_size: int,
    *,
    seed: int | None,
    dtype: torch.dtype | None = None,
    optimizer: OptimizerConfig | None = None,
    precision: PrecisionConfig | None = None,
    compiled: bool = False,
    pipeline: PipelinePlan = WHOLE_MODEL,
    draws: bool = True,
    zero_stage: int = 0,
    cuda_graph: bool | None = False,
    reduction: str = "sum",
) -> TrainState:
    """A run at step 0. dtype: of weights and activations, by default that of `precision`, or else
    torch's default; float16 uses a loss scale.

    vocab_size: the true one. seed: of initial weights and dropout; None for a model that is loaded
    next and has no dropout. draws: False leaves the weights undefined, for a model that is loaded
    next and has dropout. optimizer, precision: by default AdamW and loss scaling with the defaults
    of the programs. pipeline: the plan whose stages this rank builds. compiled: each layer is
    compiled at its first call; names, weights and hooks of the model stay. zero_stage: of ZeRO,
    over the ranks that hold the same shard of the model. cuda_graph: whether a GPU replays the
    steps; None: where a graph can. reduction: part that sums gradients, see --gradient-reduction.
    Raises UsageError if cuda_graph is True and none can, and for an optimizer that needs whole
    matrices where ranks divide them.
    """
    precision = precision or PrecisionConfig()
    if dtype is None:
        dtype = DTYPES[precision.name] if precision.name else torch.get_default_dtype()
    if mesh.device.type == "cpu":
        keep_freed_memory(gathers=zero_stage == 3)
    if cuda_graph := choose_graph(cuda_graph, config, mesh, dtype):
        use_own_stream(mesh.device)
    model = build_on_meta(config, mesh, vocab_size, seed, pipeline)
    optimizer = optimizer or OptimizerConfig()
    if optimizer.optimizer != "adamw":
        divides = zero_stage > 0 and mesh.replicas.size > 1
        check_whole(optimizer, mesh, sharding_specs(model).values(), divides=divides)
    values = getattr(model, "initial_values", None)
    is_lasting = zero_stage < 3  # whether whole weights stay in memory
    if is_lasting:
        drawn_by = seed if draws else None
        materialize(model, device=mesh.device, dtype=dtype, seed=drawn_by, values=values)
    else:
        give_memory(model, partial(untrained_memory, device=mesh.device, dtype=dtype))
    if compiled and not compile_layers(model) and config.is_unmodified:
        allowed = "left out: transformers' code of this model marks no layers to compile"
        raise UsageError("--compile", None, allowed, works=("--no-compile",))
    gradients = GradientBuckets.for_master_weights(
        model,
        in_fp32=not precision.pure_bf16,
        zero_stage=zero_stage,
        compares_weights=False,  # they are a function of the seed, or loaded next
        reduction=None if reduction == "sum" else PARTS["gradient_reduction"].find(reduction),
    )
    if config.cpu_offload_activations:
        offload_activations(model)
    master_weights = MasterWeights(gradients, optimizer)
    state = TrainState(
        mesh=mesh,
        model=model,
        objective=model,
        gradients=gradients,
        optimizer=master_weights,
        scaler=LossScaler.of(precision, dtype),
        compiled=compiled,
        pipeline=pipeline,
        kernel_seed=seed if config.draws_in_kernel(mesh.device.type) else None,
        graph=StepGraph() if cuda_graph else None,
    )
    if not is_lasting and seed is not None and draws:
        slices = {name: TensorSlice(name, *shard) for name, shard in state.shards().items()}
        set_values(model, slices, seed, values)
        master_weights.publish()
    return state
