"""What `gpu.sh` runs: training steps of every size on one GPU, each a run of `train_step.py`, and
the output layer alone, by `output_layer.py`.

A run that fails, or takes too long, is told as such and the others go on. Sizes whose contenders
do not all fit beside each other have fewer of them; above 1.2B this project's run alone.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output_layer
from benchmarks.cases import (
    AT_ONCE,
    COMPILED,
    COORDINATES,
    FULL,
    IN_CHUNKS,
    KERNEL,
    NOT_COMPILED,
    OURS,
    PLAIN,
    SELECTIVE,
    TRANSFORMERS,
)
from benchmarks.comparison import ROOT
from benchmarks.figures import HFU, MFU, percent, table
from benchmarks.machine import facts, markdown, told, write_json

LARGE_GPU = 100e9  # bytes; above it the larger batch is taken
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 8,
}
LEAST = 15.0  # seconds, in which no run could be done


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `train_step.py`, or without a preset of `output_layer.py`."""

    name: str
    preset: str | None = None
    batches: tuple[int, int] = (1, 1)  # samples, on a GPU of 141 GB and of 80 GB
    contenders: Sequence[str]
    seconds: float  # that it may take
    steps: int = 3  # of a turn
    one_rank_of: int = 1  # tensor-parallel ranks, the others of which are not there
    is_profiled: bool = False


# The most telling first: what is last is left out where time runs short.
RUNS = (
    Run(
        name="124M",
        preset="gpt2_124m",
        batches=(16, 8),
        contenders=(OURS, NOT_COMPILED, FULL, PLAIN, TRANSFORMERS, COMPILED),
        seconds=170,
        steps=8,
        is_profiled=True,
    ),
    Run(
        name="1.2B",
        preset="gpt2_scaling_1.2b",
        batches=(8, 4),
        contenders=(OURS, COMPILED),
        seconds=230,
        is_profiled=True,
    ),
    Run(
        name="1.2B, recomputation",
        preset="gpt2_scaling_1.2b",
        batches=(8, 4),
        contenders=(OURS, FULL, SELECTIVE),
        seconds=90,
    ),
    Run(
        name="124M, dropout",
        preset="gpt2_124m",
        batches=(16, 8),
        contenders=(OURS, COORDINATES, KERNEL),
        seconds=60,
        steps=4,
    ),
    Run(name="output layer", contenders=(IN_CHUNKS, AT_ONCE), seconds=40),
    Run(name="2.5B", preset="gpt2_scaling_2.5b", batches=(8, 8), contenders=(FULL,), seconds=60),
    Run(name="4.2B", preset="gpt2_scaling_4.2b", batches=(8, 8), contenders=(FULL,), seconds=60),
    Run(
        name="8.3B, one rank of 8 with communication stubbed",
        preset="gpt2_scaling_8.3b",
        batches=(8, 8),
        contenders=(FULL, OURS),
        seconds=75,
        one_rank_of=8,
    ),
    Run(
        name="355M",
        preset="gpt2_355m",
        batches=(16, 8),
        contenders=(OURS, FULL, PLAIN, TRANSFORMERS),
        seconds=100,
        steps=4,
    ),
)


TOLD = {
    "ours_over_it": "its time over this project's",
    "over_at_once": "its time over that at once",
    "mfu": "MFU",
    "hfu": "HFU",
}


@dataclass(frozen=True)
class Wanted:
    run: str
    contender: str
    figure: str
    limit: float  # at least, or of a time over another's at most
    beside: str | None = None  # the contender over whose time the figure is, if not this project

    @property
    def is_most(self) -> bool:
        return self.contender in (FULL, IN_CHUNKS, COORDINATES) and self.is_ratio

    @property
    def is_ratio(self) -> bool:
        return self.figure in ("ours_over_it", "over_at_once")

    def measured(self, runs: dict[str, Any]) -> float | None:
        figures = runs.get(self.run, {}).get("contenders", {}).get(self.contender)
        if figures is not None and self.beside is not None:
            walls = runs[self.run]["seconds"]
            own, others = walls[self.contender], walls.get(self.beside, [])
            ratios = [mine / theirs for mine, theirs in zip(own, others, strict=False)]
            return median(ratios) if ratios else None
        value = figures and figures[self.figure]
        return value["median"] if isinstance(value, dict) else value

    def row(self, runs: dict[str, Any]) -> list[str]:
        value = self.measured(runs)
        both = (self.limit, value or 0)
        shown = [f"{each:.2f}" if self.is_ratio else percent(each) for each in both]
        told = f"its time over that of {self.beside}" if self.beside else TOLD[self.figure]
        what = f"{self.run}: {self.contender}, {told}"
        bound = "at most" if self.is_most else "at least"
        if value is None:
            return [what, f"{bound} {shown[0]}", "not measured", ""]
        is_met = value <= self.limit if self.is_most else value >= self.limit
        return [what, f"{bound} {shown[0]}", shown[1], "yes" if is_met else "no"]


WANTED = (
    Wanted("1.2B", OURS, "mfu", 0.55),
    Wanted("1.2B, recomputation", FULL, "hfu", 0.60),
    Wanted("1.2B, recomputation", FULL, "ours_over_it", 1.33),
    Wanted("355M", OURS, "mfu", 0.45),
    Wanted("124M", OURS, "mfu", 0.45),
    Wanted("124M", COMPILED, "ours_over_it", 1.3),
    Wanted("1.2B", COMPILED, "ours_over_it", 1.3),
    Wanted("124M, dropout", COORDINATES, "ours_over_it", 1.1, beside=KERNEL),
    Wanted("output layer", IN_CHUNKS, "over_at_once", 1.1),
)


