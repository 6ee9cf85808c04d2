"""Megatron-Core's GPTModel, schedules, gradient buffers and optimizer, in fp32.

A layout has tensor, sequence, data, zero=1 (its distributed optimizer) and pipeline. Neither
Transformer Engine nor Apex is needed. Calls for a GPU by name get the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from conformance.adapters import Refused
from conformance.adapters.torch import Base
from conformance.fixture import IGNORED, Fixture, MicroBatch


class OnCPU(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        if func is Tensor.type and isinstance(out, str):  # its optimizers read this name
            return out.replace("torch.Float", "torch.cuda.Float")
        return out


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
OnCPU().__enter__()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

# {module there: the modules of the adapter of torch that it fuses}
LAYER = {
    "input_layernorm": ("norm1",),
    "self_attention.linear_qkv": ("q", "k", "v"),
    "self_attention.linear_proj": ("o",),
    "pre_mlp_layernorm": ("norm2",),
    "mlp.linear_fc1": ("gate", "up"),
    "mlp.linear_fc2": ("down",),
}
OUTER = {
    "embedding.word_embeddings": "words",
    "embedding.position_embeddings": "positions",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "head",
}
TIED = "embedding.word_embeddings.weight"


class Norm:
    """torch's, for sequence parallelism: Megatron-Core takes that of Apex or Transformer Engine."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for each in made.parameters():
            each.sequence_parallel = True  # type: ignore[attr-defined]
        return made


