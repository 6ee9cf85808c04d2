"""Time and memory of a training step, compared with another commit.

Each tree runs its own `pretrain_gpt2.py` on the same random tokens. Both programs exist at the same
time and make one step in turn; between its turns a program is stopped. So a machine that is busy
for a while slows both. CPU seconds are those of all ranks; memory is the sum of their peaks,
imports included. The losses of the first steps, which are not timed, are compared: without dropout
they have to be equal bit for bit, or within --tolerance. Dropout by coordinates drops other
elements than dropout before commit 681c802.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count, product
from multiprocessing.util import Finalize
from pathlib import Path
from shutil import unpack_archive
from subprocess import PIPE, Popen
from tempfile import mkdtemp

import numpy as np

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import ROOT, status_bytes
from benchmarks.watched import below
from megatron.errors import UsageError
from megatron.train.metrics import read_metrics
from tools.corpus.tokenize.writer import IndexedDatasetWriter

PRESETS = {"gpt2_30m": 8192, "quickstart": 2048}  # preset: vocabulary size
LAYOUTS = {"t = 1": (1, 1), "t = 2": (2, 2), "d = 2": (2, 1)}  # (ranks, tensor-parallel ranks)
GROUPS = tuple(map(", ".join, product(PRESETS, ("fp32", "bf16"), LAYOUTS)))
WARM_UP = 10  # untimed steps at the start of a run
RATIO = "this tree's / its CPU time"


def checked_out(against: str) -> Path:
    """A folder with the files of commit `against`, or `against` itself if it is a folder."""
    if Path(against).is_dir():
        return Path(against).resolve()
    archive, folder = scratch() / "tree.tar", scratch() / "tree"
    command = ["git", "archive", f"--output={archive}", against]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise UsageError("--against", against, "a commit or a folder")
    unpack_archive(archive, folder, filter="data")
    return folder


def random_text(vocab_size: int) -> str:
    """The prefix of a new data set of random tokens."""
    prefix, size = str(scratch() / f"random_{vocab_size}"), 200_000
    tokens = np.random.default_rng(0).integers(0, vocab_size, size, np.uint16)
    with IndexedDatasetWriter(prefix, tokens.dtype) as writer:
        writer.add(tokens, np.full(100, size // 100, np.int32))
        kind = {"tokenizer_type": "random", "tokenizer_fingerprint": "random"}
        writer.commit(**kind, vocab_size=vocab_size, eod=0, shuffled=True)
    return prefix


def run(rank: Rank, tree: str, flags: list[str], ranks: int, folder: str) -> Turn:
    """A turn is one step of the tree's program, which is stopped (SIGSTOP) between its turns."""
    record = Path(mkdtemp(dir=folder), "record.jsonl")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else ()), "pretrain_gpt2.py", *flags]
    program = Popen(
        [*command, "--metrics-file", str(record)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": tree, "PYTHONUNBUFFERED": "1"},
        stdout=PIPE,
        text=True,
        # A killed benchmark must not leave a stopped program: PR_SET_PDEATHSIG.
        preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL),
    )

    def processes() -> set[str]:
        """The program's; torchrun starts each rank in a session of its own."""
        return {str(program.pid), *below(str(program.pid))}

    def send(number: signal.Signals) -> None:
        for each in processes():
            with suppress(ProcessLookupError):
                os.kill(int(each), number)

    Finalize(program, send, (signal.SIGKILL,), exitpriority=0)
    steps = filter(re.compile(r"step \d+(/\d+ \(\d+ %\))? \| loss ").match, program.stdout or ())
    spent, turns = 0.0, count()

    def turn() -> Figures:
        nonlocal spent
        start = time.perf_counter()
        send(signal.SIGCONT)
        number = next(turns)
        # The first turn makes two steps, so that the record holds the loss that a turn returns.
        for _ in range(2 if number == 0 else 1):
            if next(steps, None) is None:
                raise RuntimeError(f"{' '.join(command)}: status {program.wait()}")
        wall = time.perf_counter() - start
        send(signal.SIGSTOP)
        before, spent = spent, sum(map(cpu_seconds_of, processes()))
        peak = sum(status_bytes("VmHWM", each) for each in processes())
        losses = [line["loss"] for line in read_metrics(record) if "loss" in line]
        return {"wall": wall, "cpu": spent - before, "peak_bytes": peak, "losses": losses[number]}

    return turn


def cpu_seconds_of(process: str) -> float:
    """CPU seconds of all its threads, to the nanosecond; /proc/PID/stat counts in hundredths."""
    files = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def contenders(
    flags: Flags,
    against: str = "HEAD~1",
    groups: tuple[str, ...] = GROUPS,
    dropout: float = 0.0,
    tolerance: float = 0.0,
) -> Iterator[Contender]:
    """Compare the trees.

    Args:
        against: a commit, or a folder that holds another tree.
        groups: groups to run, such as "quickstart, fp32, d = 2".
        dropout: dropout of attention probabilities, embeddings and residuals.
        tolerance: relative difference allowed in losses, for commits that change the last bits.
    """
    if unknown := {*groups} - {*GROUPS}:
        raise UsageError("--groups", sorted(unknown)[0], f"one of: {'; '.join(GROUPS)}")
    trees = {"this tree": ROOT, Path(against).name: checked_out(against)}
    texts = {preset: random_text(size) for preset, size in PRESETS.items()}
    for group in groups:
        preset, dtype, layout = group.split(", ")
        ranks, tensor = LAYOUTS[layout]
        words = f"--data-path {texts[preset]} "
        words += f"--attention-dropout {dropout} --hidden-dropout {dropout} --split 9,1,0 "
        words += f"--micro-batch-size {2 * tensor // ranks} --tensor-model-parallel-size {tensor} "
        words += "--train-iters 1000000 --lr-decay-iters 1000 "
        words += "--lr-warmup-iters 100 --eval-iters 0 "
        words += f"--log-interval 1 {'--bf16' if dtype == 'bf16' else '--no-bf16'}"
        for name, tree in trees.items():
            # Each tree reads its own preset, as older trees lack newer settings.
            own_words = ["--preset", f"{tree}/scripts/presets/{preset}.toml", *words.split()]
            own = {"tree": str(tree), "flags": own_words, "ranks": ranks, "folder": str(scratch())}
            same = {} if dropout else {"losses": tolerance}
            yield Contender(name, run, own, group=group, threads=2 // ranks, same=same)


QUESTION = Question(
    contenders,
    (
        Column("CPU seconds", "cpu", "{:.4f}"),
        Column(RATIO, "cpu", "{:.3f}", "first / its"),
        Column("seconds", "wall", "{:.4f}"),
        Column("this tree's / its seconds", "wall", "{:.3f}", "first / its"),
        Column("peak MiB", "peak_bytes", "{:,.0f}", unit=2**20),
    ),
    lambda found: f"A step takes {found.range(RATIO)} of the CPU time of {found.rows[-1][1]}.",
    turns=30,
    warm_up=WARM_UP,
)

if __name__ == "__main__":
    QUESTION.run()