def small_preset(preset: Path, folder: Path) -> Path:
    """A copy with a model that any machine trains in a moment."""
    settings = tomllib.loads(preset.read_text()) | SMALL
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    copy = folder / preset.name
    copy.write_text("".join(lines))
    return copy


def command(
    run: Run, device: str, *, is_small: bool, is_large_gpu: bool, folder: Path
) -> list[str]:
    """That does the run, and leaves run.json and profile/ in the folder."""
    if run.preset is None:
        words = {"vocab-size": 512 if is_small else 50304, "hidden-size": 32 if is_small else 1536}
        words |= {"tokens": 64 if is_small else 8192, "dtype": "bf16", "device": device}
        return program("output_layer", words | {"json": folder / "run.json"})
    preset = ROOT / "scripts" / "presets" / f"{run.preset}.toml"
    # What a CPU would need a C++ compiler for.
    contenders = [name for name in run.contenders if device == "cuda" or name != COMPILED]
    words = {
        "preset": small_preset(preset, folder) if is_small else preset,
        "dtype": "bf16",
        "device": device,
        "threads": 1 if is_small else 8,
        "vocab-size": 512 if is_small else 50304,
        "micro-batch-size": 2 if is_small else run.batches[0 if is_large_gpu else 1],
        "tensor-parallel": run.one_rank_of,
        "rounds": 2 if is_small else 5,
        "steps": 1 if is_small else run.steps,
        "json": folder / "run.json",
    }
    if run.is_profiled:
        words["profile"] = folder / "profile"
    stub = ["--stub-communication"] if run.one_rank_of > 1 else []
    return [*program("train_step", words), *stub, "--contenders", *contenders]


def program(name: str, words: Mapping[str, object]) -> list[str]:
    """The command of a benchmark with these flags."""
    flags = [word for flag, value in words.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *flags]


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


def results(device: str, *, is_small: bool, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, what its JSON file holds, or why it has none)."""
    is_large_gpu = gpu_memory(device) > LARGE_GPU
    for run in RUNS:
        start = time.monotonic()
        seconds = min(run.seconds, until - start)
        if seconds < LEAST:
            yield run.name, {"failed": "left out: there was no time left"}
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = command(
                run, device, is_small=is_small, is_large_gpu=is_large_gpu, folder=folder
            )
            status, printed = done(words, seconds)
            print(f"## {run.name}\n\n{printed}", flush=True)
            spent = {"whole_seconds": time.monotonic() - start}
            if status == 0:
                yield (
                    run.name,
                    json.loads((folder / "run.json").read_text()) | spent | profile(folder),
                )
            else:
                ended = "failed" if status is not None else f"took longer than {seconds:.0f} s"
                yield run.name, {"failed": f"{ended}: {printed[-1000:]}", **spent}


def profile(folder: Path) -> dict[str, str]:
    """Where the time of this project's step goes, as text, if that was asked for."""
    file = folder / "profile" / "this_project.md"
    return {"profile": file.read_text()} if file.exists() else {}


def gpu_memory(device: str) -> float:
    """Bytes."""
    if device == "cpu":
        return 0.0
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)


def page(about: dict[str, Any], runs: dict[str, Any]) -> str:
    parts = [
        f"# Training steps on one device\n\n    bash benchmarks/gpu.sh\n\n{told(about)}",
        f"MFU = {MFU}. HFU = {HFU}. The peak is the datasheet's, dense bf16.",
        markdown(["", "wanted", "measured", "met"], [each.row(runs) for each in WANTED]),
    ]
    for name, record in runs.items():
        if "failed" in record:
            parts.append(f"## {name}\n\n{record['failed']}")
            continue
        if "over_at_once" in record:
            parts.append(f"## {name}\n\n{output_layer.told_of(record)}")
            continue
        case = record["case"]
        lines = [
            f"## {name}",
            f"{record['dtype']}, {case['batch']} samples of {case['sequence']} tokens; largest "
            f"difference of compared losses: {record['loss_difference']}.",
            table(record),
        ]
        lines += [f"{name}: {' '.join(notes)}" for name, notes in record["notes"].items()]
        if record["out_of_memory"]:
            lines.append(f"Out of memory: {', '.join(record['out_of_memory'])}.")
        if "profile" in record:
            lines.append(record["profile"].replace("# ", "### Where the time goes: ", 1))
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main(
    output: Path,
    device: Literal["cpu", "cuda"] = "cuda",
    small: bool = False,
    seconds: float = 560.0,
) -> None:
    """Run all, and write gpu.md and gpu.json.

    Args:
        output: folder for both.
        device: cuda, or cpu to try it.
        small: models that any machine trains in a moment.
        seconds: that all of it may take.
    """
    output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    about = {**facts("torch", "transformers", "triton"), "device": device}
    runs: dict[str, Any] = {}
    for name, record in results(device, is_small=small, until=until):
        runs[name] = record
        about |= {"gpu": record["gpu"]} if record.get("gpu") else {}
        write_json(output / "gpu.json", {**about, "runs": runs})
        (output / "gpu.md").write_text(page(about, runs))
    print(page(about, runs))
    if failed := [name for name, record in runs.items() if "failed" in record]:
        raise SystemExit(f"error: these have no figures: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
