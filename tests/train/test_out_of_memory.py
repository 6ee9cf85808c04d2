"""A model that does not fit: one message says what helps, and the model trains in parts."""

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.errors import OutOfMemoryError
from megatron.parallel.mesh import serial_mesh
from megatron.train.machine import memory_errors
from megatron.train.step import train_step
from tests.dist import Pool
from tests.programs import pretrain
from tests.tiny import mesh_of_ranks, rows, samples, tiny_section, tiny_state
from tests.tools.plan.counted import preset

# 21 million parameters: 380 MB of stage 0, 96 and a few layers of stage 3 on four ranks.
SECTION = tiny_section(num_layers=12, hidden_size=384)
MORE = 270 * 10**6  # bytes that the process may take beside what it has


def limit_memory(more: int) -> tuple[int, int]:
    """Let this process take so many bytes beside what it has; returns the limits before."""
    ctypes.CDLL(None).malloc_trim(0)  # so that what earlier tests have freed gives no room
    words = Path("/proc/self/status").read_text().split()
    used = 1024 * int(words[words.index("VmData:") + 1])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, before[1]))
    return before


@contextmanager
def little_memory() -> Iterator[None]:
    before = limit_memory(MORE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train_one_step(stage: int) -> str:
    """The message of what went wrong, or nothing."""
    mesh, config = mesh_of_ranks(1), preset("quickstart", "--zero-stage", str(stage))
    try:
        with little_memory(), memory_errors(config, mesh):
            state = tiny_state(mesh, SECTION, dtype=torch.bfloat16, zero_stage=stage)
            batch = samples(mesh.data.size)
            train_step(state, [rows(batch, slice(mesh.data.rank, mesh.data.rank + 1))], 1e-3)
    except OutOfMemoryError as error:
        return str(error)
    return ""


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Ranks of their own: what earlier tests have freed in others is room beyond the limit."""
    pool = Pool(4)
    yield pool
    pool.close()


def test_what_does_not_fit_at_stage_0_trains_at_stage_3(fresh: Pool) -> None:
    messages = fresh.run(4, train_one_step, 0)
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank} ")
        for cure in ("--zero-stage 1", "--micro-batch-size", "--recompute-granularity full"):
            assert cure in message
    assert fresh.run(4, train_one_step, 3) == [""] * 4


@pytest.mark.parametrize(("ranks", "cure"), [(1, "ranks with --zero-stage 1"),
                                             (2, " --zero-stage 1, ")])  # fmt: skip
def test_the_program_ends_with_the_message(ranks: int, cure: str, tmp_path: Path) -> None:
    shape = "--num-layers 8 --hidden-size 512 --num-attention-heads 4 --max-position-embeddings 16"
    few = partial(limit_memory, 200 * 10**6)  # half of what the model takes
    words = "--train-iters 1 --lr 1e-3"
    with pretrain(words, world=ranks, folder=tmp_path, shape=shape, before=few) as run:
        assert 0 not in run.wait()
    text = run.text()
    assert "Traceback" not in text
    found = [each for each in text.splitlines() if re.search(r"\brank \d .*--zero-stage", each)]
    assert found  # of the rank that was first
    assert all(cure in each for each in found)


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul"), False),
        (RuntimeError("a shape is wrong"), False),
    ],
)
def test_which_errors_get_the_message(error: Exception, is_of_memory: bool) -> None:
    kind = OutOfMemoryError if is_of_memory else type(error)
    with pytest.raises(kind) as found, memory_errors(preset("quickstart"), serial_mesh()):
        raise error
    assert isinstance(found.value, OutOfMemoryError) == is_of_memory
