"""Checkpoints of the script of the PyTorch tutorial "Train your large model on multiple GPUs with
tensor parallelism", to this project's and back: a Llama of its own classes, torch's AdamW, and a
SequentialLR, saved by torch.distributed.checkpoint.

    model.base_model.rotary_emb.cos, .sin              buffers [positions, head size]
    model.base_model.embed_tokens.weight
    model.base_model.layers.N.input_layernorm.weight, .self_attn.{q,k,v,o}_proj.weight,
                              .post_attention_layernorm.weight, .mlp.{gate,up,down}_proj.weight
    model.base_model.norm.weight
    model.lm_head.weight
    optimizer.state.KEY.{exp_avg,exp_avg_sq,step}      KEY: a parameter's position or its name
    optimizer.param_groups.0.{lr,betas,eps,...}
    lrscheduler.pt                                     torch.save(scheduler.state_dict())

Parameters are recognized by the ends of their names; any prefix may precede `embed_tokens` and
`layers`. KEY is the position in model.parameters() if the script saved optimizer.state_dict(). It
is the name if it saved that of torch.distributed.checkpoint.state_dict.get_state_dict; its
optimizer counts one step more than the scheduler if the first save came before the first step. The
number of updates is the scheduler's count, or without its file the optimizer's.

Files are read as data (see `pickles`). An export's .metadata and scheduler are pickles by torch's
own save, because the script's own loading requires it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from tqdm import tqdm

from megatron.checkpoint.format import Checkpoint
from megatron.checkpoint.resume import arguments_of
from megatron.config.model import LlamaConfig
from megatron.errors import UsageError, flag
from megatron.models import registry
from megatron.parallel.layers_llama import RotaryEmbedding
from megatron.train.state import DTYPES
from tools.convert.legacy.dcp_folder import METADATA, Item, read_folder
from tools.convert.legacy.pickles import Placeholder, SavedFile, read_pickle
from tools.convert.llama import LLAMA
from tools.convert.weights import read_parameters, resolve

Precision = Literal["fp32", "bf16", "pure-bf16"]

# The names of a layer in the order of the script's model.parameters().
LAYER = (
    "input_layernorm.weight",
    *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
    "post_attention_layernorm.weight",
    *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
)
PREFIX = "base_model."  # of all names but the head's
SCHEDULER = "lrscheduler.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
_NAME = re.compile(
    rf"(?:.*\.)?((?:layers\.\d+\.(?:{'|'.join(map(re.escape, LAYER))}))"
    r"|(?:embed_tokens|norm|lm_head)\.weight)"
)
_ROTARY = re.compile(r"(?:.*\.)?(?:rotary_emb\.\w+|cos|sin|inv_freq)")

# Settings that are the same in every model of the tutorial.
MODEL = {
    "untie_embeddings_and_output_weights": True,
    "activation": "swiglu",
    "rope_scaling": None,
    "layernorm_epsilon": 1e-5,
}


def names_of(num_layers: int) -> list[str]:
    """The names in the table LLAMA, in the order of the script's model.parameters()."""
    layers = [f"layers.{n}.{each}" for n in range(num_layers) for each in LAYER]
    return ["embed_tokens.weight", *layers, "norm.weight", "lm_head.weight"]


