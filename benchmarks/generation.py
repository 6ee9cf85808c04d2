"""Greedy generation compared with transformers' `generate` with its key/value cache.

One model of 6 layers, hidden size 384, 6 heads and GPT-2's 50,257 tokens, with the same weights on
both sides, in fp32. Prompts have 32 tokens; in the unequal batch 32, 29, ... 11. A run whose tokens
differ reports nothing. t = 1 is one process with two threads. t = 2 is two gloo processes with one
thread each, and only this project: the peer is not sharded.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.peers import TRANSFORMERS, transformers_model
from benchmarks.steps import SEED
from megatron.config.model import GPT2Config
from megatron.inference.generate import Sampling, generate
from megatron.models.build import build_model

VOCABULARY, LONGEST, NEW = 50257, 32, 96
CONFIG = GPT2Config(
    num_layers=6, hidden_size=384, num_attention_heads=6, max_position_embeddings=256
)
BATCHES = {"1": [LONGEST], "8": [LONGEST] * 8, "8, unequal": [*range(LONGEST, LONGEST - 24, -3)]}
OURS, SAME, RATIO = "this project", {"texts": 0.0}, "this project's speed / its"


def prompts_of(lengths: list[int]) -> list[list[int]]:
    numbers = np.random.default_rng(SEED)
    return [numbers.integers(0, VOCABULARY, length).tolist() for length in lengths]


def ours(rank: Rank, config: GPT2Config, lengths: list[int], new: int) -> Turn:
    mesh, prompts = rank.mesh(), prompts_of(lengths)
    model = build_model(config, mesh, VOCABULARY, seed=SEED, dtype=torch.float32).eval()

    def turn() -> Figures:
        texts = generate(model, mesh, prompts, Sampling(new, temperature=0.0), ends=())
        return {"tokens": new * len(prompts), "texts": texts}

    return turn


def transformers(rank: Rank, config: GPT2Config, lengths: list[int], new: int) -> Turn:
    model = transformers_model(config, VOCABULARY).to(rank.device).eval()
    rows = [[0] * (LONGEST - len(each)) + each for each in prompts_of(lengths)]
    masks = [[0] * (LONGEST - n) + [1] * n for n in lengths]
    tokens, mask = (torch.tensor(each, device=rank.device) for each in (rows, masks))
    own = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def turn() -> Figures:
        texts = model.generate(tokens, attention_mask=mask, **own)
        return {"tokens": new * len(rows), "texts": texts[:, LONGEST:].tolist()}

    return turn


def contenders(flags: Flags) -> Iterator[Contender]:
    """Compare generation."""
    config, batches, new = CONFIG, BATCHES, NEW
    if flags.small:
        config, batches, new = replace(CONFIG, num_layers=1), {"2, unequal": [LONGEST, 5]}, 4
    for batch, lengths in batches.items():
        given, one = {"config": config, "lengths": lengths, "new": new}, f"batch {batch}, t = 1"
        yield Contender(OURS, ours, given, group=one, threads=2)
        its = {"needs": [TRANSFORMERS], "same": SAME}
        yield Contender("transformers", transformers, given, group=one, threads=2, **its)
        yield Contender(OURS, ours, given, group=f"batch {batch}, t = 2", ranks=2)


QUESTION = Question(
    contenders,
    (
        Column("tokens/s", "tokens", "{:.1f}", per="wall"),
        Column(RATIO, "wall", "{:.2f}", "its / first"),
        Column("seconds", "wall"),
        Column("CPU seconds", "cpu"),
    ),
    lambda found: (
        f"This project is {found.range(RATIO, '{:.1f}')} times as fast as transformers, in one "
        "process."
    ),
    turns=2,
    small="",
)

if __name__ == "__main__":
    QUESTION.run()
