"""What `gpu.sh` runs on one GPU, by groups: the tests of the layouts, what the host waits for, the
output layer, and training steps of every size.

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
from abc import ABC, abstractmethod
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
from benchmarks.figures import HFU, MFU, gpu_peak, percent, table
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
Group = Literal["hardware", "matrix", "host", "loss", "compile", "dropout", "speed", "sizes"]
LONG = ("speed", "sizes")  # run where they are named


@dataclass(frozen=True)
class Place:
    """Where a run is done."""

    device: str
    is_small: bool
    memory: float  # bytes of the GPU
    output: Path
    folder: Path  # of this run alone, for run.json and profile/


@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """A command; what it leaves in run.json is its record."""

    name: str
    group: Group
    seconds: float  # that it may take

    @abstractmethod
    def command(self, place: Place) -> list[str]: ...

    def text(self, record: dict[str, Any]) -> str:
        return str(record["printed"])


class Hardware(Run):
    """hardware.toml, for tools/plan.py."""

    def command(self, place: Place) -> list[str]:
        file = place.output / "hardware.toml"
        return [sys.executable, str(ROOT / "tools" / "plan.py"), "--measure", str(file)]


class Matrix(Run):
    """Every layout equal and divided. Several gloo ranks share the GPU; torch documents gloo's
    all-gather and reduce-scatter for CPU tensors alone, so that this may fail."""

    def command(self, place: Place) -> list[str]:
        some = "test_one_process" if place.is_small else "test_it_equals"
        return [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/layouts"),
            *("--device", place.device, "-k", some),
        ]


class HostReads(Run):
    def command(self, place: Place) -> list[str]:
        words = {"device": place.device, "json": place.folder / "run.json"}
        return program("host_reads", words)

    def text(self, record: dict[str, Any]) -> str:
        return markdown(["a step of", "reads"], [list(each) for each in record["reads"].items()])


class OutputLayer(Run):
    contenders = (IN_CHUNKS, AT_ONCE)

    def command(self, place: Place) -> list[str]:
        small = place.is_small
        words = {"vocab-size": 512 if small else 50304, "hidden-size": 32 if small else 1536}
        words |= {"tokens": 64 if small else 8192, "dtype": "bf16", "device": place.device}
        return program("output_layer", words | {"json": place.folder / "run.json"})

    def text(self, record: dict[str, Any]) -> str:
        return output_layer.told_of(record)


@dataclass(frozen=True, kw_only=True)
class Steps(Run):
    """Whole training steps, by `train_step.py`."""

    preset: str
    batches: tuple[int, int]  # samples, on a GPU of 141 GB and of 80 GB
    contenders: Sequence[str]
    steps: int = 3  # of a turn
    one_rank_of: int = 1  # tensor-parallel ranks, the others of which are not there
    is_profiled: bool = False

    def command(self, place: Place) -> list[str]:
        preset, small = ROOT / "scripts" / "presets" / f"{self.preset}.toml", place.is_small
        # What a CPU would need a C++ compiler for.
        contenders = [n for n in self.contenders if place.device == "cuda" or n != COMPILED]
        words = {
            "preset": small_preset(preset, place.folder) if small else preset,
            "dtype": "bf16",
            "device": place.device,
            "threads": 1 if small else 8,
            "vocab-size": 512 if small else 50304,
            "micro-batch-size": 2 if small else self.batches[place.memory <= LARGE_GPU],
            "tensor-parallel": self.one_rank_of,
            "rounds": 2 if small else 5,
            "steps": 1 if small else self.steps,
            "json": place.folder / "run.json",
        }
        if self.is_profiled:
            words["profile"] = place.folder / "profile"
        stub = ["--stub-communication"] if self.one_rank_of > 1 else []
        return [*program("train_step", words), *stub, "--contenders", *contenders]

    def text(self, record: dict[str, Any]) -> str:
        case = record["case"]
        lines = [
            f"{record['dtype']}, {case['batch']} samples of {case['sequence']} tokens; largest "
            f"difference of compared losses: {record['loss_difference']}.",
            table(record),
        ]
        lines += [f"{name}: {' '.join(notes)}" for name, notes in record["notes"].items()]
        if record["out_of_memory"]:
            lines.append(f"Out of memory: {', '.join(record['out_of_memory'])}.")
        if "profile" in record:
            lines.append(record["profile"].replace("# ", "### Where the time goes: ", 1))
        return "\n\n".join(lines)


# The most telling of a group first: what is last is left out where time runs short.
RUNS: tuple[Run, ...] = (
    Hardware(name="hardware", group="hardware", seconds=45),
    Matrix(name="layouts", group="matrix", seconds=180),
    HostReads(name="host reads", group="host", seconds=30),
    OutputLayer(name="output layer", group="loss", seconds=40),
    Steps(
        name="124M",
        group="compile",
        preset="gpt2_124m",
        batches=(16, 8),
        contenders=(OURS, NOT_COMPILED, FULL, PLAIN, TRANSFORMERS, COMPILED),
        seconds=170,
        steps=8,
        is_profiled=True,
    ),
    Steps(
        name="124M, dropout",
        group="dropout",
        preset="gpt2_124m",
        batches=(16, 8),
        contenders=(OURS, COORDINATES, KERNEL),
        seconds=60,
        steps=4,
    ),
    Steps(
        name="1.2B",
        group="speed",
        preset="gpt2_scaling_1.2b",
        batches=(8, 4),
        contenders=(OURS, COMPILED),
        seconds=230,
        is_profiled=True,
    ),
    Steps(
        name="1.2B, recomputation",
        group="speed",
        preset="gpt2_scaling_1.2b",
        batches=(8, 4),
        contenders=(OURS, FULL, SELECTIVE),
        seconds=90,
    ),
    Steps(
        name="355M",
        group="speed",
        preset="gpt2_355m",
        batches=(16, 8),
        contenders=(OURS, FULL, PLAIN, TRANSFORMERS),
        seconds=100,
        steps=4,
    ),
    *(
        Steps(
            name=size,
            group="sizes",
            preset=f"gpt2_scaling_{size.lower()}",
            batches=(8, 8),
            contenders=(FULL,),
            seconds=60,
        )
        for size in ("2.5B", "4.2B")
    ),
    Steps(
        name="8.3B, one rank of 8 with communication stubbed",
        group="sizes",
        preset="gpt2_scaling_8.3b",
        batches=(8, 8),
        contenders=(FULL, OURS),
        seconds=75,
        one_rank_of=8,
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


def results(
    runs: Sequence[Run], device: str, output: Path, *, is_small: bool, until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, its record, or why it has none)."""
    memory = gpu_memory(device)
    for run in runs:
        start = time.monotonic()
        seconds = min(run.seconds, until - start)
        if seconds < LEAST:
            yield run.name, {"failed": "left out: there was no time left"}
            continue
        with tempfile.TemporaryDirectory() as name:
            place = Place(device, is_small, memory, output, Path(name))
            status, printed = done(run.command(place), seconds)
            print(f"## {run.name}\n\n{printed}", flush=True)
            spent, end = {"whole_seconds": time.monotonic() - start}, printed[-1000:]
            if status == 0:
                file = place.folder / "run.json"
                found = json.loads(file.read_text()) if file.exists() else {"printed": end}
                yield run.name, found | spent | profile(place.folder)
            else:
                ended = "failed" if status is not None else f"took longer than {seconds:.0f} s"
                yield run.name, {"failed": f"{ended}: {end}", **spent}


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


