"""This project's program, run as its users run it, and what it says of every step."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron.config.checks import flag, switch
from megatron.train.metrics import Line, read_metrics

ROOT = Path(__file__).resolve().parents[1]


def setting_flags(*sections: Any) -> Iterator[str]:
    """What these sections of the settings hold beside the program's defaults, as arguments."""
    for section in sections:
        for field in fields(section):
            value = getattr(section, field.name)
            if field.default is not MISSING and value == field.default:
                continue
            if isinstance(value, bool):
                yield switch(field.name, value)
            else:
                yield from (flag(field.name), str(value))


def pretrain(arguments: Sequence[str], processes: int = 1, model: str = "gpt2") -> None:
    """Run pretrain.py to its end, one thread a process; what it prints is dropped.

    model: a kind, as of --model. Raises CalledProcessError where it fails; its last lines are on
    the standard error by then.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), "pretrain.py"]
    command += ["--model", model]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    done.check_returncode()


def step_lines(metrics_file: Path) -> list[Line]:
    """The line of every step, of a run that logs each; none where there is no file."""
    lines = read_metrics(metrics_file) if metrics_file.exists() else []
    return [line for line in lines if "loss" in line]
