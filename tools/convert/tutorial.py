"""Reads checkpoints of the script of the PyTorch tutorial "Train your large model on multiple GPUs
with tensor parallelism": a Llama of its own classes, torch's AdamW, and a SequentialLR.

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
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from megatron.config.model import LlamaConfig
from megatron.errors import UsageError
from tools.convert.dcp import METADATA, Item, read_folder
from tools.convert.table import any_of
from tools.convert.torch_file import Placeholder, read_pickle, read_saved

# The script's model.parameters() have this order, layer by layer.
BEFORE, WITHIN, BEHIND = (
    ("embed_tokens.weight",),
    (
        "input_layernorm.weight",
        *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
        "post_attention_layernorm.weight",
        *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
    ),
    ("norm.weight", "lm_head.weight"),
)
PREFIX = "base_model."  # of all names but the head's
SCHEDULER = "lrscheduler.pt"
_NAME = re.compile(
    r"(?:.*\.)?((?:layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj|"
    r"(?:input|post_attention)_layernorm)|embed_tokens|norm|lm_head)\.weight)"
)
_ROTARY = re.compile(r"(?:.*\.)?(?:rotary_emb\.\w+|cos|sin|inv_freq)")
_STATE = re.compile(r"optimizer\.state\.(.+)\.(\w+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(\d+)\.(\w+)")
MOMENTS = ("exp_avg", "exp_avg_sq")
FLOATS = ("float32", "bfloat16", "float16", "float64")


def names_of(num_layers: int) -> list[str]:
    """The names in the table LLAMA, in the order of the script's model.parameters()."""
    layers = (f"layers.{n}.{each}" for n in range(num_layers) for each in WITHIN)
    return [*BEFORE, *layers, *BEHIND]


def key_of(name: str) -> str:
    """The script's name of the parameter with this name in LLAMA."""
    return name if name == "lm_head.weight" else PREFIX + name


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
    updates = steps
    if (file := find_scheduler(folder, scheduler)) is not None:
        schedule = read_schedule(file)
        updates = schedule.updates
        if steps not in (updates, updates + by_name):
            raise ValueError(
                f"{folder} is behind {steps} steps of the optimizer, and {file} behind {updates}: "
                "they are not of one save; --scheduler with the file of the same save works"
            )
        if steps > updates:
            warnings.warn(
                f"{folder}: the optimizer counts {steps} steps for {updates} updates, as it does "
                f"where get_state_dict made its state; Adam goes on from {updates}, which are true",
                stacklevel=2,
            )
        settings |= {
            "lr": schedule.lr,
            "min_lr": schedule.min_lr,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": schedule.lr_warmup_iters,
            "lr_warmup_init": schedule.lr_warmup_init,
            "lr_decay_iters": schedule.lr_decay_iters,
        }
    else:
        warnings.warn(
            f"{folder} has no scheduler's file: the learning rate and its schedule are not known "
            "and have to be given to the run that goes on; --scheduler names a file elsewhere",
            stacklevel=2,
        )
    return Saved(folder, weights, moments, rotary, settings, updates)


def _split_model(
    folder: Path, items: Mapping[str, Item]
) -> tuple[dict[str, Item], dict[str, Item]]:
    """(parameters by their names in LLAMA, rotary buffers), in the order of the file."""
    weights: dict[str, Item] = {}
    rotary: dict[str, Item] = {}
    for key, item in items.items():
        if key.startswith("optimizer.") or not item.dtype:
            continue
        if match := _NAME.fullmatch(key):
            if (name := match[1]) in weights:
                raise ValueError(f"{folder} has {name} twice: {weights[name].key} and {key}")
            weights[name] = item
        elif _ROTARY.fullmatch(key):
            rotary[key] = item
        else:
            raise ValueError(f"{folder} has a tensor {key}, which the tutorial's Llama has not")
    numbers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    for name in names_of(len(numbers) or 1)[:-1]:  # the head may be tied to the word embedding
        if name not in weights:
            raise ValueError(f"{folder} has no {name}, which the tutorial's Llama has")
        if len(weights[name].shape) != (1 if "norm" in name else 2):
            raise ValueError(f"{folder}: {name} has the shape {list(weights[name].shape)}")
        if weights[name].dtype not in FLOATS:
            raise ValueError(f"{folder}: {name} is {weights[name].dtype}; {any_of(FLOATS)} work")
    return weights, rotary


