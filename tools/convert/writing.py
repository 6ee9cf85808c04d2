"""Writes a checkpoint of weights trained elsewhere, or of a run of another program."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.load import verify
from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import (
    HF_PREFIX,
    BertConfig,
    FinetunedConfig,
    ModelConfig,
    TextModelConfig,
)
from megatron.config.training import PrecisionConfig
from megatron.data.tokenizer import Tokenizer
from megatron.models.build import build_on_meta
from megatron.models.registry import KINDS
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import TensorSlice, sharding_specs
from megatron.train.evaluate import load_model, whole_logits
from megatron.train.machine import environment
from megatron.train.state import DTYPES
from tools.convert.staging import staged
from tools.convert.vocabulary import NoTokenizer


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a run of another program that resumes here.

    tensors: the optimizer's, whole, by their keys in a checkpoint: exp_avg.NAME, exp_avg_sq.NAME
    and, for weights in half precision, master.NAME. config: known settings by part of a
    PretrainConfig and field; a resumed run is compared with them.
    """

    updates: int
    samples: int
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Mapping[str, Any]]


def write_checkpoint(
    to: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    vocab_size: int,
    tokenizer: Tokenizer | NoTokenizer,
    imported_from: str,
    check: Callable[[Path], object],
    kept: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write TO/step_XXXXXXXX and TO/latest, a checkpoint of weights only at step 0, or of a run if
    `progress` is given; returns the path of the former.

    weights: every parameter, whole, by its name in this project; all of one dtype of DTYPES, which
    is kept. imported_from: recorded in the manifest for readers. check: called with the folder of
    the staged checkpoint; if it raises, nothing of the checkpoint remains. kept: files that
    accompanied the weights, by name; an export writes them, too.
    Raises UsageError if `to` exists, OSError if it cannot be written.
    """
    specs = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    assert weights.keys() == specs.keys(), f"not the model's: {weights.keys() ^ specs.keys()}"
    for name, spec in specs.items():
        assert weights[name].shape == spec.shape, f"{name}: {weights[name].shape}"
    (dtype,) = {weight.dtype for weight in weights.values()}
    data = resolve_name(KINDS[config.kind].data)()
    if isinstance(config, TextModelConfig):
        data = replace(
            data, seq_length=config.max_position_embeddings, tokenizer_type=tokenizer.kind
        )
    loss_scaler = LossScaler.of(PrecisionConfig(), dtype).counters()
    # The facts of a run that has made no step and read no data.
    facts: dict[str, Any] = {
        "kind": config.kind,
        "config": {"model": asdict(config), "data": asdict(data)},
        "precision": next(name for name, each in DTYPES.items() if each == dtype),
        "data": [],
        "run": secrets.token_hex(8),
        "weights_of": None,
        "counters": {"step": 0, "samples": 0, "skipped": 0, "loss_scaler": loss_scaler},
        "environment": environment(serial_mesh()),
        "validation_loss": None,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "imported_from": imported_from,
    }
    slices = [TensorSlice(f"model.{name}", specs[name], weights[name]) for name in specs]
    step = 0
    if progress is not None:
        step = progress.updates
        facts["counters"] |= {"step": step, "samples": progress.samples}
        for part, known in progress.config.items():
            facts["config"][part] = facts["config"].get(part, {}) | known
        for key, tensor in progress.tensors.items():
            slices.append(TensorSlice(key, specs[key.partition(".")[2]], tensor))
    with staged(to) as staging:
        files = {f"{HF_PREFIX}{name}": content for name, content in (kept or {}).items()}
        files |= tokenizer.files
        path = save_checkpoint(staging, step, slices, facts, serial_mesh(), files).path
        check(path)
    return to / path.name


def check_weights(path: Path, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise ValueError if the checkpoint at `path` has other weights, or its logits are not finite.
    source: for messages, the model that was imported."""
    mesh = serial_mesh()
    checkpoint = verify(path, mesh)
    loaded = load_model(checkpoint, mesh)
    for name, parameter in loaded.named_parameters():
        whole = weights[name].float()
        if not torch.equal(parameter[: len(whole)], whole):
            raise ValueError(f"{name} does not read back as it was written, or holds NaN")
    manifest = checkpoint.manifest
    length = min(32, manifest["config"]["model"]["max_position_embeddings"])
    tokens = torch.linspace(0, manifest["vocab_size"] - 1, 2 * length).long().view(2, length)
    if not whole_logits(loaded, mesh, tokens).isfinite().all():
        raise ValueError(f"the model of {source} computes logits that are not finite")


TASKS = {"choice": "RACE", "span": "SQUAD"}  # {head: task}


def print_import(
    source: str | Path, path: Path, config: ModelConfig, given: Sequence[str] = ("--finetune",)
) -> None:
    """Print what was imported, and the command that trains from it. given: flags in addition to
    --load, which provides model and tokenizer."""
    print(f"imported {source} as {path}")
    if KINDS[config.kind].program is not None:
        data = resolve_name(KINDS[config.kind].data)()
        packed = "P_text_sentence" if isinstance(config, BertConfig) else "P_text_document"
        sizes: list[tuple[str, Any]] = [("--data-path", "FOLDER")]  # of images
        if isinstance(config, TextModelConfig):
            length = min(data.seq_length, config.max_position_embeddings)
            files = "documents.jsonl" if "--pad" in given else packed
            sizes = [("--data-path", files), ("--seq-length", length)]
        words = ["python", "pretrain.py", "--model", config.kind, *given, "--load", path.parent]
        for name, value in (
            *sizes,
            ("--train-iters", 1000),
            ("--save", f"{path.parent}_trained"),
        ):
            words += [] if name in given else [name, value]
        print(f"to train on from it: {shlex.join(map(str, words))}")
    if isinstance(config, FinetunedConfig) and config.head in TASKS:
        task = TASKS[config.head]
        print(f"to evaluate it: tasks/main.py --task {task} --load {path.parent} ...")
    elif isinstance(config, FinetunedConfig):
        task = f"one with the labels {', '.join(config.labels)}"
        print(f"to evaluate it: tasks/main.py --task NAME, {task}, with --load {path.parent} ...")
    elif isinstance(config, BertConfig):
        tasks = "MNLI, QQP, RACE or SQUAD"
        print(f"to fine-tune it: tasks/main.py --task {tasks} --load {path.parent} ...")
