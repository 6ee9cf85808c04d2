"""Checkpoints: how long training waits, and how fast they are written and read.

A GPT-2 with Adam's moments is saved synchronously and asynchronously, and dd copies the file, which
memory holds by then; the file is read by a load with its verification and by dd. Seconds of a save
are those that training waits (but for the first asynchronous one, which allocates the host memory);
MB/s are until all is on the disk. Files that are read are not in the page cache, but the host of a
virtual machine has a cache of its own.
"""

import atexit
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig

SAVES, LOAD = ("synchronous save", "asynchronous save"), "verify and load"
DROP = "dd if={0} of=/dev/null iflag=nocache count=0 status=none"  # from the page cache
READS = {  # what comes before a turn, and the turn
    "dd conv=fsync": ("rm -f copy", "dd if={0} of=copy bs=4M conv=fsync status=none"),
    LOAD: (DROP, ""),
    "dd to /dev/null": (DROP, "dd if={0} of=/dev/null bs=4M status=none"),
}


def contender(rank: Rank, what: str, disk: str, preset: str) -> Turn:
    folder = mkdtemp(dir=disk)
    atexit.register(rmtree, folder)
    state = steps.build(steps.read(["--preset", preset, "--no-bf16"]), rank.mesh(), fast=True)
    config = CheckpointConfig(save=folder, async_save=what == SAVES[1])
    saver = Saver(state.mesh, config, {})

    def save() -> Figures:
        saver.save(state.step, state.slices(), state.facts(), None)
        saver.close()
        (done,) = saver.reports()
        return {"wall": done.stall_seconds, "on_disk": done.save_seconds, "bytes": done.bytes}

    size = save()["bytes"]
    (file,) = Path(folder).glob("step_*/*.safetensors")

    def turn() -> Figures:
        if what in SAVES:
            rmtree(file.parent)
            return save()
        before, words = (each.format(file.name).split() for each in READS[what])
        subprocess.run(before, cwd=file.parent, check=True)
        start = time.perf_counter()
        if words:
            subprocess.run(words, cwd=file.parent, check=True)
        else:
            state.load(verify(file.parent, state.mesh))
        return {"wall": time.perf_counter() - start, "bytes": size}

    return turn


def contenders(
    flags: Flags, directory: Path = Path("runs"), preset: str = "gpt2_124m"
) -> Iterator[Contender]:
    """Compare saves and loads of a preset of pretrain_gpt2.py, on the disk of this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*SAVES, *READS):
        own = {"what": name, "disk": str(directory.resolve()), "preset": preset}
        group = "loads" if DROP in READS.get(name, ()) else "saves"
        yield Contender(name, contender, own, group=group, threads=2)


COLUMNS = (
    Column("seconds", "wall"),
    Column("its time / the first's", "wall", ratio="its / first"),
    Column("MB/s", lambda x, _: x["bytes"] / x.get("on_disk", x["wall"]) / 1e6, "{:,.0f}"),
    Column("MB", "bytes", "{:,.0f}", unit=1e6),
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
