"""Converts checkpoints of the PyTorch tutorial "Train your large model on multiple GPUs with tensor
parallelism" to checkpoints of this project and back, so that a run resumes in the other program.

    python tools/convert_dcp.py import --from checkpoint-dist --to checkpoints --vocab-file
        bpe_50K.json --global-batch-size 32
    python tools/convert_dcp.py export --from checkpoints --to checkpoint-dist

Weights, Adam's moments, the learning rate schedule and the position in the data are converted.
Input is a folder that torch.distributed.checkpoint saved from {"model": ..., "optimizer": ...} on
any number of processes, of plain tensors or DTensors, the optimizer's state by position or name,
with lrscheduler.pt; tools/convert/tutorial.py lists its entries. Pickles in it are read as data:
nothing that they name is imported or run. An export's metadata is a pickle, by torch's own save.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.resume import arguments_of, find_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.launch import interruptible
from megatron.config.model import LlamaConfig
from megatron.config.parse import parse_call, user_errors
from megatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.errors import UsageError, flag
from megatron.models.registry import config_of
from tools.convert.llama import LLAMA
from tools.convert.staging import refuse_existing, staged
from tools.convert.tutorial import (
    MOMENTS,
    Saved,
    Schedule,
    read_tutorial,
    section_of,
)
from tools.convert.vocabulary import NoTokenizer

if TYPE_CHECKING:
    from torch import Tensor

Source = Annotated[Path, tyro.conf.arg(name="from")]
Vocabulary = Annotated[str | None, tyro.conf.arg(aliases=["--tokenizer-model"])]
Precision = Literal["fp32", "bf16", "pure-bf16"]
# Flags to train on data as the tutorial does.
DATA = shlex.split("--pad --no-shuffle --begin-token [BOT] --end-token [EOT] --split 1,0,0")
# The tutorial's settings, used if neither a flag nor the checkpoint gives them.
TUTORIAL = {
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_warmup_iters": 1000,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
}
# Settings that are the same in every folder of the tutorial.
FORM = {"lr_decay_style": "cosine", "decoupled_weight_decay": True, "decay_biases_and_norms": True}


def import_checkpoint(
    source: Source,
    to: Path,
    global_batch_size: int,
    vocab_file: Vocabulary = None,
    no_tokenizer: bool = False,
    scheduler: Path | None = None,
    dtype: Precision | None = None,
    num_attention_heads: int | None = None,
    rotary_base: float = 10_000.0,
    max_position_embeddings: int | None = None,
    layernorm_epsilon: float = 1e-5,
) -> None:
    """Make a checkpoint from one of the tutorial's, for --load of pretrain.py --model llama.

    Args:
        source: folder that the script saved, with .metadata and .distcp files.
        to: directory of the checkpoint; must not exist.
        global_batch_size: samples per step of the script, over all processes; with the number of
            steps it gives the position in the data.
        vocab_file: the tokenizer (bpe_50K.json, or a folder with a tokenizer.json).
        no_tokenizer: import without a tokenizer. Programs that read text then need its file, and
            can check only its size.
        scheduler: the scheduler's file; by default the only one in the folder.
        dtype: precision of the resumed run; bf16 has moments and masters in fp32, pure-bf16 moments
            in bf16 and no masters. By default that of the folder.
        num_attention_heads: heads of the queries; those of keys and values follow from k_proj. By
            default derived from the rotary buffers; without these, 12 if hidden is 768.
        rotary_base: base of the rotary frequencies.
        max_position_embeddings: the longest sequence that the model can read; by default the
            length of the rotary buffers, or else 2048.
        layernorm_epsilon: added to the mean square in RMSNorm.
    """
    refuse_existing(to)
    if global_batch_size < 1:
        name = "--global-batch-size"
        raise UsageError(name, global_batch_size, "above 0", works=(name, "32"))
    saved = read_tutorial(source, scheduler)
    section = section_of(
        saved,
        num_attention_heads=num_attention_heads,
        rotary_base=rotary_base,
        max_position_embeddings=max_position_embeddings,
        layernorm_epsilon=layernorm_epsilon,
    )
    tokenizer = find_tokenizer(vocab_file, no_tokenizer, saved.vocab_size)
    precision = dtype or precision_of(saved)

    from tools.convert.writing import Progress, check_weights, tell, write_checkpoint

    tensors = read_tensors(saved, section, precision)
    weights = {name: each for (kind, name), each in tensors.items() if kind == "model"}
    others = {key: each for key, each in tensors.items() if key[0] != "model"}
    progress = Progress(
        updates=saved.updates,
        samples=saved.updates * global_batch_size,
        tensors={f"{kind}.{name}": each for (kind, name), each in others.items()},
        config={
            "optimizer": saved.settings,
            "precision": {"pure_bf16": precision == "pure-bf16"},
            "data": {"pad": True, "shuffle": False},
        },
    )
    path = write_checkpoint(
        to,
        section,
        weights,
        saved.vocab_size,
        tokenizer,
        f"torch.distributed.checkpoint {source}",
        lambda staged: check_weights(staged, weights, str(source)),
        progress=progress,
    )
    settings = saved.settings | {
        "global_batch_size": global_batch_size,
        "seq_length": min(512, section.max_position_embeddings),
    }
    given = [word for name, value in settings.items() for word in arguments_of(flag(name), value)]
    tell(source, path, section, [*given, *DATA])
    print(f"it is behind {saved.updates} updates and {progress.samples} samples")


def find_tokenizer(
    vocab_file: str | None, no_tokenizer: bool, vocab_size: int
) -> Tokenizer | NoTokenizer:
    """The tokenizer of the flags. Raises UsageError if it has more than vocab_size ids."""
    if no_tokenizer and vocab_file is not None:
        works = ("--vocab-file", vocab_file)
        raise UsageError("--no-tokenizer", None, "left out beside --vocab-file", works=works)
    if no_tokenizer:
        return NoTokenizer(kind=HuggingFaceTokenizer.kind)
    if vocab_file is None:
        raise UsageError("--vocab-file", None, "given", works=("--no-tokenizer",))
    tokenizer = HuggingFaceTokenizer(vocab_file)
    if tokenizer.vocab_size > vocab_size:
        allowed = f"a tokenizer of at most the model's {vocab_size} ids, not {tokenizer.vocab_size}"
        raise UsageError("--vocab-file", vocab_file, allowed, works=("--no-tokenizer",))
    return tokenizer


def precision_of(saved: Saved) -> Precision:
    """The precision of the folder's weights and moments. Raises UsageError if weights have several
    dtypes, or one that is not supported here."""
    found = sorted({item.dtype for item in saved.weights.values()})
    known: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}
    if len(found) > 1 or found[0] not in known:
        allowed = f"given, as the weights are {' and '.join(found)}"
        raise UsageError("--dtype", None, allowed, works=("--dtype", "fp32"))
    moments = {item.dtype for each in saved.moments.values() for item in each.values()}
    return "pure-bf16" if moments == {"bfloat16"} else known[found[0]]


def read_tensors(
    saved: Saved, section: LlamaConfig, precision: Precision
) -> dict[tuple[str, str], Tensor]:
    """{(kind, our name): whole tensor} for all tensors of a checkpoint: weights, moments, masters.
    Raises ValueError, naming the entry, if a shape differs from the model's, or a tensor is not
    finite."""
    import torch
    from tqdm import tqdm

    from megatron.train.state import DTYPES
    from tools.convert.weights import resolve

    entries = resolve(LLAMA, section, saved.vocab_size)
    for entry in entries:
        for name, shape in zip(entry.theirs, entry.their_shapes(), strict=True):
            if (found := saved.weights[name].shape) != shape:
                raise ValueError(
                    f"{saved.folder}: {name} is {list(found)}, and {list(shape)} by the other "
                    "tensors"
                )
    check_rotary(saved, section)
    weight_dtype = DTYPES[precision.removeprefix("pure-")]
    moment_dtype = weight_dtype if precision == "pure-bf16" else torch.float32
    tensors: dict[tuple[str, str], Tensor] = {}
    for entry in tqdm(entries, "reading", unit=" tensors"):
        for kind in ("weight", *MOMENTS):
            items = saved.weights if kind == "weight" else saved.moments.get(kind, {})
            if not items:
                whole = torch.zeros(entry.spec.shape)  # an optimizer before its first step
            else:
                parts = [items[name].tensor().float() for name in entry.theirs]
                whole = entry.transform.to_ours(parts, entry.spec.shape)
            if not whole.isfinite().all():
                raise ValueError(f"{saved.folder}: {kind} of {entry.theirs[0]} is not finite")
            if kind != "weight":
                tensors[kind, entry.ours] = whole.to(moment_dtype)
                continue
            tensors["model", entry.ours] = whole.to(weight_dtype)
            if weight_dtype != moment_dtype:
                tensors["master", entry.ours] = whole
    return tensors


def check_rotary(saved: Saved, section: LlamaConfig) -> None:
    """Raise UsageError if the rotary buffers are not those of the model."""
    import torch

    from megatron.parallel.layers_llama import RotaryEmbedding

    frequencies = RotaryEmbedding(section.head_size, base=section.rotary_base).frequencies
    angles = torch.outer(torch.arange(section.max_position_embeddings), frequencies).repeat(1, 2)
    for key, item in saved.rotary.items():
        if len(item.shape) == 2 and (end := key.rpartition(".")[2]) in ("cos", "sin"):
            theirs, ours = item.tensor(), angles[:, : item.shape[1]]
            # Position, frequency, their product and the result are each rounded, by half of eps:
            # in bf16 high frequencies are soon lost, and low ones determine the base. Ours are
            # fp32, and powers on other machines differ from ours in the last digits.
            eps = torch.finfo(theirs.dtype).eps + 4 * torch.finfo(torch.float32).eps
            error = (theirs.float() - getattr(ours, end)()).abs()
            if not (error <= eps * (0.5 + 1.5 * ours)).all():
                allowed = f"that of {key} in {saved.folder}, which is not scaled"
                raise UsageError("--rotary-base", section.rotary_base, allowed)


def export_checkpoint(
    source: Source,
    to: Path,
    lr: float | None = None,
    min_lr: float | None = None,
    lr_warmup_iters: int | None = None,
    lr_warmup_init: float | None = None,
    train_iters: int | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    state_keys: Literal["place", "name"] = "place",
) -> None:
    """Make a folder that the tutorial's script loads from a checkpoint of a Llama.

    Settings of the optimizer and its schedule default to those of the run that saved the
    checkpoint, or else to the tutorial's.

    Args:
        source: directory of checkpoints (the newest is used), or one of them.
        to: folder to make; must not exist.
        lr: highest learning rate.
        min_lr: learning rate at the end.
        lr_warmup_iters: number of warm-up steps.
        lr_warmup_init: learning rate of the first step; 0.1 x --lr in the tutorial.
        train_iters: number of steps of the whole run, at whose end the cosine ends.
        dtype: dtype of all tensors; by default that of the checkpoint's masters, or else of its
            weights.
        state_keys: keys of the optimizer's state: place, as in optimizer.state_dict(), or name, as
            in torch.distributed.checkpoint.state_dict.get_state_dict.
    """
    refuse_existing(to)
    start = find_start(CheckpointConfig(load=str(source)), "--from")

    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.mesh import serial_mesh
    from megatron.train.state import DTYPES
    from tools.convert.tutorial_export import read_tensors as read_ours
    from tools.convert.tutorial_export import write_tutorial

    checkpoint, passed_over = newest_whole(start.folders, serial_mesh(), "--from")
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    manifest = checkpoint.manifest
    section = llama_of(manifest, checkpoint.path)
    counters, configs = manifest["counters"], manifest["config"]
    run = configs.get("optimizer", {})
    known = TUTORIAL | {name: value for name, value in run.items() if value is not None}
    known.setdefault("lr_decay_iters", configs.get("training", {}).get("train_iters"))
    known.setdefault("lr_warmup_init", 0.1 * known["lr"])
    if lr is not None:  # the warm-up starts at the same fraction of it
        known["lr_warmup_init"] *= lr / known["lr"]
    given = {
        "lr": lr,
        "min_lr": min_lr,
        "lr_warmup_iters": lr_warmup_iters,
        "lr_warmup_init": lr_warmup_init,
        "lr_decay_iters": train_iters,
    }
    known |= {name: value for name, value in given.items() if value is not None}
    schedule = Schedule(
        **{name: known[name] for name in Schedule.__dataclass_fields__ if name != "updates"},
        updates=counters["step"] - counters["skipped"],
    )
    check_schedule(schedule)
    for name, value in FORM.items():
        if run.get(name, value) != value:
            words = (" ".join(arguments_of(flag(name), each)) for each in (run[name], value))
            warnings.warn("the run has {}, and the folder {}".format(*words), stacklevel=2)
    if run.get("lr_warmup_init", 0) is None and lr_warmup_init is None:
        first = f"the folder begins at {schedule.lr_warmup_init:g}; --lr-warmup-init sets it"
        warnings.warn(f"the run's warm-up is without --lr-warmup-init, and {first}", stacklevel=2)
    adamw = {
        "betas": (known["adam_beta1"], known["adam_beta2"]),
        "eps": known["adam_eps"],
        "weight_decay": known["weight_decay"],
    }
    tensors = read_ours(checkpoint, section, None if dtype is None else DTYPES[dtype])
    with staged(to) as staging:
        write_tutorial(staging, section, tensors, schedule, adamw, by_name=state_keys == "name")
    print(f"exported {checkpoint.path} as {to}, behind {schedule.updates} updates")
    print(
        f"its learning rate: {schedule.lr_warmup_init:g} to {schedule.lr:g} in "
        f"{schedule.lr_warmup_iters} updates, by a cosine to {schedule.min_lr:g} at "
        f"{schedule.lr_decay_iters}"
    )
    if len(tensors) == 1:
        print("it has no moments: the checkpoint holds weights alone")


def llama_of(manifest: Any, path: Path) -> LlamaConfig:
    """The config of a checkpoint of a Llama like the tutorial's. Raises UsageError for any other
    checkpoint."""
    if "config" not in manifest:
        allowed = "a checkpoint that says what model it holds, as those of pretrain.py"
        raise UsageError("--from", path, allowed)
    if manifest["kind"] != "llama":
        raise UsageError("--from", path, f"a checkpoint of a llama, not of a {manifest['kind']}")
    section: LlamaConfig = config_of(manifest)
    for name, wanted in (
        ("untie_embeddings_and_output_weights", True),
        ("activation", "swiglu"),
        ("rope_scaling", None),
        ("layernorm_epsilon", 1e-5),
    ):
        if (value := getattr(section, name)) != wanted:
            theirs, ours = (" ".join(arguments_of(flag(name), each)) for each in (wanted, value))
            allowed = f"of a model with {theirs or f'no {flag(name)}'}, not {ours}"
            raise UsageError("--from", path, allowed)
    return section


def check_schedule(schedule: Schedule) -> None:
    """Raise UsageError if torch's SequentialLR has no such schedule."""
    lr, warmup, end = schedule.lr, schedule.lr_warmup_iters, schedule.lr_decay_iters
    if end is None or end < 2:
        works = ("--train-iters", "10000")
        raise UsageError("--train-iters", end, "given, and 2 or above", works=works)
    if not 0 < lr < inf:
        raise UsageError("--lr", lr, "above 0", works=("--lr", "0.001"))
    if not 0 <= schedule.min_lr <= lr:
        allowed = f"0 or above, and at most --lr {lr:g}"
        raise UsageError("--min-lr", schedule.min_lr, allowed, works=("--min-lr", "0"))
    if not 0 < warmup < end:
        allowed, works = f"above 0 and below --train-iters {end}", str(max(1, end // 10))
        raise UsageError("--lr-warmup-iters", warmup, allowed, works=("--lr-warmup-iters", works))
    if not 0 < schedule.lr_warmup_init <= lr:
        name, allowed = "--lr-warmup-init", f"above 0 and at most --lr {lr:g}"
        raise UsageError(name, schedule.lr_warmup_init, allowed, works=(name, f"{0.1 * lr:g}"))


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        commands = {"import": import_checkpoint, "export": export_checkpoint}
        parse_call(commands, arguments, environ)()


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
