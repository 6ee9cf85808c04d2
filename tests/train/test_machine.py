"""Needs that a machine lacks: memory, where one message says what helps; a compiler; a precision
that all ranks have. Also the commit that a record names."""

import ctypes
import re
import resource
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.errors import OutOfMemoryError
from megatron.parallel.mesh import serial_mesh
from megatron.train import machine
from megatron.train.machine import (
    choose_compile,
    choose_precision,
    commit,
    crowded_hosts,
    memory_errors,
)
from tests.dist import on_ranks
from tests.programs import pretrain
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks, tiny_config
from tests.tools.plan.counted import preset


def limit_memory(more: int) -> None:
    """Let this process take so many bytes beside what it has."""
    ctypes.CDLL(None).malloc_trim(0)  # so that what earlier tests have freed gives no room
    words = Path("/proc/self/status").read_text().split()
    used = 1024 * int(words[words.index("VmData:") + 1])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, before[1]))


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
    assert all("--recompute-granularity full" in each for each in found)
    assert all("--context-parallel-size 2" in each for each in found)


def test_a_sequence_that_one_rank_cannot_hold_trains_on_four(tmp_path: Path) -> None:
    """It takes 850 MB beside what every process has, and 500 MB on each of four ranks."""
    words = "--mock-data --vocab-size 96 --seq-length 4096 --max-position-embeddings 4096 "
    words += "--global-batch-size 1 --train-iters 1 --attention-dropout 0 --hidden-dropout 0 "
    words += "--eval-iters 0"
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 8"
    run = partial(pretrain, folder=tmp_path, shape=shape, before=partial(limit_memory, 650 * 10**6))
    with run(words, world=1) as alone:
        assert 0 not in alone.wait()
        assert "--context-parallel-size 2" in alone.text()
    with run(f"{words} --context-parallel-size 4", world=4) as ranks:
        assert ranks.wait() == [0] * 4, ranks.text()


def test_which_errors_get_the_message() -> None:
    for error, is_of_memory in (
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul"), False),
        (RuntimeError("a shape is wrong"), False),
    ):
        kind = OutOfMemoryError if is_of_memory else type(error)
        with pytest.raises(kind) as found, memory_errors(preset("quickstart"), serial_mesh()):
            raise error
        assert isinstance(found.value, OutOfMemoryError) == is_of_memory
        assert ("--micro-batch-size" in str(found.value)) == is_of_memory
    config = preset("quickstart")
    config = replace(config, training=replace(config.training, micro_batch_size=2))
    refused = pytest.raises(OutOfMemoryError, match="--micro-batch-size 1,")
    with refused, memory_errors(config, serial_mesh()):
        raise MemoryError


@on_ranks(2)
def test_all_ranks_compile_or_none() -> None:
    """failure: of the last rank. expected: whether layers are compiled, and how many warnings."""
    for asked, kind, failure, expected in (
        (None, "cpu", None, (False, 0)),
        (False, "cuda", None, (False, 0)),
        (True, "cpu", None, (True, 0)),
        (None, "cuda", None, (True, 0)),
        (None, "cuda", "no Triton", (False, 1)),
    ):
        mesh = replace(mesh_of_ranks(1), device=torch.device(kind))
        own = failure if mesh.control.rank == mesh.size() - 1 else None
        with patch.object(machine, "compiler_failure", return_value=own):
            is_compiled, warnings = choose_compile(asked, mesh)
        assert (is_compiled, len(warnings)) == expected


def test_compile_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    error = refusal(lambda: choose_compile(True, serial_mesh()), field="--compile")
    assert error.works == ("--no-compile",)
    assert choose_compile(False, serial_mesh()) == (False, [])
    assert not tiny_config(layernorm_impl="apex").can_compile


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_record_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag is not named; the code may be installed inside somebody else's repository."""
    (tmp_path / "file").write_text("first")
    (tmp_path / "packages").mkdir()
    for words in ("init --quiet", "add file", "commit --quiet --message first", "tag v1"):
        git(tmp_path, *words.split())
    head = git(tmp_path, "rev-parse", "HEAD")
    for content, name in (("first", head), ("second", f"{head}-dirty")):
        commit.cache_clear()
        (tmp_path / "file").write_text(content)
        assert commit(tmp_path) == name
    assert commit(tmp_path / "packages") is None
    commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None


@on_ranks(2)
def test_ranks_compute_in_one_precision_or_not_at_all() -> None:
    mesh, flags = mesh_of_ranks(1), ("--bf16", ("--no-bf16",))
    with patch.object(machine, "default_precision", return_value="fp32"):
        assert choose_precision(None, mesh, *flags) == "fp32"
    own = ("bf16", "fp32")[mesh.control.rank]
    with patch.object(machine, "default_precision", return_value=own):
        assert choose_precision("fp16", mesh, *flags) == "fp16"
        assert field_of(refusal(lambda: choose_precision(None, mesh, *flags))) == "--bf16"


@on_ranks(4)
def test_more_processes_than_cores_are_warned_of_once() -> None:
    """The ranks of a host are bound to these cores."""
    mesh = mesh_of_ranks("data=4")
    for cores, count in (
        ([{0, 1}] * 4, 1),
        ([{0, 1, 2}] * 4, 1),
        ([{0, 1, 2, 3}] * 4, 0),
        ([{0}, {1}, {2}, {3}], 0),  # each has its own
        ([{0}, {1, 2}, {1, 2}, {0}], 1),
    ):
        with patch("os.sched_getaffinity", return_value=cores[mesh.control.rank]):
            assert len(crowded_hosts(mesh)) == count
