"""A GPT-2 small enough for tests, its batches, and its tensors gathered whole."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import GPT2Config, RecomputeGranularity
from megatron.config.parallel import TrainingParallelConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.batch import Batch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.models.gpt import GPT2
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.initialize import initial_value
from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh
from megatron.parallel.schedules import WHOLE_MODEL, PipelinePlan
from megatron.parallel.sharding import (
    GradientViews,
    ShardedModule,
    TensorSlice,
    gather_whole,
    load_whole,
    sharding_specs,
)
from megatron.train.executor import on_device
from megatron.train.pipelining import plan_pipeline
from megatron.train.state import TrainState, build_state
from tools.layouts.layout import Layout, parse_layout

SEED = 1234
VOCABULARY = 101
SEQUENCE = 16
GRANULARITIES = get_args(RecomputeGranularity)


def tiny_config(**changes: Any) -> GPT2Config:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": SEQUENCE,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return GPT2Config(**(settings | changes))


def mesh_of_ranks(tensor_size: int | str, *, sequence_parallel: bool = False) -> Mesh:
    """The ranks of this call of the pool, or the process of the test alone. tensor_size: a number,
    as a LAYOUT has it, "4:2d", or a whole LAYOUT."""
    if not dist.is_initialized():
        return serial_mesh()
    if isinstance(tensor_size, str):
        name = tensor_size if "=" in tensor_size else f"tensor={tensor_size}"
        return parse_layout(name).mesh(torch.device("cpu"))
    sizes, device = {"tensor": tensor_size}, torch.device("cpu")
    return build_mesh(sizes, device, sequence_parallel=sequence_parallel)


def tiny_model(
    mesh: Mesh, config: GPT2Config | None = None, *, dtype: torch.dtype = torch.float64
) -> GPT2:
    """A model whose every parameter, biases and norms too, is random."""
    config = config or tiny_config()
    model: GPT2 = build_model(config, mesh, VOCABULARY, seed=SEED, dtype=dtype)
    scatter_weights(model, tiny_weights(model))
    return model


def tiny_state(
    mesh: Mesh,
    config: GPT2Config | None = None,
    optimizer: OptimizerConfig | None = None,
    precision: PrecisionConfig | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = SEED,
    pipeline: PipelinePlan = WHOLE_MODEL,
    zero_stage: int = 0,
) -> TrainState:
    """A run at step 0 with the weights of `tiny_model`."""
    optimizer = optimizer or OptimizerConfig(weight_decay=0.1, clip_grad=0.5)
    config, precision = config or tiny_config(), precision or PrecisionConfig()
    state = build_state(
        config,
        mesh,
        VOCABULARY,
        seed=seed,
        dtype=dtype,
        optimizer=optimizer,
        precision=precision,
        pipeline=pipeline,
        zero_stage=zero_stage,
    )
    set_weights(state, tiny_weights(state.model))
    return state


def plan_at(layout: Layout, config: Any) -> PipelinePlan:
    """The stages of a model at this layout."""
    parallel = TrainingParallelConfig(**layout.settings)
    return plan_pipeline(parallel, config, seq_length=SEQUENCE, vocab_size=VOCABULARY)


def state_at(
    name: str, config: Any = None, *others: Any, mesh: Mesh | None = None, **settings: Any
) -> TrainState:
    """`tiny_state` at a LAYOUT. mesh: that of its ranks, if there is one already."""
    layout, config = parse_layout(name), config or tiny_config()
    mesh = mesh or layout.mesh(torch.device("cpu"))
    settings |= {"zero_stage": layout.zero, "pipeline": plan_at(layout, config)}
    return tiny_state(mesh, config, *others, **settings)


@torch.no_grad()
def set_weights(state: TrainState, weights: dict[str, Tensor]) -> None:
    """Whole ones, rounded to the dtype of the model."""
    dtype = next(state.model.parameters()).dtype
    for each in state.optimizer.masters():
        load_whole(each.local, weights[each.key].to(dtype), each.spec)
    state.optimizer.publish()


def save_state(state: TrainState, directory: Path, **facts: Any) -> Path:
    """A checkpoint of this step in the directory, with these facts in its manifest."""
    every = {"counters": state.counters(), **facts}
    return save_checkpoint(directory, state.step, state.slices(), every, state.mesh)


def tiny_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights: the initial ones and noise, so that no bias is zero and no gain is one."""
    weights, values = {}, getattr(model, "initial_values", None)
    own = {} if values is None else dict(values(SEED))
    for name, spec in sharding_specs(model).items():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        noise = torch.randn(spec.shape, generator=generator)
        initial = own[name] if own else initial_value(name, spec, SEED)
        weights[name] = initial + 0.1 * noise
    return weights


@torch.no_grad()
def scatter_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    table = sharding_specs(model)
    for name, parameter in model.named_parameters():
        load_whole(parameter, weights[name], table[name])


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {n: gather_whole(parameters[n], spec) for n, spec in sharding_specs(model).items()}


