"""Megatron-Core's GPTModel as a contender of `train_step.py`, in an environment of its own.

    PYTHON benchmarks/megatron_core_gpt2.py SETTINGS.json WEIGHTS.npz RANK

Its top-level package is called `megatron`, as this project's is: so this file is run by the Python
of an environment in which megatron-core is installed and this project is not, and takes from here
what imports neither. Layers are Transformer Engine's where that is installed, else its own. In
bf16 its weights are bf16 with fp32 masters, by fused AdamW of torch, as this project's are.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent


def import_benchmarks() -> None:
    """Make `benchmarks` known without its parent folder, where another `megatron` is."""
    spec = spec_from_file_location("benchmarks", FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["benchmarks"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


import_benchmarks()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from benchmarks.cases import LEARNING_RATE, Case  # noqa: E402
from benchmarks.profiles import profiled  # noqa: E402
from benchmarks.turns import GpuMemory, ResidentMemory, Stopwatch, serve  # noqa: E402

# Theirs and ours, of a layer. Theirs is [out, in] too.
LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    # Transformer Engine's norms are part of the product behind them.
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
}
OUTER = {
    "embedding.word_embeddings.weight": "word_embedding.weight",
    "embedding.position_embeddings.weight": "position_embedding.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = ("word_embeddings", "linear_qkv", "linear_fc1")  # cut along dim 0
ROWS = ("linear_proj.weight", "linear_fc2.weight")  # along dim 1


def replace_what_needs_cuda() -> None:
    """On the CPU its own layers run but for two lines: where a scratch buffer is made, and the
    random state of dropout, of which there is none here."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext


def uses_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def build(case: Case, dtype: torch.dtype, device: torch.device, size: int) -> GPTModel:
    on_gpu = device.type == "cuda"
    settings: dict[str, Any] = {
        "num_layers": case.num_layers,
        "hidden_size": case.hidden_size,
        "num_attention_heads": case.heads,
        "layernorm_epsilon": case.epsilon,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": size,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # GeLU by tanh: theirs is, where it is fused with the bias.
        "activation_func": F.gelu if on_gpu else partial(F.gelu, approximate="tanh"),
        "use_cpu_initialization": not on_gpu,
        **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), on_gpu),
        "masked_softmax_fusion": False,  # a kernel of apex
    }
    if case.checkpoint_activations:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        settings["recompute_num_layers"] = 1
    if uses_transformer_engine(device):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(
        TransformerConfig(**settings),
        spec,
        vocab_size=case.vocab_size,  # without padding, which their softmax would count
        max_sequence_length=case.sequence,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    return model.to(device, dtype).train()


@torch.no_grad()
def load(model: GPTModel, weights: Any, case: Case, rank: int, size: int) -> None:
    """weights: this project's, whole, by name."""
    for name, parameter in model.named_parameters():
        whole = torch.from_numpy(weights[our_name(name)])
        if "linear_qkv" in name and "layer_norm" not in name:
            whole = by_head(whole, case.heads)
        cut = 0 if any(part in name for part in COLUMNS) and "layer_norm" not in name else None
        cut = 1 if any(part in name for part in ROWS) else cut
        parameter.copy_(whole if cut is None else whole.chunk(size, cut)[rank])


def our_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, number, *rest = name.split(".")
    part = ".".join(rest)
    stem, _, kind = part.replace("layer_norm_", "layer_norm.").rpartition(".")
    return f"transformer.layers.{number}.{LAYER[stem]}.{kind}"


def by_head(whole: Tensor, heads: int) -> Tensor:
    """[3, heads x size, ...] to rows of query, key and value head by head, as theirs are."""
    return whole.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2)


class Training:
    """Steps as its own optimizer does them: fp32 masters of narrow weights, clipping, AdamW."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.clip_grad = case.clip_grad
        self.weights = list(model.parameters())
        self.masters = [each.detach().float() for each in self.weights]  # itself, if it is fp32
        matrices = [each for each in self.masters if each.dim() > 1]
        vectors = [each for each in self.masters if each.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": case.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, betas=case.betas, eps=case.adam_eps, fused=True
        )
        # What every rank holds whole counts once in the norm.
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        is_cut = [getattr(each, "tensor_model_parallel", False) for each in self.weights]
        self.counts = [is_first or each for each in is_cut]

    def step(self, loss: Tensor) -> float:
        """One update; the loss before it."""
        loss.backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        self.clip([master.grad for master in self.masters if master.grad is not None])
        self.adamw.step()
        if self.weights[0].dtype != self.masters[0].dtype:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return loss.item()

    def clip(self, gradients: list[Tensor]) -> None:
        own = [each for each, is_own in zip(gradients, self.counts, strict=True) if is_own]
        square = torch.stack(torch._foreach_norm(own)).square().sum()
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        factor = (self.clip_grad / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)


def connect(device: torch.device, store: str, rank: int, size: int) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    if on_gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    else:
        replace_what_needs_cuda()


def steps(case: Case, model: GPTModel, device: torch.device) -> Callable[[int], float]:
    """Of a batch's number, to its loss."""
    training = Training(model, case)
    positions = torch.arange(case.sequence, device=device).expand(case.batch, -1)
    mask = None  # Transformer Engine makes the one that its kernels know
    if not uses_transformer_engine(device):
        square = torch.ones(case.sequence, case.sequence, dtype=torch.bool, device=device)
        mask = square.triu(1)[None, None]

    def step(number: int) -> float:
        text = torch.from_numpy(case.text(number)).to(device)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        return training.step(model(tokens, positions, mask, labels=labels).mean())

    return step


def main(file: str, weights: str, rank: int) -> None:
    """Build the model and answer what `train_step.py` asks of it."""
    told = json.loads(Path(file).read_text())
    torch.set_num_threads(told["threads"])
    case, size, kind = Case.read(told["case"]), told["tensor_parallel"], told["device"]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    connect(device, f"{file}.megatron_core", rank, size)
    memory = GpuMemory() if kind == "cuda" else ResidentMemory()
    model = build(case, DTYPES[told["dtype"]], device, size)
    with np.load(weights) as whole:
        load(model, whole, case, rank, size)

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()
        if size > 1:
            dist.barrier()

    watch = Stopwatch(steps(case, model, device), wait)
    serve(
        {
            "losses": watch.losses,
            "time": watch.time,
            "memory": lambda: {"bytes": memory.peak()},
            "profile": lambda steps, trace: profiled(
                partial(watch.time, 1), steps, Path(f"{trace}.{rank}.json"), kind
            ),
        }
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
