"""Offload to the host: its cost in time, and the memory of a device that it saves.

Training steps of GPT-2 in bf16, with the optimizer's state, the saved activations or both kept on
the host. Copies are those of one step under the profiler: the time in which any runs, and the part
of it in which kernels run, too. A run in which offload changes the losses reports nothing. Not yet
run on a GPU; on a CPU nothing is copied.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import steps
from benchmarks.harness import Column, Contender, Flags, Question, Rank, Turn
from benchmarks.profiles import copies_beside_kernels, events_of

NONE = "none"
OFFLOADS = {
    NONE: "",
    "optimizer": "--optimizer-cpu-offload",
    "activations": "--cpu-offload-activations",
    "optimizer and activations": "--optimizer-cpu-offload --cpu-offload-activations",
}
TOLERANCE = 1e-4  # of the losses: with the optimizer on the host, sums round otherwise
RATIO, MEMORY = "time / without", "memory / without"


def train(rank: Rank, flags: list[str]) -> Turn:
    step = steps.ours(rank, flags)
    step()
    if rank.device_type == "cpu":  # nothing is copied, so that a profile would only take time
        return step
    copies = copies_beside_kernels(events_of(step, rank)[0])
    return lambda: step() | copies


def contenders(
    flags: Flags,
    layers: int = 24,
    hidden_size: int = 1024,
    samples: int = 8,
    seq_length: int = 1024,
) -> Iterator[Contender]:
    """Compare steps with and without offload. Heads have 64 channels."""
    words = f"--num-layers {layers} --hidden-size {hidden_size} --micro-batch-size {samples} "
    words += f"--num-attention-heads {hidden_size // 64} --seq-length {seq_length} "
    words += f"--max-position-embeddings {seq_length} --vocab-size 50304 --bf16 "
    words += "--no-compile --no-cuda-graph --train-iters 1000 "
    for name, offload in OFFLOADS.items():
        own = {"flags": (words + offload).split()}
        same = {"loss": TOLERANCE}
        yield Contender(name, train, own, threads=2, memory_of_turns=True, same=same)


QUESTION = Question(
    contenders,
    (
        Column("ms", "wall", "{:.1f}", unit=1e-3),
        Column(RATIO, "wall", "{:.2f}", "its / first"),
        Column("peak GiB", "peak_bytes", "{:.2f}", unit=2**30),
        Column(MEMORY, "peak_bytes", "{:.2f}", "its / first"),
        Column("ms of copies", "copies", "{:.1f}", unit=1e-3),
        Column("beside kernels", "beside_kernels", "{:.1f}", unit=1e-3),
    ),
    lambda found: f"{RATIO}: {found.ratios(RATIO)}; {MEMORY}: {found.ratios(MEMORY)}.",
    turns=3,
    together=False,
    small="--layers 1 --hidden-size 64 --samples 2 --seq-length 32",
)

if __name__ == "__main__":
    QUESTION.run()
