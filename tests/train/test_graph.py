"""A step as a CUDA graph, with a replay that runs the recorded function again on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.errors import UsageError
from megatron.parallel.mesh import serial_mesh
from megatron.train.compiled import WARM_UP, StepGraph, choose_graph
from megatron.train.state import TrainState
from megatron.train.step import train_step
from tests.bert import bert_samples, bert_section
from tests.llama import llama_section
from tests.tiny import samples, tiny_section, tiny_state

KINDS: dict[str, tuple[Any, Any]] = {
    "gpt2": (tiny_section(hidden_dropout=0.1, attention_dropout=0.1), samples),
    "bert": (bert_section(), bert_samples),
    "llama": (llama_section(), samples),
}
STEPS = WARM_UP + 3


def again(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
    """As compiled.record, but that it computes."""
    result = function()
    return result, lambda: result.copy_(function())


def steps(state: TrainState, draw: Any, sizes: list[int]) -> list[tuple[float, float]]:
    """(loss, norm) of each step, of two micro-batches of this size."""
    found, first = [], 0
    for size in sizes:
        batch = [draw(size, first=first), draw(size, first=first + size)]
        result = train_step(state, batch, 1e-3)
        found.append((result.loss, result.grad_norm))
        first += 2 * size
    return found


def two_states(kind: str) -> tuple[TrainState, TrainState]:
    section, _ = KINDS[kind]
    plain, graphed = (tiny_state(serial_mesh(), section) for _ in range(2))
    return plain, replace(graphed, graph=StepGraph(record=again))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_reads_what_is_new(kind: str) -> None:
    plain, graphed = two_states(kind)
    sizes = [2] * STEPS
    assert steps(graphed, KINDS[kind][1], sizes) == steps(plain, KINDS[kind][1], sizes)
    assert graphed.graph is not None
    assert graphed.graph.replay is not None
    for own, wanted in zip(graphed.slices(), plain.slices(), strict=True):
        assert torch.equal(own.local, wanted.local), own.key


def test_batches_of_another_shape_are_recorded_in_their_turn() -> None:
    plain, graphed = two_states("gpt2")
    assert graphed.graph is not None
    sizes = [*[4] * STEPS, *[2] * STEPS, 4, *[2] * WARM_UP]
    assert steps(graphed, samples, sizes) == steps(plain, samples, sizes)
    assert graphed.graph.replay is None  # it was given up for the 4, and no other is recorded yet
    assert steps(graphed, samples, [2]) == steps(plain, samples, [2])
    assert graphed.graph.replay is not None


def test_a_shape_that_has_not_run_is_not_recorded() -> None:
    _, graphed = two_states("gpt2")
    assert graphed.graph is not None
    for size in range(1, WARM_UP + 3):
        steps(graphed, samples, [size])
        assert graphed.graph.replay is None


@pytest.mark.parametrize(
    ("device", "words", "dtype", "reason"),
    [
        ("cpu", "", torch.bfloat16, "without a GPU"),
        ("cuda", "", torch.float16, "loss scale"),
        ("cuda", "--cpu-offload-activations", torch.bfloat16, "offload"),
        (
            "cuda",
            "--attention-dropout 0.1 --attention-dropout-rng kernel",
            torch.bfloat16,
            "kernel draws",
        ),
        ("cuda", "--attention-dropout 0", torch.bfloat16, ""),
    ],
)
def test_what_no_graph_can_repeat_is_refused(
    device: str, words: str, dtype: torch.dtype, reason: str
) -> None:
    config = parse(PretrainGPT2Config, ["--preset", "quickstart", *words.split()], {})
    mesh = replace(serial_mesh(), device=torch.device(device))
    refused = pytest.raises(UsageError, match=f"^--cuda-graph: must be left out .*{reason}")
    assert choose_graph(None, config.model, mesh, dtype) is not bool(reason)
    assert not choose_graph(False, config.model, mesh, dtype)
    with refused if reason else nullcontext():
        assert choose_graph(True, config.model, mesh, dtype)
