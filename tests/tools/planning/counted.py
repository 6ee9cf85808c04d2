"""A step of the real model on rank 0 of ranks that are not there, and what it communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config.pretrain import PretrainConfig
from megatron.data.batch import Batch
from megatron.data.bert import BertBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.optim.adam import LossScaler
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.train.state import DTYPES, TrainState
from tools.planning.shape import Shape

META = torch.device("meta")
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "broadcast", "reduce", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
)  # fmt: skip


@contextmanager
def fake_ranks(world: int, tensor: int, device: torch.device = META) -> Iterator[Mesh]:
    """Rank 0 of `world` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield replace(build_mesh({"tensor": tensor}, torch.device("cpu")), device=device)
    finally:
        dist.destroy_process_group()


class Traffic:
    """Calls and bytes of the collectives by axis and phase, as torch.distributed is asked for them.

    phase: agreement, forward, or backward with recomputation.
    """

    def __init__(self, mesh: Mesh, patch: pytest.MonkeyPatch) -> None:
        self.axes = {axis.group: axis.name for axis in (mesh.tensor, mesh.data) if axis.size > 1}
        self.phase = "agreement"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        patch.setattr(dist, "all_reduce", self.all_reduce)
        for name in COLLECTIVES[1:]:
            patch.setattr(dist, name, self._refuse)

    def all_reduce(self, x: torch.Tensor, op: Any = None, group: Any = None,
                   async_op: bool = False) -> Any:  # fmt: skip
        key = self.axes[group], self.phase
        self.calls[key] += 1
        self.bytes[key] += x.numel() * x.element_size()
        return SimpleNamespace(wait=lambda: None) if async_op else None

    def follow(self, model: Any) -> None:
        """Set the phase when the stages of the model begin and end."""
        embed, loss = model.embed, model.loss

        def first(batch: Any) -> Any:
            self.phase = "forward"
            return embed(batch)

        def last(*arguments: Any) -> Any:
            result = loss(*arguments)
            self.phase = "backward"
            return result

        model.embed, model.loss = first, last

    def _refuse(self, *arguments: Any, **named: Any) -> None:
        raise AssertionError("a collective that the plan does not know")


def meta_state(config: PretrainConfig, mesh: Mesh, precision: str, vocab_size: int) -> TrainState:
    """All that a forward and backward pass needs, without memory; no optimizer."""
    model = build_model(config.model, mesh, vocab_size, seed=None, dtype=DTYPES[precision])
    nothing: Any = None
    return TrainState(
        mesh=mesh,
        model=model.train(),
        objective=model,
        gradients=GradientBuckets(model),
        optimizer=nothing,
        scaler=LossScaler(),
    )


def micro_batch(shape: Shape) -> Batch:
    """One of its size, in which a BERT predicts as many tokens as planned."""
    size = (shape.batch, shape.sequence)
    tokens = np.zeros(size, np.int64)
    if shape.kind == "gpt2":
        return GPT2Batch(
            tokens=tokens,
            labels=tokens,
            loss_mask=np.ones(size, np.float32),
            positions=np.broadcast_to(np.arange(shape.sequence), size).copy(),
            document_starts=None,
            numbers=np.arange(shape.batch),
        )
    mask = np.zeros(shape.tokens, np.float32)
    mask[: shape.predicted] = 1
    return BertBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=mask.reshape(size),
        token_types=tokens,
        is_real=np.ones(size, bool),
        is_swapped=np.zeros(shape.batch, np.int64),
        numbers=np.arange(shape.batch),
    )
