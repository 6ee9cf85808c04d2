"""Unmodified models of transformers, cut by a plan (parallelize.py).

The plan is transformers' own or one of plan.py. In addition, the word embedding and the output
layer are cut by vocabulary, the loss is computed from cut logits, and attention runs on our kernels
with dropout by coordinates.

A model's own code computes some results in fp32 whatever its dtype. For a model in fp64 it computes
them in fp64 (`KeepFP64`), so that equal results can be recognised as equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import shorten
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.bert import BertBatch
from megatron.errors import UsageError
from megatron.huggingface import weights
from megatron.huggingface.config import HuggingFaceConfig, has_window
from megatron.huggingface.layers import ColumnLinear
from megatron.huggingface.plan import PlanError, plan_at
from megatron.huggingface.replacements import (
    DropoutKeys,
    KernelDropout,
    other_dropout,
    unmodified,
    use_own_kernels,
)
from megatron.models.cache import KeyValueCache
from megatron.models.gpt import dropout_keys
from megatron.models.registry import NO_END
from megatron.parallel.compare import KeepFP64
from megatron.parallel.context import document_mask
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.dropout import fold, require_keys
from megatron.parallel.factory import LayerFactory
from megatron.parallel.mesh import ALONE
from megatron.parallel.regions import split_with_gradient


@contextmanager
def _refused(config: HuggingFaceConfig, allowed: str) -> Iterator[None]:
    """Raise errors of the block as a UsageError about --hf-model, or about the user's plan."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, ImportError) as error:
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        reason = shorten(reason.partition(". ")[0], 300)  # transformers lists all models it knows
        if isinstance(error, PlanError) and config.plan != "auto":
            allowed, others = "one that fits {} {}: {}", ("--hf-model", config.hf_model, reason)
            raise UsageError("--plan", None, allowed, *map(str, others), works="auto") from error
        raise UsageError("--hf-model", config.hf_model, f"{allowed}: {reason}") from error


