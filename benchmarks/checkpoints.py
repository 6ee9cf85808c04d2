"""Checkpoints: how long training waits, and how fast they are written and read.

A GPT-2 with Adam's moments is saved synchronously and asynchronously, and dd copies the file, which
is then in the page cache. The file is read by a load with its verification, and by dd. Seconds of a
save are the time that training waits (without the first asynchronous save, which allocates host
memory); MB/s count until all is on the disk. Files to read are dropped from the page cache, but the
host of a virtual machine has its own cache.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import atexit
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from benchmarks import steps
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.report import Results
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import Saver
from megatron.config.checkpoint import CheckpointConfig

SAVES = SYNC, ASYNC = "synchronous save", "asynchronous save"
COPY, LOAD, READ = "dd conv=fsync", "verify and load", "dd to /dev/null"


def contender(rank: Rank, what: str, disk: str, preset: str) -> Turn:
    folder = mkdtemp(dir=disk)
    atexit.register(rmtree, folder)
    state = steps.build(steps.read(["--preset", preset, "--no-bf16"]), rank.mesh())
    saver = Saver(state.mesh, CheckpointConfig(save=folder, async_save=what == ASYNC), {})

    def save() -> Figures:
        saver.save(state.step, state.slices(), state.facts(), None)
        saver.close()
        (done,) = saver.reports()
        return {"wall": done.stall_seconds, "on_disk": done.save_seconds, "bytes": done.bytes}

    size = save()["bytes"]
    (file,) = Path(folder).glob("step_*/*.safetensors")
    copy = Path(folder, "copy")

    def turn() -> Figures:
        if what in SAVES:
            rmtree(file.parent)
            return save()
        copy.unlink(missing_ok=True)
        if what != COPY:
            with file.open() as opened:  # drop the file from the page cache
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        if what == LOAD:
            state.load(verify(file.parent, state.mesh))
        else:
            target = [f"of={copy}", "conv=fsync"] if what == COPY else ["of=/dev/null"]
            subprocess.run(["dd", f"if={file}", "bs=4M", "status=none", *target], check=True)
        return {"wall": time.perf_counter() - start, "bytes": size}

    return turn


def contenders(
    flags: Flags, directory: Path = Path("runs"), preset: str = "gpt2_124m"
) -> Iterator[Contender]:
    """Compare saves and loads of a preset of pretrain_gpt2.py on the disk of `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*SAVES, COPY, LOAD, READ):
        own = {"what": name, "disk": str(directory.resolve()), "preset": preset}
        group = "loads" if name in (LOAD, READ) else "saves"
        yield Contender(name, contender, own, group=group, threads=2)


COLUMNS = (
    Column("seconds", "wall"),
    Column("its time / the first's", "wall", ratio="its / first"),
    Column("MB/s", lambda x, _: x["bytes"] / x.get("on_disk", x["wall"]) / 1e6, "{:,.0f}"),
    Column("MB", "bytes", "{:,.0f}", unit=1e6),
)
RESULT = "A synchronous save holds training for {:.2f} s, an asynchronous one for {:.2f} s."


def result(found: Results) -> str:
    return RESULT.format(*(found.median("saves", name, "seconds") for name in SAVES))


QUESTION = Question(contenders, COLUMNS, result, rounds=3, turns=3)

if __name__ == "__main__":
    QUESTION.run()
