"""This project's side of the benchmarks of training steps: a case as its settings and batches."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import SEED, Case
from megatron.config.model import GPT2Config
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_on_meta
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import initial_value, sharding_specs
from megatron.train.state import DTYPES, TrainState, build_state


def model_section(case: Case) -> GPT2Config:
    return GPT2Config(
        num_layers=case.num_layers,
        hidden_size=case.hidden_size,
        num_attention_heads=case.heads,
        max_position_embeddings=case.sequence,
        make_vocab_size_divisible_by=case.divisible_by,
        layernorm_epsilon=case.epsilon,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        recompute_granularity="full" if case.checkpoint_activations else "none",
    )


def optimizer_section(case: Case) -> OptimizerConfig:
    return OptimizerConfig(
        weight_decay=case.weight_decay,
        adam_beta1=case.betas[0],
        adam_beta2=case.betas[1],
        adam_eps=case.adam_eps,
        clip_grad=case.clip_grad,
    )


def build(
    case: Case,
    mesh: Mesh,
    dtype: str,
    *,
    settings: Mapping[str, Any],
    compiled: bool = False,
    is_drawn_there: bool = False,
) -> TrainState:
    """dtype: a key of DTYPES. settings: of the model, in place of the case's. is_drawn_there:
    initial weights of the device's generator, which are there at once, but no peer has them."""
    state = build_state(
        replace(model_section(case), **settings),
        optimizer_section(case),
        PrecisionConfig(),
        mesh,
        case.vocab_size,
        seed=None if is_drawn_there else SEED,
        dtype=DTYPES[dtype],
        compiled=compiled,
    )
    if is_drawn_there:
        draw_there(state)
    return state


@torch.no_grad()
def draw_there(state: TrainState) -> None:
    torch.manual_seed(SEED)
    for view, own in state.optimizer.master_views():
        spec = view.spec
        if spec.std is None:
            own.fill_(spec.fill)
        else:
            own.normal_(0.0, spec.std)
        own[len(spec.real(own)) :] = 0  # padding
    state.optimizer.publish()


def initial_weights(case: Case) -> dict[str, Tensor]:
    """The whole parameters that `build` begins with, by name."""
    mesh = serial_mesh()
    model = build_on_meta(model_section(case), mesh, case.vocab_size)
    table = sharding_specs(model)
    return {name: initial_value(name, spec, SEED) for name, spec in table.items()}


def write_initial_weights(case: Case, file: Path) -> None:
    """As .npz, for a peer that cannot import this project."""
    np.savez(file, **{name: whole.numpy() for name, whole in initial_weights(case).items()})


def make_batch(case: Case, number: int) -> GPT2Batch:
    text, shape = case.text(number), (case.batch, case.sequence)
    return GPT2Batch(
        tokens=text[:, :-1].copy(),
        labels=text[:, 1:].copy(),
        loss_mask=np.ones(shape, np.float32),
        positions=np.broadcast_to(np.arange(shape[1]), shape).copy(),
        document_starts=None,
        numbers=np.arange(number * case.batch, (number + 1) * case.batch),
    )