def leave_to_autograd(model: nn.Module) -> None:
    """From now on all gradients reach the model's GradientBuckets through `.grad`."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.gradient_views = GradientViews()


@contextmanager
def wide() -> Iterator[None]:
    """Modules built inside compute in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def tensors(state: TrainState) -> dict[str, Tensor]:
    """Copies of what this rank saves."""
    return {each.key: each.local.clone() for each in state.slices()}


def whole_slices(slices: Iterable[TensorSlice]) -> dict[str, Tensor]:
    return {each.key: gather_whole(each.local, each.spec) for each in slices}


def whole_gradients(gradients: GradientBuckets) -> dict[str, Tensor]:
    return whole_slices(gradients.slices())


def samples(count: int, *, seed: int = 0, first: int = 0) -> GPT2Batch:
    """Samples first to first + count, each with as many counted tokens as its own mask says."""
    tokens, masks = [], []
    for number in range(first, first + count):
        random = np.random.default_rng([seed, number])
        tokens.append(random.integers(VOCABULARY, size=SEQUENCE + 1))
        masks.append(random.random(SEQUENCE) < random.uniform(0.1, 1.0))
    ids = np.stack(tokens)
    return GPT2Batch(
        tokens=ids[:, :-1],
        labels=ids[:, 1:],
        loss_mask=np.stack(masks).astype(np.float32),
        positions=np.broadcast_to(np.arange(SEQUENCE), (count, SEQUENCE)).copy(),
        document_starts=None,
        numbers=np.arange(first, first + count),
    )


def summed_loss(model: nn.Module, batch: GPT2Batch, device: torch.device) -> tuple[Tensor, float]:
    """(sum of the loss over counted tokens, number of counted tokens)."""
    total = model(on_device(batch, device), torch.ones(1, dtype=torch.float64))[0]
    return total, float(batch.loss_mask.sum(dtype=np.float64))


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def run_whole(
    model: Any, objective: Any, batch: Batch, device: torch.device, loss_scales: Tensor
) -> Tensor:
    """A model that is not cut, on a batch of arrays: as `Objective.loss`."""
    moved = on_device(batch, device)
    return objective.loss(model.layers(model.embed(moved), moved), moved, loss_scales)


def rows(batch: AnyBatch, part: slice) -> AnyBatch:
    arrays = {each.name: getattr(batch, each.name) for each in fields(batch) if each.init}
    return type(batch)(**{n: None if array is None else array[part] for n, array in arrays.items()})


def micro_batches(batch: AnyBatch, mesh: Mesh, size: int) -> list[AnyBatch]:
    """The part of a global batch that this rank's place along the batch axis gets."""
    first = mesh.batch.rank * size
    starts = range(first, batch.num_samples, size * mesh.batch.size)
    return [rows(batch, slice(start, start + size)) for start in starts]


# Tensors, lists or dictionaries of them.
assert_exact = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """The largest difference is within `tolerance` of the largest expected value, which is
    above zero."""
    error = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    assert 0 < scale < inf, f"{name} is not compared: it reaches {scale}"
    assert error <= tolerance * scale, f"{name} differs by {error:.3g} where it reaches {scale:.3g}"


def assert_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Relative for each parameter, but for the key biases, whose gradient is zero in theory: a
    constant added to all keys adds the same to all scores of a query."""
    assert actual.keys() == expected.keys()
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in actual.items():
        wanted = expected[name]
        if name.endswith("qkv.bias"):
            assert gradient[1].abs().max() <= tolerance * scale
            gradient, wanted = gradient[[0, 2]], wanted[[0, 2]]
        assert_relative(gradient, wanted, tolerance, name)


def live_tensors() -> list[Tensor]:
    """Those of this process that have memory; a compiler's have none."""
    while gc.collect():  # what an object lets go is found the next time
        pass
    return [
        each for each in gc.get_objects() if issubclass(type(each), Tensor) and has_memory(each)
    ]


def has_memory(tensor: Tensor) -> bool:
    try:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of a fake or functional tensor
        return False


def live_memories() -> dict[int, int]:
    """{address: bytes} of the memory of all tensors of this process, each memory once."""
    found = (each.untyped_storage() for each in live_tensors())
    return {memory.data_ptr(): memory.nbytes() for memory in found}


class Watch(TorchDispatchMode):
    """Shows `see` each operator inside, its arguments and its result."""

    def __init__(self, see: Callable[[Any, Sequence[Any], Any], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.see(function, args, result)
        return result


class Communication(Watch):
    """Records (collective, shape) of all that goes over the process groups inside."""

    def __init__(self) -> None:
        super().__init__(self.record)
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def record(self, function: Any, args: Sequence[Any], result: object) -> None:
        if function.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.calls.append((function.overloadpacket.__name__, tuple(tensors[0].shape)))
