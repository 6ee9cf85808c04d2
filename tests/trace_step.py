"""Files of megatron/ that a training step at t = 2, and a run of three steps with a save, enter.

    python -m tests.trace_step

Prints the lines of each file of the step (with dropout, without the kernels of parallel/cpu/), and
then the other files that the run enters. Imports are not counted.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType

from megatron.parallel import kernels
from megatron.train.pretrain import pretrain
from megatron.train.step import train_step
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_config, tiny_state

ROOT = Path(__file__).resolve().parents[1]
Calls = set[tuple[str, str]]  # (file of megatron/, function)
RUN = """--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --vocab-size 101 --micro-batch-size 2 --train-iters 3 --save-interval 3
--log-interval 1"""


def calls_of(function: Callable[[], object]) -> Calls:
    """The calls that the function makes, on threads that it starts too."""
    package, calls = str(ROOT / "megatron"), Calls()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(package) and code.co_name != "<module>"
        if event == "call" and is_ours:
            calls.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_name))

    cpu_kernels, kernels.use_cpu_kernels = kernels.use_cpu_kernels, False
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        kernels.use_cpu_kernels = cpu_kernels
    return calls


def calls_of_a_step() -> Calls:
    mesh = mesh_of_ranks(2)
    state = tiny_state(mesh, tiny_config(attention_dropout=0.1, hidden_dropout=0.1))
    batches = micro_batches(samples(4), mesh, 2)
    return calls_of(lambda: train_step(state, batches, 1e-3))


def calls_of_a_run() -> Calls:
    with tempfile.TemporaryDirectory() as folder:
        words = [*RUN.split(), "--save", f"{folder}/run"]
        return calls_of(lambda: pretrain(words, {}, "gpt2"))


def show(title: str, files: set[str]) -> None:
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in sorted(files)}
    print(f"{title}: {len(lines)} files, {sum(lines.values()):,} lines")
    for file, count in lines.items():
        print(f"{count:6,}  {file}")


if __name__ == "__main__":
    with closing(Pool(2)) as pool:
        step = {file for file, _ in pool.run(2, calls_of_a_step)[0]}
    show("a step at t = 2", step)
    show("a run of three steps with a save, beside these", {f for f, _ in calls_of_a_run()} - step)
