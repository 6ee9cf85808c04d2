"""The benefit of pretraining, on a small machine.

A BERT is fine-tuned from its pretrained weights and, with the same commands, from the random
weights at the start of pretraining. Figures are those of the last epoch: median, lowest and highest
over the seeds, and the share of the most frequent class.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Column, Contender, Flags, Rank, Turn, scratch
from benchmarks.peers import initial_weights
from benchmarks.program import DATA, WholeRuns, record_of
from benchmarks.report import Results
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.models.registry import config_of
from megatron.train.trained import open_trained
from tools.convert.writing import write_checkpoint

SETTINGS = """--task MNLI --seeds 3 --epochs 5 --lr 3e-4 --seq-length 64 --micro-batch-size 32
--global-batch-size 32 --hidden-dropout 0.1 --attention-dropout 0"""


def fine_tuned(rank: Rank, words: Sequence[str]) -> Turn:
    return lambda: record_of(rank, "tasks/main.py", *words)["last_epoch"]


def contenders(
    flags: Flags,
    pretrained: Path = Path("runs/miniature/bert/checkpoints"),
    train_data: Path = DATA / "glue/MNLI/train.json",
    valid_data: Path = DATA / "glue/MNLI/dev.json",
    settings: str = SETTINGS,
) -> Iterator[Contender]:
    """Compare the two. settings: flags of tasks/main.py, as one word.

    Defaults: data in the folder MEGATRON_TEST_DATA, and models of scripts/paper/miniature.sh.
    """
    trained = TrainedConfig(load=str(pretrained))
    _, tokenizer, facts = open_trained(trained, ParallelConfig(), 1, ("bert",))
    config, size, random = config_of(facts), facts["vocab_size"], scratch() / "random"
    weights = initial_weights(config, size)
    write_checkpoint(random, config, weights, size, tokenizer, "initial weights", lambda _: None)
    words = [*shlex.split(settings), "--train-data", str(train_data.resolve())]
    words += ["--valid-data", str(valid_data.resolve()), "--load"]
    for name, folder in (("pretrained", pretrained.resolve()), ("random weights", random)):
        yield Contender(name, fine_tuned, {"words": [*words, str(folder)]}, threads=2)


def result(found: Results) -> str:
    cells = (f"{found.median(*row, 'accuracy'):.4f} ({row[1]})" for row in found.rows)
    return f"Accuracy {', '.join(cells)}."


COLUMNS = (
    Column("accuracy", lambda own, _: own["accuracy"]["median"], "{:.4f}"),
    Column("lowest", lambda own, _: own["accuracy"]["min"], "{:.4f}"),
    Column("highest", lambda own, _: own["accuracy"]["max"], "{:.4f}"),
    Column("most frequent class", lambda own, _: own["majority_accuracy"]["median"], "{:.4f}"),
)
QUESTION = WholeRuns(contenders, COLUMNS, result)

if __name__ == "__main__":
    QUESTION.run()
