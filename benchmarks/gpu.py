"""What `gpu.sh` runs on one GPU, by groups: the tests of the layouts, what the host waits for, the
output layer, and training steps of every size; and what is wanted of them.

A run that fails, or takes too long, is shown as such and the others go on. Each leaves a page and a
JSON file of its own; gpu.md puts all pages of the folder together.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import ROOT
from benchmarks.report import markdown
from benchmarks.train_step import DROPOUT, OURS

Group = Literal["hardware", "matrix", "host", "loss", "compile", "dropout", "speed", "sizes"]
LONG = ("speed", "sizes")  # run where they are named
LEAST = 15.0  # seconds, in which no run could be done
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 8 --vocab-size 512 "
    "--micro-batch-size 2"
)
FULL, SELECTIVE = f"{OURS}, full recomputation", f"{OURS}, selective recomputation"
COORDINATES, COMPILED = f"{DROPOUT}, attention's by coordinates", "transformers, compiled"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command that may take so many seconds; {device}, {out}, {small} and {batch} are filled in."""

    name: str
    group: Group
    seconds: float
    command: str
    contenders: tuple[str, ...] = ()
    batches: tuple[int, int] = (0, 0)  # samples on a GPU of 80 GB, and on a larger one

    def words(self, place: "Place") -> list[str]:
        file = place.out / self.name.replace(" ", "_").replace(",", "")
        filled = self.command.format(
            device=place.device,
            out=place.out,
            only="-k test_one_process" if place.small else "-k test_it_equals",
            size="--vocab-size 512 --hidden-size 32 --tokens 64"
            if place.small
            else "--hidden-size 1536 --tokens 8192",
        )
        words = [sys.executable, *shlex.split(filled)]
        if "benchmarks" not in self.command:
            return words
        words += ["--device", place.device, "--json", f"{file}.json", "--page", f"{file}.md"]
        if self.batches != (0, 0):
            model = f"--micro-batch-size {self.batches[place.is_large]} --vocab-size 50304"
            words += ["--dtypes", "bf16", "--program-flags", SMALL if place.small else model]
            words += ["--contenders", *self.contenders]
        return [*words, "--rounds", "1", *(["--turns", "1"] if place.small else [])]


@dataclass(frozen=True)
class Place:
    device: str
    small: bool
    is_large: bool  # whether the GPU has more than 100 GB
    out: Path


STEPS = "benchmarks/train_step.py --threads 8 --tensor-parallel 1 --turns 12 --presets"
# The most telling of a group first: what is last is left out where time runs short.
RUNS = (
    Run(
        name="hardware",
        group="hardware",
        seconds=45,
        command="tools/plan.py --measure {out}/hardware.toml",
    ),
    Run(
        name="layouts",  # several gloo ranks share the GPU
        group="matrix",
        seconds=180,
        command="-m pytest -q -p no:cacheprovider tests/layouts --device {device} {only}",
    ),
    Run(name="host reads", group="host", seconds=30, command="benchmarks/host_reads.py"),
    Run(
        name="output layer",
        group="loss",
        seconds=40,
        command="benchmarks/output_layer.py --dtypes bf16 --tensor-parallel 1 {size}",
    ),
    Run(
        name="124M",
        group="compile",
        seconds=170,
        command=f"{STEPS} gpt2_124m --profile {{out}}/profile",
        contenders=(OURS, f"{OURS}, not compiled", FULL, "plain torch", "transformers", COMPILED),
        batches=(8, 16),
    ),
    Run(
        name="124M, dropout",
        group="dropout",
        seconds=60,
        command=f"{STEPS} gpt2_124m",
        contenders=(OURS, COORDINATES, DROPOUT),
        batches=(8, 16),
    ),
    Run(
        name="1.2B",
        group="speed",
        seconds=230,
        command=f"{STEPS} gpt2_scaling_1.2b --profile {{out}}/profile",
        contenders=(OURS, FULL, SELECTIVE, COMPILED),
        batches=(4, 8),
    ),
    Run(
        name="355M",
        group="speed",
        seconds=100,
        command=f"{STEPS} gpt2_355m",
        contenders=(OURS, FULL, "plain torch", "transformers"),
        batches=(8, 16),
    ),
    *(
        Run(
            name=size,
            group="sizes",
            seconds=60,
            command=f"{STEPS} gpt2_scaling_{size.lower()}",
            contenders=(FULL,),
            batches=(8, 8),
        )
        for size in ("2.5B", "4.2B")
    ),
    Run(
        name="8.3B, one rank of 8 with communication stubbed",
        group="sizes",
        seconds=75,
        command=f"{STEPS} gpt2_scaling_8.3b --tensor-parallel 8 --stub-communication",
        contenders=(FULL, OURS),
        batches=(8, 8),
    ),
)


