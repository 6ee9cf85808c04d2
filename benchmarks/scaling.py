"""Section 5.1 of the paper measured: weak scaling, strong scaling and the number of heads.

    torchrun --nproc-per-node 8 benchmarks/scaling.py --json FILE --picture FILE --page FILE
    torchrun --nproc-per-node 2 benchmarks/scaling.py --json FILE    # without GPUs: in miniature

Whatever the started ranks suffice for is trained with the program's own step on the first so many
of them, fully recomputed as in the paper, while the others sleep; of the rest it is told why not.
Configurations take turns, so that all see the same machine, and each is compared with the single
rank of the same round. --hardware adds what tools/plan.py predicts.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import scaling_report
from benchmarks.machine import JsonFile, facts, write_json
from benchmarks.scaling_axes import profile_steps
from benchmarks.scaling_configurations import Configuration, Point, studies
from benchmarks.scaling_figures import Account, Record, Result, find_peak, record
from benchmarks.scaling_worlds import Failed, Worlds
from benchmarks.turns import Stopwatch
from megatron.config.checks import writable
from megatron.config.launch import world_size
from megatron.config.parse import user_errors
from megatron.config.training import ParallelConfig
from megatron.parallel.mesh import Mesh
from megatron.train.launch import default_precision, launch
from megatron.train.state import choose_compile
from tools.planning.anchor import find_hardware
from tools.planning.hardware import Hardware

PROFILED = 2  # steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for."""

    is_small: bool | None  # None: where there is no GPU
    precision: str | None  # None: the presets', or the device's own
    hardware: Hardware | None
    rounds: int
    steps: int  # of a turn
    warm_up: int  # in front of them
    threads: int
    command: str


@dataclass(frozen=True, kw_only=True)
class Files:
    json: Path | None
    picture: Path | None
    page: Path | None

    def __post_init__(self) -> None:
        for name, ending in (("json", ""), ("picture", ".png"), ("page", "")):
            writable(self, name, ending)

    def show(self, found: Record) -> None:
        if self.picture is not None:
            scaling_report.draw(self.picture, found)
        if self.page is not None:
            picture = self.picture and self.picture.name
            self.page.write_text(scaling_report.page(found, picture))


def measure(whole: Mesh, settings: Settings, files: Files) -> Record:
    """Every rank calls this; the first one writes what there is after every round, and all of it
    at the end."""
    is_small = whole.device.type == "cpu" if settings.is_small is None else settings.is_small
    points = studies(whole.size, is_small=is_small)
    config = points[0].configuration.config
    precision = settings.precision or config.precision.name or default_precision(whole.device)
    compiled, warnings = choose_compile(None, whole)
    worlds = Worlds(whole=whole, precision=precision, compiled=compiled, warm_up=settings.warm_up)
    with user_errors(os.environ, agreed=True):
        peak = find_peak(whole.device.type, settings.hardware, precision)
    account = Account(precision=precision, hardware=settings.hardware, peak=peak)
    about = describe(worlds, settings, is_small) | {"warnings": warnings}
    results: dict[str, Result] = {}
    for number in rounds(worlds, settings, points, results):
        found = {**about, "rounds": number, **record(account, points, results)}
        if whole.is_first:
            write_json(files.json, found)
            print(f"round {number} of {settings.rounds}", flush=True)
    if whole.is_first:
        files.show(found)
        print(f"\n{scaling_report.tables(found)}")
    return found


def describe(worlds: Worlds, settings: Settings, is_small: bool) -> dict[str, Any]:
    device = worlds.whole.device
    return {
        **facts("torch"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "miniature": is_small,
        "processes": worlds.whole.size,
        "threads_per_process": torch.get_num_threads(),
        "compiled": worlds.compiled,
        "steps_of_a_round": settings.steps,
        "warm_up_steps": settings.warm_up,
        "command": settings.command,
    }


def rounds(
    worlds: Worlds, settings: Settings, points: Sequence[Point], results: dict[str, Result]
) -> Iterator[int]:
    """Fill the results, and yield the number of each round behind it; the last one profiles."""
    configurations = {each.configuration.name: each.configuration for each in points}
    ranks = worlds.whole.size
    for name, each in configurations.items():
        short = f"takes {each.ranks} ranks, {ranks} were started"
        results[name] = Result(reason=short if each.ranks > ranks else None)
    for number in range(settings.rounds):
        names = [name for name in configurations if results[name].reason is None]
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            turn(worlds, configurations[name], results[name], settings.steps)
            if number == settings.rounds - 1 and results[name].reason is None:
                profile(worlds, configurations[name], results[name])
        yield number + 1


def turn(worlds: Worlds, configuration: Configuration, result: Result, steps: int) -> None:
    """A step is over when it is on the slowest rank."""

    def work(_: Mesh, watch: Stopwatch) -> list[float]:
        return [watch.time(1)["wall"] for _ in range(steps)]

    answers = worlds.turn(configuration, work)
    if isinstance(answers, Failed):
        result.reason = answers.reason
    else:
        result.rounds.append([max(each) for each in zip(*answers, strict=True)])


def profile(worlds: Worlds, configuration: Configuration, result: Result) -> None:
    def work(mesh: Mesh, watch: Stopwatch) -> dict[str, Any]:
        return profile_steps(mesh, watch, PROFILED)

    answers = worlds.turn(configuration, work)
    if not isinstance(answers, Failed):  # the times are there all the same
        result.communication = answers[0]


def scaling(
    json_file: JsonFile = None,
    picture: Path | None = None,
    page: Path | None = None,
    miniature: bool | None = None,
    hardware: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    rounds: int = 6,
    steps: int = 4,
    warm_up: int = 2,
    threads: int = 1,
) -> None:
    """Measure and print.

    Args:
        json_file: where every figure is written.
        picture: PNG like the paper's figure 5.
        page: the tables as markdown, with the picture.
        miniature: small models in the proportions of table 1; if not said, where there is no GPU.
        hardware: of scripts/hardware/ or a file, for what tools/plan.py predicts and for MFU.
        dtype: of weights and activations; if not said the presets', in miniature the device's own.
        rounds: times that every configuration has its turn.
        steps: that are timed in a turn.
        warm_up: steps in front of these.
        threads: of every process, on the CPU.
    """
    with user_errors(os.environ):
        if min(rounds, steps, warm_up, threads) < 1:
            raise ValueError("--rounds, --steps, --warm-up and --threads are 1 or more each")
        size = world_size(os.environ)
        settings = Settings(
            is_small=miniature,
            precision=dtype,
            hardware=find_hardware(hardware) if hardware else None,
            rounds=rounds,
            steps=steps,
            warm_up=warm_up,
            threads=threads,
            command=command(size),
        )
        files = Files(json=json_file, picture=picture, page=page)
    torch.set_num_threads(threads)
    with launch(ParallelConfig(tensor_model_parallel_size=size), os.environ) as mesh:
        measure(mesh, settings, files)


def command(size: int) -> str:
    """By which this run was started."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = f"--nnodes {size // each} " if size > each else ""
    start = f"torchrun {nodes}--nproc-per-node {each}" if size > 1 else "python"
    return f"{start} benchmarks/scaling.py {shlex.join(sys.argv[1:])}".rstrip()


if __name__ == "__main__":
    tyro.cli(scaling)
