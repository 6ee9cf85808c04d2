"""Which code runs: layers that torch.compile has compiled compute the same; the commit."""

import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.checks import UsageError
from megatron.parallel.bucket import Bucket
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.offload import on_host
from megatron.train import state as state_module
from megatron.train.diagnose import find_first
from megatron.train.state import choose_compile, commit, compile_layers
from megatron.train.step import count, forward_backward, train_step
from tests.bert import bert_samples, bert_section
from tests.dist import Pool
from tests.llama import llama_section
from tests.tiny import (
    assert_gradients,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_section,
    tiny_state,
    whole_gradients,
)

GCC = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
CONFIGS = {"gpt2": tiny_section, "bert": bert_section, "llama": llama_section}
SAMPLES = {"gpt2": samples, "bert": bert_samples, "llama": samples}
# fp32; the order of sums differs.
TOLERANCE = 2e-5
POST_LN = {"residual_order": "post-ln"}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def forget_compiled() -> None:
    # Plain instructions: to find out what the processor can do takes longer than these tests.
    torch._inductor.config.cpp.simdlen = 1
    torch._dynamo.reset()


def first_steps(
    kind: str, size: int, cuts_stream: bool, is_compiled: bool, changes: dict[str, Any]
) -> Any:
    """(loss and gradients of a first step, loss of a second, graphs, and places that broke one)."""
    forget_compiled()
    counters.clear()
    mesh = mesh_of_ranks(size, sequence_parallel=cuts_stream)
    state = tiny_state(mesh, CONFIGS[kind](**changes), dtype=torch.float32)
    if is_compiled:
        compile_layers(state.model)
    batches = [SAMPLES[kind](4)]
    state.model.train()
    loss = forward_backward(state, batches, count(state, batches))
    gradients = whole_gradients(state.gradients)
    again = train_step(state, batches, 1e-3).loss
    return loss, gradients, again, counters["stats"]["unique_graphs"], [*counters["graph_break"]]


def three_steps(
    zero_stage: int, is_compiled: bool, offloads: bool = False
) -> tuple[list[float], list[int], set[int]]:
    """(losses of three steps; behind the layers of each forward, how many of them have their
    weights in memory, and bytes of activations on the host) of a rank."""
    forget_compiled()
    mesh, section = mesh_of_ranks(1), tiny_section(num_layers=3, cpu_offload_activations=offloads)
    state = tiny_state(mesh, section, dtype=torch.float32, zero_stage=zero_stage)
    if is_compiled:
        compile_layers(state.model)
    batches, gathered, alive = micro_batches(samples(8), mesh, 4), list[StorageWeakRef](), []
    gather, held = Bucket.gather, set[int]()

    def watched(bucket: Bucket) -> None:
        gather(bucket)
        if bucket.is_of_layer and bucket.weights is not None:
            gathered.append(StorageWeakRef(bucket.weights.untyped_storage()))

    def count_kept(*_: object) -> None:
        alive.append(len({each.cdata for each in gathered if not each.expired()}))
        held.add(sum(each.nbytes for each in on_host))

    state.model.final_norm.register_forward_pre_hook(count_kept)
    with patch.object(Bucket, "gather", watched):
        losses = [train_step(state, batches, 1e-3).loss for _ in range(3)]
    return losses, alive, held


@GCC
@pytest.mark.slow
def test_compiled_layers_keep_no_weights_that_zero_releases(gloo: Pool) -> None:
    plain = gloo.run(2, three_steps, 0, False)[0][0]
    for stage in (1, 2, 3):
        for losses, alive, _ in gloo.run(2, three_steps, stage, True):
            assert losses == pytest.approx(plain, rel=TOLERANCE)
            assert alive == [1 if stage == 3 else 0] * 3


@GCC
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_layers_offload_what_they_keep(gloo: Pool, stage: int) -> None:
    (wanted, _, nothing), (losses, _, held) = (
        gloo.run(2, three_steps, stage, True, offloads)[0] for offloads in (False, True)
    )
    assert losses == wanted
    assert nothing == {0}
    assert min(held) > 3 * 4 * 16 * 32 * 4  # more than what enters the layers


@GCC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "cuts_stream", "changes", "is_whole"),
    [
        ("gpt2", 1, False, {"num_layers": 3}, True),
        ("gpt2", 2, True, {}, True),
        ("llama", 2, True, {}, True),
        ("bert", 1, False, {"recompute_granularity": "selective"}, False),
        ("bert", 2, False, POST_LN | {"recompute_granularity": "full"} | DROPOUT, True),
    ],
)
def test_compiled_layers_compute_the_same(
    gloo: Pool, kind: str, size: int, cuts_stream: bool, changes: dict[str, Any], is_whole: bool
) -> None:
    """is_whole: whether all layers share one graph, collectives and dropout in it. Where a part of
    a layer is recomputed, a graph ends."""
    plain = gloo.run(size, first_steps, kind, size, False, False, changes)
    found = gloo.run(size, first_steps, kind, size, cuts_stream, True, changes)
    for theirs, ours in zip(plain, found, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE, atol=0)
        assert_gradients(ours[1], theirs[1], TOLERANCE)
        assert ours[2] == pytest.approx(theirs[2], rel=TOLERANCE)
        graphs, breaks = ours[3:]
        assert graphs >= 1
        assert (graphs == 1 and not breaks) == is_whole, breaks


def test_a_diagnosis_still_sees_every_module() -> None:
    state = tiny_state(serial_mesh(), dtype=torch.float32)
    for layer in state.model.transformer.layers.values():
        layer.compile(backend="eager")  # traced, which is what hooks are lost by
    batches = [samples(2)]
    state.model.train()
    counts = count(state, batches)
    replay = partial(forward_backward, state, batches, counts)
    replay()
    with torch.no_grad():
        state.model.transformer.layers["1"].mlp.up.weight.fill_(1e38)
    found = find_first(state, replay)
    assert found.what == "the output of transformer.layers.1.mlp.up"


def choose(asked: bool | None, kind: str, failure_of_last_rank: str | None) -> tuple[bool, int]:
    """(whether layers are compiled, warnings) on a device of this kind."""
    mesh = replace(mesh_of_ranks(1), device=torch.device(kind))
    failure = failure_of_last_rank if mesh.control.rank == mesh.size() - 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "compiler_failure", lambda _: failure)
        is_compiled, warnings = choose_compile(asked, mesh)
    return is_compiled, len(warnings)


def test_all_ranks_compile_or_none(gloo: Pool) -> None:
    for asked, kind, failure, expected in (
        (None, "cpu", None, (False, 0)),
        (False, "cuda", None, (False, 0)),
        (True, "cpu", None, (True, 0)),
        (None, "cuda", None, (True, 0)),
        (None, "cuda", "no Triton", (False, 1)),
    ):
        assert gloo.run(2, choose, asked, kind, failure) == [expected] * 2


def test_compile_is_refused_without_a_compiler_and_of_a_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    grid = replace(serial_mesh(), tensor_parallel_mode="2d", device=torch.device("cuda"))
    for mesh in (serial_mesh(), grid):
        with pytest.raises(UsageError) as error:
            choose_compile(True, mesh)
        assert (error.value.flag, error.value.works) == ("--compile", ("--no-compile",))
        assert choose_compile(False, mesh) == (False, [])
    assert choose_compile(None, grid) == (False, [])


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
