"""Converts checkpoints of the PyTorch tutorial "Train your large model on multiple GPUs with tensor
parallelism" to checkpoints of this project and back, so that a run resumes in the other program.

    python tools/convert_dcp.py import --from checkpoint-dist --output checkpoints \\
        --vocab-file bpe_50K.json --global-batch-size 32
    python tools/convert_dcp.py export --from checkpoints --output checkpoint-dist

Weights, Adam's moments, the learning rate schedule and the position in the data are converted.
Input is a folder that torch.distributed.checkpoint saved from {"model": ..., "optimizer": ...} on
any number of processes, of plain tensors or DTensors, the optimizer's state by position or name,
with lrscheduler.pt; tools/convert/legacy/dcp_tutorial.py lists its entries. Pickles in it are read
as data: nothing that they name is imported or run.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron.checkpoint.resume import arguments_of, find_start
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parse import parse_call, whole_program
from megatron.data.tokenizer import HuggingFaceTokenizer
from megatron.errors import UsageError, flag
from tools.convert.staging import refuse_existing, staged
from tools.convert.vocabulary import NoTokenizer

Source = Annotated[Path, tyro.conf.arg(name="from")]
Vocabulary = Annotated[str | None, tyro.conf.arg(aliases=["--tokenizer-model"])]

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
OPTIMIZER = {
    "lr_decay_style": "cosine",
    "decoupled_weight_decay": True,
    "decay_biases_and_norms": True,
}


def import_checkpoint(
    source: Source,
    output: Path,
    global_batch_size: int,
    vocab_file: Vocabulary = None,
    no_tokenizer: bool = False,
    scheduler: Path | None = None,
    dtype: Literal["fp32", "bf16", "pure-bf16"] | None = None,
    num_attention_heads: int | None = None,
    rotary_base: float = 10_000.0,
    max_position_embeddings: int | None = None,
    layernorm_epsilon: float = 1e-5,
) -> None:
    """Make a checkpoint from one of the tutorial's, for --load of pretrain.py --model llama.

    Args:
        source: folder that the script saved, with .metadata and .distcp files.
        output: directory of the checkpoint; must not exist.
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
    refuse_existing(output)
    if global_batch_size < 1:
        raise UsageError("--global-batch-size", global_batch_size, "above 0")
    if no_tokenizer and vocab_file is not None:
        works = ("--vocab-file", vocab_file)
        raise UsageError("--no-tokenizer", None, "left out beside --vocab-file", works=works)
    if not no_tokenizer and vocab_file is None:
        raise UsageError("--vocab-file", None, "given", works=("--no-tokenizer",))

    from tools.convert.legacy.dcp_tutorial import (
        llama_config,
        precision_of,
        read_tensors,
        read_tutorial,
    )
    from tools.convert.writing import Progress, check_weights, print_import, write_checkpoint

    saved = read_tutorial(source, scheduler)
    config = replace(
        llama_config(saved, num_attention_heads, max_position_embeddings),
        rotary_base=rotary_base,
        layernorm_epsilon=layernorm_epsilon,
    )
    tokenizer: HuggingFaceTokenizer | NoTokenizer = NoTokenizer(kind=HuggingFaceTokenizer.kind)
    if vocab_file is not None:
        tokenizer = HuggingFaceTokenizer(vocab_file)
        if (count := tokenizer.vocab_size) > saved.vocab_size:
            allowed = f"a tokenizer of at most the model's {saved.vocab_size} ids, not {count}"
            raise UsageError("--vocab-file", vocab_file, allowed, works=("--no-tokenizer",))
    precision = dtype or precision_of(saved)
    weights, state = read_tensors(saved, config, precision)
    progress = Progress(
        updates=saved.updates,
        samples=saved.updates * global_batch_size,
        tensors=state,
        config={
            "optimizer": saved.settings,
            "precision": {"pure_bf16": precision == "pure-bf16"},
            "data": {"pad": True, "shuffle": False},
        },
    )
    path = write_checkpoint(
        output,
        config,
        weights,
        saved.vocab_size,
        tokenizer,
        f"torch.distributed.checkpoint {source}",
        lambda folder: check_weights(folder, weights, str(source)),
        progress=progress,
    )
    settings = saved.settings | {
        "global_batch_size": global_batch_size,
        "seq_length": min(512, config.max_position_embeddings),
    }
    flags = [word for name, value in settings.items() for word in arguments_of(flag(name), value)]
    print_import(source, path, config, [*flags, *DATA])
    print(f"a run resumes after {saved.updates} updates and {progress.samples} samples")


def export_checkpoint(
    source: Source,
    output: Path,
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
        output: folder to make; must not exist.
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
    refuse_existing(output)
    start = find_start(CheckpointConfig(load=str(source)), "--from")

    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.mesh import serial_mesh
    from megatron.train.state import DTYPES
    from tools.convert.legacy.dcp_tutorial import (
        Schedule,
        check_schedule,
        exportable_config,
        load_tensors,
        write_tutorial,
    )

    checkpoint, passed_over = newest_whole(start.folders, serial_mesh(), "--from")
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    manifest = checkpoint.manifest
    config = exportable_config(checkpoint)
    run = manifest["config"].get("optimizer", {})
    training = manifest["config"].get("training", {})
    known = TUTORIAL | {name: value for name, value in run.items() if value is not None}
    known.setdefault("lr_decay_iters", training.get("train_iters"))
    known.setdefault("lr_warmup_init", 0.1 * known["lr"])
    if lr is not None:  # the warm-up starts at the same fraction of it
        known["lr_warmup_init"] *= lr / known["lr"]
    flags = {
        "lr": lr,
        "min_lr": min_lr,
        "lr_warmup_iters": lr_warmup_iters,
        "lr_warmup_init": lr_warmup_init,
        "lr_decay_iters": train_iters,
    }
    known |= {name: value for name, value in flags.items() if value is not None}
    updates = manifest["counters"]["step"] - manifest["counters"]["skipped"]
    schedule = Schedule(**{name: known[name] for name in flags}, updates=updates)
    check_schedule(schedule)
    for name, value in OPTIMIZER.items():
        if run.get(name, value) != value:
            ours, theirs = (" ".join(arguments_of(flag(name), each)) for each in (run[name], value))
            warnings.warn(f"the run has {ours}, and the folder {theirs}", stacklevel=2)
    if run.get("lr_warmup_init", 0) is None and lr_warmup_init is None:
        warnings.warn(
            "the run's warm-up is without --lr-warmup-init, and the folder begins at "
            f"{schedule.lr_warmup_init:g}; --lr-warmup-init sets it",
            stacklevel=2,
        )
    adamw = {
        "betas": (known["adam_beta1"], known["adam_beta2"]),
        "eps": known["adam_eps"],
        "weight_decay": known["weight_decay"],
    }
    tensors = load_tensors(checkpoint, config, None if dtype is None else DTYPES[dtype])
    with staged(output) as staging:
        write_tutorial(staging, config, tensors, schedule, adamw, by_name=state_keys == "name")
    print(f"exported {checkpoint.path} as {output}, after {schedule.updates} updates")
    print(
        f"its learning rate: {schedule.lr_warmup_init:g} to {schedule.lr:g} in "
        f"{schedule.lr_warmup_iters} updates, by a cosine to {schedule.min_lr:g} at "
        f"{schedule.lr_decay_iters}"
    )
    if len(tensors) == 1:
        print("it has no moments: the checkpoint holds weights alone")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with whole_program(environ):
        commands = {"import": import_checkpoint, "export": export_checkpoint}
        parse_call(commands, arguments, environ)()


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