class Adapter(Base):
    """Zeros pad the vocabulary to a multiple of the tensor ranks, as the layers want it. The loss
    is Megatron-Core's."""

    trainer = "Megatron-Core"
    keys = ("tensor", "sequence", "data", "zero", "pipeline")
    stages = (0, 1)
    dtypes = (torch.float32,)

    def check(self, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        super().check(layout, dtype)
        self.layout = layout
        if self.facts["model_type"] == "bert":
            raise Refused("Megatron-Core's BERT has its norms before attention and MLP")

    def build(self, fixture: Fixture, dtype: torch.dtype) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor, pipeline = self.sizes[1], self.layout.get("pipeline", 1)
        parallel_state.initialize_model_parallel(tensor, pipeline)
        CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # streams of a GPU, for dropout
        kind, c = self.facts["model_type"], self.facts["config"]
        is_llama = kind == "llama"
        self.heads = heads = c.get("n_head") or c["num_attention_heads"]
        self.groups = c.get("num_key_value_heads", heads)
        hidden = c.get("n_embd") or c["hidden_size"]
        config = TransformerConfig(
            num_layers=c.get("n_layer") or c["num_hidden_layers"],
            hidden_size=hidden,
            ffn_hidden_size=c.get("n_inner") or c["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=self.groups,
            normalization="RMSNorm" if is_llama else "LayerNorm",
            layernorm_epsilon=c["rms_norm_eps" if is_llama else "layer_norm_epsilon"],
            gated_linear_unit=is_llama,
            activation_func=F.silu if is_llama else partial(F.gelu, approximate="tanh"),
            add_bias_linear=not is_llama,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=dtype,
            sequence_parallel=bool(self.layout.get("sequence")),
            use_cpu_initialization=True,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
        )
        layer: Any = get_gpt_layer_local_spec(normalization=config.normalization)
        if config.sequence_parallel:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            layers = [layer] * get_num_layers_to_build(config)
            layer = TransformerBlockSubmodules(layers, layer_norm=Norm)
        self.vocabulary = c["vocab_size"]
        self.core = GPTModel(
            config,
            layer,
            vocab_size=self.vocabulary + -self.vocabulary % tensor,
            max_sequence_length=c.get("n_positions") or c["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not is_llama,
            position_embedding_type="rope" if is_llama else "learned_absolute",
            rotary_base=int(c.get("rope_theta", 10000)),
        )
        wholes = self.to_core(self.to_ours(fixture.weights()))
        for name, parameter in self.core.named_parameters():
            there = self.global_name(name)
            whole = wholes[there if there in wholes else TIED]
            if getattr(parameter, "tensor_model_parallel", False) and tensor > 1:
                short = parameter.shape[0] * tensor - len(whole) if is_vocabulary(name) else 0
                whole = torch.cat([whole, whole.new_zeros(short, *whole.shape[1:])])
                rank = parallel_state.get_tensor_model_parallel_rank()
                whole = whole.chunk(tensor, parameter.partition_dim)[rank]
            parameter.data.copy_(whole)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=bool(self.zero))
        return DistributedDataParallel(config, settings, self.core)

    def prepare(self) -> None:
        given = self.facts["optimizer"]
        config = OptimizerConfig(
            lr=given["lr"],
            min_lr=given["lr"],
            adam_beta1=given["betas"][0],
            adam_beta2=given["betas"][1],
            adam_eps=given["eps"],
            weight_decay=given["weight_decay"],
            clip_grad=given["clip"],
            use_distributed_optimizer=bool(self.zero),
        )
        self.megatron = get_megatron_optimizer(config, [self.model])
        decay = {f"{each}_wd": given["weight_decay"] for each in ("start", "end")}
        OptimizerParamScheduler(  # it also leaves weights of one dim without decay
            self.megatron,
            init_lr=given["lr"],
            max_lr=given["lr"],
            min_lr=given["lr"],
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            wd_incr_steps=1,
            wd_incr_style="constant",
            **decay,
        )

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        rank = parallel_state.get_data_parallel_rank()
        own = [each.share(rank, self.sizes[0]) for each in micro_batches]
        self.model.zero_grad_buffer()
        self.megatron.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=iter(own),
            model=[self.model],
            num_microbatches=len(own),
            seq_length=own[0].input_ids.shape[1],
            micro_batch_size=len(own[0].input_ids),
            forward_only=False,
        )
        self.recorded = self.whole_gradients()
        total = sum(found, torch.zeros(2))  # stages before the last one find nothing
        dist.all_reduce(total)  # tensor ranks count both numbers again
        _, norm, _ = self.megatron.step()
        return float(total[0] / total[1]), float(norm)

    def forward(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        scored = (batch.labels != IGNORED).float()
        positions = torch.arange(scored.shape[1]).expand(scored.shape)
        losses = self.losses(model, batch.input_ids, positions, batch.labels.clamp(min=0))

        def of_micro_batch(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss, tokens = (losses * scored).sum(), scored.sum()
            return loss, tokens.int(), torch.stack([loss.detach(), tokens])

        return losses, of_micro_batch

    def losses(self, model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """[b, s]; before the last stage its output."""
        return model(tokens, positions, None, labels=labels)

    def whole_gradients(self) -> dict[str, Tensor]:
        """Those of this stage before clipping; a rank of a distributed optimizer has its part."""
        gradients = {}
        for buffer in self.model.buffers:
            flat = buffer.grad_data.clone()
            for bucket in buffer.buckets if self.zero else ():
                part = flat[bucket.offset : bucket.offset + bucket.grad_data.numel()]
                group = parallel_state.get_data_parallel_group()
                own = part.chunk(self.sizes[0])[parallel_state.get_data_parallel_rank()]
                dist.all_gather_into_tensor(part, own.clone(), group=group)
            for name, parameter in self.core.named_parameters():
                first, last, _ = buffer.param_index_map[parameter]
                gradients[name] = flat[first:last].view(parameter.shape)
        return gradients

    def gradients(self) -> Mapping[str, Tensor]:
        return self.whole(self.recorded)

    def weights(self) -> Mapping[str, Tensor]:
        return self.whole(dict(self.core.named_parameters()))

    def whole(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        group, wholes = parallel_state.get_tensor_model_parallel_group(), {}
        for name, parameter in self.core.named_parameters():
            tensor = own[name].detach()
            if getattr(parameter, "tensor_model_parallel", False) and self.sizes[1] > 1:
                parts = [torch.empty_like(tensor) for _ in range(self.sizes[1])]
                dist.all_gather(parts, tensor.contiguous(), group=group)
                tensor = torch.cat(parts, parameter.partition_dim)
            wholes[self.global_name(name)] = (
                tensor[: self.vocabulary] if is_vocabulary(name) else tensor
            )
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, wholes)
        found = dict(chain.from_iterable(each.items() for each in stages))
        lost = {}
        if "head" not in self.table:  # another stage has a copy of the tied weight
            copy, own_weight = found.pop("output_layer.weight", None), found[TIED]
            lost = {} if copy is None or copy.equal(own_weight) else {"lm_head.weight": copy}
        return self.to_theirs(self.from_core(found)) | lost

    def global_name(self, name: str) -> str:
        """By the layer's number in the model, not in the stage."""
        if "layers." not in name:
            return name
        first, number, rest = re.split(r"(?<=layers\.)(\d+)", name)
        return f"{first}{self.core.decoder.layers[int(number)].layer_number - 1}{rest}"

    def to_core(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Heads of a group are side by side: its queries, its key, its value."""
        found = {}
        for name, tensor in ours.items():
            path, _, kind = name.rpartition(".")
            if not path.startswith("layers."):
                found[f"{next(k for k, v in OUTER.items() if v == path)}.{kind}"] = tensor
                continue
            where, _, module = path.rpartition(".")
            there, parts = next((k, v) for k, v in LAYER.items() if module in v)
            every = [ours[n] for each in parts if (n := f"{where}.{each}.{kind}") in ours]
            if len(parts) == 3:
                every = [
                    torch.cat([p.unflatten(0, (self.groups, -1)) for p in every], 1).flatten(0, 1)
                ]
            found[f"decoder.{where}.{there}.{kind}"] = torch.cat(every)
        return found

    def from_core(self, there: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ours = {}
        for name, tensor in there.items():
            path, _, kind = name.rpartition(".")
            if path in OUTER:
                ours[f"{OUTER[path]}.{kind}"] = tensor
                continue
            _, number, module = re.split(r"(?<=layers\.)(\d+)\.", path)
            parts = LAYER[module]
            split: Sequence[Tensor] = [tensor]
            if len(parts) == 3:
                grouped = tensor.unflatten(0, (self.groups, -1))
                head = grouped.shape[1] // (self.heads // self.groups + 2)
                sizes = [grouped.shape[1] - 2 * head, head, head]
                split = [each.flatten(0, 1) for each in grouped.split(sizes, 1)]
            elif len(parts) == 2:
                split = tensor.chunk(2) if "gate" in self.table else [tensor]
                parts = parts[-len(split) :]
            for each, part in zip(parts, split, strict=True):
                ours[f"layers.{number}.{each}.{kind}"] = part
        return ours

    def local_tensors(self) -> dict[str, list[Tensor]]:
        own = list(self.core.parameters())
        inner = getattr(self.megatron, "chained_optimizers", [self.megatron])
        states = [state for each in inner for state in each.optimizer.state.values()]
        return {
            "parameters": own,
            "gradients": [each.main_grad for each in own],
            "optimizer": [t for s in states for t in s.values() if torch.is_tensor(t)],
        }


class Cut(Adapter):
    """Scores of the vocabulary's padding are out of the softmax."""

    def losses(self, model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        out = model(tokens, positions, None)
        if not self.core.post_process:
            return out
        first = parallel_state.get_tensor_model_parallel_rank() * out.shape[-1]
        is_real = torch.arange(first, first + out.shape[-1]) < self.vocabulary
        out = out.masked_fill(~is_real, torch.finfo(out.dtype).min)
        return self.core.compute_language_model_loss(labels, out.transpose(0, 1).contiguous())


def is_vocabulary(name: str) -> bool:
    return "word_embeddings" in name or "output_layer" in name
