"""The checkpoint that a run or another program starts from, and its tokenizer, checked against the
settings and against each other. Importing this needs no torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import resume
from megatron.checkpoint.format import Checkpoint
from megatron.config.checkpoint import CheckpointConfig, TrainedConfig
from megatron.config.model import HF_PREFIX, KindConfig, hf_files
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse_part
from megatron.config.pretrain import PretrainConfig
from megatron.data.tokenizer import (
    TOKENIZERS,
    Tokenizer,
    build_tokenizer,
    file_names,
    read_tokenizer,
)
from megatron.errors import UsageError, flag
from megatron.models.registry import config_of, find_kind, text_kinds

if TYPE_CHECKING:
    from megatron.parallel.mesh import Mesh
    from megatron.train.state import TrainState

# Fields of a model's config that belong to the present run, not to the checkpoint.
OF_A_RUN = {
    *("attention_dropout_rng", "cpu_offload_activations", "layernorm_impl"),
    *("make_vocab_size_divisible_by", "recompute_granularity"),
    *("hf_config", "plan", "plan_text", "random_weights"),
}


def open_model(
    load: str,
    parallel: ParallelConfig,
    world_size: int,
    kinds: Sequence[str] | None = None,
    given: str = "--load",
) -> tuple[Sequence[Path], dict[str, Any]]:
    """(the checkpoints of --load from the newest readable one on, its manifest): see open_trained,
    which also finds its tokenizer."""
    start = resume.find_start(CheckpointConfig(load=load), given)
    newest, passed_over = resume.newest_readable(start.folders, given)
    path, manifest = newest.path, newest.manifest
    for reason in passed_over:
        warnings.warn(f"passed over: {reason}", stacklevel=2)
    kind = manifest["kind"]
    if not (find_kind(kind, given).writes_text if kinds is None else kind in kinds):
        allowed = " or ".join(text_kinds() if kinds is None else kinds)
        raise UsageError(given, path, f"a model of the kind {allowed}, not {kind}")
    model = config_of(manifest)
    parallel.check_kind(model, given)
    parallel.check(world_size, model.widths)
    return start.folders[start.folders.index(path) :], manifest


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
    folders, manifest = open_model(config.load, parallel, world_size, kinds, given)
    path, kind = folders[0], config.tokenizer_type or manifest["config"]["data"]["tokenizer_type"]
    given_files = [file for file in (config.vocab_file, config.merge_file) if file is not None]
    tokenizer = tokenizer_in(path, manifest, kind) if not given_files else None
    if given_files:
        tokenizer = build_tokenizer(kind, config.vocab_file, config.merge_file)
    first, *others = map(flag, TOKENIZERS[kind].names)
    with_others = " with {}" * len(others)
    if tokenizer is None:
        allowed = f"given{with_others}, as {{}} holds no tokenizer"
        raise UsageError(first, None, allowed, *others, str(path))
    expected, fingerprint, wrong = manifest["tokenizer"], tokenizer.fingerprint, ""
    if expected not in ("", fingerprint):
        wrong = f"fingerprint {expected[:12]}, not {fingerprint[:12]}"
    if not expected and tokenizer.vocab_size > manifest["vocab_size"]:  # no tokenizer was imported
        wrong = f"at most {manifest['vocab_size']} ids, not {tokenizer.vocab_size}"
    if wrong:
        given_file = given_files[0] if given_files else f"in {path}"
        allowed = f"that of the model in {{}}{with_others}: {wrong}"
        raise UsageError(first, given_file, allowed, str(path), *others)

    # The end marks beside its weights: one or several eos_token_id.
    files = hf_files(path, HF_PREFIX, ("generation_config.json", "config.json"))
    of_model = manifest["config"]["model"].get("hf_config") or b"{}"  # of --hf-model
    marks = (json.loads(each).get("eos_token_id") for each in (*files.values(), of_model))
    ends: Any = next((each for each in marks if each is not None), [])
    ends = {*ends} if isinstance(ends, list) else {ends}
    tokenizer.more_ends = tuple(sorted(ends - {tokenizer.eod}))
    return folders, tokenizer, manifest


def tokenizer_in(path: Path, manifest: Mapping[str, Any], kind: str) -> Tokenizer | None:
    """The tokenizer of this kind in the checkpoint at `path`; None if it holds none."""
    has_files = set(file_names(kind)) <= manifest["files"].keys()
    return read_tokenizer(kind, path) if has_files else None


def saved_checkpoint(config: CheckpointConfig) -> Checkpoint | None:
    """The newest readable checkpoint that a run may start from; None if it starts from none. Raises
    UsageError as find_start does."""
    folders = resume.find_start(config).folders
    return resume.newest_readable(folders)[0] if folders else None


@dataclass
class SavedRun:
    """The settings in the newest checkpoint of --load, which is read once. kind: of the run's
    model."""

    kind: str
    environ: Mapping[str, str]
    model: Mapping[str, Any] | None = None
    """The model's config there, after `settings`; None without a checkpoint."""

    def settings(self, words: Sequence[str]) -> dict[str, Any]:
        """{key: value} of the model's config, and of the tokenizer's kind: settings that need no
        flag. words: flags with --load. Raises UsageError for a checkpoint of another kind, and as
        find_start does."""
        if not any(word.partition("=")[0] == "--load" for word in words):
            return {}
        checkpoint = saved_checkpoint(parse_part(CheckpointConfig, words, self.environ))
        if checkpoint is None:
            return {}
        manifest = checkpoint.manifest
        resume.require_kind(checkpoint.path, manifest, self.kind)
        names = [each.name for each in fields(resolve_name(find_kind(self.kind).config))]
        self.model = model = manifest["config"]["model"]
        settings = {name: model.get(name) for name in names if name not in OF_A_RUN}
        if "vocab_size" in names:
            settings["vocab_size"] = manifest["vocab_size"]
        if [word for word in words if word.endswith("mock-data")][-1:] != ["--mock-data"]:
            settings["tokenizer_type"] = manifest["config"].get("data", {}).get("tokenizer_type")
        return {key: value for key, value in settings.items() if value is not None}


