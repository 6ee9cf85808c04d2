"""The unmodified GPT-2 of transformers, cut by a plan and trained as usual.

    torchrun --nproc-per-node 2 examples/huggingface_gpt2.py --tensor 2 --save trained
    torchrun --nproc-per-node 4 examples/huggingface_gpt2.py --tensor 2 --load trained

--save and --load are folders in the format of transformers, with whole weights under their own
names. Losses are the same at every layout and with both plans.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megatron import api
from megatron.api import Column, Local, Row, Vocabulary

BATCH, SEQUENCE, WORDS = 8, 32, 101
SIZES: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SEQUENCE}
TOKENS: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
# torch's dropout differs between layouts; `pretrain.py --model huggingface` has one of ours.
STILL: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIG = GPT2Config(**SIZES, **TOKENS, **STILL)
MEGATRON: dict[str, Any] = {  # column and row layers alternate; each rank computes its own heads
    "*.attn.c_attn": Column(parts=3),
    "*.attn": Local("num_heads", "split_size"),
    "*.attn.c_proj": Row(),
    "*.mlp.c_fc": Column(),
    "*.mlp.c_proj": Row(),
    "*.wte": Vocabulary(),
}
LITERAL: dict[str, Any] = {  # the tutorial's: matmuls are divided, every rank has all heads
    "*.attn.c_*": Column(gather=True),
    "*.mlp.c_fc": Column(),
    "*.mlp.c_proj": Row(),
    "*.w[tp]e": Column(gather=True),
}
PLANS = {"megatron": MEGATRON, "literal": LITERAL}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The sum over this rank's logits [b, s, v] / the number of terms in the global batch."""
    shifted = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(*shifted, reduction="sum") / (BATCH * (SEQUENCE - 1))


def train(model: Any, plan: str, mesh: api.Mesh, steps: int) -> Iterator[tuple[float, float]]:
    """Yields (loss, gradient norm) of each step."""
    api.parallelize(model.train(), PLANS[plan], mesh).to(mesh.device)
    gradients = api.GradientBuckets(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(WORDS, (BATCH, SEQUENCE), generator=draw).sort().values
        tokens = batch[mesh.rank("batch") :: mesh.size("batch")].to(mesh.device)
        with gradients.accumulate(is_last=True):
            loss = loss_of(model(tokens, use_cache=False).logits, tokens)
            loss.backward()
        norm = api.clip_grad_norm(gradients, 1.0)  # torch's sees only the shards of this rank
        optimizer.step()
        yield float(api.all_reduce(loss.detach(), mesh.axis("batch"))), float(norm)


def recompute(model: Any) -> None:
    """Layers recompute their activations in the backward."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # its name in 5.17
    enable({"use_reentrant": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words = ("--tensor", "--tensor-model-parallel-size")
    parser.add_argument(*words, type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", choices=PLANS, default="megatron")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    parser.add_argument("--load", help="folder of a GPT-2 of transformers; else random weights")
    parser.add_argument("--save", help="folder to write the trained model to")
    flags = parser.parse_args()

    torch.manual_seed(1)  # the same weights on every rank, which keeps its shards of them
    with api.user_errors(os.environ):  # bad input gives one line, before processes connect
        parallel = api.ParallelConfig(tensor_model_parallel_size=flags.tensor)
        parallel.check(int(os.environ.get("WORLD_SIZE", "1")))
        folder = GPT2LMHeadModel.from_pretrained
        model: Any = folder(flags.load, **STILL) if flags.load else GPT2LMHeadModel(CONFIG)
    if flags.checkpoint:
        recompute(model)
    with api.launch(parallel) as mesh:
        results = train(model, flags.plan, mesh, flags.steps)
        for step, (loss, norm) in enumerate(results, start=1):
            if mesh.is_first:
                print(f"step {step} | loss {loss:.4f} | gradient norm {norm:.4f}")
        if flags.save:
            weights = api.whole_state_dict(model)  # every rank gives its shards
            if mesh.is_first:
                model.save_pretrained(flags.save, state_dict=weights)


if __name__ == "__main__":
    main()
