"""GPT-2 and Llama by others, to compare with `steps.ours`: same weights, samples and updates.

plain torch      a direct model in nanoGPT's style; compiled: the whole model with the loss, while
                 clipping and fused AdamW are outside, as in nanoGPT
DTensor          the same under torch's parallelize_module, with the best plan that we know
transformers     GPT2LMHeadModel or LlamaForCausalLM with sdpa; compiled: block by block
Megatron-Core    GPTModel (pip install megatron-core, next to this project); on a CPU its own layers
floor            only the matmuls of the step, each in the memory layout that is fastest here

In bf16 this project and Megatron-Core compute on bf16 weights with fp32 masters. The others run as
their users do, on fp32 weights under autocast, whose conversions are part of their steps. Peers of
models.py keep weights, gradients and moments in bf16 (Training).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from timeit import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.harness import Figures, Rank, Turn
from benchmarks.plain_gpt2 import PlainGPT2
from benchmarks.steps import LEARNING_RATE, SEED, draw, dtype_of, precision_of, read, step_batches
from megatron.config.model import ModelConfig
from megatron.config.pretrain import PretrainConfig, PretrainGPT2Config
from megatron.data.images import ImageBatch
from megatron.libraries import failure
from megatron.models.build import build_on_meta
from megatron.parallel.initialize import initial_value
from megatron.parallel.kernels import matmul as our_matmul
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import sharding_specs
from megatron.train.executor import to_device
from megatron.train.state import DTYPES
from tools.convert.weights import model_of_transformers
from tools.layouts.job import open_samples
from tools.plan.trace import Step

TRANSFORMERS = "transformers.models.gpt2.modeling_gpt2"
"""Only contenders that call `transformers_model` need this module; its import takes seconds."""


def initial_weights(
    config: ModelConfig, vocab_size: int, device: torch.device | None = None
) -> dict[str, Tensor]:
    """This project's whole fp32 initial parameters, by name, for SEED; with a device, those of
    `steps.build(fast=True)` on it."""
    table = sharding_specs(build_on_meta(config, serial_mesh(), vocab_size))
    if device is None:
        return {name: initial_value(name, spec, SEED) for name, spec in table.items()}
    found = {name: torch.empty(spec.shape, device=device) for name, spec in table.items()}
    for name, whole in found.items():
        draw(name, table[name], whole)
    return found


def in_parts(weights: Mapping[str, Tensor], parts: int) -> dict[str, Tensor]:
    """This project's weights, with the rows of query, key and value as [parts, 3, rows], so that
    equal parts hold whole heads. parts = 1: all q, all k, all v; parts = heads: head by head."""
    return {
        name: x.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 2) if "qkv" in name else x
        for name, x in weights.items()
    }


@dataclass
class Training:
    """Training steps as a user of torch writes them: AdamW updates the parameters in their dtype.

    loss: mean over int64 [b, s] tokens, or images, and their labels. models: number of ranks that
    read different samples, and whose gradients are averaged. autocast: compute in bf16.
    """

    rank: Rank
    config: PretrainConfig
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    models: int = 1
    autocast: bool = False

    def __post_init__(self) -> None:
        own = self.rank.rank % self.models
        self.batches = step_batches(self.config, own, self.models)
        self.parameters = list(self.model.parameters())
        self.adamw = self.optimizer()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(self.parameters), fused=True, **self.options())

    def options(self) -> dict[str, Any]:
        own = self.config.optimizer
        betas = (own.adam_beta1, own.adam_beta2)
        return {"lr": LEARNING_RATE, "betas": betas, "eps": own.adam_eps}

    def groups(self, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
        """With and without weight decay, and with DTensors apart from plain tensors, as a fused
        AdamW does not take both."""
        own, found = self.config.optimizer, defaultdict[tuple[bool, bool], list[Tensor]](list)
        for each in parameters:
            decays = own.decay_biases_and_norms or each.dim() > 1
            found[decays, isinstance(each, DTensor)].append(each)
        return [
            {"params": several, "weight_decay": own.weight_decay if decays else 0.0}
            for (decays, _), several in found.items()
        ]

    def __call__(self) -> Figures:
        """A turn is one update; the loss is that before the update."""
        device, batch = self.rank.device, cast(Any, next(self.batches)[0])
        inputs = batch.images if isinstance(batch, ImageBatch) else batch.tokens
        inputs, labels = to_device(device, inputs, batch.labels)
        self.adamw.zero_grad(set_to_none=True)
        with parallel.loss_parallel():  # no effect on plain tensors
            with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.loss(inputs.contiguous(), labels.contiguous())
            loss.backward()
        self.update()
        mean = loss.detach() / self.models
        if self.models > 1:
            dist.all_reduce(mean)
        return {"loss": mean, "tokens": batch.num_tokens * self.models}

    def update(self) -> None:
        """Clip by the global norm, and update. clip_grad_norm_ does not take DTensors and plain
        tensors in one call."""
        kinds = [
            [each for each in self.parameters if isinstance(each, DTensor) is distributed]
            for distributed in (True, False)
        ]
        kinds = [each for each in kinds if each]
        norms = [get_total_norm(x.grad for x in each) for each in kinds]
        norm = torch.stack([whole(each) for each in norms]).norm()
        for each in kinds:
            clip_grads_with_norm_(each, self.config.optimizer.clip_grad, norm)
        self.adamw.step()


@dataclass
class MasterTraining(Training):
    """AdamW updates plain fp32 tensors: a rank's local parameters, or their masters if these are in
    half precision. is_cut: whether a parameter is sharded."""

    is_cut: Callable[[Tensor], bool] = lambda parameter: False

    def optimizer(self) -> torch.optim.Optimizer:
        self.masters = [local(each.detach()).float() for each in self.parameters]
        self.is_half = self.parameters[0].dtype != torch.float32
        return torch.optim.AdamW(self.groups(self.masters), fused=True, **self.options())

    def update(self) -> None:
        """Apply and free the gradients of the parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad, parameter.grad = local(parameter.grad).float(), None
        total = self.norm([each.grad for each in self.masters])
        clip_grads_with_norm_(self.masters, self.config.optimizer.clip_grad, total)
        self.adamw.step()
        if self.is_half:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Global norm; gradients that are whole on every rank count once."""
        pairs = zip(gradients, self.parameters, strict=True)
        own = [g for g, parameter in pairs if not self.rank.rank or self.is_cut(parameter)]
        square = get_total_norm(own).square()
        if self.rank.size > 1:
            dist.all_reduce(square)
        return square.sqrt()


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_gpt2(
    config: PretrainGPT2Config, device: torch.device, *, parts: int = 1, fast: bool = False
) -> PlainGPT2:
    """GPT-2 with this project's initial weights, and the head tied. parts: see in_parts. fast: see
    steps.build."""
    vocab_size = open_samples(config)[1]
    weights = in_parts(initial_weights(config.model, vocab_size, device if fast else None), parts)
    with device:
        model = PlainGPT2(config.model, vocab_size)
    model.load_state_dict(weights | {"head.weight": weights["word_embedding.weight"]})
    model.head.weight = model.word_embedding.weight
    return model


def plain(rank: Rank, flags: Sequence[str], *, compiled: bool = False, fast: bool = False) -> Turn:
    """On several ranks, DTensor shards it as in the paper, loss included. fast: see steps.build."""
    config: PretrainGPT2Config = read(flags, rank.size)
    model = plain_gpt2(config, rank.device, parts=rank.size, fast=fast)
    if rank.size > 1:
        replicated = Replicate()  # norms stay plain tensors: dispatch through DTensor is slower
        by_rows, by_columns = parallel.RowwiseParallel, parallel.ColwiseParallel
        plan = {
            "word_embedding": by_rows(input_layouts=replicated, output_layouts=replicated),
            "transformer.layers.*.attention.qkv": by_columns(),
            "transformer.layers.*.attention.output": by_rows(),
            "transformer.layers.*.mlp.up": by_columns(),
            "transformer.layers.*.mlp.down": by_rows(),
            "head": by_columns(output_layouts=Shard(-1), use_local_output=False),
        }
        parallel.parallelize_module(model, rank.mesh().device_mesh()["tensor"], plan)
        model.head.weight = model.word_embedding.weight  # parallelize_module unties them
    if compiled:
        model.compile()
    return MasterTraining(
        rank,
        config,
        model,
        model,
        autocast=precision_of(config) == "bf16",
        is_cut=lambda parameter: local(parameter).shape != parameter.shape,
    )


def transformers_model(
    config: ModelConfig, vocab_size: int, device: torch.device | None = None
) -> Any:
    """The model of transformers with this project's initial weights. device: see
    initial_weights."""
    weights = initial_weights(config, vocab_size, device)
    return model_of_transformers(config, vocab_size, weights, device)


def causal_loss(
    model: nn.Module,
    entropy: Callable[..., Tensor] = F.cross_entropy,
    dtype: torch.dtype | None = torch.float32,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean loss of a model of transformers. dtype: of the logits; None leaves theirs."""

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return entropy(logits.to(dtype or logits.dtype).flatten(0, 1), labels.flatten())

    return loss