def saved_tokenizer(config: CheckpointConfig) -> Tokenizer | None:
    """The tokenizer in `saved_checkpoint`; None without one."""
    checkpoint = saved_checkpoint(config) if config.load is not None else None
    if checkpoint is None:
        return None
    kind = checkpoint.manifest["config"].get("data", {}).get("tokenizer_type")
    return None if kind is None else tokenizer_in(checkpoint.path, checkpoint.manifest, kind)


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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run starts: at a checkpoint, or else at weights of another program, or else from
    scratch; the same on all ranks."""

    checkpoint: Checkpoint | None
    finetune: bool
    """Only the checkpoint's weights are taken."""
    weights: str | None
    """See `KindConfig.starts_from`."""
    messages: list[str]

    @property
    def resumed(self) -> Mapping[str, Any] | None:
        """The manifest of the checkpoint whose run continues; None for a new run."""
        return None if self.checkpoint is None or self.finetune else self.checkpoint.manifest

    def load(self, state: TrainState) -> list[str]:
        """Takes weights or all of the state from here; returns messages that say which."""
        from megatron.train.watch import note

        note("reading the checkpoint")
        if self.weights is not None:
            messages = state.load_folder(self.weights)
        elif self.checkpoint is None:
            messages = ["starting from scratch"]
        elif self.finetune:
            state.load_weights(self.checkpoint)
            messages = [f"starting at step 0 from the weights of {self.checkpoint.path}"]
        else:
            state.load(self.checkpoint)
            messages = [f"going on from {self.checkpoint.path}"]
        note("building the model")
        return messages


def find_origin(
    config: PretrainConfig,
    start: resume.Start,
    mesh: Mesh,
    identity: Mapping[str, Any],
    samples_in: Callable[[int], int],
) -> tuple[PretrainConfig, Origin]:
    """(the config with --epochs converted to steps from the checkpoint on, and with its --pure-bf16
    if no precision is given; the origin). The checkpoint is the newest of the first rank's `start`
    that every rank finds whole, byte for byte: over a network ranks may see other folders.

    identity: of the run's data, see check_start. samples_in: see Inputs. Raises UsageError, the
    same on every rank, if the checkpoint is of another run.
    """
    from megatron.checkpoint.load import newest_whole
    from megatron.parallel.agree import on_all_ranks
    from megatron.train.watch import note

    note("reading the checkpoint")
    start = mesh.control.gather(start)[0]
    checkpoint, passed_over = newest_whole(start.folders, mesh) if start.folders else (None, [])

    def resolve() -> tuple[PretrainConfig, str | None]:
        if checkpoint is None:
            return config.with_steps(samples_in, mesh.size()), config.model.starts_from()
        manifest, precision = checkpoint.manifest, config.precision
        if precision.name is None and not start.finetune:
            is_pure = manifest["config"].get("precision", {}).get("pure_bf16", False)
            precision = replace(precision, pure_bf16=is_pure)
        resolved = replace(config, precision=precision)
        resume.check_start(
            resolved, checkpoint.path, manifest, identity=identity, finetune=start.finetune
        )
        done = {"step": 0, "samples": 0} if start.finetune else manifest["counters"]
        resolved = resolved.with_steps(
            samples_in, mesh.size(), steps_done=done["step"], samples_done=done["samples"]
        )
        return resolved, None

    resolved, weights = on_all_ranks(mesh, resolve)
    note("building the model")
    return resolved, Origin(
        checkpoint=checkpoint,
        finetune=start.finetune,
        weights=mesh.control.gather(weights)[0],
        messages=[f"passed over: {reason}" for reason in passed_over],
    )


def changes_on_resume(
    manifest: Mapping[str, Any], facts: Mapping[str, Any], state: TrainState, zero_stage: int
) -> list[str]:
    """Messages: differences from the run that saved the checkpoint of this manifest. facts: of this
    run, as in its own manifests."""
    from megatron.train.machine import environment

    saved, now = manifest["environment"], environment(state.mesh)
    messages = resume.changes({**facts, "environment": now}, manifest, state.mesh.batch.size)
    affected = "the last bits may"
    if state.kernel_seed is not None:
        affected = "what the kernel of attention drops, and so every loss, will"
    messages += [
        f"warning: {name} is {now[name]}, and was {saved[name]} when the checkpoint was saved: "
        f"{affected} differ from those of an undisturbed run"
        for name in ("torch", "threads", "device", "layout")
        if saved[name] != now[name]
    ]
    parallel = manifest["config"].get("parallel", {})
    # The first checkpoints have a switch for ZeRO stage 1.
    saved_stage = int(parallel.get("use_distributed_optimizer", False))
    saved_stage = max(saved_stage, parallel.get("zero_stage", 0))
    if (saved_stage > 1) != (zero_stage > 1):
        messages.append(
            f"warning: --zero-stage is {zero_stage}, and was {saved_stage} when the checkpoint was "
            "saved: from 2 on micro-batches are summed in another order, so that last bits "
            "differ from those of an undisturbed run"
        )
    return messages


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
