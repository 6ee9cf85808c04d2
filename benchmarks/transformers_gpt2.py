"""The independent peer of `learning_curves.py`: GPT-2 as a user of transformers trains it.

GPT2LMHeadModel, torch's AdamW, schedulers and `clip_grad_norm_`. Of this project it takes settings,
initial weights and batches, and no code that computes.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.config.model import TextModelConfig
from megatron.config.training import OptimizerConfig
from megatron.data.gpt2 import GPT2Batch

NAMES = {
    "word_embedding": "wte",
    "position_embedding": "wpe",
    "transformer.layers": "h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "final_norm": "ln_f",
}


def build(section: TextModelConfig, vocab_size: int, weights: dict[str, Tensor]) -> GPT2LMHeadModel:
    """weights: whole ones under our names."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=section.max_position_embeddings,
        n_embd=section.hidden_size,
        n_layer=section.num_layers,
        n_head=section.num_attention_heads,
        layer_norm_epsilon=section.layernorm_epsilon,
        embd_pdrop=section.hidden_dropout,
        resid_pdrop=section.hidden_dropout,
        attn_pdrop=section.attention_dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.transformer.load_state_dict(
        {_rename(name): _reshape(name, whole) for name, whole in weights.items()}
    )
    return model.train()


def _rename(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _reshape(name: str, whole: Tensor) -> Tensor:
    """Their linear weights are [inputs, outputs], ours [outputs, inputs]; Q, K and V are one."""
    if name.endswith("bias"):
        return whole.flatten()
    is_linear = "layers" in name and whole.dim() > 1
    return whole.flatten(0, -2).T if is_linear else whole


def optimizer_and_schedule(
    model: GPT2LMHeadModel, section: OptimizerConfig, steps: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Weight decay on matrices alone; linear warm-up, then cosine decay until `steps`."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": section.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=section.lr,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
    )
    warmup = section.lr_warmup_iters
    rise = LinearLR(adamw, start_factor=1 / warmup, total_iters=warmup - 1)
    decay = CosineAnnealingLR(adamw, T_max=steps - warmup, eta_min=section.min_lr)
    return adamw, SequentialLR(adamw, [rise, decay], milestones=[warmup - 1])


def clip_by_exact_norm(parameters: Iterable[Tensor], limit: float) -> None:
    """`clip_grad_norm_` with squares summed in fp64."""
    parameters = list(parameters)
    norm = get_total_norm([each.grad.double() for each in parameters])
    clip_grads_with_norm_(parameters, limit, norm.float())


def train(
    model: GPT2LMHeadModel,
    section: OptimizerConfig,
    steps: int,
    batches: Iterable[GPT2Batch],
    clip: Callable[[Iterable[Tensor], float], object],
) -> Iterator[tuple[float, float]]:
    """(mean loss before the update, learning rate) of each step, a batch each."""
    adamw, schedule = optimizer_and_schedule(model, section, steps)
    for batch in batches:
        logits = model(torch.from_numpy(batch.tokens)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        adamw.zero_grad()
        loss.backward()
        clip(model.parameters(), section.clip_grad)
        yield loss.item(), schedule.get_last_lr()[0]
        adamw.step()
        schedule.step()
