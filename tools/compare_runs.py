"""Say where two runs part: in their settings, in their figures, or in the modules of the model.

    python tools/compare_runs.py runs/a runs/b
    python tools/compare_runs.py runs/a runs/b --activations

A and B are folders of runs (their --save), or their files metrics.jsonl. Prints the settings that
differ, and for each figure that equal runs have in common (losses, gradient norm, learning rate)
the first step at which it differs. Differences are relative to A.

--activations instead loads the newest step that both have as a checkpoint, of whatever layout, and
runs a forward and backward of both on this machine's CPU, without dropout, on the samples that A
reads next. Prints the weights that differ, and the first module whose output does, in order of the
forward, and whose gradient does, in order of the backward.

Exit status: 0 all is equal, 1 a difference is beyond --tolerance, 2 a wrong argument, or runs
without a step in common. Settings do not count.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron.config.checks import needs, non_negative, positive, writable
from megatron.config.parse import parse, whole_program
from megatron.data.files import write_atomically
from tools.report import runs


@dataclass(frozen=True, kw_only=True)
class Settings:
    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """Folder of a run (its --save), or its metrics.jsonl."""

    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """The run that is compared with it."""

    activations: bool = False
    """Compare the outputs and gradients of all modules in one step."""

    tolerance: float = 0.0
    """Largest relative difference that counts as equal; by default none does."""

    step: int | None = None
    """Checkpoints of --activations; by default those of the newest step that both have."""

    samples: int | None = None
    """Samples that --activations reads; by default a micro-batch of A."""

    dtype: Literal["fp64", "fp32"] | None = None
    """Precision of --activations: fp64 if not given; fp32 takes half the memory."""

    json: Path | None = None
    """JSON file to write, with all results."""

    def __post_init__(self) -> None:
        non_negative(self, "tolerance", "step")
        positive(self, "samples")
        for name in ("step", "samples", "dtype"):
            needs(self, name, "activations")
        writable(self, "json")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the comparison; returns the exit status."""
    with whole_program(environ):
        settings = parse(Settings, arguments, environ, description=__doc__)
        if settings.activations:
            from tools.layouts import activations

            result = activations.compare_step(
                settings.a,
                settings.b,
                step=settings.step,
                samples=settings.samples,
                dtype=settings.dtype or "fp64",
                tolerance=settings.tolerance,
            )
            text, status = activations.shown(result), activations.status_of(result)
        else:
            a, b = runs.read_run(settings.a, "A"), runs.read_run(settings.b, "B")
            result = runs.compare_records(a, b, settings.tolerance)
            text, status = runs.shown(result, settings.tolerance), runs.status_of(result)
        print(text)
        if settings.json is not None:
            write_atomically(settings.json, (json.dumps(result, indent=1) + "\n").encode())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