def page(about: dict[str, Any], records: dict[str, Any]) -> str:
    parts = [
        f"# What was run on one device\n\n    bash benchmarks/gpu.sh [GROUP ...]\n\n{told(about)}",
        f"MFU = {MFU}. HFU = {HFU}. The peak is the datasheet's, dense bf16.",
        markdown(
            ["", "wanted", "measured", "met"],
            [each.row(records) for each in WANTED if each.run in records],
        ),
    ]
    for run in RUNS:
        if (record := records.get(run.name)) is not None:
            parts.append(f"## {run.name}\n\n{record.get('failed') or run.text(record)}")
    return "\n\n".join(parts) + "\n"


def kept(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The records that the same commit has left in the file, on the same machine."""
    former = json.loads(file.read_text()) if file.exists() else {}
    is_known = about["commit"] is not None and not about["commit"].endswith("-dirty")
    is_same = all(former.get(name) == value for name, value in about.items())
    return former.get("runs", {}) if is_known and is_same else {}


def main(
    groups: tyro.conf.Positional[tuple[Group, ...]] = (),
    /,
    *,
    output: Path,
    device: Literal["cpu", "cuda"] = "cuda",
    small: bool = False,
    seconds: float = 560.0,
) -> None:
    """Run the groups, and write gpu.md and gpu.json.

    Args:
        groups: by default those that are short.
        output: folder for both; what other groups of the same commit have left there stays.
        device: cuda, or cpu to try it.
        small: models that any machine trains in a moment.
        seconds: that a group that is named, or all short ones, may take.
    """
    output.mkdir(parents=True, exist_ok=True)
    about = {**facts("torch", "transformers", "triton"), "device": device, "small": small}
    about["gpu"] = gpu_peak(device)[0]
    records = kept(output / "gpu.json", about)
    chosen = groups or [each.group for each in RUNS if each.group not in LONG]
    wanted = [each for each in RUNS if each.group in chosen]
    until = time.monotonic() + seconds * max(1, len(groups))
    for name, record in results(wanted, device, output, is_small=small, until=until):
        records[name] = record
        write_json(output / "gpu.json", {**about, "runs": records})
        (output / "gpu.md").write_text(page(about, records))
    print(page(about, records))
    if failed := [each.name for each in wanted if "failed" in records[each.name]]:
        raise SystemExit(f"error: these have no figures: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