def _read_state(
    folder: Path, items: Mapping[str, Item], weights: Mapping[str, Item]
) -> tuple[dict[str, dict[str, Item]], int, bool]:
    """(moments by kind and name, steps of the optimizer, whether the keys of its state are names);
    ({}, 0, False) without state."""
    by_name = True
    places = list(weights)  # in the order of the file, which is that of the script's model
    found: dict[str, dict[str, Item]] = {}
    for key, item in items.items():
        if (match := _STATE.fullmatch(key)) is None:
            continue
        place, kind = match.groups()
        named = _NAME.fullmatch(place)
        name = named[1] if named else ""
        if place.isdecimal() and int(place) < len(places):
            name, by_name = places[int(place)], False
            if not weights[name].in_order:
                raise ValueError(
                    f"{folder} has the optimizer's state by place, and its {METADATA} does not say "
                    "the order of the weights; state by name (get_state_dict) works"
                )
        if name not in weights or kind not in (*MOMENTS, "step"):
            raise ValueError(f"{folder} has {key}, which AdamW does not keep of this model")
        if kind != "step" and item.shape != weights[name].shape:
            raise ValueError(
                f"{folder}: {key} is {list(item.shape)}, and {name}, whose it is, "
                f"{list(weights[name].shape)}"
            )
        found.setdefault(kind, {})[name] = item
    if not found:
        return {}, 0, False
    for kind in (*MOMENTS, "step"):
        if missing := weights.keys() - found.get(kind, {}).keys():
            raise ValueError(f"{folder} has an optimizer without {kind} of {min(missing)}")
    counts = [item.value() for item in found.pop("step").values()]
    step = counts[0]
    is_count = type(step) in (int, float) and 0 <= step < inf and not step % 1
    if not is_count or any(count != step for count in counts):
        raise ValueError(f"{folder}: the optimizer's steps are {counts[:3]}, not one whole number")
    return found, int(step), by_name


