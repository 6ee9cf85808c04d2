"""The evaluations of GPT-2 as it is: table 3 of the paper."""

from pathlib import Path

from tools.command import Command, python
from tools.paper.corpus import evaluation_files

ZERO_SHOT = ("wikitext103", "lambada")
Flags = list[str | Path]


def zero_shot_flags(data: Path, overlapping_eval: int) -> dict[str, Flags]:
    """Of both evaluations, by name.  overlapping_eval: the stride of WikiText103's window."""
    files = evaluation_files(data)
    stride = ["--overlapping-eval", str(overlapping_eval)]
    return {
        "wikitext103": ["--valid-data", files["wikitext103"], *stride, "--compare-paper"],
        "lambada": ["--valid-data", files["lambada"], "--compare-paper"],
    }


def evaluate(task: str, checkpoints: Path, flags: Flags, result: Path, cores: int) -> Command:
    """result: the record that it leaves (JSON)."""
    return python(
        "tasks/main.py", "--task", task.upper(), "--load", checkpoints, *flags,
        "--output", result, OMP_NUM_THREADS=str(cores),
    )  # fmt: skip
