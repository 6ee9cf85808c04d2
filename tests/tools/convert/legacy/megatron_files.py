"""Checkpoints as Megatron-LM wrote them in 2019 and 2020, made up, and their model written anew.

The forward here starts from what each rank holds, under the old names, and computes as the old
model did: each rank its heads and columns, sums over ranks. It shares nothing with what is tested.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, HIDDEN, HEADS, POSITIONS = 2, 32, 8, 16
VOCABULARY = 261  # of tests/data/samples.py's tokenizer
Rank = dict[str, Tensor]


def old_weights(
    ranks: int, dtype: torch.dtype = torch.float32, divisible_by: int = 8
) -> list[Rank]:
    """Random weights of each rank, by the flat names of 2019."""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(*shape: int, scale: float = 0.2) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    h, own = HIDDEN, HIDDEN // ranks
    rows = -(-VOCABULARY // (divisible_by * ranks)) * divisible_by
    parts: list[Rank] = [{"word_embeddings.weight": drawn(rows, h)} for _ in range(ranks)]
    shared = {"position_embeddings.weight": drawn(POSITIONS, h)}
    for n in range(LAYERS):
        place = f"transformer.layers.{n}"
        for part in parts:
            part[f"{place}.attention.query_key_value.weight"] = drawn(3 * own, h)
            part[f"{place}.attention.query_key_value.bias"] = drawn(3 * own)
            part[f"{place}.attention.dense.weight"] = drawn(h, own)
            part[f"{place}.mlp.dense_h_to_4h.weight"] = drawn(4 * own, h)
            part[f"{place}.mlp.dense_h_to_4h.bias"] = drawn(4 * own)
            part[f"{place}.mlp.dense_4h_to_h.weight"] = drawn(h, 4 * own)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shared[f"{place}.{name}.weight"] = 1 + drawn(h)
            shared[f"{place}.{name}.bias"] = drawn(h)
        shared[f"{place}.attention.dense.bias"] = drawn(h)
        shared[f"{place}.mlp.dense_4h_to_h.bias"] = drawn(h)
    shared["transformer.final_layernorm.weight"] = 1 + drawn(h)
    shared["transformer.final_layernorm.bias"] = drawn(h)
    return [part | shared for part in parts]


def nested(part: Rank, transformer: str = "transformer", attention: str = "attention") -> Any:
    """As the code of 2020 keeps it; later code says encoder and self_attention."""
    prefix = "transformer."
    return {
        "language_model": {
            "embedding": {
                name: {"weight": part[f"{name}.weight"]}
                for name in ("word_embeddings", "position_embeddings")
            },
            transformer: {
                name.removeprefix(prefix).replace(".attention.", f".{attention}."): tensor
                for name, tensor in part.items()
                if name.startswith(prefix)
            },
        }
    }


def old_args(ranks: int, **changes: Any) -> argparse.Namespace:
    known = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "layernorm_epsilon": 1e-5,
        "make_vocab_size_divisible_by": 8,
        "model_parallel_size": ranks,
        "hidden_dropout": 0.25,
        "params_dtype": torch.half,
        "save": "checkpoints",
        "lr": None,
    }
    return argparse.Namespace(**(known | changes))


def everything(model: Any, args: Any, version: float | None) -> dict[str, Any]:
    """All that a file of a running training holds."""
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.ones(2, 3)}}, "param_groups": []}
    return {
        "model": model,
        **({} if args is None else {"args": args}),
        **({} if version is None else {"checkpoint_version": version}),
        "iteration": 250000,
        "total_iters": 250000,
        "optimizer": {"optimizer": optimizer, "loss_scaler": 65536.0},
        "lr_scheduler": {"max_lr": 1.5e-4, "decay_style": "cosine"},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.arange(816, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(816, dtype=torch.uint8)},
    }


def write_old(
    folder: Path,
    parts: list[Rank],
    *,
    args: Any = None,
    version: float | None = None,
    model: Callable[[Rank], Any] = nested,
    zipped: bool = False,
    iteration: str = "250000",
) -> Path:
    """A --save directory with one file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)
    name = iteration if iteration == "release" else f"iter_{int(iteration):07d}"
    for number, part in enumerate(parts):
        file = folder / name / f"mp_rank_{number:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        content = everything(model(part), args, version)
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return folder


def old_logits(parts: list[Rank], version: int, tokens: Tensor, eps: float = 1e-5) -> Tensor:
    """Logits [b, s, v] fp64, of the padded vocabulary, of tokens [b, s]."""
    ranks = [{name: tensor.double() for name, tensor in part.items()} for part in parts]
    words = torch.cat([rank["word_embeddings.weight"] for rank in ranks])
    x = words[tokens] + ranks[0]["position_embeddings.weight"][: tokens.shape[1]]
    for n in range(LAYERS):
        place = f"transformer.layers.{n}"
        inner = norm(x, ranks[0], f"{place}.input_layernorm", eps)
        x = x + ranks[0][f"{place}.attention.dense.bias"]
        x = x + sum(attention(inner, rank, place, version, len(ranks)) for rank in ranks)
        inner = norm(x, ranks[0], f"{place}.post_attention_layernorm", eps)
        x = (
            x
            + ranks[0][f"{place}.mlp.dense_4h_to_h.bias"]
            + sum(mlp(inner, r, place) for r in ranks)
        )
    return norm(x, ranks[0], "transformer.final_layernorm", eps) @ words.T


def norm(x: Tensor, rank: Rank, place: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * rank[f"{place}.weight"] + rank[f"{place}.bias"]


def mlp(x: Tensor, rank: Rank, place: str) -> Tensor:
    up = x @ rank[f"{place}.mlp.dense_h_to_4h.weight"].T + rank[f"{place}.mlp.dense_h_to_4h.bias"]
    return F.gelu(up, approximate="tanh") @ rank[f"{place}.mlp.dense_4h_to_h.weight"].T


def attention(x: Tensor, rank: Rank, place: str, version: int, ranks: int) -> Tensor:
    """A rank's heads, through its part of the output layer, without the bias."""
    place = f"{place}.attention"
    mixed = x @ rank[f"{place}.query_key_value.weight"].T + rank[f"{place}.query_key_value.bias"]
    heads, size = HEADS // ranks, HIDDEN // HEADS
    if version == 0:  # Q of all heads, then K, then V
        triple = [part.unflatten(-1, (heads, size)) for part in mixed.chunk(3, -1)]
    elif version == 1:  # Q, K and V of one number after another
        triple = [mixed[..., kind::3].unflatten(-1, (heads, size)) for kind in range(3)]
    else:  # Q, K and V of one head after another
        triple = list(mixed.unflatten(-1, (heads, 3 * size)).split(size, -1))
    q, k, v = (part.transpose(1, 2) for part in triple)
    score = q @ k.transpose(-1, -2) / size**0.5
    later = torch.ones(score.shape[-2:]).triu(1).bool()
    mixed = score.masked_fill(later, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ rank[f"{place}.dense.weight"].T
