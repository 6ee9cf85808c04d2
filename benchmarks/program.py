"""Training runs of pretrain.py as contenders, started as its users start it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Figures, Rank, Turn
from benchmarks.processes import ROOT
from megatron.train.metrics import read_metrics

TEXT = Path("runs/quickstart/data/train_text_document")
DATA = Path(os.environ.get("MEGATRON_TEST_DATA", "data"))  # files that nothing here can make


def found(flag: str, file: Path) -> str:
    """Its absolute path. Raises ValueError where it is not there."""
    if not file.exists():
        raise ValueError(f"{flag} {file}: is not there")
    return str(file.resolve())


def training(rank: Rank, starts: Sequence[tuple[int, Sequence[str]]], model: str = "gpt2") -> Turn:
    """A turn is a whole run; it returns of each step the loss before the update, and the rate.

    starts: number of processes, and flags; a later start resumes from the checkpoint of the one
    before. model: as of --model.
    """

    def turn() -> Figures:
        with TemporaryDirectory() as folder:
            for processes, flags in starts:
                torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                launcher = [*torchrun, str(processes)] if processes > 1 else []
                command = [sys.executable, *launcher, "pretrain.py", "--model", model, *flags]
                command += ["--log-interval", "1", "--save", folder, "--load", folder]
                subprocess.run(command, cwd=ROOT, env=rank.environ, check=True)
            lines = read_metrics(Path(folder, "metrics.jsonl"))
        logged = [line for line in lines if "loss" in line]
        steps = [line["step"] for line in logged]
        if steps != [*range(1, len(steps) + 1)] or lines[-1].get("ended") != "train_iters":
            raise RuntimeError("the run is not complete")
        last = {key: value for line in lines for key, value in line.items()}
        kept = {"validation_loss", "loss_scale", "skipped_steps"} & last.keys()
        every = {"losses": "loss", "rates": "lr"}
        figures = {name: [line[key] for line in logged] for name, key in every.items()}
        return figures | {key: last[key] for key in kept}

    return turn