def count_layers(weights: Mapping[str, Any]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


@dataclass(frozen=True)
class Schedule:
    """A SequentialLR of a LinearLR and a CosineAnnealingLR. updates: number of updates so far."""

    lr: float
    min_lr: float
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_iters: int
    updates: int


@dataclass(frozen=True)
class Saved:
    """A folder of the script that was found consistent; none of its weights is read yet.

    weights: by name in LLAMA. moments: by kind, then by name; empty for an optimizer before its
    first step. rotary: the buffers. settings: known settings of the optimizer and its schedule, by
    field of OptimizerConfig. updates: number of updates of the weights so far.
    """

    folder: Path
    weights: Mapping[str, Item]
    moments: Mapping[str, Mapping[str, Item]]
    rotary: Mapping[str, Item]
    settings: Mapping[str, Any]
    updates: int

    @property
    def vocab_size(self) -> int:
        return self.weights["embed_tokens.weight"].shape[0]


def read_tutorial(folder: Path, scheduler: Path | None) -> Saved:
    """Read a folder of the script, without its weights. scheduler: see find_scheduler.

    Raises UsageError for a folder of another program, ValueError or OSError, naming file and entry,
    if one is damaged or missing or entries do not fit together.
    """
    items = read_folder(folder)
    weights, rotary = _split_model(folder, items)
    moments, steps, by_name = _read_state(folder, items, weights)
    settings = _read_group(folder, items)
    if (file := find_scheduler(folder, scheduler)) is None:
        warnings.warn(
            f"{folder} has no scheduler's file, so the learning rate and its schedule are unknown; "
            "give them to the run that resumes, or name a file elsewhere with --scheduler",
            stacklevel=2,
        )
        return Saved(folder, weights, moments, rotary, settings, steps)
    schedule = read_schedule(file)
    if steps not in (schedule.updates, schedule.updates + by_name):
        raise ValueError(
            f"{folder} has {steps} steps of the optimizer, and {file} {schedule.updates}: they are "
            "not of one save; --scheduler with the file of the same save works"
        )
    if steps > schedule.updates:
        warnings.warn(
            f"{folder}: the optimizer counts {steps} steps for {schedule.updates} updates, as if "
            "get_state_dict made its state; Adam continues from the updates",
            stacklevel=2,
        )
    settings |= {name: value for name, value in vars(schedule).items() if name != "updates"}
    settings["lr_decay_style"] = "cosine"
    return Saved(folder, weights, moments, rotary, settings, schedule.updates)


def _split_model(
    folder: Path, items: Mapping[str, Item]
) -> tuple[dict[str, Item], dict[str, Item]]:
    """(parameters by their names in LLAMA, rotary buffers), in the order of the file."""
    weights: dict[str, Item] = {}
    rotary: dict[str, Item] = {}
    for key, item in items.items():
        if key.startswith("optimizer.") or item.dtype is None:
            continue
        if match := _NAME.fullmatch(key):
            if (name := match[1]) in weights:
                raise ValueError(f"{folder} has {name} twice: {weights[name].key} and {key}")
            weights[name] = item
        elif _ROTARY.fullmatch(key):
            rotary[key] = item
        else:
            raise ValueError(f"{folder} has a tensor {key}, which the tutorial's Llama has not")
    for name in names_of(count_layers(weights) or 1)[:-1]:  # the head may be tied to the embedding
        if name not in weights:
            raise ValueError(f"{folder} has no {name}, which the tutorial's Llama has")
    return weights, rotary


def _read_state(
    folder: Path, items: Mapping[str, Item], weights: Mapping[str, Item]
) -> tuple[dict[str, dict[str, Item]], int, bool]:
    """(moments by kind and name, steps of the optimizer, whether the keys of its state are names);
    ({}, 0, False) without state."""
    prefix = "optimizer.state."
    by_name = True
    names = list(weights)  # in the order of the file, which is that of the script's model
    state: dict[str, dict[str, Item]] = {kind: {} for kind in (*MOMENTS, "step")}
    for key, item in items.items():
        if not key.startswith(prefix):
            continue
        parameter, _, kind = key.removeprefix(prefix).rpartition(".")
        # Prefixes of a name differ: get_state_dict drops those of compile and of wrappers.
        match = _NAME.fullmatch(parameter)
        name = match[1] if match else ""
        if parameter.isdecimal() and int(parameter) < len(names):
            name, by_name = names[int(parameter)], False
        if name not in weights or kind not in state:
            raise ValueError(f"{folder} has {key}, which AdamW does not have for this model")
        weight = weights[name]
        if not by_name and not weight.in_order:
            raise ValueError(
                f"{folder} has the optimizer's state by position, and its {METADATA} does not give "
                "the order of the weights; state by name (get_state_dict) works"
            )
        if name in state[kind]:
            raise ValueError(f"{folder} has {kind} of {name} twice: {state[kind][name].key}, {key}")
        if kind != "step" and item.shape != weight.shape:
            raise ValueError(
                f"{folder}: {key} is {list(item.shape)}, and its weight {name} is "
                f"{list(weight.shape)}"
            )
        state[kind][name] = item
    if not any(state.values()):
        return {}, 0, False
    for kind, by_weight in state.items():
        if missing := weights.keys() - by_weight.keys():
            raise ValueError(f"{folder} has an optimizer without {kind} of {min(missing)}")
    step, *others = {item.value() for item in state.pop("step").values()}
    if others:
        raise ValueError(f"{folder}: the optimizer's steps differ: {step} and {others[0]}")
    return state, int(step), by_name


def _read_group(folder: Path, items: Mapping[str, Item]) -> dict[str, Any]:
    """Settings of AdamW, the same for all parameters, by field of OptimizerConfig."""
    prefix = "optimizer.param_groups."
    if any(key.startswith(f"{prefix}1.") for key in items):
        raise ValueError(f"{folder} has an optimizer of several groups; one group works")
    prefix += "0."
    group = {
        name: items[prefix + name].value()
        for name in ("betas", "eps", "weight_decay", "amsgrad", "maximize")
        if prefix + name in items
    }
    if group.get("amsgrad") or group.get("maximize"):
        raise ValueError(f"{folder}: its optimizer has amsgrad or maximize; plain AdamW works")
    settings: dict[str, Any] = {}
    try:
        if "betas" in group:
            settings["adam_beta1"], settings["adam_beta2"] = map(float, group["betas"])
        if "eps" in group:
            settings["adam_eps"] = float(group["eps"])
        if "weight_decay" in group:
            settings["weight_decay"] = float(group["weight_decay"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder}: an optimizer with {group} is none of AdamW") from error
    return {**settings, "decay_biases_and_norms": True} if settings else {}


def find_scheduler(folder: Path, scheduler: Path | None) -> Path | None:
    """The file of the flag --scheduler, or the only *.pt or *.pkl in the folder, or None. Raises
    UsageError if that of the flag does not exist, or the folder has several."""
    if scheduler is not None:
        if not scheduler.is_file():
            raise UsageError("--scheduler", scheduler, "a file that exists")
        return scheduler
    files = sorted(file for file in folder.iterdir() if file.suffix in (".pt", ".pkl"))
    if len(files) > 1:
        allowed = f"given, as there are {' and '.join(file.name for file in files)}"
        raise UsageError("--scheduler", None, allowed, works=("--scheduler", str(files[0])))
    return files[0] if files else None


def read_schedule(file: Path) -> Schedule:
    """The schedule in a scheduler's state dict, or in a scheduler that was pickled as an object.
    Raises ValueError for any other content and for a damaged file."""
    is_archive = file.read_bytes()[:2] == b"PK"
    content = SavedFile(file).content if is_archive else read_pickle(file)
    try:
        whole = _state(content)
        warmup, cosine = map(_state, whole["_schedulers"])
        (milestone,) = whole["_milestones"]
        (lr,) = cosine["base_lrs"]
        if warmup["end_factor"] != 1.0 or warmup["total_iters"] != milestone:
            raise ValueError("its warm-up does not end at the learning rate")
        return Schedule(
            lr=float(lr),
            min_lr=float(cosine["eta_min"]),
            lr_warmup_iters=milestone,
            lr_warmup_init=float(lr * warmup["start_factor"]),
            lr_decay_iters=milestone + cosine["T_max"],
            updates=whole["last_epoch"],
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{file} is no SequentialLR of a LinearLR and a CosineAnnealingLR: {reason}"
        ) from error


def _state(value: Any) -> Mapping[str, Any]:
    """A state dict, or the attributes of a pickled object."""
    return value.state if isinstance(value, Placeholder) else value


def llama_config(saved: Saved, heads: int | None, positions: int | None) -> LlamaConfig:
    """The model's config, from the shapes of the tensors. Heads and positions that are None come
    from the rotary buffers, or else from the tutorial.

    Raises UsageError if heads do not fit the tensors, or heads or positions the rotary buffers.
    """
    hidden = saved.weights["embed_tokens.weight"].shape[1]
    rows = saved.weights["layers.0.self_attn.k_proj.weight"].shape[0]
    ffn = saved.weights["layers.0.mlp.gate_proj.weight"].shape[0]
    tables = [item.shape for item in saved.rotary.values() if len(item.shape) == 2]
    lengths, widths = {length for length, _ in tables}, {width for _, width in tables}
    if positions is None:
        positions = min(lengths, default=2048)
    if lengths - {positions}:
        allowed = f"{min(lengths)}, as the rotary buffers have"
        raise UsageError("--max-position-embeddings", positions, allowed)
    if heads is None and widths:
        heads = hidden // max(1, *widths)
    elif heads is None and hidden == 768:  # the tutorial's own model
        heads = 12
    if heads is None:
        raise UsageError("--num-attention-heads", None, "given, as there are no rotary buffers")
    size = hidden // heads if heads > 0 else 0
    divides = size > 0 and not (hidden % heads or size % 2 or rows % size)
    if not divides or not rows or heads % (rows // size) or not widths <= {size, size // 2}:
        allowed = f"such that {rows} rows of k_proj and the rotary buffers are of whole heads"
        raise UsageError("--num-attention-heads", heads, allowed)
    return LlamaConfig(
        num_layers=count_layers(saved.weights),
        hidden_size=hidden,
        ffn_hidden_size=None if ffn == 4 * hidden else ffn,
        num_attention_heads=heads,
        num_query_groups=rows // size,
        max_position_embeddings=positions,
        untie_embeddings_and_output_weights="lm_head.weight" in saved.weights,
    )


def precision_of(saved: Saved) -> Precision:
    """The precision of the folder's weights and moments. Raises UsageError if weights have several
    dtypes, or one that is not supported here."""
    dtypes = {item.dtype for item in saved.weights.values()}
    if dtypes == {torch.float32}:
        return "fp32"
    if dtypes == {torch.bfloat16}:
        moments = {item.dtype for each in saved.moments.values() for item in each.values()}
        return "pure-bf16" if moments == dtypes else "bf16"
    allowed = f"given, as the weights are {' and '.join(sorted(map(str, dtypes)))}"
    raise UsageError("--dtype", None, allowed, works=("--dtype", "fp32"))


def read_tensors(
    saved: Saved, config: LlamaConfig, precision: Precision
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights by name, moments and masters by their keys in a checkpoint), all whole. Raises
    ValueError, naming the entry, if a shape differs from the model's, or a tensor is not finite."""
    entries = resolve(LLAMA, config, saved.vocab_size)
    for entry in entries:
        entry.check_shapes(saved.weights, saved.folder, "the other tensors")
    check_rotary(saved, config)
    weight_dtype = DTYPES[precision.removeprefix("pure-")]
    moment_dtype = weight_dtype if precision == "pure-bf16" else torch.float32
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for entry in tqdm(entries, "reading", unit=" tensors"):
        for kind in ("weight", *MOMENTS):
            items = saved.weights if kind == "weight" else saved.moments.get(kind)
            if items is None:
                whole = torch.zeros(entry.spec.shape)  # an optimizer before its first step
            else:
                parts = [items[name].tensor().float() for name in entry.theirs]
                whole = entry.transform.to_ours(parts, entry.spec.shape)
            if not whole.isfinite().all():
                raise ValueError(f"{saved.folder}: {kind} of {entry.theirs[0]} is not finite")
            if kind != "weight":
                state[f"{kind}.{entry.ours}"] = whole.to(moment_dtype)
                continue
            weights[entry.ours] = whole.to(weight_dtype)
            if weight_dtype != moment_dtype:
                state[f"master.{entry.ours}"] = whole
    return weights, state


def check_rotary(saved: Saved, config: LlamaConfig) -> None:
    """Raise UsageError if the rotary buffers are not those of the model."""
    frequencies = RotaryEmbedding(config.head_size, base=config.rotary_base).frequencies
    angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies).repeat(1, 2)
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
                raise UsageError("--rotary-base", config.rotary_base, allowed)


def exportable_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The config of a checkpoint of a Llama like the tutorial's. Raises UsageError for any other
    checkpoint."""
    manifest, path = checkpoint.manifest, checkpoint.path
    if "config" not in manifest:
        allowed = "a checkpoint that says what model it holds, as those of pretrain.py"
        raise UsageError("--from", path, allowed)
    if manifest["kind"] != "llama":
        raise UsageError("--from", path, f"a checkpoint of a llama, not of a {manifest['kind']}")
    config: LlamaConfig = registry.config_of(manifest)
    for name, value in MODEL.items():
        if (ours := getattr(config, name)) != value:
            theirs = " ".join(arguments_of(flag(name), value)) or f"no {flag(name)}"
            raise UsageError("--from", path, f"of a model with {theirs}, and its {name} is {ours}")
    return config


def check_schedule(schedule: Schedule) -> None:
    """Raise UsageError if torch's SequentialLR has no such schedule."""
    lr, warmup, end = schedule.lr, schedule.lr_warmup_iters, schedule.lr_decay_iters
    if end is None or end < 2:
        raise UsageError("--train-iters", end, "given, and 2 or above")
    if not 0 < lr < inf:
        raise UsageError("--lr", lr, "above 0")
    if not 0 <= schedule.min_lr <= lr:
        raise UsageError("--min-lr", schedule.min_lr, f"0 or above, and at most --lr {lr:g}")
    if not 0 < warmup < end:
        raise UsageError("--lr-warmup-iters", warmup, f"above 0 and below --train-iters {end}")
    if not 0 < schedule.lr_warmup_init <= lr:
        allowed = f"above 0 and at most --lr {lr:g}"
        raise UsageError("--lr-warmup-init", schedule.lr_warmup_init, allowed)


def load_tensors(
    checkpoint: Checkpoint, config: LlamaConfig, dtype: torch.dtype | None
) -> dict[str, dict[str, Tensor]]:
    """{kind: {name in LLAMA: whole tensor}} of a complete checkpoint. Kinds are "weight" and, if it
    has them, MOMENTS. dtype: dtype of all tensors; None is the widest that the checkpoint has
    weights in: that of its masters, or of its weights if it has no masters."""
    saved = checkpoint.manifest["tensors"]
    entries = resolve(LLAMA, config, checkpoint.manifest["vocab_size"])
    specs, first = {entry.ours: entry.spec for entry in entries}, entries[0].ours
    widest = "master" if f"master.{first}" in saved else "model"
    dtype = dtype or getattr(torch, saved[f"{widest}.{first}"]["dtype"])
    tensors: dict[str, dict[str, Tensor]] = {}
    for kind in ("weight", *MOMENTS):
        ours = widest if kind == "weight" else kind
        if f"{ours}.{first}" not in saved:
            continue
        whole = read_parameters(checkpoint, specs, ours, dtype)
        tensors[kind] = {}
        for entry in entries:
            parts = entry.transform.to_theirs(whole[entry.ours])
            for name, part in zip(entry.theirs, parts, strict=True):
                tensors[kind][name] = part.contiguous()
    return tensors


def write_tutorial(
    folder: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Mapping[str, Tensor]],
    schedule: Schedule,
    adamw: Mapping[str, Any],
    *,
    by_name: bool,
) -> None:
    """Write the folder and the scheduler in it. tensors: see load_tensors. adamw: arguments of
    torch's AdamW except the learning rate. by_name: give the optimizer's state the keys of
    get_state_dict rather than of optimizer.state_dict().

    Raises ValueError if a tensor does not read back bit for bit.
    """
    keys = {  # the script's names by those in LLAMA
        name: name if name == "lm_head.weight" else PREFIX + name
        for name in names_of(config.num_layers)
    }
    parameters = {name: nn.Parameter(tensors["weight"][name]) for name in keys}
    optimizer = torch.optim.AdamW(parameters.values(), lr=schedule.lr, **adamw)
    scheduler = scheduler_of(optimizer, schedule)
    if schedule.updates and len(tensors) > 1:
        for name, parameter in parameters.items():
            moments = {kind: tensors[kind][name] for kind in MOMENTS}
            step = torch.tensor(float(schedule.updates))
            optimizer.state[parameter] = {"step": step, **moments}
    state: dict[str, Any] = optimizer.state_dict()
    if by_name:
        ordered = list(keys.values())
        state["state"] = {ordered[number]: values for number, values in state["state"].items()}
        state["param_groups"][0]["params"] = ordered
    # cos and sin [positions, head size], fp32, as the script's model computes them.
    rotary = RotaryEmbedding(config.head_size, base=config.rotary_base)
    cos, sin = rotary(torch.arange(config.max_position_embeddings)[None], torch.float32)
    model = {
        f"{PREFIX}rotary_emb.cos": torch.cat([cos[0, 0]] * 2, dim=-1),
        f"{PREFIX}rotary_emb.sin": torch.cat([sin[0, 0]] * 2, dim=-1),
        **{keys[name]: parameter.detach() for name, parameter in parameters.items()},
    }
    with warnings.catch_warnings(action="ignore"):  # a warning that it runs in one process
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    torch.save(scheduler.state_dict(), folder / SCHEDULER)
    written = {f"model.{key}": tensor for key, tensor in model.items()}
    for key, values in state["state"].items():
        written |= {f"optimizer.state.{key}.{kind}": tensor for kind, tensor in values.items()}
    items = read_folder(folder)
    for key, tensor in written.items():
        if not torch.equal(items[key].tensor(), tensor):
            raise ValueError(f"{folder}: {key} does not read back as it was written")


def scheduler_of(optimizer: torch.optim.Optimizer, schedule: Schedule) -> SequentialLR:
    """The script's scheduler after schedule.updates steps; sets the optimizer's learning rate."""
    warmup = schedule.lr_warmup_iters
    linear = LinearLR(
        optimizer,
        start_factor=schedule.lr_warmup_init / schedule.lr,
        end_factor=1.0,
        total_iters=warmup,
    )
    cosine = CosineAnnealingLR(
        optimizer, T_max=schedule.lr_decay_iters - warmup, eta_min=schedule.min_lr
    )
    scheduler = SequentialLR(optimizer, [linear, cosine], milestones=[warmup])
    optimizer.step()  # has no gradients and does nothing, but the scheduler expects a step
    with warnings.catch_warnings(action="ignore"):  # a warning about its own deprecated argument
        for _ in range(schedule.updates):
            scheduler.step()
    return scheduler
