"""GPT-2 by others, as contenders beside `steps.ours`: same weights, same samples, the same update.

plain torch      a model as a user of torch writes it, without a detour for generality
DTensor          the same by torch's parallelize_module, with the best plan that we know
transformers     GPT2LMHeadModel with sdpa
Megatron-Core    GPTModel (pip install megatron-core, beside this project); on a CPU its own layers
floor            the matmuls of the step alone, each in the layout that is fastest here

In bf16 this project and Megatron-Core compute on bf16 weights with fp32 masters; the others as
their users do, on fp32 weights under autocast, whose conversions are part of their steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product as combinations
from typing import Any

import torch
import torch._dynamo  # here, or the first step of torch's optimizer would import it
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from benchmarks.harness import Rank, Turn, is_installed
from benchmarks.steps import LEARNING_RATE, SEED, batch_of, precision_of, read
from megatron.config.model import GPT2Config, TextModelConfig
from megatron.config.pretrain import PretrainGPT2Config
from megatron.models.build import build_on_meta
from megatron.parallel.kernels import matmul as our_matmul
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import initial_value, sharding_specs
from megatron.train.state import DTYPES
from tools.convert.gpt2 import GPT2
from tools.convert.weights import resolve, to_theirs
from tools.layouts.job import open_samples
from tools.planning.trace import Step


def initial_weights(config: TextModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """This project's whole parameters, by name, as a run of SEED begins with them."""
    table = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    return {name: initial_value(name, spec, SEED) for name, spec in table.items()}


def weights_of(config: PretrainGPT2Config) -> dict[str, Tensor]:
    return initial_weights(config.model, open_samples(config)[1])


class Training:
    """Steps as a user of torch writes them; of narrow parameters AdamW updates fp32 masters.

    loss: the mean over int64 [b, s] inputs and labels. norm: of gradients of one kind, DTensors or
    plain tensors; by default clip_grad_norm_'s own.
    """

    def __init__(
        self,
        rank: Rank,
        config: PretrainGPT2Config,
        parameters: Iterable[Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        norm: Callable[[list[Tensor]], Tensor] = get_total_norm,
    ) -> None:
        self.device, self.config, self.loss, self.norm = rank.device, config, loss, norm
        self.weights = list(parameters)
        is_wide = all(each.dtype == torch.float32 for each in self.weights)
        self.masters = self.weights if is_wide else [x.detach().float() for x in self.weights]
        is_cast = is_wide and precision_of(config) == "bf16"
        self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=is_cast)
        self.number, optimizer = 0, config.optimizer
        # DTensors and plain tensors in one list break fused AdamW and the norm.
        self.kinds = grouped(self.masters, lambda x: isinstance(x, DTensor))
        self.adamw = torch.optim.AdamW(
            [
                {"params": same, "weight_decay": optimizer.weight_decay * (same[0].dim() > 1)}
                for same in grouped(self.masters, lambda x: (isinstance(x, DTensor), x.dim() > 1))
            ],
            lr=LEARNING_RATE,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            fused=True,
        )

    def __call__(self) -> dict[str, Any]:
        """A turn: one update; the loss is that before it."""
        batch = batch_of(self.config, self.number)
        self.number += 1
        tokens, labels = (torch.from_numpy(x).to(self.device) for x in (batch.tokens, batch.labels))
        self.adamw.zero_grad(set_to_none=True)
        with loss_parallel():  # of no effect on plain tensors
            with self.autocast():
                loss = self.loss(tokens.contiguous(), labels.contiguous())
            loss.backward()
        if self.masters is not self.weights:
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        norms = [self.norm([each.grad for each in kind]) for kind in self.kinds]
        local = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(local))
        for kind in self.kinds:
            clip_grads_with_norm_(kind, self.config.optimizer.clip_grad, total)
        self.adamw.step()
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return {"loss": loss.item(), "tokens": batch.num_tokens}


def grouped(tensors: Iterable[Tensor], key: Callable[[Tensor], object]) -> list[list[Tensor]]:
    table: dict[object, list[Tensor]] = {}
    for each in tensors:
        table.setdefault(key(each), []).append(each)
    return list(table.values())