def _read_group(folder: Path, items: Mapping[str, Item]) -> dict[str, Any]:
    """Settings of AdamW, the same for all parameters, by field of OptimizerConfig."""
    group: dict[str, Any] = {}
    for key, item in items.items():
        if (match := _GROUP.fullmatch(key)) is None:
            continue
        if match[1] != "0":
            raise ValueError(f"{folder} has an optimizer of several groups; one group works")
        group[match[2]] = item.value()
    if group.get("amsgrad") or group.get("maximize"):
        raise ValueError(f"{folder}: its optimizer has amsgrad or maximize; plain AdamW works")
    betas = group.get("betas", ())
    betas = betas if isinstance(betas, tuple | list) else (betas,)
    settings = dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False))
    settings |= {"adam_eps": group["eps"]} if "eps" in group else {}
    settings |= {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
    if any(not isinstance(value, int | float) for value in settings.values()):
        raise ValueError(f"{folder}: an optimizer with {settings} is none of AdamW")
    return {**settings, "decay_biases_and_norms": True} if settings else {}


def find_scheduler(folder: Path, given: Path | None) -> Path | None:
    """The scheduler's file: the given one, or the only *.pt or *.pkl in the folder, or None. Raises
    UsageError if the given one does not exist, or the folder has several."""
    if given is not None:
        if not given.is_file():
            raise UsageError("--scheduler", given, "a file that is there")
        return given
    found = sorted(file for file in folder.iterdir() if file.suffix in (".pt", ".pkl"))
    if len(found) > 1:
        allowed = f"given, as there are {' and '.join(file.name for file in found)}"
        raise UsageError("--scheduler", None, allowed, works=("--scheduler", str(found[0])))
    return found[0] if found else None


def read_schedule(file: Path) -> Schedule:
    """The schedule in a scheduler's state dict, or in a scheduler that was pickled as an object.
    Raises ValueError for any other content and for a damaged file."""
    try:
        content = read_saved(file) if zipfile.is_zipfile(file) else read_pickle(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    try:
        whole = _dict(content)
        warmup, cosine = map(_dict, whole["_schedulers"])
        (milestone,), (lr,) = whole["_milestones"], cosine["base_lrs"]
        if warmup["end_factor"] != 1.0 or warmup["total_iters"] != milestone:
            raise ValueError("its warm-up does not end at the learning rate")
        schedule = Schedule(
            lr=float(lr),
            min_lr=float(cosine["eta_min"]),
            lr_warmup_iters=milestone,
            lr_warmup_init=float(lr * warmup["start_factor"]),
            lr_decay_iters=milestone + cosine["T_max"],
            updates=whole["last_epoch"],
        )
        for name in ("lr_warmup_iters", "lr_decay_iters", "updates"):
            if type(value := getattr(schedule, name)) is not int or value < 0:
                raise ValueError(f"{name} is {value!r:.80}")
    except (ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(
            f"{file} is no SequentialLR of a LinearLR and a CosineAnnealingLR: {reason}"
        ) from error
    return schedule


def _dict(value: Any) -> Mapping[str, Any]:
    """A state dict, or the attributes of an object that was not built."""
    found = value.state if isinstance(value, Placeholder) else value
    if not isinstance(found, dict):
        raise ValueError(f"{found!r:.80} is no state")
    return found


def section_of(saved: Saved, **given: Any) -> LlamaConfig:
    """The model's config: sizes from the tensors, the rest from `given`, by field of LlamaConfig.
    Heads and positions that are None come from the rotary buffers, or else from the tutorial.

    Raises UsageError if heads do not fit the tensors, or heads or positions the rotary buffers.
    """
    h = saved.weights["embed_tokens.weight"].shape[1]
    rows = saved.weights["layers.0.self_attn.k_proj.weight"].shape[0]
    tables = [item.shape for item in saved.rotary.values() if len(item.shape) == 2]
    widths = {width for _, width in tables}
    if (heads := given["num_attention_heads"]) is None:
        heads = h // max(1, *widths) if widths else 12 if h == 768 else None
    if heads is None:
        name, allowed = "--num-attention-heads", "given, as there are no rotary buffers"
        raise UsageError(name, None, allowed)
    lengths = {length for length, _ in tables}
    if (positions := given["max_position_embeddings"]) is None:
        positions = min(lengths, default=2048)
    if lengths - {positions}:
        name, works = "--max-position-embeddings", str(min(lengths))
        allowed = f"{works}, as the rotary buffers have"
        raise UsageError(name, positions, allowed, works=(name, works))

    def fits(count: int) -> bool:
        size = h // count
        is_whole = not (h % count or size % 2 or rows % size or count % (rows // size))
        return is_whole and widths <= {size, size // 2}

    if heads < 1 or not fits(heads):
        possible = [count for count in range(1, h // 2 + 1) if rows and fits(count)]
        nearest = sorted(possible, key=lambda count: abs(count - heads))[:1]
        name, works = "--num-attention-heads", ("--num-attention-heads", *map(str, nearest))
        allowed = f"such that {rows} rows of k_proj and the rotary buffers are of whole heads"
        works = works if nearest else ()
        raise UsageError(name, heads, allowed, works=works)
    f = saved.weights["layers.0.mlp.gate_proj.weight"].shape[0]
    numbers = {int(each.split(".")[1]) for each in saved.weights if each.startswith("layers.")}
    return LlamaConfig(
        num_layers=len(numbers),
        hidden_size=h,
        ffn_hidden_size=None if f == 4 * h else f,
        num_query_groups=rows // (h // heads),
        untie_embeddings_and_output_weights="lm_head.weight" in saved.weights,
        **{**given, "num_attention_heads": heads, "max_position_embeddings": positions},
    )
