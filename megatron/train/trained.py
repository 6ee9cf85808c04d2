"""The checkpoint and the tokenizer of a trained model, checked against each other without torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.resume import find_start, newest_readable, require_kind
from megatron.config.checkpoint import CheckpointConfig, TrainedConfig
from megatron.config.model import KEPT, KindConfig, beside
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse_part
from megatron.data.tokenizer import (
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from megatron.errors import UsageError
from megatron.models.registry import config_of, find_kind, text_kinds

# Fields of a model's config that belong to the present run, not to the checkpoint.
OF_A_RUN = {
    *("attention_dropout_rng", "cpu_offload_activations", "layernorm_impl"),
    *("make_vocab_size_divisible_by", "recompute_granularity"),
    *("hf_config", "plan", "plan_text", "random_weights"),
}


def open_trained(
    config: TrainedConfig,
    parallel: ParallelConfig,
    world_size: int,
    kinds: Sequence[str] | None = None,
    given: str = "--load",
) -> tuple[Sequence[Path], Tokenizer, dict[str, Any]]:
    """(the checkpoints of --load from the newest readable one on, its tokenizer, its manifest).

    kinds: kinds of model that the program can use; by default those that write text. given: the
    flag that names the checkpoint. The tokenizer is that of the flags, or else the checkpoint's
    own; its `ends` are the model's.
    Warns about checkpoints that are passed over. Raises ValueError if no checkpoint is whole, if
    its model is of another kind or cannot be sharded over the processes, or if the tokenizer is
    missing or another one.
    """
    start = find_start(CheckpointConfig(load=config.load), given)
    newest, passed_over = newest_readable(start.folders, given)
    path, manifest = newest.path, newest.manifest
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    kind, known = manifest["kind"], text_kinds() if kinds is None else kinds
    is_known = find_kind(kind, given).writes_text if kinds is None else kind in known
    if not is_known:
        allowed = f"a model of the kind {' or '.join(known)}, not {kind}"
        raise UsageError(given, path, allowed)
    model = config_of(manifest)
    parallel.check_kind(model, given)
    parallel.check(world_size, model.widths)

    kind = config.tokenizer_type or manifest["config"]["data"]["tokenizer_type"]
    files = [file for file in (config.vocab_file, config.merge_file) if file is not None]
    if files:
        tokenizer = build_tokenizer(kind, config.vocab_file, config.merge_file)
    elif (found_in := tokenizer_in(path, manifest, kind)) is not None:
        tokenizer = found_in
    else:
        raise UsageError(file_flags(kind), None, f"given, as {path} holds no tokenizer")
    expected, found, wrong = manifest["tokenizer"], tokenizer.fingerprint, ""
    if expected not in ("", found):
        wrong = f"fingerprint {expected[:12]}, not {found[:12]}"
    if not expected and tokenizer.vocab_size > manifest["vocab_size"]:  # no tokenizer was imported
        wrong = f"at most {manifest['vocab_size']} ids, not {tokenizer.vocab_size}"
    if wrong:
        allowed = f"that of the model in {path}: {wrong}"
        raise UsageError(file_flags(kind), " ".join(files) or f"in {path}", allowed)
    tokenizer.more_ends = tuple(sorted({*ends_beside(path, manifest)} - {tokenizer.eod}))
    return start.folders[start.folders.index(path) :], tokenizer, manifest


def tokenizer_in(path: Path, manifest: Mapping[str, Any], kind: str) -> Tokenizer | None:
    """The tokenizer of this kind in the checkpoint at `path`; None if it holds none."""
    has_files = set(file_names(kind)) <= manifest["files"].keys()
    return read_tokenizer(kind, path) if has_files else None


def saved_settings(kind: str, environ: Mapping[str, str], words: Sequence[str]) -> dict[str, Any]:
    """{key: value} of the model's config, and of the tokenizer's kind, from the newest checkpoint
    that --load in `words` provides: settings that need no flag.

    kind: of the model. Raises UsageError for a checkpoint of another kind, and as find_start does.
    """
    if not any(word.partition("=")[0] == "--load" for word in words):
        return {}
    if not (folders := find_start(parse_part(CheckpointConfig, words, environ)).folders):
        return {}
    checkpoint = newest_readable(folders)[0]
    manifest = checkpoint.manifest
    require_kind(checkpoint.path, manifest, kind)
    own = [each.name for each in fields(resolve_name(find_kind(kind).config))]
    found = {name: manifest["config"]["model"].get(name) for name in own if name not in OF_A_RUN}
    if "vocab_size" in own:
        found["vocab_size"] = manifest["vocab_size"]
    if [word for word in words if word.endswith("mock-data")][-1:] != ["--mock-data"]:
        found["tokenizer_type"] = manifest["config"].get("data", {}).get("tokenizer_type")
    return {key: each for key, each in found.items() if each is not None}


def saved_tokenizer(config: CheckpointConfig) -> Tokenizer | None:
    """The tokenizer of the newest checkpoint that a run may start from; None without one. Raises
    UsageError as find_start does."""
    folders = find_start(config).folders if config.load is not None else ()
    if not folders:
        return None
    newest = newest_readable(folders)[0]
    kind = newest.manifest["config"].get("data", {}).get("tokenizer_type")
    return None if kind is None else tokenizer_in(newest.path, newest.manifest, kind)


def files_beside(
    model: KindConfig, checkpoint: Checkpoint | None, identity: Mapping[str, Any]
) -> Mapping[str, bytes]:
    """{name: content} of the files that a run's checkpoints keep beside its model.

    checkpoint: the one that the run goes on from. identity: of the run's data, see check_start.
    Files beside a model with another tokenizer are left out, except for models of transformers,
    which have their own.
    """
    if checkpoint is None:
        return model.files(None)
    tokenizers = {checkpoint.manifest["tokenizer"], identity["tokenizer"]} - {""}
    is_kept = len(tokenizers) < 2 or model.is_unmodified
    return model.files(checkpoint.path if is_kept else None)


def ends_beside(path: Path, manifest: Mapping[str, Any]) -> list[int]:
    """The eos_token_id, one or several, of the generation_config.json that was beside the weights
    of the checkpoint at `path`, or else of their config.json."""
    kept = beside(path, KEPT, ("generation_config.json", "config.json"))
    of_model = manifest["config"]["model"].get("hf_config") or b"{}"  # of --hf-model
    found = (json.loads(each).get("eos_token_id") for each in (*kept.values(), of_model))
    ids: Any = next((each for each in found if each is not None), [])
    return ids if isinstance(ids, list) else [ids]


def begin_token_of(manifest: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """The token that began each text in training, as the vocabulary spells it; None without one.

    It is that of --begin-token or, for weights from elsewhere, the bos_token if their tokenizer
    puts it before each text.
    """
    given: str | None = manifest["config"].get("data", {}).get("begin_token")
    if given is not None or tokenizer.bos_id is None or "imported_from" not in manifest:
        return given
    marks = tokenizer.library.encode("", add_special_tokens=True).ids
    return str(tokenizer.library.id_to_token(marks[0])) if tokenizer.bos_id in marks[:1] else None


def begin_of(manifest: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The id of begin_token_of, or no id. Raises ValueError if the vocabulary lacks the token."""
    token = begin_token_of(manifest, tokenizer)
    return [] if token is None else [tokenizer.token_id(token)]
