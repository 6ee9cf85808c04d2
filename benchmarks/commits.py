"""This tree beside another commit of the project: time and memory of a training step, and losses.

Each runs its own `pretrain_gpt2.py`, under torchrun where there are several ranks, on the same data
set of random tokens. CPU and wall seconds are those between two logged steps of one run, so that
nothing of its start is among them; CPU seconds are of all ranks, read in /proc, and memory is the
sum of their peaks, with all that they have imported. Every step's loss is compared. Dropout by
coordinates and dropout that is drawn (before commit 681c802) drop different elements.
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.processes import ROOT, status_bytes
from benchmarks.report import Results
from tools.data_files import IndexedDatasetWriter

PRESETS = {"gpt2_30m": 8192, "quickstart": 2048}  # and the size of the vocabulary
LAYOUTS = {"t1": (1, 1), "t2": (2, 2), "d2": (2, 1)}  # ranks, and of these tensor-parallel
COMMON = (
    *("--split", "9,1,0", "--eval-iters", "0", "--lr-decay-iters", "1000"),
    *("--log-interval", "1"),
)
BEFORE, BEHIND = 5, 2  # steps of a run that are not timed
RATIO, DIFFERENCE = "this tree's / its CPU time", "largest difference of a loss"


@contextmanager
def checked_out(against: str) -> Iterator[Path]:
    """A folder with the files of this commit, or `against` itself where it is a folder."""
    if Path(against).is_dir():
        yield Path(against).resolve()
        return
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", against], capture_output=True, check=False
    )
    if archive.returncode:
        raise ValueError(f"--against {against}: {archive.stderr.decode().strip()}")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def write_text(prefix: Path, vocab_size: int) -> None:
    """A data set of 100 documents of random tokens."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(100):
            tokens = np.append(rng.integers(1, vocab_size, 2000), 0).astype(np.uint16)
            writer.add(tokens, np.array([len(tokens)], np.int32))
        writer.commit(
            tokenizer_type="random",
            tokenizer_fingerprint="random",
            vocab_size=vocab_size,
            eod=0,
            shuffled=True,
        )


def training(rank: Rank, tree: str, flags: list[str], vocab_size: int, ranks: int) -> Turn:
    folder = TemporaryDirectory()
    prefix, steps = Path(folder.name, "text_document"), int(flags[-1]) - BEFORE - BEHIND
    write_text(prefix, vocab_size)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "pretrain_gpt2.py", *flags]

    def turn() -> Figures:
        record, seen = Path(folder.name, "record.jsonl"), []
        record.unlink(missing_ok=True)
        with subprocess.Popen(
            [*command, "--data-path", str(prefix), "--metrics-file", str(record)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": tree, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for line in process.stdout or ():
                if re.match(rf"step ({BEFORE}|{BEFORE + steps}) \| loss ", line):
                    own = [*family(process.pid)][ranks > 1 :]  # without torchrun's
                    seen.append((time.perf_counter(), sum(map(cpu_seconds, own))))
                    peak = sum(status_bytes("VmHWM", each) for each in own)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} has ended with status {process.returncode}")
        wall, cpu = ((last - first) / steps for first, last in zip(*seen, strict=True))
        lines = map(json.loads, record.read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        return {"wall": wall, "cpu": cpu, "peak_bytes": peak, "losses": losses}

    return turn


def family(process: int | str) -> Iterator[str]:
    """The number of a process and those of all that it has started, itself first."""
    yield str(process)
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(child)


def cpu_seconds(process: str) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def difference(own: Figures, first: Figures) -> float | None:
    """Of the other's losses from this tree's."""
    if own is first or not first:
        return None
    return float(np.abs(np.subtract(own["losses"], first["losses"])).max())


def differing(found: Results) -> str:
    """Why a run without dropout is a failure."""
    rows = [row for row in found.rows if (cell := found.cell(*row, DIFFERENCE)) and cell.median]
    return f"the losses differ: {'; '.join(group for group, _ in rows)}" if rows else ""


def main(
    flags: Flags,
    against: str = "HEAD~1",
    presets: tuple[str, ...] = tuple(PRESETS),
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16"),
    layouts: tuple[Literal["t1", "t2", "d2"], ...] = ("t1", "t2", "d2"),
    dropout: float = 0.0,
    steps: int = 30,
) -> None:
    """Compare the trees. Exit status 1 where a loss differs without dropout.

    Args:
        against: a commit, or a folder that holds another tree.
        presets: gpt2_30m, quickstart.
        dtypes: fp32, bf16.
        layouts: one rank, two of tensor parallelism, two of data parallelism.
        dropout: of attention's probabilities, embeddings and residuals.
        steps: of a run, that are timed.
    """
    with checked_out(against) as other:
        contenders, its_name = [], Path(against).name
        for preset, dtype, layout in product(presets, dtypes, layouts):
            ranks, tensor = LAYOUTS[layout]
            words = ["--preset", str(ROOT / "scripts" / "presets" / f"{preset}.toml"), *COMMON]
            words += ["--bf16" if dtype == "bf16" else "--no-bf16"]
            words += ["--attention-dropout", str(dropout), "--hidden-dropout", str(dropout)]
            words += ["--micro-batch-size", str(2 * tensor // ranks)]
            words += ["--tensor-model-parallel-size", str(tensor)]
            words += ["--train-iters", str(BEFORE + steps + BEHIND)]
            given = {"flags": words, "vocab_size": PRESETS[preset], "ranks": ranks}
            group, threads = f"{preset}, {dtype}, {layout[0]} = {layout[1]}", 2 // ranks
            for name, tree in (("this tree", ROOT), (its_name, other)):
                own: dict[str, Any] = {"run": training, "arguments": {"tree": str(tree), **given}}
                contenders.append(Contender(name=name, group=group, threads=threads, **own))
        ask(
            Question(
                title=f"Beside commit {its_name}",
                method=__doc__,
                contenders=contenders,
                columns=(
                    Column("CPU seconds", "cpu", "{:.4f}"),
                    Column(RATIO, "cpu", "{:.3f}", "first / its"),
                    Column("seconds", "wall", "{:.4f}"),
                    Column("this tree's / its seconds", "wall", "{:.3f}", "first / its"),
                    Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
                    Column(DIFFERENCE, difference, "{:g}"),
                ),
                result=lambda found: (
                    f"A step takes {found.range(RATIO)} of the CPU time of {its_name}; the largest "
                    f"difference of a loss is {found.range(DIFFERENCE, '{:g}')}."
                ),
                failure=lambda found: "" if dropout else differing(found),
                warm_up=0,
                together=False,
                packages=("torch",),
                settings={"against": its_name, "dropout": dropout},
            ),
            flags,
        )


if __name__ == "__main__":
    cli(main)