def transformers(
    rank: Rank,
    flags: Sequence[str],
    *,
    settings: type[PretrainConfig] = PretrainGPT2Config,
    compiled: bool = False,
    fast: bool = False,
) -> Turn:
    config, entropy = read(flags, 1, settings), F.cross_entropy
    drawn_on = rank.device if fast else None
    model = transformers_model(config.model, open_samples(config)[1], drawn_on).to(rank.device)
    if compiled:
        # Block by block: if the whole model is compiled, attention gets its mask as a tensor, and
        # torch has no flash attention with that.
        entropy = torch.compile(entropy)
        for block in model.transformer.h if config.model.kind == "gpt2" else model.model.layers:
            block.compile()
    loss = causal_loss(model, entropy)
    return MasterTraining(rank, config, model, loss, autocast=precision_of(config) == "bf16")


def transformers_in_dtype(
    rank: Rank,
    flags: Sequence[str],
    *,
    settings: type[PretrainConfig],
    plan: Callable[[], dict[str, Any]] | None = None,
) -> Turn:
    """Weights, gradients, moments and logits are in the dtype of the flags. plan: of torch's
    parallelize_module."""
    config = read(flags, rank.size, settings)
    model = transformers_model(config.model, open_samples(config)[1])
    model.to(rank.device, dtype_of(config))
    if plan is not None:
        parallel.parallelize_module(model, rank.mesh().device_mesh()["tensor"], plan())
    return Training(rank, config, model, causal_loss(model, dtype=None))


