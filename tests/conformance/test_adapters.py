"""The adapters of this project, of torch and of transformers give the exact figures, divided among
the ranks."""

import os
import tempfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance import compare
from conformance.adapters import Refused
from conformance.adapters.megatron import config_of
from conformance.fixture import STEPS, Figures, ranks, read_fixture
from conformance.run import flops_of, layout_of
from conformance.worker import take_steps
from tests.dist import Pool

OURS, TORCH = "conformance.adapters.megatron:Adapter", "conformance.adapters.torch:Adapter"
TRANSFORMERS = "conformance.adapters.transformers:Adapter"
FORCED, TRAINER = "conformance.adapters.accelerate:Forced", "conformance.adapters.trainer:Adapter"
Row = tuple[str, str, str, str]  # adapter, model, layout, dtype
ROWS: list[Row] = [
    (OURS, "gpt2", "tensor=1", "float32"),
    (OURS, "gpt2", "tensor=2,sequence=1", "float64"),
    (OURS, "llama", "ring=2", "float32"),
    (OURS, "bert", "context=2", "float64"),
    (OURS, "bert", "data=2", "float32"),
    (OURS, "gpt2", "data=2,zero=1", "float64"),
    (OURS, "llama", "data=2,zero=2", "float64"),
    (OURS, "bert", "pipeline=2,virtual=2", "float64"),
    (OURS, "bert", "tensor2d=4", "float64"),
    (OURS, "gpt2", "tensor=2,pipeline=2,sequence=1", "float64"),
    (TORCH, "llama", "tensor=1", "float64"),
    (TORCH, "gpt2", "data=2", "float64"),
    (TORCH, "bert", "tensor=2,data=2,zero=3", "float64"),
    (TRANSFORMERS, "llama", "data=2,zero=3", "float32"),
]
RESUMED = [  # adapter, model, layout of the first steps and of the others
    (OURS, "gpt2", "data=2,zero=3", "pipeline=2"),
    (TORCH, "gpt2", "data=2,zero=3", "tensor=2"),
]
SINGLE: list[Row] = [  # they keep their state in classes and in the environment
    (FORCED, "bert", "data=2,zero=3", "float64"),
    (TRAINER, "gpt2", "data=2", "float32"),
]
REFUSED: list[Row] = [
    (OURS, "gpt2", "tensor=8", "float64"),  # 4 heads
    (OURS, "gpt2", "pipeline=2,data=2,zero=2", "float64"),
    (OURS, "gpt2", "context=2,ring=2", "float64"),
    (TORCH, "llama", "tensor=2", "float64"),  # 3 key/value heads
    (TORCH, "llama", "tensor=3", "float64"),  # 64 columns of the MLP
    (TORCH, "gpt2", "pipeline=2", "float64"),
    (TORCH, "gpt2", "data=2,zero=1", "float64"),
    (TRANSFORMERS, "llama", "data=2,zero=3", "float64"),  # it has fp32 inside
    (TRANSFORMERS, "gpt2", "data=2", "float32"),
    (FORCED, "gpt2", "tensor=2", "float64"),
    (TRAINER, "gpt2", "data=2", "float64"),
]


def figures_of(row: Row) -> tuple[Figures, Any]:
    adapter, model, layout, dtype = row
    fixture = read_fixture(model)
    trainer = resolve_name(adapter)(fixture, layout_of(layout), getattr(torch, dtype))
    return take_steps(trainer, fixture, 1, STEPS)


def wrong(row: Row, figures: Figures, divided: list[Any]) -> list[str]:
    _, model, layout, dtype = row
    fixture = read_fixture(model)
    exact, facts = fixture.expected(), fixture.facts
    found = compare.differences(figures, exact, facts, dtype)
    faults = [f"{row}: {each}" for each in found if each.is_fault]
    division = compare.division(divided, layout_of(layout), fixture, flops_of(fixture))
    return faults + [f"{row}: {kind} {each}" for kind, each in division.items() if each["ignored"]]


def run_rows(rows: list[Row]) -> list[str]:
    """On every rank: what is wrong with each of these rows, which have as many ranks."""
    result = []
    for row in rows:
        figures, own = figures_of(row)
        divided: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(divided, own)
        result += wrong(row, figures, divided) if dist.get_rank() == 0 else []
    return result


def run_single(row: Row) -> list[str]:
    """A row of SINGLE, for which the process looks as torchrun starts it."""
    from accelerate.state import AcceleratorState

    rank, before = str(dist.get_rank()), dict(os.environ)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # read, and not used
    try:
        return run_rows([row])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def run_resumed(folder: str) -> list[str]:
    result = []
    for number, (adapter, model, *layouts) in enumerate(RESUMED):
        fixture, make = read_fixture(model), resolve_name(adapter)
        first, second = (make(fixture, layout_of(each), torch.float64) for each in layouts)
        figures, _ = take_steps(first, fixture, 1, 3)
        first.save(Path(folder) / str(number))
        dist.barrier()
        second.load(Path(folder) / str(number))
        rest, divided = take_steps(second, fixture, 4, STEPS)
        figures.add(rest)
        row = adapter, model, layouts[1], "float64"
        result += wrong(row, figures, [divided] * 2) if dist.get_rank() == 0 else []
    return result


@pytest.mark.parametrize("row", [row for row in ROWS if row[2] == "tensor=1"], ids=str)
def test_one_process(row: Row) -> None:
    figures, division = figures_of(row)
    assert not wrong(row, figures, [division])


@pytest.mark.parametrize("size", [2, 4])
def test_layouts(gloo: Pool, size: int) -> None:
    rows = [row for row in ROWS if ranks(layout_of(row[2])) == size]
    assert rows
    assert gloo.run(size, run_rows, rows)[0] == []


@pytest.mark.parametrize("row", SINGLE, ids=str)
def test_trainers_that_are_here(gloo: Pool, row: Row) -> None:
    assert gloo.run(2, run_single, row)[0] == []


def test_names_of_tensor_parallel_modes() -> None:
    """Those of 8 ranks."""
    for layout, found in (("tensor25d=8", ("2.5d", 8, 2)), ("tensor3d=8", ("3d", 8, 1))):
        each = config_of(layout_of(layout))
        sizes = each.tensor_model_parallel_size, each.tensor_parallel_depth
        assert (each.tensor_parallel_mode, *sizes) == found


def test_resumed_at_another_layout(gloo: Pool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert gloo.run(2, run_resumed, folder)[0] == []


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_refused(row: Row) -> None:
    with pytest.raises(Refused):
        figures_of(row)