class Projections(nn.Module):
    """q, k and v: fused, or for DTensor, which cannot cut a fused weight by heads, apart."""

    def __init__(self, h: int, is_fused: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(h, 3 * h)] if is_fused else [nn.Linear(h, h) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        found = [each(x) for each in self.parts]
        return found if len(found) == 3 else found[0].chunk(3, dim=-1)


class Block(nn.Module):
    """x [b, s, h] to [b, s, h]."""

    def __init__(self, config: TextModelConfig, is_fused: bool) -> None:
        super().__init__()
        h, epsilon = config.hidden_size, config.layernorm_epsilon
        self.head_size = h // config.num_attention_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h, epsilon), nn.LayerNorm(h, epsilon)
        self.projections, self.output = Projections(h, is_fused), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for each in self.projections(self.ln_1(x))
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    def __init__(self, config: TextModelConfig, vocab_size: int, is_fused: bool) -> None:
        super().__init__()
        h = config.hidden_size
        self.wte = nn.Embedding(vocab_size, h)
        self.wpe = nn.Embedding(config.max_position_embeddings, h)
        self.h = nn.ModuleList(Block(config, is_fused) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(h, config.layernorm_epsilon)
        self.head = nn.Linear(h, vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over int64 [b, s] tokens."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), labels.flatten())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """weights: this project's, whole, by name."""
        renamed = {"head.weight": weights["word_embedding.weight"]}
        names = {"transformer.layers": "h", "word_embedding": "wte", "position_embedding": "wpe"}
        names |= {"attention_norm": "ln_1", "mlp_norm": "ln_2", "final_norm": "ln_f"}
        names |= {"attention.output": "output", "mlp.": "", "attention.qkv": "projections.parts.0"}
        for name, whole in weights.items():
            for own, theirs in names.items():
                name = name.replace(own, theirs)
            parts = [whole]
            if "projections" in name:
                parts = [whole.flatten(0, 1)] if len(self.h[0].projections.parts) == 1 else whole
            for number, part in enumerate(parts):
                renamed[name.replace("parts.0", f"parts.{number}")] = part
        self.load_state_dict(renamed)


def plain(rank: Rank, flags: Sequence[str]) -> Turn:
    """On several ranks cut by DTensor as the paper does, its loss too."""
    config = read(flags, rank.size)
    model = PlainGPT2(config.model, open_samples(config)[1], is_fused=rank.size == 1)
    model.load(weights_of(config))
    model.to(rank.device)
    if rank.size > 1:
        parallelize(model, rank.mesh().device_mesh()["tensor"])
    return Training(rank, config, model.parameters(), model)


def parallelize(model: PlainGPT2, grid: Any) -> None:
    """The norms stay plain tensors, since dispatch through DTensor makes them slower."""
    whole = Replicate()
    outer = {
        "wte": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    inner = {
        # One conversion for the three layers, and so one all-reduce in the backward.
        "projections": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "projections.parts.*": ColwiseParallel(),
        "up": ColwiseParallel(),
        "output": RowwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, grid, outer)
    for block in model.h:
        parallelize_module(block, grid, inner)
    model.tie()  # parallelize_module has untied them


def transformers_gpt2(
    config: GPT2Config, vocab_size: int, weights: Mapping[str, Tensor]
) -> GPT2LMHeadModel:
    """weights: this project's, whole, by name; converted as tools/convert_hf.py does."""
    settings = {each.theirs: getattr(config, each.meaning or each.ours) for each in GPT2.settings}
    theirs = TheirConfig(vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, **settings)
    model = GPT2LMHeadModel(theirs)
    model.load_state_dict(to_theirs(GPT2, resolve(GPT2, config, vocab_size), weights), strict=False)
    return model.train()


def transformers(rank: Rank, flags: Sequence[str], *, compiled: bool = False) -> Turn:
    config = read(flags)
    model = transformers_gpt2(config.model, open_samples(config)[1], weights_of(config))
    model.to(rank.device)
    assert model.config._attn_implementation == "sdpa"
    entropy = F.cross_entropy
    if compiled:
        # Block by block: in a model that is compiled whole attention gets a mask as a tensor, with
        # which torch has no flash attention.
        entropy = torch.compile(entropy)
        for block in model.transformer.h:
            block.compile()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return entropy(logits.float().flatten(0, 1), labels.flatten())

    return Training(rank, config, model.parameters(), loss)


# Theirs and ours, of a layer; Transformer Engine's norms are part of the matmul behind them.
CORE_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
CORE_NAMES = {
    "embedding.word_embeddings": "word_embedding",
    "embedding.position_embeddings": "position_embedding",
    "decoder.final_layernorm": "final_norm",
    "decoder.layers": "transformer.layers",
    **CORE_LAYER,
}


def megatron_core(rank: Rank, flags: Sequence[str]) -> Turn:
    from megatron.core import parallel_state, tensor_parallel

    config, device = read(flags, rank.size), rank.device
    if rank.size > 1:
        rank.connect()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=rank.size)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    else:  # its own layers run but for two lines: where a scratch buffer is, and dropout's state
        torch.cuda.current_device = lambda: device  # type: ignore[assignment]
        tensor_parallel.get_cuda_rng_tracker().fork = nullcontext
    model = core_model(config, rank)
    load_core(model, weights_of(config), config, rank)
    weights, s = list(model.parameters()), config.data.seq_length
    positions, mask = torch.arange(s, device=device)[None], None
    if not has_transformer_engine(rank):  # which makes the mask that its kernels know
        mask = torch.ones(s, s, dtype=torch.bool, device=device).triu(1)[None, None]

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, positions.expand(len(tokens), -1), mask, labels=labels).mean()

    def norm(gradients: list[Tensor]) -> Tensor:
        """What every rank holds whole counts once."""
        pairs = zip(gradients, weights, strict=True)
        own = [g for g, w in pairs if not rank.rank or getattr(w, "tensor_model_parallel", False)]
        square = get_total_norm(own).square()
        if rank.size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    return Training(rank, config, weights, loss, norm)


def has_transformer_engine(rank: Rank) -> bool:
    return rank.device_type == "cuda" and is_installed("transformer_engine")


def core_model(config: PretrainGPT2Config, rank: Rank) -> nn.Module:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, dtype = config.model, DTYPES[precision_of(config)]
    is_gpu = rank.device_type == "cuda"
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="LayerNorm")
    if has_transformer_engine(rank):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    settings = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        layernorm_epsilon=model.layernorm_epsilon,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=rank.size,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # GeLU by tanh: theirs is, where it is fused with the bias.
        activation_func=F.gelu if is_gpu else partial(F.gelu, approximate="tanh"),
        use_cpu_initialization=not is_gpu,
        bias_activation_fusion=is_gpu,
        bias_dropout_fusion=is_gpu,
        masked_softmax_fusion=False,  # a kernel of apex
    )
    built = GPTModel(
        settings,
        spec,
        vocab_size=open_samples(config)[1],  # without padding, which their softmax would count
        max_sequence_length=config.model.max_position_embeddings,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    return built.to(rank.device, dtype).train()


@torch.no_grad()
def load_core(
    model: nn.Module, weights: Mapping[str, Tensor], config: PretrainGPT2Config, rank: Rank
) -> None:
    for name, parameter in model.named_parameters():
        its_name = name.replace("layer_norm_", "layer_norm.")
        for theirs, own in CORE_NAMES.items():
            its_name = its_name.replace(theirs, own)
        whole = weights[its_name]
        if "qkv" in its_name:  # theirs has query, key and value head by head
            heads = config.model.num_attention_heads
            whole = whole.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2)
        for dim, (size, own_size) in enumerate(zip(whole.shape, parameter.shape, strict=True)):
            if size != own_size:
                whole = whole.chunk(rank.size, dim)[rank.rank]
        parameter.copy_(whole)


