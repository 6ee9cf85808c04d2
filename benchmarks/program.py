"""Programs of this project as contenders, started as users start them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Figures, Question, Rank, Turn, scratch
from benchmarks.processes import ROOT
from megatron.train.metrics import read_metrics

FILE, TEXT = "pretrain_gpt2.py", Path("runs/quickstart/data/train_text_document")
DATA = Path(os.environ.get("MEGATRON_TEST_DATA", "data"))  # files that cannot be generated here
WholeRuns = partial(Question, rounds=1, warm_up=0, together=False)


def start(rank: Rank, *words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def record_of(rank: Rank, *words: str) -> Figures:
    """The record that a program writes to its --output."""
    file = scratch() / "record.json"
    start(rank, *words, "--output", str(file))
    return dict(json.loads(file.read_text()))


def training(rank: Rank, starts: Sequence[tuple[int, Sequence[str]]], program: str = FILE) -> Turn:
    """A turn is a whole run. Its figures: per step, the loss before the update and the rate.

    starts: (processes, flags); later ones resume. program: a file, or -c and Python as one word.
    """

    def turn() -> Figures:
        with TemporaryDirectory() as folder:
            kept = ["--log-interval", "1", "--save", folder, "--load", folder]
            for processes, flags in starts:
                torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes}"
                start(rank, *(torchrun.split() if processes > 1 else ()), program, *flags, *kept)
            lines = read_metrics(Path(folder, "metrics.jsonl"))
        steps = [line for line in lines if "loss" in line]
        if lines[-1].get("ended") != "train_iters" or steps[-1]["step"] != len(steps):
            raise RuntimeError("the run is not complete")
        last = {key: value for line in lines for key, value in line.items()}
        return last | {"losses": [x["loss"] for x in steps], "rates": [x["lr"] for x in steps]}

    return turn
