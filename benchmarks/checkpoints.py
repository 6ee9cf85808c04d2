"""Saving GPT-2 124M with Adam's moments: how long training waits, and how fast against dd.

    python benchmarks/checkpoints.py --directory DISK [--rounds 7] [--num-layers 12] [--json FILE]

Each round saves the same state synchronously and asynchronously, writes the same bytes with dd
(conv=fsync, from a file in memory), loads the checkpoint with its verification, and reads its file
with dd; which half of a pair is first changes from round to round. Files are dropped from the page
cache before they are read. The first asynchronous save, which also allocates the host memory, is
not among the rounds. One process, with torch's own number of threads.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver, SaveReport, save
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import GPT2Config
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import TrainState, build_state

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Round:
    """Seconds."""

    sync_stall: float
    async_stall: float
    async_save: float
    dd_write: float
    load: float
    dd_read: float


@dataclass(frozen=True)
class Bench:
    """A state, its two savers, and a checkpoint of it whose file also lies in memory, for dd."""

    state: TrainState
    savers: dict[str, Saver]
    directory: Path
    shard: Path
    copy: Path

    def save(self, kind: str) -> SaveReport:
        """Save and wait; the checkpoint is removed again."""
        saver = self.savers[kind]
        saver.save(self.state.step, self.state.slices(), self.state.facts(), None)
        saver.close()
        (report,) = saver.reports()
        shutil.rmtree(report.path)
        return report

    def dd_write(self) -> float:
        target = self.directory / "dd"
        seconds = timed(lambda: dd(f"if={self.copy}", f"of={target}", "conv=fsync"))
        target.unlink()
        return seconds

    def load(self) -> float:
        drop_from_memory(self.shard)
        return timed(lambda: self.state.load(verify(self.shard.parent, self.state.mesh)))

    def dd_read(self) -> float:
        drop_from_memory(self.shard)
        return timed(lambda: dd(f"if={self.shard}", "of=/dev/null"))

    def round(self, number: int) -> Round:
        calls: dict[str, Callable[[], Any]] = {
            "sync": lambda: self.save("sync"),
            "async": lambda: self.save("async"),
            "dd_write": self.dd_write,
            "load": self.load,
            "dd_read": self.dd_read,
        }
        order = list(calls) if number % 2 else list(calls)[::-1]
        seen = {name: calls[name]() for name in order}
        return Round(
            seen["sync"].stall_seconds,
            seen["async"].stall_seconds,
            seen["async"].save_seconds,
            seen["dd_write"],
            seen["load"],
            seen["dd_read"],
        )


def drop_from_memory(file: Path) -> None:
    """Whoever reads the file next reads the disk; its content has been flushed."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def dd(*words: str) -> None:
    subprocess.run(["dd", "bs=4M", "status=none", *words], check=True)


def open_bench(directory: Path, memory: Path, layers: int) -> Bench:
    section = GPT2Config(
        num_layers=layers, hidden_size=768, num_attention_heads=12, max_position_embeddings=1024
    )
    state = build_state(
        section,
        OptimizerConfig(),
        PrecisionConfig(),
        serial_mesh(),
        50257,
        seed=1234,
        dtype=torch.float32,
    )
    savers = {
        kind: Saver(
            state.mesh, CheckpointConfig(save=str(directory / kind), async_save=kind == "async"), {}
        )
        for kind in ("sync", "async")
    }
    save(directory / "kept", state.step, state.slices(), {}, state.mesh)
    shard = directory / "kept" / "step_00000000" / "shard_00000.safetensors"
    shutil.copy(shard, memory)
    return Bench(state, savers, directory, shard, memory / shard.name)


def benchmark(
    directory: Path, rounds: int = 7, num_layers: int = 12, json_file: JsonFile = None
) -> None:
    """Run and print.

    Args:
        directory: on the disk to measure; a folder in it is made and removed.
        rounds: times that everything is done.
        num_layers: of the model; fewer for a smaller checkpoint.
        json_file: where every round's figures are written.
    """
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(dir=directory) as disk,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        bench = open_bench(Path(disk), Path(memory), num_layers)
        size = bench.shard.stat().st_size
        first = bench.save("async").stall_seconds
        bench.save("sync")
        done = [bench.round(number) for number in range(rounds)]
    record = facts("torch", "safetensors")
    record |= {"threads": torch.get_num_threads(), "bytes": size, "rounds": rounds}
    record |= {"load_before": load, "first_async_stall": first}
    print(told(record))
    print(markdown(["", "median (quartiles)"], rows(done, size / 1e6)))
    write_json(json_file, record | {"runs": [asdict(each) for each in done]})


def rows(done: list[Round], megabytes: float) -> list[list[str]]:
    def of(figure: Callable[[Round], float], digits: int) -> str:
        return spread([figure(each) for each in done], digits)

    return [
        ["synchronous save, training waits, s", of(lambda r: r.sync_stall, 2)],
        ["asynchronous save, training waits, s", of(lambda r: r.async_stall, 3)],
        ["that is % of the synchronous one", of(lambda r: 100 * r.async_stall / r.sync_stall, 1)],
        ["asynchronous save, until it is on disk, s", of(lambda r: r.async_save, 2)],
        ["write, MB/s", of(lambda r: megabytes / r.sync_stall, 0)],
        ["dd conv=fsync, MB/s", of(lambda r: megabytes / r.dd_write, 0)],
        ["write as % of dd", of(lambda r: 100 * r.dd_write / r.sync_stall, 0)],
        ["verify and load, MB/s", of(lambda r: megabytes / r.load, 0)],
        ["dd to /dev/null, MB/s", of(lambda r: megabytes / r.dd_read, 0)],
        ["verify and load as % of dd", of(lambda r: 100 * r.dd_read / r.load, 0)],
    ]


if __name__ == "__main__":
    tyro.cli(benchmark)
