"""Proof of a plan: a tiny model of the architecture, cut by the plan, computes the same as the
unmodified model of transformers.

One forward and backward run in fp64, where equal models differ only by the order of additions: by
1e-14. A plan that is wrong without an error (a fused projection cut through its parts, a norm of
heads whose gradient is never summed) differs by 1e-3 or more. If config.json has dropout, one more
of each with dropout is compared with one process: the unmodified model draws other masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, lcm
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.data.bert import BertBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.errors import UsageError
from megatron.huggingface.config import NAMES, HuggingFaceConfig
from megatron.huggingface.layers import ColumnLinear, WeightLayout
from megatron.huggingface.plan import Local, PlanError, read_plan, read_toml
from megatron.huggingface.weights import layout_of
from megatron.models.build import build_on_meta
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.collectives import gather_from
from megatron.parallel.compare import KeepFP64, unseen
from megatron.parallel.initialize import materialize
from megatron.parallel.mesh import Mesh, serial_mesh
from megatron.parallel.sharding import gather_whole, sharding_specs
from megatron.train.executor import on_device

TOLERANCE = 1e-9  # relative to the norm of the compared tensor
# Relative to the norm of the model's gradient. A smaller gradient, such as that of a key's bias,
# which is zero, is mostly rounding, and its difference is taken relative to this limit.
SMALL = 1e-3
SAMPLES, LENGTH = 3, 12  # the batch: sequences of 12, 9 and 5 tokens, then padding
LAYERS, HEADS, HEAD, VOCABULARY, WINDOW = 2, 8, 16, 101, 5

# The part of a pattern that stands for a number: 17, 1[01], ?, and not [qkv]_proj or fc1.
NUMBERED = re.compile(r"(^|\.)[]\d?*[!-]*[\d?[][]\d?*[!-]*(\.|$)|\.\d")


def tiny(described: Mapping[str, Any], plan: str, tensor: int) -> dict[str, Any]:
    """A config.json of the same architecture that is proved in seconds: 2 layers or one of each
    kind, 8 query heads or as many as the ranks can share, as many key/value heads or few, a small
    vocabulary. Settings that decide which modules exist and what they compute stay. All layers stay
    if the plan has layer numbers. Ranks share or divide key/value heads as in the whole model and,
    if the plan is the user's, the vocabulary."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**described)
    patterns = [] if plan == "auto" else [*read_toml(plan)]
    keeps_layers = any(re.search(NUMBERED, each) for each in patterns)
    rows = config.get_text_config().vocab_size
    is_shared = plan != "auto" and rows % tensor == 0
    vocabulary = _multiple(tensor, VOCABULARY + 1) if is_shared else VOCABULARY
    whole = config.to_dict() | {"model_type": config.model_type}
    return _shrunk(whole, keeps_layers, vocabulary, tensor)