def floor(rank: Rank, flags: Sequence[str]) -> Turn:
    """The matmuls of a step on one rank, each in the layout of factors and result that is fastest
    here, by torch or as this project does it."""
    config, device = read(flags, rank.size), rank.device
    dtype, chosen = DTYPES[precision_of(config)], []
    for phase in Step(config, rank.size, precision_of(config), rank.device_type).work.values():
        for each, times in phase.matmuls.items():
            left = torch.randn(each.batch, each.m, each.k, dtype=dtype, device=device).squeeze(0)
            right = torch.randn(each.batch, each.k, each.n, dtype=dtype, device=device).squeeze(0)
            run = min(layouts(left, right), key=lambda run: fastest(run, rank))
            chosen += [run] * round(times * each.share)

    def turn() -> None:
        for run in chosen:
            run()

    return turn


def layouts(left: Tensor, right: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Either factor and the result in memory by rows or by columns."""
    for by_columns in combinations((False, True), repeat=3):
        x, y = left, right
        x = x.mT.contiguous().mT if by_columns[0] else x
        y = y.mT.contiguous().mT if by_columns[1] else y
        if by_columns[2]:  # (x y)' = y' x', so that memory holds the result by columns
            x, y = y.mT, x.mT
        yield partial(torch.matmul, x, y, out=torch.matmul(x, y))
        if x.dim() == 2:
            yield partial(our_matmul, x, y.mT)


def fastest(run: Callable[[], Tensor], rank: Rank) -> float:
    """Seconds of the best of four, after one."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        rank.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])