class HuggingFace(nn.Module):
    """A model of transformers that predicts the next token, with the methods of our own models."""

    terms: ClassVar = ("loss",)
    auto_class: ClassVar = "AutoModelForCausalLM"

    def __init__(self, config: Any, factory: LayerFactory, vocab_size: int) -> None:
        """config: a HuggingFaceConfig. vocab_size: of the tokenizer, at most that of the model.
        Raises UsageError for a model that `auto_class` of transformers cannot build, and for a plan
        that does not fit the model."""
        super().__init__()
        self.config, self.batch_keys = config, DropoutKeys()
        self.buffers_on: torch.device | None = None
        self.has_run = False
        self.positions = config.positions or NO_END
        assert factory.parallelize is not None, "this tensor-parallel mode takes no such model"
        self.tensor = factory.tensor
        with _refused(config, f"a model that {self.auto_class} of transformers builds"):
            model = unmodified(config, self.auto_class)
        self.vocab_size = model.config.get_text_config().vocab_size
        if config.recompute_granularity == "full":
            contexts = {"context_fn": lambda: (nullcontext(), self.recomputing())}
            with _refused(config, "one that recomputes its layers"):
                enable = getattr(model, "activation_checkpointing_enable", None)
                enable = enable or model.gradient_checkpointing_enable  # its name in 5.17
                enable({"use_reentrant": False, **contexts})
        self.has_window = has_window(model.config.get_text_config().to_dict())
        self._replace_dropout(model, factory)
        use_own_kernels(model)
        self.warnings = []
        if self.drawn:
            self.warnings.append(
                "warning: torch draws the dropout of these modules, which depends on micro-batches "
                f"and layout: {', '.join(self.drawn)}"
            )
        self.tied_table: str | None = None
        if getattr(model.config, "tie_word_embeddings", False):
            names = {id(each): f"model.{name}.weight" for name, each in model.named_modules()}
            self.tied_table = names.get(id(model.get_input_embeddings()))
        with _refused(config, "a model that can be cut"):
            plan = plan_at(model, config.stated_plan, factory.tensor.size)
            self.model = factory.parallelize(model, plan)
        columns = (each for each in self.model.modules() if isinstance(each, ColumnLinear))
        self.shared_inputs = {id(each.shared_input): each.shared_input for each in columns}
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compiles = "in parts"  # type: ignore[assignment]
        head = model.get_output_embeddings()
        self.reads = "input" if isinstance(head, ColumnLinear) else "output"

    def _replace_dropout(self, model: Any, factory: LayerFactory) -> None:
        text = model.config.get_text_config()
        names = ("hidden_size", "embedding_size", "word_embed_proj_dim")
        widths: list[int] = [getattr(text, name) for name in names if hasattr(text, name)]
        is_ours = model.config._attn_implementation == "megatron"
        for name, module in [*model.named_modules()]:
            if "Attention" in type(module).__name__:
                if not is_ours:
                    continue  # its own code may apply a Dropout to probabilities
                core: Any = factory.attention_core(0.0, f"{name}.core")
                core.batch_keys, module.megatron_core = self.batch_keys, core
                if factory.tensor.size > 1:
                    own = getattr(module, "config", text)
                    core.heads = getattr(own, "num_attention_heads", 0)
            for own_name, child in [*module.named_children()]:
                if type(child) is nn.Dropout and child.p > 0:
                    dropout = factory.dropout(child.p, f"{name}.{own_name}")
                    planned = KernelDropout(dropout, self.batch_keys, widths, factory.tensor.size)
                    setattr(module, own_name, planned)
        self.drawn = other_dropout(model)
        self.drawn_key: Any = factory.dropout(0.0, "drawn").key

    def denominators(self, batch: Any) -> list[float]:
        return [float(batch.loss_mask.sum(dtype=np.float64))]

    def embed(self, batch: Any) -> dict[str, Any]:
        """Arguments of the model's forward: such a model is a single stage. In a batch that is
        padded at its end no token attends to padding."""
        if batch.document_starts is None:
            return {"input_ids": batch.tokens}
        if self.has_window:
            raise NotImplementedError("a mask of documents would take the place of its window")
        mask = document_mask(batch.document_starts)
        if self.model.config._attn_implementation != "megatron":  # its code adds masks to scores
            dtype = next(self.model.parameters()).dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return {"input_ids": batch.tokens, "position_ids": batch.positions, "attention_mask": mask}

    def layers(
        self, x: Any, batch: Any, cache: KeyValueCache | None = None, *, numbers: Any = None
    ) -> Tensor:
        """Input of the output layer, [n, h]; if the model scales or caps its logits, the logits:
        this rank's columns [n, v/t], or [n, v] if the plan leaves the output layer whole.
        cache: see Decoder; keys and values are in the model's own cache."""
        self.batch_keys.keys = dropout_keys(batch)
        with self.arithmetic():
            if cache is not None:
                from transformers import DynamicCache

                if not self.has_run:
                    self._call(x)  # its second try would read the tokens into the cache twice
                if cache.other is None:
                    cache.other = DynamicCache(config=self.model.config)
                x = x | {"past_key_values": cache.other, "use_cache": True}
                if cache.first is not None:
                    count = cache.length + batch.tokens.shape[1]
                    columns = torch.arange(count, device=cache.first.device)
                    is_real = columns >= cache.first[:, None]
                    x |= {"attention_mask": is_real.long(), "position_ids": batch.positions}
            output = self._call(x)
        if cache is not None:
            cache.advance(batch.tokens.shape[1])
        return output.flatten(0, 1)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around the recomputation of a layer. It ends at the layer's last saved tensor, and so may
        leave a module before this lets its shared input go."""
        with self.arithmetic():
            try:
                yield
            finally:
                for each in self.shared_inputs.values():
                    each.close()

    def arithmetic(self) -> AbstractContextManager[object]:
        """Context in which the model's code runs, and in which its layers are recomputed."""
        if next(self.model.parameters()).dtype != torch.float64:
            return nullcontext()
        self.model.set_experts_implementation("eager")  # the grouped matmul knows no fp64
        return KeepFP64()

    def _call(self, arguments: Any) -> Tensor:
        head, device = self.model.get_output_embeddings(), arguments["input_ids"].device
        if self.drawn and self.training:
            # The same seed on the ranks that hold one model; recomputed layers draw the same.
            torch.manual_seed(int(fold(self.drawn_key, require_keys(self.batch_keys.keys)).sum()))
        if isinstance(head, ColumnLinear):
            head.mode = self.reads
        if self.buffers_on != device:
            self.buffers_on = device
            for module in self.model.modules():
                for name, buffer in [*module.named_buffers(recurse=False)]:
                    setattr(module, name, buffer.to(device))
        try:
            logits: Tensor = self.model(**({"use_cache": False} | arguments)).logits
            is_input = isinstance(head, ColumnLinear) and logits is head.kept_input
        finally:
            if isinstance(head, ColumnLinear):
                head.mode, head.kept_input = "output", None
        if self.reads == "input" and not is_input:
            # The model scales or caps its logits, which also works on one rank's columns.
            self.reads = "own columns"
            return self._call(arguments)
        self.has_run = True
        return logits

    def logits(self, x: Tensor) -> Tensor:
        """This rank's columns [n, v/t] of the logits, from the output x of `layers`."""
        if self.reads == "own columns":
            return x
        head = self.model.get_output_embeddings()
        if self.reads == "output":  # whole on every rank
            size = -(-x.shape[-1] // self.tensor.size) * self.tensor.size
            return split_with_gradient(F.pad(x, (0, size - x.shape[-1])), -1, self.tensor)
        return head.columns(x)

    def losses(self, x: Tensor, labels: Tensor, scales: Tensor) -> Tensor:
        """The sum of scales [n] x the cross-entropy of labels [n]."""
        head = self.model.get_output_embeddings()
        if self.reads == "input":
            return head.loss(x, labels, scales)
        axis = ALONE if self.reads == "output" else self.tensor
        losses = vocab_parallel_cross_entropy(x, labels, axis, self.vocab_size)
        return (losses * scales.to(losses.dtype)).sum()

    def loss(self, x: Tensor, batch: Any, loss_scales: Tensor) -> Tensor:
        """See Objective: cross-entropy of each counted token."""
        scales = batch.loss_mask.double() * loss_scales
        return self.losses(x, batch.labels.flatten(), scales.flatten())[None]

    def forward(self, batch: Any, loss_scales: Tensor | None = None) -> Tensor:
        """See `loss`; without scales see `logits`."""
        x = self.layers(self.embed(batch), batch)
        return self.logits(x) if loss_scales is None else self.loss(x, batch, loss_scales)

    load_folder = weights.load_folder

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor as it is held) from the model's own initialisation, one layer
        at a time, so that no more of it is whole at once. A function of the seed alone."""
        for name, whole in weights.initial_values(unmodified(self.config, self.auto_class), seed):
            yield f"model.{name}", weights.layout_of(self.model, name).from_original(whole)


class HuggingFaceMasked(HuggingFace):
    """A model of transformers that predicts masked tokens."""

    terms: ClassVar = ("mlm_loss",)
    auto_class: ClassVar = "AutoModelForMaskedLM"

    def embed(self, batch: Any) -> dict[str, Any]:
        found = {"input_ids": batch.tokens, "attention_mask": batch.is_real.to(torch.int64)}
        if self.config.has_token_types:
            found["token_type_ids"] = batch.token_types
        return found

    def loss(self, x: Tensor, batch: BertBatch, loss_scales: Tensor) -> Tensor:
        """See Objective: cross-entropy of each masked token."""
        scales = batch.is_counted * loss_scales[0]
        return self.losses(x[batch.masked], batch.masked_labels, scales)[None]
