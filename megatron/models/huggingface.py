"""Models of transformers, unmodified, cut by a plan (megatron/parallel/parallelize.py).

`auto` is transformers' own plan where a model has one (`tp_plan`), and one of PLANS where it has
none. What comes on top: the word embedding and the output layer are cut by vocabulary and the loss
is computed of cut logits; attention runs on our kernels, and drops by coordinates.

A model's own code computes in fp32 here and there, whatever its dtype; of a model in fp64 it
computes in fp64 (`Wide`), so that what is equal can be seen to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron.config.model import HuggingFaceConfig
from megatron.data.bert import BertBatch
from megatron.data.gpt2 import GPT2Batch
from megatron.models.decoder import document_mask
from megatron.models.transformer import text_rows
from megatron.parallel.collectives import split_with_gradient
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.factory import LayerFactory
from megatron.parallel.kernels import attention
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.plan import (
    Column,
    Local,
    Plan,
    PlanError,
    Row,
    Style,
    Summed,
    Vocabulary,
    Whole,
    read_plan,
    read_style,
)
from megatron.parallel.planned import ColumnLinear, Planned, heads_of_queries
from megatron.parallel.random import derive_seed

# Of models that transformers has no plan of.
PLANS: Mapping[str, Plan] = {
    "gpt2": {
        "*.attn": Local("num_heads", "split_size"),
        "*.attn.c_attn": Column(parts=3),
        "*.attn.c_proj": Row(),
        "*.mlp.c_fc": Column(),
        "*.mlp.c_proj": Row(),
    },
    "bert": {
        "*.attention.self.query": Column(),
        "*.attention.self.key": Column(),
        "*.attention.self.value": Column(),
        "*.attention.output.dense": Row(),
        "*.intermediate.dense": Column(),
        "*.layer.*.output.dense": Row(),
    },
    "opt": {
        "*.self_attn": Local("num_heads"),
        "*.self_attn.?_proj": Column(),
        "*.self_attn.out_proj": Row(),
        "*.fc1": Column(),
        "*.fc2": Row(),
    },
}
# Where transformers' own plan of an architecture is wrong.
_WHOLE_GATES: Mapping[str, Style] = {  # whose mean and deviation decide which ones stay
    "*.language_model.layers.*.mlp.gate_proj": Column(gather=True),
    "*.language_model.layers.*.mlp.up_proj": Column(gather=True),
}
MENDED: Mapping[str, Mapping[str, Style]] = {
    "apertus": {"*.mlp.act_fn": Summed()},  # parameters of an activation of cut columns
    # Masks of all heads, which are computed of all values.
    "doge": {"*.self_attn.*_proj": Whole()},
    "esmc": {"*.self_attn.[qkv]_proj": Column(gather=True)},  # norms over all heads
    "neomme": {"*.self_attn.*_proj": Whole()},  # numbers of heads from the config
    "gemma3n": _WHOLE_GATES,
    "gemma3n_text": {
        each.replace("*.language_model", "model"): style for each, style in _WHOLE_GATES.items()
    },
}
# Names of layers that compute the heads of queries, and of keys and values.
QUERIES = ("q_proj", "query", "query_key_value", "qkv_proj", "c_attn")
KEYS = ("k_proj", "v_proj", "key", "value")


def plan_of(model: nn.Module, tensor: Axis, text: str = "auto") -> Plan:
    """The plan of a model of transformers, for the ranks of this axis; text: "auto", or a plan in
    TOML. Raises PlanError for a model without one, and for what the plan does not say right."""
    config: Any = model.config
    modules = dict(model.named_modules())
    if text != "auto":
        plan: dict[str, Any] = dict(read_plan(text))
        return plan | _of_heads(modules, plan, config, tensor)
    own = getattr(model, "_tp_plan", None) or {}
    plan = {each: read_style(each, value) for each, value in own.items() if _fits(each, modules)}
    plan |= MENDED.get(config.model_type, {}) if plan else {}
    ends = _of_ends(model, modules)
    if not plan.keys() - ends.keys():
        if config.model_type not in PLANS:
            raise PlanError(
                f"neither transformers nor this project has a plan for {type(model).__name__}: "
                "--plan FILE.toml says how it is cut"
            )
        plan = dict(PLANS[config.model_type])
    return plan | _of_heads(modules, plan, config, tensor) | ends


def _fits(pattern: str, modules: Mapping[str, nn.Module]) -> bool:
    return any(fnmatchcase(name, pattern) for name in modules)


def _of_ends(model: Any, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """Of the word embedding and the output layer."""
    names = {id(module): name for name, module in modules.items()}
    words, output = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, Style] = {names[id(words)]: Vocabulary()}
    if output is not None:
        found[names[id(output)]] = Column(gather=True)
    return found


def _of_heads(
    modules: Mapping[str, nn.Module], plan: Plan, config: Any, tensor: Axis
) -> dict[str, Any]:
    """The same styles of the layers that compute heads, with the number of these."""
    text = config.get_text_config()
    queries = text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or queries
    found: dict[str, Any] = {}
    for name in modules:
        fitting = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        style = fitting[-1] if fitting else None
        parent, _, last = name.rpartition(".")
        if not isinstance(style, Column) or style.gather or last not in (*QUERIES, *KEYS):
            continue
        own = heads if last in KEYS else queries
        found[name] = replace(style, heads=own, queries=queries)
        if own % tensor.size and hasattr(modules[parent], "num_key_value_groups"):
            used = heads_of_queries(own, queries, tensor)
            counts = {used.count(each) for each in used}
            groups = counts.pop() if len(counts) == 1 else 1
            found[parent] = Local(num_key_value_groups=groups)
    return found


class Wide(TorchFunctionMode):
    """Under it no tensor of fp64 is narrowed to fp32, as transformers' models do in an RMSNorm, of
    rotary positions, in a softmax: of models that are equal results would differ by 1e-7."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_wide and func is Tensor.float:
            return args[0]
        if is_wide and func in (Tensor.to, Tensor.type, Tensor.softmax, torch.softmax, F.softmax):

            def widened(value: Any) -> Any:
                return torch.float64 if value is torch.float32 else value

            args = tuple(map(widened, args))
            kwargs = {name: widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have parameters without memory; their buffers have values,
    which nothing else would give them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class Place:
    """What layers of ours inside such a model know of the batch: keys of its rows, for dropout."""

    rows: Tensor | None = None


class PlannedDropout(nn.Module):
    """In the place of torch's Dropout: by coordinates, the same at every layout."""

    def __init__(self, dropout: Any, place: Place, width: int) -> None:
        super().__init__()
        self.dropout, self.p, self.place, self.width = dropout, dropout.p, place, width

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.p and x.shape[-1] != self.width:
            raise RuntimeError(
                f"dropout {self.dropout.name} is of {x.shape[-1]} channels, not of the "
                f"{self.width} of the stream: it cannot be the same at every layout"
            )
        dropped: Tensor = self.dropout(x, self.place.rows)
        return dropped


def run_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it, on our kernels: q [b, a, s, d], k and v
    [b, g, m, d], mask bool or added to the scores, to [b, s, a, d]."""
    if others.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__}: attention with position_bias")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    size, softcap, sinks = query.shape[-1], others.get("softcap"), others.get("s_aux")
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)
    if causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    is_added = attention_mask is not None and attention_mask.is_floating_point()
    if softcap is not None or sinks is not None or is_added:
        if dropout:
            what = "capped scores, sinks or a mask that is added to scores"
            raise NotImplementedError(f"{type(module).__name__}: attention dropout with {what}")
        if causal:
            attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        heads = attention_by_scores(query, key, value, attention_mask, softcap, sinks)
        return heads.transpose(1, 2).contiguous(), None
    core: Any = getattr(module, "megatron_core", None)
    if core is None:
        heads = attention(query, key, value, attention_mask, dropout, causal)
    else:
        core.dropout = dropout
        heads = core(query, key, value, attention_mask, causal, core.place.rows)
    return heads.transpose(1, 2).contiguous(), None


def attention_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[b, a, s, d], with scores c tanh(scores / c) of softcap c: what no fused kernel computes.
    mask: bool, or added to the scores. sinks: [a], a score more of each head, of no value."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        more = sinks.view(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=wide)[..., : key.shape[2]]
    return shares.to(query.dtype) @ value


def register_attention() -> None:
    """Make `run_attention` known to transformers as "megatron"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("megatron", run_attention)
    AttentionMaskInterface.register("megatron", sdpa_mask)


def unmodified(config: HuggingFaceConfig, auto_class: str) -> Any:
    """The model as transformers builds it, its parameters on meta."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    register_attention()
    described = transformers.AutoConfig.for_model(**json.loads(config.hf_config or "{}"))
    described.use_cache = False
    maker = getattr(transformers, auto_class)
    with torch.device("cpu"), parameters_on_meta():
        try:
            return maker.from_config(described, attn_implementation="megatron")
        except KeyError as error:
            if error.args != ("megatron",):
                raise
            # The model chooses its attention from a table of its own, such as GPT-J's.
            return maker.from_config(described, attn_implementation="eager")


class HuggingFace(nn.Module):
    """A model of transformers that predicts the next token, as this project trains one."""

    terms: ClassVar = ("loss",)
    auto_class: ClassVar = "AutoModelForCausalLM"

    def __init__(self, config: Any, factory: LayerFactory, vocab_size: int) -> None:
        """config: a HuggingFaceConfig. vocab_size: of the tokenizer, at most that of the model."""
        super().__init__()
        self.config, self.place = config, Place()
        model = unmodified(config, self.auto_class)
        self.vocab_size = model.config.get_text_config().vocab_size
        if vocab_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens, and --hf-model {self.vocab_size}"
            )
        if config.recompute_granularity == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._replace_dropout(model, factory)
        assert factory.parallelize is not None, "this tensor-parallel mode takes no such model"
        self.tensor = factory.tensor
        plan = plan_of(model, self.tensor, config.plan)
        self.model = factory.parallelize(model, plan)
        head = model.get_output_embeddings()
        self.reads = "input" if isinstance(head, ColumnLinear) else "output"

    def _replace_dropout(self, model: Any, factory: LayerFactory) -> None:
        width = model.config.get_text_config().hidden_size
        for name, module in [*model.named_modules()]:
            if "Attention" in type(module).__name__ and hasattr(module, "config"):
                module.megatron_core = factory.attention_core(0.0, f"{name}.core")
                module.megatron_core.place = self.place
            for own_name, child in [*module.named_children()]:
                if type(child) is nn.Dropout and child.p > 0:
                    dropout = factory.dropout(child.p, f"{name}.{own_name}")
                    setattr(module, own_name, PlannedDropout(dropout, self.place, width))

    def denominators(self, batch: Any) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def arguments(self, batch: GPT2Batch) -> dict[str, Any]:
        """What the model is called with. Of a batch that is padded at its end no token looks at
        padding."""
        if batch.document_starts is None:
            return {"input_ids": batch.tokens}
        mask = document_mask(batch.document_starts)
        return {
            "input_ids": batch.tokens,
            "position_ids": batch.positions,
            "attention_mask": mask,
        }

    def embed(self, batch: Any) -> Any:
        """Such a model is one stage: what goes into its layers are its arguments."""
        return self.arguments(batch)

    def layers(self, x: Any, batch: Any, *, numbers: Any = None) -> Tensor:
        """What the output layer reads, [n, h]; where the model goes on with its logits, these:
        [n, v/t] of this rank's columns, or [n, v] where the plan leaves the output layer whole."""
        self.place.rows = text_rows(batch)
        is_wide = next(self.model.parameters()).dtype == torch.float64
        with Wide() if is_wide else nullcontext():
            output = self._call(x)
        return output.flatten(0, 1)

    def _call(self, arguments: Any) -> Tensor:
        head, device = self.model.get_output_embeddings(), arguments["input_ids"].device
        if isinstance(head, ColumnLinear):
            head.mode = self.reads
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    setattr(module, name, buffer.to(device))
        try:
            logits: Tensor = self.model(**arguments, use_cache=False).logits
            is_input = isinstance(head, ColumnLinear) and logits is head.seen
        finally:
            if isinstance(head, ColumnLinear):
                head.mode, head.seen = "output", None
        if self.reads == "input" and not is_input:
            # The model scales or caps its logits, which it can do with those of a rank, too.
            self.reads = "own columns"
            return self._call(arguments)
        return logits

    def logits(self, x: Tensor) -> Tensor:
        """Logits [n, v/t] of this rank's columns, of what `layers` returns."""
        if self.reads == "own columns":
            return x
        head = self.model.get_output_embeddings()
        if self.reads == "output":  # whole on every rank
            size = -(-x.shape[-1] // self.tensor.size) * self.tensor.size
            return split_with_gradient(F.pad(x, (0, size - x.shape[-1])), -1, self.tensor)
        own: Tensor = head.columns(x)
        return own

    def losses(self, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        """The sum of scales [n] x the cross-entropy of labels [n]."""
        head = self.model.get_output_embeddings()
        if self.reads == "input":
            return head.loss(x, labels, scales)
        axis = ALONE if self.reads == "output" else self.tensor
        losses = vocab_parallel_cross_entropy(x, labels, axis, self.vocab_size)
        return (losses * scales.to(losses.dtype)).sum()

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        """As of Objective: cross-entropy of each counted token."""
        scales = batch.loss_mask.double() * loss_scales
        return self.losses(x, batch.labels.flatten(), scales.flatten())[None]

    def forward(self, batch: Any, loss_scales: Tensor | None = None) -> Tensor:
        """As of `loss`; without scales as of `logits`."""
        x = self.layers(self.embed(batch), batch)
        return self.logits(x) if loss_scales is None else self.loss(x, batch, loss_scales)

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor as it is held) of the model's own initialisation, unit after unit:
        a layer's, so that no more of the model is whole at a time. A function of the seed alone."""
        planned = dict(self.named_modules())
        for name, whole in initial_values(unmodified(self.config, self.auto_class), seed):
            module_name, _, own_name = f"model.{name}".rpartition(".")
            module = planned[module_name]
            form = module.forms.get(own_name) if isinstance(module, Planned) else None
            yield f"model.{name}", whole if form is None else form.held(whole)


class HuggingFaceMasked(HuggingFace):
    """One that predicts masked tokens."""

    terms: ClassVar = ("mlm_loss",)
    auto_class: ClassVar = "AutoModelForMaskedLM"

    def denominators(self, batch: BertBatch) -> list[float]:
        return [float(np.count_nonzero(batch.loss_mask))]

    def arguments(self, batch: Any) -> dict[str, Any]:
        found = {"input_ids": batch.tokens, "attention_mask": batch.is_real.to(torch.int64)}
        if self.config.has_token_types:
            found["token_type_ids"] = batch.token_types
        return found

    def loss(self, x: Tensor, batch: BertBatch, loss_scales: Tensor) -> Tensor:
        """As of Objective: cross-entropy of each masked token."""
        scales = batch.is_counted * loss_scales[0]
        return self.losses(x[batch.masked], batch.masked_labels, scales)[None]


@torch.no_grad()
def initial_values(model: Any, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of the parameters of a model of transformers that is on meta."""
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    def initialise(module: nn.Module, own: Any) -> None:
        for child in module.children():
            initialise(child, child._init_weights if isinstance(child, PreTrainedModel) else own)
        own(module)

    def walk(name: str, module: nn.Module, own: Any, is_unit: bool) -> Iterator[tuple[str, Tensor]]:
        if isinstance(module, PreTrainedModel):
            own = module._init_weights
        if is_unit or [*module.parameters(recurse=False)]:
            module.to_empty(device="cpu", recurse=is_unit)
            with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
                torch.manual_seed(derive_seed(seed, "initialise", name))
                initialise(module, own) if is_unit else own(module)
            for own_name, parameter in module.named_parameters(name, recurse=is_unit):
                yield own_name, parameter.detach()
            module.to("meta")
        for child_name, child in () if is_unit else module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            yield from walk(full, child, own, isinstance(module, nn.ModuleList))

    yield from walk("", model, model._init_weights, False)