@dataclass(frozen=True)
class Wanted:
    """Of a run: `MFU` or `HFU` of a contender of at least `limit`, or its time over that of another: at
    least, or with is_most at most."""

    run: str
    contender: str
    over: str
    limit: float
    is_most: bool = False

    def row(self, folder: Path) -> list[str]:
        bound = f"{'at most' if self.is_most else 'at least'} {self.limit:.2f}"
        value = self.measured(folder / f"{self.run.replace(' ', '_').replace(',', '')}.json")
        what = [f"{self.run}: {self.contender}, {self.over}", bound]
        if value is None:
            return [*what, "not measured", ""]
        is_met = value <= self.limit if self.is_most else value >= self.limit
        return [*what, f"{value:.2f}", "yes" if is_met else "no"]

    def measured(self, file: Path) -> float | None:
        if not file.exists():
            return None
        found = {each["name"]: each for each in json.loads(file.read_text())[0]["contenders"]}
        seconds = {
            name: median(each["rounds"][-1]["wall"])
            for name, each in found.items()
            if each["rounds"]
        }
        if self.contender not in seconds:
            return None
        own, facts = seconds[self.contender], found[self.contender]["facts"]
        if self.over in ("MFU", "HFU"):
            flops = facts["useful" if self.over == "MFU" else "executed"]
            return flops / own / facts["peak"] if "peak" in facts else None
        return own / seconds[self.over] if self.over in seconds else None


WANTED = (
    Wanted("1.2B", OURS, "MFU", 0.55),
    Wanted("1.2B", FULL, "HFU", 0.60),
    Wanted("1.2B", FULL, OURS, 1.33, is_most=True),
    Wanted("1.2B", COMPILED, OURS, 1.3),
    Wanted("355M", OURS, "MFU", 0.45),
    Wanted("124M", OURS, "MFU", 0.45),
    Wanted("124M", COMPILED, OURS, 1.3),
    Wanted("124M, dropout", COORDINATES, DROPOUT, 1.1, is_most=True),
    Wanted("output layer", "logits in chunks", "all logits at once", 1.1, is_most=True),
)


def done(words: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """(exit status, None where it took longer; what it printed). Nothing of it goes on."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def run(each: Run, place: Place, until: float) -> bool:
    """Whether it has succeeded; its page is there in any case."""
    page = place.out / f"{each.name.replace(' ', '_').replace(',', '')}.md"
    seconds = min(each.seconds, until - time.monotonic())
    if seconds < LEAST:
        page.write_text(f"# {each.name}\n\nLeft out: there was no time left.\n")
        return False
    page.unlink(missing_ok=True)
    status, printed = done(each.words(place), seconds)
    print(f"## {each.name}\n\n{printed}", flush=True)
    if status != 0:
        ended = "Failed" if status is not None else f"Took longer than {seconds:.0f} s"
        page.write_text(f"# {each.name}\n\n{ended}:\n\n    {printed[-1000:]}\n")
    elif not page.exists():
        page.write_text(f"# {each.name}\n\n    {printed[-1000:]}\n")
    return status == 0


def main(
    groups: tyro.conf.Positional[tuple[Group, ...]] = (),
    /,
    *,
    output: Path,
    device: Literal["cpu", "cuda"] = "cuda",
    small: bool = False,
    seconds: float = 560.0,
) -> None:
    """Run the groups, and write gpu.md.

    Args:
        groups: by default those that are short.
        output: folder for all pages; what other groups have left there stays.
        device: cuda, or cpu to try it.
        small: models that any machine trains in a moment.
        seconds: that a group that is named, or all short ones, may take.
    """
    output.mkdir(parents=True, exist_ok=True)
    is_large = False
    if device == "cuda":
        import torch

        is_large = torch.cuda.get_device_properties(0).total_memory > 100e9
    place = Place(device, small, is_large, output.resolve())
    chosen = [
        each for each in RUNS if each.group in groups or (not groups and each.group not in LONG)
    ]
    until = time.monotonic() + seconds * max(1, len(groups))
    failed = [each.name for each in chosen if not run(each, place, until)]
    pages = [page.read_text() for page in sorted(output.glob("*.md")) if page.name != "gpu.md"]
    wanted = markdown(["", "wanted", "measured", "met"], [each.row(place.out) for each in WANTED])
    (output / "gpu.md").write_text("\n\n".join(["# What was run on one device", wanted, *pages]))
    print(wanted)
    if failed:
        raise SystemExit(f"error: these have no figures: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
