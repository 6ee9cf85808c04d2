"""The checkpoint and the tokenizer of a trained model, checked against each other without torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.resume import find_start, newest_readable
from megatron.config.checkpoint import CheckpointConfig, TrainedConfig
from megatron.config.checks import UsageError
from megatron.config.model import ModelConfig
from megatron.config.training import ParallelConfig
from megatron.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)


def open_trained(
    section: TrainedConfig,
    parallel: ParallelConfig,
    world_size: int,
    kinds: Sequence[str] = (ModelConfig.kind,),
    given: str = "--load",
) -> tuple[Sequence[Path], Tokenizer, dict[str, Any]]:
    """The checkpoints of --load from the newest readable one on, its tokenizer and its manifest.

    kinds: of model that the program can use. given: the flag that names the checkpoint. The
    tokenizer is that of the flags, or else the checkpoint's own. Warns of checkpoints that are
    passed over. Raises ValueError without a checkpoint or where none is whole, where
    the model is of another kind or cannot be cut over the processes, and where the tokenizer is
    another one, or neither in the checkpoint nor given.
    """
    start = find_start(CheckpointConfig(load=section.load), given)
    newest, passed_over = newest_readable(start.folders, given)
    path, manifest = newest.path, newest.manifest
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    if (kind := manifest["kind"]) not in kinds:
        raise UsageError(given, path, f"a model of the kind {' or '.join(kinds)}, not {kind}")
    parallel.check(manifest["config"]["model"]["num_attention_heads"], world_size)
    tokenizer = _open_tokenizer(section, path, manifest)
    return start.folders[start.folders.index(path) :], tokenizer, manifest


def _open_tokenizer(section: TrainedConfig, path: Path, manifest: Mapping[str, Any]) -> Tokenizer:
    kind = section.tokenizer_type or manifest["config"]["data"]["tokenizer_type"]
    if section.vocab_file is not None or section.merge_file is not None:
        tokenizer = build_tokenizer(kind, section.vocab_file, section.merge_file)
        given = {"--vocab-file": section.vocab_file, "--merge-file": section.merge_file}
        files = " and ".join(f"{name} {file}" for name, file in given.items() if file is not None)
        _check_same(f"the tokenizer of {files}", tokenizer, path, manifest)
    elif missing := set(file_names(kind)) - manifest["files"].keys():
        raise ValueError(
            f"{path} holds no tokenizer ({' and '.join(sorted(missing))}); {file_flags(kind)}, of "
            "what the training data was made with, would work"
        )
    else:
        tokenizer = read_tokenizer(kind, path)
        _check_same(f"the tokenizer in {path}", tokenizer, path, manifest)
    return tokenizer


def _check_same(what: str, tokenizer: Tokenizer, path: Path, manifest: Mapping[str, Any]) -> None:
    trained_with = manifest["tokenizer"]
    if not trained_with:  # imported without a tokenizer
        if tokenizer.vocab_size != manifest["vocab_size"]:
            raise ValueError(
                f"{what} has {tokenizer.vocab_size} ids, but the model of {path} has "
                f"{manifest['vocab_size']}; the model's own tokenizer would work"
            )
        return
    if trained_with != tokenizer.fingerprint:
        raise ValueError(
            f"{what} is not the one that {path} was trained with: fingerprint "
            f"{tokenizer.fingerprint[:12]}, not {trained_with[:12]}; {file_flags(tokenizer.kind)} "
            "with what the training data was made with would work"
        )
