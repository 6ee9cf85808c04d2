"""How often a training step of GPT-2 and of BERT waits for the device.

Whatever the host reads is finished before it goes on, so that a GPU runs out of work. A step reads
once: loss, gradient norm and votes together. Counted are the operators of a step of 4 micro-batches
in bf16 with dropout, its backward included. On a CPU nothing waits, but the same is counted.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainGPT2Config
from tools.layouts.meters import host_reads

KINDS = {"gpt2": PretrainGPT2Config, "bert": PretrainBertConfig}
FLAGS = "--preset miniature_{} --hidden-dropout 0.1 --attention-dropout 0.1 --vocab-size 512 --bf16"


def contender(rank: Rank, kind: str) -> Turn:
    config = parse(KINDS[kind], FLAGS.format(kind).split(), {})
    state = steps.build(config, rank.mesh())

    def turn() -> Figures:
        batches = [steps.batch_of(config, number) for number in range(4)]
        with host_reads() as found:
            steps.train_step(state, batches, steps.LEARNING_RATE)
        return {"reads": found.total()}

    return turn


def contenders(flags: Flags) -> Iterator[Contender]:
    """Count. Exit status 1: a step reads more than once."""
    for kind in KINDS:
        yield Contender(kind, contender, {"kind": kind})


QUESTION = Question(
    contenders,
    [Column("reads", "reads", "{:g}")],
    lambda found: f"The host reads {found.range('reads', '{:g}')} time a step.",
    failure=lambda found: "" if found.range("reads", "{:g}") == "1" else "a step reads again",
    rounds=1,
)

if __name__ == "__main__":
    QUESTION.run()
