"""Training with dropout by coordinates.

The quickstart's model with dropout 0.1, by the program itself, beside the same program with
F.dropout and what F.scaled_dot_product_attention draws. Both have the same weights and samples; a
round has a seed of its own, which changes these, too. The validation loss is that of 400 samples
after the last step.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Flags, Rank, Turn
from benchmarks.program import FILE, TEXT, WholeRuns, training

TORCHS = """-c
import runpy
from torch.nn.functional import dropout
from megatron.parallel.dropout import Dropout
Dropout.forward = lambda self, x, rows: dropout(x, self.p, self.training)
runpy.run_path("pretrain_gpt2.py", run_name="__main__")"""
ARMS = {"torch's": (TORCHS, "kernel"), "by coordinates": (FILE, "coordinates")}
WORDS = """--preset quickstart --split 90,10,0 --attention-dropout 0.1 --hidden-dropout 0.1
--train-iters {0} --eval-interval {0} --lr-warmup-iters {1} --eval-iters {1}
--attention-dropout-rng {2}"""
RATIO = "its loss / torch's"


def contender(rank: Rank, words: Sequence[str], program: str) -> Turn:
    return training(rank, [(1, [*words, "--seed", str(1 + rank.round)])], program)


def contenders(flags: Flags, data_path: Path = TEXT, steps: int = 1000) -> Iterator[Contender]:
    """Compare losses. Reads the text of a finished scripts/quickstart.sh, or data_path."""
    for name, (program, rng) in ARMS.items():
        words = WORDS.format(steps, steps // 10, rng).split()
        own = {"words": [*words, "--data-path", str(data_path.resolve())], "program": program}
        yield Contender(name, contender, own)


COLUMNS = (
    Column("validation loss", "validation_loss", "{:.4f}"),
    Column(RATIO, "validation_loss", "{:.4f}", "its / first"),
)
RESULT = "By coordinates the validation loss is {} times that with torch's own dropout."
QUESTION = WholeRuns(
    contenders, COLUMNS, lambda found: RESULT.format(found.range(RATIO, "{:.4f}")), rounds=5
)

if __name__ == "__main__":
    QUESTION.run()
