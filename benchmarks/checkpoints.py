"""Saving and loading a GPT-2 with Adam's moments: how long training waits, and how fast beside dd.

Written are the same bytes synchronously, asynchronously, and by dd (conv=fsync, from a file in
memory); read is a checkpoint's file, by a load with its verification and by dd. Seconds of a save
are those that training waits; MB/s are until all is on the disk. The first asynchronous save also
allocates the host memory, and is shown apart. Files are dropped from the page cache before they are
read, but the host of a virtual machine has a cache of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig

SAVES = "synchronous save", "asynchronous save", "dd conv=fsync"
LOADS = "verify and load", "dd to /dev/null"


def contender(rank: Rank, what: str, disk: str, preset: str) -> Turn:
    folder, memory = TemporaryDirectory(dir=disk), TemporaryDirectory(dir="/dev/shm")
    config = steps.read(["--preset", preset, "--no-bf16"])
    state = steps.build(config, rank.mesh(), fast=True)
    settings = CheckpointConfig(save=folder.name, async_save=what == SAVES[1])
    saver = Saver(state.mesh, settings, {})

    def save() -> Figures:
        saver.save(state.step, state.slices(), state.facts(), None)
        saver.close()
        (done,) = saver.reports()
        return {"wall": done.stall_seconds, "on_disk": done.save_seconds, "bytes": done.bytes}

    first = save()
    (path,) = Path(folder.name).glob("step_*")
    file = path / "shard_00000.safetensors"
    if what == SAVES[2]:
        shutil.move(file, memory.name)
    if what in SAVES:
        shutil.rmtree(path)

    def turn() -> Figures:
        target = Path(folder.name, "dd")
        commands = {
            SAVES[2]: [f"if={memory.name}/{file.name}", f"of={target}", "conv=fsync"],
            LOADS[1]: [f"if={file}", "of=/dev/null"],
        }
        if what in SAVES[:2]:
            done = save()
            shutil.rmtree(path)
            return done | ({"first": first["wall"]} if settings.async_save else {})
        if what in LOADS:
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        target.unlink(missing_ok=True)
        start = time.perf_counter()
        if what in commands:
            subprocess.run(["dd", "bs=4M", "status=none", *commands[what]], check=True)
        else:
            state.load(verify(path, state.mesh))
        return {"wall": time.perf_counter() - start, "bytes": first["bytes"]}

    return turn


def speed(own: Figures, _: Figures) -> float:
    return float(own["bytes"] / own.get("on_disk", own["wall"]) / 1e6)


def main(flags: Flags, directory: Path = Path("runs"), preset: str = "gpt2_124m") -> None:
    """Compare saves and loads.

    Args:
        directory: on the disk to measure; folders in it are made and removed.
        preset: of pretrain_gpt2.py, a name or a file; with smaller ones checkpoints are smaller.
    """
    directory.mkdir(parents=True, exist_ok=True)
    given = {"disk": str(directory.resolve()), "preset": preset}
    ask(
        Question(
            title="Checkpoints: how long training waits, and how fast they are written and read",
            method=__doc__,
            contenders=[
                Contender(name=n, group=g, run=contender, arguments=given | {"what": n}, threads=2)
                for g, names in (("saves", SAVES), ("loads", LOADS))
                for n in names
            ],
            columns=(
                Column("seconds", "wall"),
                Column("its time / the first's", "wall", ratio="its / first"),
                Column("MB/s", speed, "{:,.0f}"),
                Column("MB", "bytes", "{:,.0f}", unit=1e6),
                Column("the first one, seconds", "first"),
                Column("CPU seconds", "cpu"),
            ),
            result=lambda found: (
                f"An asynchronous save holds training for "
                f"{found.median('saves', SAVES[1], 'seconds'):.2f} s, a synchronous one for "
                f"{found.median('saves', SAVES[0], 'seconds'):.2f} s "
                f"({found.median('saves', SAVES[0], 'MB'):,.0f} MB)."
            ),
            rounds=3,
            turns=3,
            packages=("torch", "safetensors"),
        ),
        flags,
    )


if __name__ == "__main__":
    cli(main)
