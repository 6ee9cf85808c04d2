"""Finds the files of Megatron-LM's checkpoints of 2019 and 2020, and reads each rank's contents.

    DIR/latest_checkpointed_iteration.txt               "250000", or "release"
    DIR/iter_0250000/mp_rank_00/model_optim_rng.pt      one file per model-parallel rank

A file is a dict. "model" has the weights of the rank, nested by module from 2020 on, before that
flat with dotted names. "args" (an argparse.Namespace) and "checkpoint_version" may be absent. The
optimizer and random states are not used here. Nothing in this file imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import UsageError
from tools.convert.torch_file import Placeholder, StoredTensor, read_saved

POINTER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"

# Modules that only contain others; 2019 and 2020 have different ones, and wrappers add "module".
HOLDERS = {"module", "language_model", "embedding", "transformer", "encoder"}
# Modules and parameters that a BERT has and a GPT-2 does not.
BERT = {"pooler", "lm_head", "binary_head", "tokentype_embeddings"}


@dataclass(frozen=True)
class Rank:
    """Contents of one model-parallel rank's file; tensors have the names of 2019."""

    file: Path
    tensors: Mapping[str, StoredTensor]
    args: Mapping[str, Any]
    version: float


def find_files(source: Path) -> list[Path]:
    """Files of all ranks. source: a --save directory, the folder of an iteration, or one file.

    Raises FileNotFoundError if there are none or one is missing, ValueError for other layouts.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UsageError("--from", source, "a file or directory that is there")
    folder = _iteration(source)
    names = sorted(path.name for path in folder.glob("mp_rank_*"))
    if not names:
        raise UsageError(
            "--from",
            folder,
            f"a folder that Megatron-LM wrote with --save, with mp_rank_00/{FILE} or {POINTER}",
        )
    if odd := [name for name in names if not re.fullmatch(r"mp_rank_\d\d", name)]:
        raise UsageError(
            "--from", folder, f"a checkpoint of --pipeline-model-parallel-size 1, without {odd[0]}"
        )
    count = int(names[-1].removeprefix("mp_rank_")) + 1
    files = [folder / f"mp_rank_{rank:02d}" / FILE for rank in range(count)]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing: {folder} has ranks up to {names[-1]}")
    return files


def _iteration(source: Path) -> Path:
    pointer = source / POINTER
    if not pointer.is_file():
        return source
    text = pointer.read_bytes()[:100].decode("latin1").strip()
    if text == "release":
        return source / text
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{pointer} says {text!r}; an iteration or 'release' would be right")
    return source / f"iter_{int(text):07d}"


def read_ranks(files: Sequence[Path]) -> list[Rank]:
    """Each file's contents without its weights; ValueError if one is no GPT-2 or ranks disagree."""
    ranks = [_read_rank(file) for file in files]
    first = ranks[0]
    for rank in ranks[1:]:
        if rank.version != first.version:
            raise ValueError(
                f"{rank.file} has checkpoint_version {rank.version:g}, {first.file} "
                f"{first.version:g}; all ranks of one checkpoint would work"
            )
        if odd := sorted(rank.tensors.keys() ^ first.tensors.keys()):
            raise ValueError(f"{rank.file} and {first.file} do not both have a tensor {odd[0]}")
    return ranks


def _read_rank(file: Path) -> Rank:
    content = read_saved(file)
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{file} has no weights under 'model'; {FILE} of Megatron-LM has")
    args = content.get("args")
    args = args.state if isinstance(args, Placeholder) else args
    version = content.get("checkpoint_version") or 0
    if not isinstance(version, int | float) or not (version in (0, 1) or version >= 2):
        raise ValueError(f"{file} has checkpoint_version {version!r}; 0, 1, 2 and 3 are known")
    tensors = _by_name(file, model)
    return Rank(file, tensors, args if isinstance(args, dict) else {}, version)


def _by_name(file: Path, model: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for full, value in _leaves(file, model):
        if bert := BERT.intersection(full.split(".")):
            raise ValueError(f"{file} is of a BERT, for it has a {bert.pop()}; a GPT-2 would work")
        name = _short(full)
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{file}: {full} is no tensor")
        if name in tensors:
            raise ValueError(f"{file} has {name} twice, once as {full}")
        value.check()
        tensors[name] = value
    return tensors


def _leaves(file: Path, model: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value that is not a dict."""
    waiting: list[tuple[str, Mapping[Any, Any]]] = [("", model)]
    seen: set[int] = set()
    while waiting:
        prefix, tree = waiting.pop()
        if id(tree) in seen:
            raise ValueError(f"{file} has {prefix:.100} twice: one dict stands in two places")
        seen.add(id(tree))
        for key, value in tree.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value


def _short(name: str) -> str:
    """language_model.encoder.layers.0.self_attention.dense.bias -> layers.0.attention.dense.bias"""
    parts = name.split(".")
    while parts and parts[0] in HOLDERS:
        parts.pop(0)
    return ".".join(parts).replace(".self_attention.", ".attention.")