def _multiple(of: int, least: int) -> int:
    return -(-least // of) * of


def _shrunk(
    given: Mapping[str, Any], keeps_layers: bool, vocabulary: int, tensor: int
) -> dict[str, Any]:
    found = {
        name: _shrunk(value, keeps_layers, vocabulary, tensor)
        if isinstance(value, Mapping) and "model_type" in value
        else value
        for name, value in given.items()
    }

    def known(what: str) -> Any:
        return next((given[name] for name in NAMES[what] if given.get(name) is not None), None)

    def put(size: Any, *names: str) -> None:
        found.update({name: size for name in names if isinstance(given.get(name), int)})

    layers, hidden, heads = known("layers"), known("hidden"), known("heads")
    lists = [name for name, value in given.items() if isinstance(value, list)]
    lists = [name for name in lists if layers and len(given[name]) == layers]
    said = [given[name] for name in lists if given[name] != [*range(layers)]]  # layers' numbers
    kinds = [repr(each) for each in zip(*said, strict=True)]
    numbers = sorted({kinds.index(each) for each in kinds})
    if keeps_layers:
        numbers = [*range(layers)]
    elif given.get("num_kv_shared_layers"):  # the last layers use keys and values of others
        put(len(numbers), "num_kv_shared_layers")
        numbers *= 2
    numbers += [each for each in range(LAYERS) if each not in numbers][: LAYERS - len(numbers)]
    found |= {name: [given[name][number] for number in numbers] for name in lists}
    put(len(numbers), *NAMES["layers"])
    shared = known("key_value_heads") or 2
    few = tensor if shared % tensor == 0 else shared
    query_heads = _multiple(lcm(2 * few, tensor), HEADS)
    width, mlp = query_heads * HEAD, _multiple(tensor, 160)
    put(width, *NAMES["hidden"])
    narrow = _multiple(tensor, 48)
    for name in ("embedding_size", "word_embed_proj_dim"):
        put(width if given.get(name) == hidden else narrow, name)
    put(_multiple(tensor, 16), "hidden_size_per_layer_input", "q_lora_rank", "kv_lora_rank")
    put(1, "first_k_dense_replace")  # so that there are layers of both kinds
    put(query_heads, *NAMES["heads"])
    put(query_heads if shared == heads else few, *NAMES["key_value_heads"])
    size = given.get("head_dim")
    if "qk_rope_head_dim" in given:  # latent attention
        put(8, "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim")
        size = 8
    elif isinstance(size, int) and hidden and heads and size * heads != hidden:
        found["head_dim"] = size = 2 * HEAD
    else:
        put(HEAD, "head_dim")
        size = HEAD
    put(mlp, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if isinstance(widths := found.get("intermediate_size"), list):
        found["intermediate_size"] = [mlp for _ in widths]
    put(2 * HEAD, "global_head_dim")
    if isinstance(own := given.get("per_layer_config"), Mapping):  # by layer, as in Gemma 4
        by_layer = {int(key): value for key, value in own.items()}
        found["per_layer_config"] = {
            str(new): {
                name: found.get(f"global_{name}", each) for name, each in by_layer[old].items()
            }
            for new, old in enumerate(numbers)
            if old in by_layer
        }
    put(vocabulary, "vocab_size", "vocab_size_per_layer_input")
    put(64, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    put(WINDOW, "sliding_window")
    for name in [each for each in given if each.endswith("_token_id")]:
        ids = given[name] if isinstance(given[name], list) else [given[name]]
        if any(each is not None and each >= VOCABULARY for each in ids):
            found[name] = VOCABULARY - 1
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given.get(name), Mapping):
            found[name] = _shrunk_rope(given[name], size)
    return found


def _shrunk_rope(given: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Settings of rotary positions, shrunk so that scaling has an effect at few positions."""
    found = dict(given)
    for name, value in given.items():
        if isinstance(value, Mapping):
            found[name] = _shrunk_rope(value, head_size)
        elif name == "original_max_position_embeddings":
            found[name] = 8
        elif isinstance(value, list):
            turned = head_size * (given.get("partial_rotary_factor") or 1)
            found[name] = value[: int(turned) // 2]
    return found


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a proof. Differences are relative, of norms, the largest of all ranks; infinite
    where values are not finite."""

    tensor: int
    """Ranks of the tensor axis."""
    failure: str | None = None
    """Error that ended the cut model's forward or backward; then nothing below is measured."""
    loss: float = 0.0
    logits: float = 0.0
    gradients: Mapping[str, float]
    """Difference for each parameter."""
    outputs: Mapping[str, float]
    """Difference for each module whose output can be compared, in the order in which they end."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Differences with dropout from one process, for the loss and for each parameter's gradient;
    empty if nothing drops, or torch draws the masks."""
    flops: tuple[int, int] = (0, 0)
    """Matmul FLOPs of the step: on the busiest rank, and in the unmodified model."""

    @property
    def first(self) -> str | None:
        """The first module whose output is wrong."""
        wrong = (name for name, value in self.outputs.items() if not value <= TOLERANCE)
        return next(wrong, None)

    @property
    def wrong(self) -> list[str]:
        """Sentences that say what is wrong; empty if the plan is right."""
        if self.failure is not None:
            return [self.failure]
        found = []
        for values, what in (
            (self.gradients, "gradients are off"),
            (self.dropped, "results with dropout are not those of one process"),
        ):
            if off := {name: value for name, value in values.items() if not value <= TOLERANCE}:
                most = sorted(off, key=lambda name: -off[name])[:3]
                each = ", ".join(f"{name} by {off[name]:.2g}" for name in most)
                found.append(f"{len(off)} of {len(values)} {what}, most: {each}")
        for name in ("logits", "loss"):
            if not (value := getattr(self, name)) <= TOLERANCE:
                found.append(f"the {name} {'is' if name == 'loss' else 'are'} off by {value:.2g}")
        if found and self.first is not None:  # by itself it may be padding, without effect
            by = self.outputs[self.first]
            found.insert(0, f"{self.first} is the first module whose output is off, by {by:.2g}")
        return found

    @property
    def worst(self) -> float:
        """The largest difference of loss, logits and gradients."""
        return max(self.loss, self.logits, *self.gradients.values(), *self.dropped.values())

    def __str__(self) -> str:
        if self.wrong:
            return "; ".join(self.wrong)
        share = self.flops[0] / self.flops[1]
        dropout = ", and with dropout those of one process," if self.dropped else ""
        return (
            f"loss, logits and {len(self.gradients)} gradients are the unmodified model's{dropout} "
            f"within {self.worst:.1e}; a rank of {self.tensor} does {share:.0%} of its matmul FLOPs"
        )


class NoProofError(ValueError):
    """There is no tiny model of the architecture, or none that shows whether the plan is right."""


class TinyModelError(NoProofError):
    """The tiny model of the architecture does not run."""


def require_proof(config: HuggingFaceConfig, mesh: Mesh) -> str:
    """Prove a plan before training; returns a line for the log. Every rank calls this. Raises
    UsageError, the same on every rank, for a plan that does not fit the model or is wrong."""
    build_on_meta(config, mesh, 1)  # an error here names the sizes of the whole model
    try:
        proof = prove(config, mesh)
    except (NoProofError, PlanError) as error:  # about the tiny model: the whole one fits
        return f"warning: the plan is not proved by a tiny model: {error}"
    if proof.wrong:
        allowed = f"a plan that computes what the model does; for a tiny model, {proof}"
        works = "--tensor-model-parallel-size", "1"
        raise UsageError("--plan", config.plan, allowed, works=works)
    return f"the plan is proved: for a tiny model, {proof}"


def prove(config: HuggingFaceConfig, mesh: Mesh) -> Proof:
    """Prove the plan of the config for a tiny model of its architecture, over the tensor axis of
    the mesh (every rank calls this and gets the same result). Raises PlanError for a plan that does
    not fit the tiny model, before any weight is made, and NoProofError."""
    try:
        if config.plan != "auto" and any(
            isinstance(each, Local) and each.values
            for each in read_plan(config.stated_plan).values()
        ):
            raise NoProofError("it sets numbers of the whole model, which a tiny one has not")
        text = json.loads(config.hf_config or "{}")
        described = tiny(text, config.stated_plan, mesh.tensor.size)
        config = replace(
            config,
            hf_config=json.dumps(described),
            recompute_granularity="none",
            attention_dropout_rng="coordinates",  # a kernel's draws depend on the layout
        )
        ours = build_on_meta(config, mesh, VOCABULARY).eval()
        alone = None
        if _has_dropout(described) and not ours.drawn:
            alone = build_on_meta(config, serial_mesh(mesh.device), VOCABULARY)
        theirs = _unmodified(described, ours.auto_class, mesh.device)
        batch, arguments = _batch(ours, mesh.device)
        wanted = _Computed(theirs, batch, arguments)
    except (PlanError, NoProofError):
        raise
    except Exception as error:  # from transformers' code of any model
        if isinstance(error.__cause__, PlanError):  # the model made a UsageError of it
            raise error.__cause__ from None
        reason = " ".join(str(error).split())[:200]
        reason = f"its tiny model ends with {type(error).__name__}: {reason}"
        failure: NoProofError | None = TinyModelError(reason)
    else:
        missing = wanted.unseen(ours, mesh)
        reason = f"it shows nothing of {' and '.join(missing)}"
        failure = NoProofError(reason) if missing else None
    if failures := [*filter(None, mesh.control.gather(failure))]:  # one rank may run out of memory
        raise failures[0]
    layouts = {name: layout_of(ours.model, name) for name, _ in theirs.named_parameters()}
    values = [
        (f"model.{name}", layouts[name].from_original(each.detach()))
        for name, each in theirs.named_parameters()
    ]
    for model in filter(None, (ours, alone)):
        materialize(
            model, device=mesh.device, dtype=torch.float64, seed=0, values=lambda _: iter(values)
        )
    own: dict[str, Any]
    try:
        own = _compare(ours, alone, batch, wanted, layouts, mesh)
    except Exception as error:  # from the model's code, which the plan breaks
        own = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        if (module := wanted.module) is not None:
            own["failure"] = f"{module}: {own['failure']}"
    ranks = mesh.control.gather(own)
    failures = [each["failure"] for each in ranks if "failure" in each]
    if failures:
        return Proof(tensor=mesh.tensor.size, failure=failures[0], gradients={}, outputs={})
    numbers = ("loss", "logits", "flops")
    largest: dict[str, Any] = {key: max(each[key] for each in ranks) for key in numbers}
    for key in ("gradients", "outputs", "dropped"):
        names = dict.fromkeys(name for each in ranks for name in each[key])
        largest[key] = {name: max(each[key].get(name, 0.0) for each in ranks) for name in names}
    return Proof(tensor=mesh.tensor.size, **largest)


@torch.no_grad()
def _unmodified(described: Mapping[str, Any], auto_class: str, device: torch.device) -> Any:
    """The model as transformers builds and runs it. No parameter is a constant, so that each has an
    effect. Buffers keep their dtype, as in the model that is cut."""
    import transformers

    config = transformers.AutoConfig.for_model(**described)
    config.use_cache = False
    maker = getattr(transformers, auto_class)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = maker.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.data = parameter.double() + noise
    return model.to(device)


def _has_dropout(described: Mapping[str, Any]) -> bool:
    return any(
        _has_dropout(value)
        if isinstance(value, Mapping)
        else "drop" in str(name) and isinstance(value, float) and value > 0
        for name, value in described.items()
    )


def _batch(model: Any, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """(batch for our model, arguments for the unmodified model). Sequences are padded at their
    end."""
    draw = np.random.default_rng(0)
    tokens, labels = draw.integers(3, VOCABULARY - 1, (2, SAMPLES, LENGTH))
    lengths = np.array([[LENGTH], [LENGTH - 3], [LENGTH - 7]])
    is_real = np.arange(LENGTH) < lengths
    common: Any = {"tokens": tokens, "labels": labels, "is_real": is_real}
    common["numbers"] = np.arange(SAMPLES)
    if model.auto_class == "AutoModelForMaskedLM":
        types = (np.arange(LENGTH) >= lengths // 2).astype(np.int64)
        loss_mask = (is_real & (draw.random(is_real.shape) < 0.5)).astype(np.float32)
        batch: Any = BertBatch(**common, token_types=types, loss_mask=loss_mask)
    else:
        positions = np.broadcast_to(np.arange(LENGTH), tokens.shape).copy()
        batch = GPT2Batch(**common, positions=positions, loss_mask=is_real.astype(np.float32))
    batch = on_device(batch, device)
    return batch, model.embed(batch) | {"attention_mask": batch.is_real.long()}


class _Computed:
    """Results of the unmodified model."""

    module: str | None = None  # the name of the module that the cut model is running

    def __init__(self, model: Any, batch: Any, arguments: Mapping[str, Any]) -> None:
        labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
        with KeepFP64(), _counter() as counter:
            logits = model(**arguments, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        self.loss, self.logits = loss.detach(), logits.detach()
        self.flops = counter.get_total_flops()
        self.gradients = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        # In a causal model no token attends to padding, with or without the mask.
        same, self.outputs = dict(arguments), dict[str, Tensor]()
        if isinstance(batch, GPT2Batch):
            del same["attention_mask"]
        with torch.no_grad(), KeepFP64(), _watched(model, self.outputs):
            model(**same, use_cache=False)

    def unseen(self, ours: nn.Module, mesh: Mesh) -> list[str]:
        """See compare.unseen; only for parameters that the plan cuts or sums. Others may process
        images, and no text reaches them."""
        specs = sharding_specs(ours)
        largest = {
            name: float(each.abs().max())
            for name, each in self.gradients.items()
            if mesh.tensor in {*(spec := specs[f"model.{name}"]).shard_axes, *spec.partial}
            and not spec.zero_gradient
        }
        return unseen(largest, _norm(self.gradients.values()), [float(self.loss)])


def _counter() -> FlopCounterMode:
    # FlopCounterMode lacks the one in place.
    addmm: Any = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    return FlopCounterMode(display=False, custom_mapping=addmm)


@contextmanager
def _watched(
    model: nn.Module, outputs: dict[str, Tensor], enter: Callable[[str | None], object] = str
) -> Iterator[None]:
    """Inside, `outputs` collects the first output of each module's first call, in the order in
    which modules end; `enter` is called with the innermost running module."""
    inside: list[str] = []
    hooks = []

    def before(name: str, *_: Any) -> None:
        inside.append(name)
        enter(name)

    def after(name: str, _: Any, __: Any, output: Any) -> None:
        inside.pop()
        enter(inside[-1] if inside else None)
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs.setdefault(name, first.detach())

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(partial(before, name)))
            hooks.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _compare(
    ours: Any,
    alone: Any,
    batch: Any,
    wanted: _Computed,
    layouts: Mapping[str, WeightLayout],
    mesh: Mesh,
) -> dict[str, Any]:
    """Differences on this rank. alone: the same model in one process, if dropout is compared."""
    enter = partial(setattr, wanted, "module")
    with torch.no_grad(), _watched(ours.model, {}, enter):
        # Here `ours` finds what the model does with its logits, and moves buffers to the device.
        ours.layers(ours.embed(batch), batch)
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), KeepFP64(), _watched(ours.model, outputs, enter):
        logits = ours.model(**ours.embed(batch), use_cache=False).logits
    if logits.shape != wanted.logits.shape:  # the output layer stays cut
        logits = gather_from(logits, -1, mesh.tensor)
    modules = dict(ours.model.named_modules())
    differences = {}
    for name, found in outputs.items():
        expected = wanted.outputs.get(name)
        whole = None if expected is None else _whole(found, expected, modules[name], mesh)
        if expected is not None and whole is not None:
            if whole.shape[:2] == batch.is_real.shape:  # padding is not compared
                whole, expected = whole[batch.is_real], expected[batch.is_real]
            differences[name] = _difference(whole, expected)
    buckets, counter = GradientBuckets(ours.model, mesh=mesh), _counter()
    with _watched(ours.model, {}, enter), counter:
        loss, held = _step(ours, buckets, batch)
    gradients = {name: layouts[name].to_original(each) for name, each in held.items()}
    dropped = {}
    if alone is not None:
        with _watched(ours.model, {}, enter):
            own_loss, held = _step(ours.train(), buckets, batch)
        of_one = GradientBuckets(alone.model, mesh=serial_mesh(mesh.device))
        one_loss, one_process = _step(alone, of_one, batch)
        norm = _norm(one_process.values())
        dropped = {name: _difference(held[name], each, norm) for name, each in one_process.items()}
        dropped["loss"] = _difference(own_loss, one_loss)
    norm = _norm(wanted.gradients.values())
    is_real = batch.is_real
    return {
        "loss": _difference(loss, wanted.loss),
        "logits": _difference(logits[is_real], wanted.logits[is_real]),
        "gradients": {
            name: _difference(gradients[name], each, norm)
            for name, each in wanted.gradients.items()
            if each.any() or gradients[name].any()
        },
        "outputs": differences,
        "dropped": dropped,
        "flops": (counter.get_total_flops(), wanted.flops),
    }


def _step(model: Any, buckets: GradientBuckets, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean loss, {name: whole gradient in the layout that is held})."""
    mesh, buckets.checks_reach = buckets.mesh, False  # the user's model is another one
    # Ranks of `replicas` read the same samples here, and their gradients are summed.
    count = float((batch.loss_mask != 0).sum()) * mesh.replicas.size
    scales = torch.full((1,), 1 / count, dtype=torch.float64, device=mesh.device)
    with buckets.accumulate(is_last=True):
        loss = model(batch, scales).sum()
        loss.backward()
    held = {each.name: gather_whole(each.gradient, each.spec).clone() for each in buckets.views}
    return loss.detach() * mesh.replicas.size, held


def _whole(found: Tensor, expected: Tensor, module: nn.Module, mesh: Mesh) -> Tensor | None:
    """A module's output, whole as in the unmodified model; None where it cannot be compared."""
    is_column = isinstance(module, ColumnLinear)
    if (is_column and module.rows_in_use is not None) or found.dim() != expected.dim():
        return None
    t = mesh.tensor.size
    cut = [dim for dim, size in enumerate(expected.shape) if size != found.shape[dim]]
    if not cut:
        return found
    (dim, *others) = cut
    if others or found.shape[dim] * t != expected.shape[dim]:
        return None
    parts = module.style.parts if is_column else 1
    if parts == 1:
        return gather_from(found, dim, mesh.tensor)
    return gather_from(found.unflatten(-1, (parts, -1)), -1, mesh.tensor).flatten(-2)


def _norm(tensors: Any) -> float:
    return float(torch.stack([each.norm() for each in tensors]).norm())


def _difference(found: Tensor, wanted: Tensor, model_norm: float = 0.0) -> float:
    """Difference relative to the norm of `wanted`. model_norm: of all gradients, to compare one."""
    norm = max(float(wanted.norm()), SMALL * model_norm)
    off = float((found - wanted).norm())
    if not isfinite(off):
        return float("inf")
    return off / norm if norm else off
