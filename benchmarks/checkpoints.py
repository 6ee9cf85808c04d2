"""Checkpoints: how long training waits, and how fast they are written and read.

A GPT-2 with Adam's moments is saved synchronously and asynchronously, and dd writes the same bytes
from a file in memory; its file is read by a load with its verification and by dd. Seconds of a save
are those that training waits (the first asynchronous one also allocates the host memory); MB/s are
until all is on the disk. Files that are read are not in the page cache, but the host of a virtual
machine has a cache of its own.
"""

import atexit
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig

SAVES, LOAD = ("synchronous save", "asynchronous save"), "verify and load"
WRITTEN, READ = "dd conv=fsync", "dd to /dev/null"


def contender(rank: Rank, what: str, disk: str, preset: str) -> Turn:
    folder, memory = mkdtemp(dir=disk), mkdtemp(dir="/dev/shm")
    for each in (folder, memory):
        atexit.register(rmtree, each)
    state = steps.build(steps.read(["--preset", preset, "--no-bf16"]), rank.mesh())
    config = CheckpointConfig(save=folder, async_save=what == SAVES[1])
    saver = Saver(state.mesh, config, {})

    def save() -> Figures:
        saver.save(state.step, state.slices(), state.facts(), None)
        saver.close()
        (done,) = saver.reports()
        return {"wall": done.stall_seconds, "on_disk": done.save_seconds, "bytes": done.bytes}

    first = save()
    (file,) = Path(folder).glob("step_*/*.safetensors")
    words = f"dd if={file.name} of=/dev/null bs=4M status=none"
    before = f"{words} iflag=nocache count=0"  # drops the file from the page cache
    if what == WRITTEN:
        copyfile(file, f"{memory}/file")
        words = f"dd if={memory}/file of={file.name} bs=4M status=none conv=fsync"
        before = f"rm {file.name}"

    def turn() -> Figures:
        if what in SAVES:
            rmtree(file.parent)
            return save() | {"first": first["wall"]}
        subprocess.run(before.split(), cwd=file.parent, check=True)
        start = time.perf_counter()
        if what == LOAD:
            state.load(verify(file.parent, state.mesh))
        else:
            subprocess.run(words.split(), cwd=file.parent, check=True)
        return {"wall": time.perf_counter() - start, "bytes": first["bytes"]}

    return turn


def contenders(
    flags: Flags, directory: Path = Path("runs"), preset: str = "gpt2_124m"
) -> Iterator[Contender]:
    """Compare saves and loads of a preset of pretrain_gpt2.py, on the disk of this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*SAVES, WRITTEN, LOAD, READ):
        own = {"what": name, "disk": str(directory.resolve()), "preset": preset}
        group = "loads" if name in (LOAD, READ) else "saves"
        yield Contender(name, contender, own, group=group, threads=2)


COLUMNS = (
    Column("seconds", "wall"),
    Column("its time / the first's", "wall", ratio="its / first"),
    Column("MB/s", lambda x, _: x["bytes"] / x.get("on_disk", x["wall"]) / 1e6, "{:,.0f}"),
    Column("MB", "bytes", "{:,.0f}", unit=1e6),
    Column("the first one, seconds", "first"),
    Column("CPU seconds", "cpu"),
)
RESULT = "A synchronous save holds training for {:.2f} s, an asynchronous one for {:.2f} s."
QUESTION = Question(
    contenders,
    COLUMNS,
    lambda found: RESULT.format(*(found.median("saves", name, "seconds") for name in SAVES)),
    rounds=3,
    turns=3,
)

if __name__ == "__main__":
    QUESTION.run()
