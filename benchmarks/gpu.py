"""What `gpu.sh` runs on one GPU, by groups, and what is wanted of it.

A run that fails, or takes too long, is shown as such and the others go on. Each leaves a page, and
most a JSON file; gpu.md puts all pages of the folder together.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.processes import ROOT
from benchmarks.report import markdown

Group = Literal["hardware", "matrix", "host", "loss", "compile", "dropout", "speed", "sizes"]
LONG = ("speed", "sizes")  # run where they are named
LEAST = 15.0  # seconds, in which no run could be done
OURS, FULL = "this project", "this project, full recomputation"
DROPOUT, COMPILED = "this project, dropout 0.1", "transformers, compiled"
COORDINATES = f"{DROPOUT}, attention's by coordinates"


class Run(NamedTuple):
    name: str
    group: Group
    seconds: float  # that it may take
    command: str  # python's, with blanks for `fill`


STEPS = "benchmarks/train_step.py {common} --dtypes bf16 --threads 8 --turns {turns}"
ONE, PROFILE = f"{STEPS} --tensor-parallel 1", "--profile {out}/profile"
# The most telling of a group first: what is last is left out where time runs short. Several gloo
# ranks share the GPU in the matrix: torch documents some of gloo's collectives for CPUs alone.
RUNS = (
    Run("hardware", "hardware", 45, "tools/plan.py --measure {out}/hardware.toml"),
    Run("layouts", "matrix", 180, "-m pytest -q -p no:cacheprovider tests/layouts {matrix}"),
    Run("host reads", "host", 30, "benchmarks/host_reads.py {common}"),
    Run("output layer", "loss", 40, "benchmarks/output_layer.py {common} {output_layer}"),
    Run("124M", "compile", 170, f"{ONE} --presets gpt2_124m {{b16}} {PROFILE} --contenders "
        f"'{OURS}' '{OURS}, not compiled' '{FULL}' 'plain torch' transformers {{compiled}}"),
    Run("124M, dropout", "dropout", 60, f"{ONE} --presets gpt2_124m {{b16}} --contenders "
        f"'{DROPOUT}' \"{COORDINATES}\" '{OURS}'"),
    Run("1.2B", "speed", 230, f"{ONE} --presets gpt2_scaling_1.2b {{b8}} {PROFILE} --contenders "
        f"'{OURS}' '{FULL}' '{OURS}, selective recomputation' {{compiled}}"),
    Run("355M", "speed", 100, f"{ONE} --presets gpt2_355m {{b16}} --contenders '{OURS}' '{FULL}' "
        "'plain torch' transformers"),
    Run("2.5B", "sizes", 60, f"{ONE} --presets gpt2_scaling_2.5b {{b8}} --contenders '{FULL}'"),
    Run("4.2B", "sizes", 60, f"{ONE} --presets gpt2_scaling_4.2b {{b8}} --contenders '{FULL}'"),
    Run("8.3B, one rank of 8", "sizes", 75, f"{STEPS} --tensor-parallel 8 --stub-communication "
        f"--presets gpt2_scaling_8.3b {{b8}} --contenders '{FULL}' '{OURS}'"),
)  # fmt: skip
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 8 --vocab-size 512 "
    "--micro-batch-size 2"
)


class Place(NamedTuple):
    out: Path
    device: str
    small: bool  # models that any machine trains in a moment
    gigabytes: float  # of the GPU

    def file(self, run: str, ending: str) -> Path:
        return self.out / f"{run.replace(' ', '_').replace(',', '')}.{ending}"

    def words(self, run: Run) -> list[str]:
        def batch(size: int) -> str:
            size = size if self.gigabytes > 100 else size // 2
            flags = SMALL if self.small else f"--micro-batch-size {size} --vocab-size 50304"
            return f"--program-flags '{flags}'"

        written = f"--json {self.file(run.name, 'json')} --page {self.file(run.name, 'md')}"
        loss = "--vocab-size 512 --hidden-size 32 --tokens 64"
        filled = run.command.format(
            out=self.out,
            common=f"--device {self.device} {written} --rounds 1",
            matrix=f"--device {self.device} -k {'one_process' if self.small else 'test_it_equals'}",
            output_layer=loss if self.small else "--hidden-size 1536 --tokens 8192",
            turns=1 if self.small else 12,
            b16=batch(16),
            b8=batch(8),
            compiled=f"'{COMPILED}'" if self.device == "cuda" else "",  # a CPU needs a C++ compiler
        )
        return [sys.executable, *shlex.split(filled)]


class Wanted(NamedTuple):
    """MFU or HFU of a contender, or its time over that of another."""

    run: str
    contender: str
    over: str
    bound: Literal["at least", "at most"]
    limit: float

    def row(self, place: Place) -> list[str]:
        value, what = self.measured(place.file(self.run, "json")), f"{self.contender} / {self.over}"
        row = [f"{self.run}: {what}", f"{self.bound} {self.limit:.2f}"]
        if value is None:
            return [*row, "not measured", ""]
        is_met = value <= self.limit if self.bound == "at most" else value >= self.limit
        return [*row, f"{value:.2f}", "yes" if is_met else "no"]

    def measured(self, file: Path) -> float | None:
        contenders = json.loads(file.read_text())[0]["contenders"] if file.exists() else []
        found = {each["name"]: each for each in contenders if each["rounds"]}
        if self.contender not in found:
            return None
        seconds = {name: median(each["rounds"][-1]["wall"]) for name, each in found.items()}
        own, facts = seconds[self.contender], found[self.contender]["facts"]
        if self.over in ("MFU", "HFU"):
            flops = facts["useful" if self.over == "MFU" else "executed"]
            return flops / own / facts["peak"] if "peak" in facts else None
        return own / seconds[self.over] if self.over in seconds else None


WANTED = (
    Wanted("1.2B", OURS, "MFU", "at least", 0.55),
    Wanted("1.2B", FULL, "HFU", "at least", 0.60),
    Wanted("1.2B", FULL, OURS, "at most", 1.33),
    Wanted("1.2B", COMPILED, OURS, "at least", 1.3),
    Wanted("355M", OURS, "MFU", "at least", 0.45),
    Wanted("124M", OURS, "MFU", "at least", 0.45),
    Wanted("124M", COMPILED, OURS, "at least", 1.3),
    Wanted("124M, dropout", COORDINATES, DROPOUT, "at most", 1.1),
    Wanted("output layer", "logits in chunks", "all logits at once", "at most", 1.1),
)


def done(words: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """(exit status, None where it took longer; what it printed). Nothing of it goes on."""
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        process_group=0,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=seconds)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def perform(run: Run, place: Place, until: float) -> bool:
    """Whether it has succeeded; its page says what came of it. until: as time.monotonic."""
    page, seconds = place.file(run.name, "md"), min(run.seconds, until - time.monotonic())
    page.unlink(missing_ok=True)
    status, printed, said = None, "", "Left out: there was no time left."
    if seconds >= LEAST:
        status, printed = done(place.words(run), seconds)
        said = "Failed." if status else f"It took longer than {seconds:.0f} s."
    print(f"## {run.name}\n\n{printed}", flush=True)
    if status == 0:
        said = ""
    if not page.exists():
        page.write_text(f"# {run.name}\n\n{said}\n\n```\n{printed[-1000:]}\n```\n")
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
    gigabytes = 0.0
    if device == "cuda":
        import torch

        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    output.mkdir(parents=True, exist_ok=True)
    place = Place(output.resolve(), device, small, gigabytes)
    wanted = groups or {run.group for run in RUNS} - {*LONG}
    until = time.monotonic() + seconds * max(1, len(groups))
    chosen = [run for run in RUNS if run.group in wanted]
    failed = [run.name for run in chosen if not perform(run, place, until)]
    table = markdown(["", "wanted", "measured", "met"], [each.row(place) for each in WANTED])
    pages = [place.file(run.name, "md") for run in RUNS]
    found = [page.read_text().replace("\n# ", "\n## ") for page in pages if page.exists()]
    (output / "gpu.md").write_text("\n\n".join(["# What was run on one device", table, *found]))
    print(table)
    if failed:
        raise SystemExit(f"error: these have no figures: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
