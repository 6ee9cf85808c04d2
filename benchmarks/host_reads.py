"""How often the host waits for the device in a training step of GPT-2 and of BERT.

Whatever the host reads is finished before it goes on, so that a GPU runs out of work. A step reads
once: loss, gradient norm and votes together. Operators are counted as they run, those of the
backward too (tools/layouts/meters.py), in bf16 and with dropout. On a CPU nothing waits, but the
same is counted. Exit status: 0 each step reads once, 1 one reads more.
"""

import sys
from itertools import product
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from megatron.config.model import BertConfig, GPT2Config
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.train.loader import prefetch
from megatron.train.state import build_state
from megatron.train.step import train_step
from tools.layouts.job import RandomSamples
from tools.layouts.meters import host_reads

BATCH, LENGTH, VOCABULARY = 4, 64, 512
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
SHAPE["max_position_embeddings"] = LENGTH
KINDS = {"gpt2": (GPT2Config, None), "bert": (BertConfig, 0.15)}


def contender(rank: Rank, kind: str, micro_batches: int) -> Turn:
    config, mask_prob = KINDS[kind]
    settings = config(**SHAPE), OptimizerConfig(), PrecisionConfig()
    state = build_state(*settings, rank.mesh(), VOCABULARY, seed=0, dtype=torch.bfloat16)
    samples = RandomSamples(vocabulary=VOCABULARY, length=LENGTH, seed=0, mask_prob=mask_prob)

    def turn() -> dict[str, int]:
        starts = range(state.samples, state.samples + BATCH, BATCH)
        (batches,) = prefetch(
            samples, starts, micro_batch_size=BATCH // micro_batches, data_rank=0, data_size=1
        )
        with host_reads() as found:
            train_step(state, batches, 1e-3)
        return {"reads": found.total()}

    return turn


def failure(found: Results) -> str:
    reads = {row: found.median(*row, "reads") for row in found.rows}
    wrong = [f"{kind}, {name}" for (kind, name), number in reads.items() if number != 1]
    return f"these do not read once a step: {'; '.join(wrong)}" if wrong else ""


def main(flags: Flags) -> None:
    """Count."""
    ask(
        Question(
            title="How often a training step waits for the device",
            method=__doc__,
            contenders=[
                Contender(
                    name=f"{n} micro-batches",
                    group=k,
                    run=contender,
                    arguments={"kind": k, "micro_batches": n},
                )
                for k, n in product(KINDS, (1, BATCH))
            ],
            columns=(Column("reads", "reads", "{:.0f}"),),
            result=lambda found: f"The host reads {found.range('reads', '{:.0f}')} time a step.",
            failure=failure,
            rounds=1,
            packages=("torch",),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