CORE_NAMES = {  # theirs: ours; Transformer Engine's norms are part of the next matmul
    "embedding.word_embeddings": "word_embedding",
    "embedding.position_embeddings": "position_embedding",
    "decoder.layers": "transformer.layers",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "decoder.final_layernorm": "final_norm",
}


def megatron_core(rank: Rank, flags: Sequence[str]) -> Turn:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, device = read(flags, rank.size), rank.device
    if rank.size > 1:
        rank.connect()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=rank.size)
    is_gpu = device.type == "cuda"
    has_engine = is_gpu and not failure("transformer_engine")
    layers = partial(gpt_layer_specs.get_gpt_layer_local_spec, normalization="LayerNorm")
    layers = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec if has_engine else layers
    if is_gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    else:  # its own layers run on a CPU after two patches: device of a buffer, dropout's state
        torch.cuda.current_device = lambda: device
        tensor_parallel.get_cuda_rng_tracker().fork = nullcontext
    ours, dtype, s = config.model, dtype_of(config), config.data.seq_length
    settings = TransformerConfig(
        num_layers=ours.num_layers,
        hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_attention_heads,
        layernorm_epsilon=ours.layernorm_epsilon,
        attention_dropout=ours.attention_dropout,
        hidden_dropout=ours.hidden_dropout,
        # Tanh GeLU on both: their GeLU is the tanh form where it is fused with the bias.
        activation_func=F.gelu if is_gpu else partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=is_gpu,
        bias_dropout_fusion=is_gpu,
        tensor_model_parallel_size=rank.size,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not is_gpu,
        masked_softmax_fusion=False,  # needs a kernel of apex
    )
    vocab_size = open_samples(config)[1]
    model = GPTModel(
        settings,
        layers(),
        vocab_size,  # without padding, which their softmax would include
        max_sequence_length=ours.max_position_embeddings,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    weights = in_parts(initial_weights(ours, vocab_size), ours.num_attention_heads)
    for name, parameter in model.named_parameters():
        for theirs, own in CORE_NAMES.items():
            name = name.replace(theirs, own)
        whole = weights[name]
        for dim, (size, own_size) in enumerate(zip(whole.shape, parameter.shape, strict=True)):
            whole = whole.chunk(size // own_size, dim)[rank.rank if size > own_size else 0]
        parameter.data.copy_(whole)
    model.to(device, dtype).train()
    positions = torch.arange(s, device=device).expand(config.training.micro_batch_size, -1)
    mask = torch.ones(s, s, dtype=torch.bool, device=device).triu(1)[None, None]
    mask = None if has_engine else mask  # its kernels apply the causal mask themselves
    return MasterTraining(
        rank,
        config,
        model,
        loss=lambda tokens, labels: model(tokens, positions, mask, labels=labels).mean(),
        is_cut=lambda weight: getattr(weight, "tensor_model_parallel", False),
    )


def floor(rank: Rank, flags: Sequence[str]) -> Turn:
    """The matmuls of a step on one rank, each in the way that is fastest here."""
    config, chosen = read(flags, rank.size), list[Callable[[], Tensor]]()
    precision = precision_of(config)
    draw = partial(torch.randn, dtype=DTYPES[precision], device=rank.device)

    def seconds(run: Callable[[], Tensor]) -> float:
        return min(repeat(lambda: (run(), rank.synchronize()), number=1, repeat=5)[1:])

    for phase in Step(config, rank.size, precision, rank.device_type).work.values():
        for each, times in phase.matmuls.items():
            left, right = draw(each.batch, each.m, each.k), draw(each.batch, each.k, each.n)
            best = min(ways(left.squeeze(0), right.squeeze(0)), key=seconds)
            chosen += [best] * round(times * each.share)

    def turn() -> None:
        for run in chosen:
            run()

    return turn


def ways(left: Tensor, right: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Ways to multiply, by torch or by this project's matmul, with either factor and the result in
    row-major or column-major order. A column-major result is (x y)' = y' x'."""
    pairs = ([each, each.mT.contiguous().mT] for each in (left, right))
    for x, y in product(*pairs):
        for one, two in ((x, y), (y.mT, x.mT)):
            yield partial(torch.matmul, one, two, out=torch.matmul(one, two))
            if x.dim() == 2:
                yield partial(our_matmul, one, two.mT)
