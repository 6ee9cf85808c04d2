"""How often a training step waits for the device.

Whatever the host reads is finished before it goes on, so that a GPU runs out of work. A step reads
once: loss, gradient norm and votes together. Counted are the operators of a step of GPT-2 in bf16
with dropout, its backward included. On a CPU nothing waits, but the same is counted.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from tools.layouts.meters import host_reads

FLAGS = """--preset miniature_gpt2 --vocab-size 512 --bf16 --hidden-dropout 0.1
--attention-dropout 0.1"""


def contender(rank: Rank) -> Turn:
    step = steps.ours(rank, FLAGS.split())

    def turn() -> Figures:
        with host_reads() as found:
            step()
        return {"reads": found.total()}

    return turn


def contenders(flags: Flags) -> Iterator[Contender]:
    """Count. Exit status 1: a step reads more than once."""
    yield Contender("GPT-2", contender)


QUESTION = Question(
    contenders,
    [Column("reads", "reads", "{:g}")],
    lambda found: f"The host reads {found.range('reads', '{:g}')} time a step.",
    failure=lambda found: "" if found.range("reads", "{:g}") == "1" else "a step reads again",
    rounds=1,
)

if __name__ == "__main__":
    QUESTION.run()
