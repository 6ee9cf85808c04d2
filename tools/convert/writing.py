"""A checkpoint of weights that this project did not train."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.checks import flag
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.data.tokenizer import Tokenizer
from megatron.model.gpt2 import GPT2
from megatron.optim.loss_scaler import LossScaler
from megatron.parallel.kit import kit_1d
from megatron.parallel.layout import layouts
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.random import RandomStreams
from megatron.train.checkpoint import Piece, save
from megatron.train.start import environment
from megatron.train.state import DTYPES
from tools.convert.staging import staged


def empty_model(section: ModelConfig, vocab_size: int) -> GPT2:
    """The model uncut and without memory, for its names, shapes and layouts."""
    mesh = serial_mesh()
    with torch.device("meta"):
        return GPT2(section, kit_1d(mesh, RandomStreams(0, mesh)), vocab_size)


def write_checkpoint(
    to: Path,
    section: ModelConfig,
    weights: Mapping[str, Tensor],
    vocab_size: int,
    tokenizer: Tokenizer,
    imported_from: str,
    check: Callable[[Path], object],
) -> Path:
    """Write TO/step_00000000 and TO/latest, a checkpoint of weights alone; returns the former.

    weights: every parameter whole, by its name in this project; one dtype of DTYPES, which is
    kept. imported_from: kept in the manifest for whoever reads it. check: is called with the folder
    of the staged checkpoint, and raises where it should not come to be; then nothing of it is left.
    Raises FileExistsError where `to` is there, OSError where it cannot be written.
    """
    table = layouts(empty_model(section, vocab_size))
    assert weights.keys() == table.keys(), f"not the model's: {weights.keys() ^ table.keys()}"
    for name, layout in table.items():
        assert weights[name].shape == layout.shape, f"{name}: {weights[name].shape}"
    (dtype,) = {weight.dtype for weight in weights.values()}
    facts = {
        **_facts_of_no_run(section, dtype),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "imported_from": imported_from,
    }
    pieces = [Piece(f"model.{name}", table[name], weights[name]) for name in table]
    with staged(to) as staging:
        path = save(staging, 0, pieces, facts, serial_mesh(), tokenizer.files)
        check(path)
    return to / path.name


def tell(source: str | Path, path: Path, section: ModelConfig) -> None:
    """Say what was imported, and how to train on from it."""
    shape = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    flags = " ".join(f"{flag(name)} {getattr(section, name)}" for name in shape)
    if section.layernorm_epsilon != ModelConfig.layernorm_epsilon:
        flags += f" --layernorm-epsilon {section.layernorm_epsilon}"
    print(f"imported {source} as {path}")
    print(f"to train on from it: pretrain_gpt2.py --finetune --load {path.parent} {flags} ...")


def _facts_of_no_run(section: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What the manifests of a run say of it, of one that has made no step and read no data."""
    data = DataConfig(seq_length=section.max_position_embeddings)
    scaler = LossScaler.of(PrecisionConfig(), dtype)
    return {
        "config": {"model": asdict(section), "data": asdict(data)},
        "precision": next(name for name, wide in DTYPES.items() if wide == dtype),
        "data": [],
        "run": secrets.token_hex(8),
        "weights_of": None,
        "counters": {"step": 0, "samples": 0, "skipped": 0, "loss_scaler": scaler.counters()},
        "environment": environment(serial_mesh()),
        "validation_loss": None,
    }
