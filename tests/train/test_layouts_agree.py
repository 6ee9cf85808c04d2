"""One answer for every layout: the paper's claim that sharding the model changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce
from megatron.train.evaluate import whole_logits
from megatron.train.step import StepResult, count, forward_backward, train_step
from tests.bert import bert_samples, bert_section
from tests.dist import Pool
from tests.tiny import (
    assert_gradients,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    samples,
    tiny_section,
    tiny_state,
    whole_gradients,
    whole_weights,
)

GLOBAL_BATCH, STEPS = 4, 5
DROPOUT: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "embedding_dropout": 0.2,
}
MODELS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "gpt2": (tiny_section(), samples),
    "gpt2 dropout": (tiny_section(**DROPOUT), samples),
    "bert pre-ln": (bert_section("pre-ln", **DROPOUT), bert_samples),
    "bert post-ln": (bert_section("post-ln", **DROPOUT), bert_samples),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
# In fp32 Adam amplifies the rounding noise of the key bias, whose gradient is zero in theory.
DTYPES = {"gpt2": [torch.float64, torch.float32], "gpt2 dropout": [torch.float64, torch.float32]}


@dataclass(frozen=True)
class Outcome:
    """What one rank says of a run of several steps; all tensors whole."""

    logits: Tensor | None
    losses: Tensor  # means over the global batch, in the first step
    gradients: dict[str, Tensor]  # of their sum
    results: list[StepResult]
    weights: dict[str, Tensor]


def outcome(
    model: str,
    tensor_size: int,
    micro_batch_size: int,
    dtype: torch.dtype,
    granularity: str = "none",
) -> Outcome:
    mesh, (config, draw) = mesh_of_ranks(tensor_size), MODELS[model]
    config = replace(config, recompute_granularity=granularity)
    state = tiny_state(mesh, config, dtype=dtype)
    logits = None
    if model == "gpt2":
        logits = whole_logits(state.model, mesh, torch.from_numpy(samples(2).tokens))
    batches = micro_batches(draw(GLOBAL_BATCH), mesh, micro_batch_size)
    counts = count(state, batches)
    losses = all_reduce(forward_backward(state, batches, counts), mesh.data) / counts[1:]
    gradients, results = whole_gradients(state.gradients), []
    for step in range(STEPS):
        batch = draw(GLOBAL_BATCH, first=step * GLOBAL_BATCH)
        results.append(train_step(state, micro_batches(batch, mesh, micro_batch_size), 1e-3))
    assert (state.step, state.samples) == (STEPS, STEPS * GLOBAL_BATCH)
    return Outcome(logits, losses, gradients, results, whole_weights(state.model))


def outcomes(
    model: str, tensor_size: int, micro_batch_size: int, granularity: str = "none"
) -> dict[torch.dtype, Outcome]:
    dtypes, sizes = DTYPES.get(model, [torch.float64]), (tensor_size, micro_batch_size)
    return {each: outcome(model, *sizes, each, granularity) for each in dtypes}


@cache
def alone(model: str) -> dict[torch.dtype, Outcome]:
    """The run of one process with the whole batch at once."""
    return outcomes(model, 1, GLOBAL_BATCH)


def assert_agree(actual: dict[torch.dtype, Outcome], expected: dict[torch.dtype, Outcome]) -> None:
    for dtype, own in actual.items():
        wanted, tolerance = expected[dtype], TOLERANCES[dtype]
        if own.logits is not None:
            assert_relative(own.logits, wanted.logits, tolerance, "logits")
        torch.testing.assert_close(own.losses, wanted.losses, rtol=tolerance, atol=0)
        assert_gradients(own.gradients, wanted.gradients, tolerance)
        for one, other in zip(own.results, wanted.results, strict=True):
            assert one.tokens == other.tokens
            assert one.terms == pytest.approx(other.terms, rel=tolerance)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=tolerance)
    weights = expected[torch.float64].weights
    for name, weight in actual[torch.float64].weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("world", "tensor_size", "micro_batch_size"),
    [
        pytest.param(1, 1, 1, id="4-micro-batches"),
        pytest.param(2, 2, 4, id="t2"),
        pytest.param(2, 2, 1, id="t2-4-micro-batches"),
        pytest.param(4, 4, 2, id="t4"),
        pytest.param(2, 1, 1, id="d2-2-micro-batches"),
        pytest.param(4, 1, 1, id="d4"),
        pytest.param(4, 2, 1, id="t2-d2-2-micro-batches"),
        pytest.param(4, 2, 2, id="t2-d2"),
    ],
)
def test_every_layout_and_split_of_the_batch_gives_one_answer(
    gloo: Pool, model: str, world: int, tensor_size: int, micro_batch_size: int
) -> None:
    if world == 1:
        assert_agree(outcomes(model, 1, micro_batch_size), alone(model))
        return
    for each in gloo.run(world, outcomes, model, tensor_size, micro_batch_size):
        assert_agree(each, alone(model))


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("model", ["gpt2 dropout", "bert post-ln"])
def test_recomputation_drops_the_same(gloo: Pool, model: str, granularity: str) -> None:
    for each in gloo.run(4, outcomes, model, 2, 1, granularity):
        assert_agree(each, alone(model))


def test_dropout_is_on() -> None:
    plain, dropped = (alone(model)[torch.float64] for model in ("gpt2", "gpt2 dropout"))
    assert abs(plain.results[0].loss - dropped.results[0].loss) > 1e-3


def test_the_masks_are_uneven_and_the_norm_is_of_all_gradients() -> None:
    for _, draw in MODELS.values():
        masks = draw(GLOBAL_BATCH).loss_mask.sum(axis=1).tolist()
        assert len(set(masks)) > 1, "a mean of means would pass"
    for model in MODELS:
        for dtype, run in alone(model).items():
            norm = torch.nn.utils.get_total_norm(run.gradients.values()).item()
            assert run.results[0].grad_norm == pytest.approx(norm, rel=TOLERANCES[dtype])
