"""One step: overflow, votes to stop, precision, a batch without a counted token."""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.files import DataError
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import serial_mesh
from megatron.train.diagnose import NonFiniteError
from megatron.train.executor import on_device
from megatron.train.state import TrainState
from megatron.train.step import StepResult, count, forward_backward, train_step
from tests.bert import bert_config, bert_samples
from tests.dist import Pool, on_ranks
from tests.refusals import refusal
from tests.tiny import (
    VOCABULARY,
    Communication,
    assert_exact,
    mesh_of_ranks,
    micro_batches,
    samples,
    tensors,
    tiny_config,
    tiny_state,
)
from tools.layouts.meters import host_reads


def step(state: TrainState, number: int) -> StepResult:
    return train_step(state, micro_batches(samples(4, first=4 * number), state.mesh, 1), 1e-3)


def outputs(
    tensor_size: int | str, model: str, sequence_parallel: bool = False, zero_stage: int = 0
) -> tuple[Tensor, Tensor]:
    """(logits, labels) of a step of 4 samples, a micro-batch each."""
    mesh = mesh_of_ranks(tensor_size, sequence_parallel=sequence_parallel)
    config, draw = (None, samples) if model == "gpt2" else (bert_config("pre-ln"), bert_samples)
    state = tiny_state(mesh, config, zero_stage=zero_stage)
    found = train_step(state, micro_batches(draw(4), mesh, 1), 1e-3, return_outputs=True).outputs
    return found.logits, found.labels


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_outputs_of_the_global_batch(gloo: Pool, model: str) -> None:
    draw = samples if model == "gpt2" else bert_samples
    logits, labels = outputs(1, model)
    assert labels.tolist() == draw(4).labels.tolist()
    assert logits.shape == (*labels.shape, VOCABULARY)
    for ranks, layout in (
        (2, (2, model)),
        (4, (2, model, True, 3)),
        (4, ("context=2:p2p,data=2", model)),
    ):
        for found, its_labels in gloo.run(ranks, outputs, *layout):
            assert torch.equal(its_labels, labels)
            torch.testing.assert_close(found, logits, rtol=1e-11, atol=1e-11)


def test_outputs_that_cannot_be_are_refused() -> None:
    state, batch = tiny_state(serial_mesh()), samples(2)
    cut = batch.take(np.arange(batch.tokens.shape[1] // 2))
    for batches in ([replace(batch, labels=None)], [batch, samples(1)], [cut]):
        error = refusal(lambda each=batches: train_step(state, each, 1e-3, return_outputs=True))
        assert "return_outputs" in str(error)
    assert state.step == 0


def scaling(scale: float = 1024.0, **settings: Any) -> LossScaler:
    config = PrecisionConfig(fp16=True, initial_loss_scale=str(scale), **settings)
    return LossScaler.of(config, torch.float16)


def infinite_gradient(state: TrainState) -> RemovableHandle:
    """That of a bias which is cut, in this rank's last layer, until the handle is removed."""
    (*_, layer) = state.model.transformer.layers.values()
    return layer.mlp.up.bias.register_hook(lambda gradient: gradient + torch.inf)


FAULTS: dict[str, Callable[[TrainState], RemovableHandle]] = {
    "gradient": infinite_gradient,
    # Every tensor rank holds the weight whole, and one of them counts its gradient.
    "replica": lambda state: state.model.final_norm.bias.register_hook(lambda dw: dw - torch.inf),
    # All gradients are as they were.
    "loss": lambda state: state.model.head.register_forward_hook(lambda *call: call[2] + torch.inf),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("layout", "bad"), [("tensor=1", (0, 0)), ("tensor=2", (0, 1)), ("tensor=2,data=2", (1, 0))]
)
@on_ranks("layout")
def test_all_ranks_skip_an_overflow(layout: str, bad: tuple[int, int], fault: str) -> None:
    state = tiny_state(mesh_of_ranks(layout))
    state.scaler = scaling(hysteresis=1)
    skip_an_overflow(state, fault, (state.mesh.data.rank, state.mesh.tensor.rank) == bad)


def skip_an_overflow(state: TrainState, fault: str, is_bad: bool) -> None:
    """The second step of a run overflows, and the third does not."""
    step(state, 0)
    before, scale = tensors(state), state.scaler.scale
    hook = FAULTS[fault](state) if is_bad else None
    result = step(state, 1)
    assert result.skipped
    assert isfinite(result.grad_norm) == (fault == "loss")
    assert_exact(tensors(state), before)
    assert state.scaler.scale == scale / 2
    if hook is not None:
        hook.remove()
    assert not step(state, 2).skipped
    assert (state.step, state.updates, state.samples) == (3, 2, 12)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_skipped_step_leaves_no_trace(optimizer: str, dtype: torch.dtype) -> None:
    """Same weights and moments, bit for bit, as a run that never saw the skipped batch."""
    config = OptimizerConfig(optimizer=optimizer, weight_decay=0.1)
    skipping, straight = (
        tiny_state(mesh_of_ranks(1), optimizer=config, dtype=dtype) for _ in range(2)
    )
    for state in (skipping, straight):
        state.scaler = scaling()
        step(state, 0)
    hook = infinite_gradient(skipping)
    assert step(skipping, 1).skipped
    hook.remove()
    for state in (skipping, straight):
        step(state, 2)
    assert skipping.updates == straight.updates == 2
    assert_exact(tensors(skipping), tensors(straight))


@pytest.mark.parametrize(
    ("scaler", "steps"),
    [
        (scaling(max_consecutive_skips=3), 3),
        (LossScaler(scale=64.0, most_skips=4), 4),
        (scaling(4.0, min_loss_scale=2.0), 3),
        (LossScaler(), 1),
    ],
)
def test_the_run_stops_when_no_more_steps_may_be_skipped(scaler: LossScaler, steps: int) -> None:
    state = tiny_state(mesh_of_ranks(1))
    state.scaler = replace(scaler)
    before = tensors(state)
    infinite_gradient(state)
    for number in range(steps - 1):
        assert step(state, number).skipped
    with pytest.raises(NonFiniteError) as raised:
        step(state, steps - 1)
    assert raised.value.what == "gradient"
    assert str(raised.value).startswith(f"step {steps}: ")
    assert (state.step, state.skipped) == (steps - 1, steps - 1), "as before the last step"
    assert_exact(tensors(state), before)


@on_ranks(4)
def test_all_ranks_stop_after_the_vote_of_one() -> None:
    """The last rank votes in the second step of three."""
    state = tiny_state(mesh_of_ranks(2))
    asked = []

    def vote() -> bool:
        assert any(bucket.gradients.any() for bucket in state.gradients.buckets), "asked too early"
        asked.append(state.step)
        return state.step == 1 and state.mesh.control.rank == 3

    seen = []
    for number in range(3):
        batches = micro_batches(samples(4, first=4 * number), state.mesh, 1)
        for bucket in state.gradients.buckets:
            bucket.gradients.zero_()
        seen.append(train_step(state, batches, 1e-3, wants_stop=vote).stop)
    assert (asked, state.updates) == ([0, 1, 2], 3), "the step itself is finished"
    assert seen == [False, True, False]


@on_ranks(4)
def test_three_small_all_reduces_a_step() -> None:
    """Shapes of what a step sends before its forward pass, and after its backward pass."""
    state = tiny_state(mesh_of_ranks(2))
    batches = micro_batches(samples(4), state.mesh, 1)
    train_step(state, batches, 1e-3)
    counts = count(state, batches)
    with Communication() as passes:
        forward_backward(state, batches, counts)
    with Communication() as communication:
        train_step(state, batches, 1e-3)
    shapes, own = [shape for _, shape in communication.calls], len(passes.calls)
    assert shapes[: len(shapes) - 2 - own] == [(2,)]
    assert shapes[-2:] == [(2,), (3,)]


def test_the_loss_scale_changes_nothing() -> None:
    """A power of two scales gradients without rounding, and the optimizer divides it out."""
    plain, scaled = tiny_state(mesh_of_ranks(1)), tiny_state(mesh_of_ranks(1))
    scaled.scaler = scaling(2.0**12)
    for number in range(3):
        assert step(plain, number) == step(scaled, number)
    assert_exact(tensors(scaled), tensors(plain))


def test_a_batch_without_a_counted_token_is_an_error() -> None:
    batch = samples(2)
    batch = replace(batch, loss_mask=0 * batch.loss_mask)
    state = tiny_state(mesh_of_ranks(1))
    before = tensors(state)
    error = refusal(lambda: train_step(state, [batch], 1e-3))
    assert isinstance(error, DataError)
    assert_exact(tensors(state), before)
    assert all(each in str(error) for each in ("step 1 ", "--data-path"))


def test_a_mean_may_be_over_less_than_one() -> None:
    """The denominator is a sum of a user's weights: loss and gradient are divided by the same."""
    batch = samples(2)
    light = replace(batch, loss_mask=batch.loss_mask / 64)
    whole, small = (
        train_step(tiny_state(mesh_of_ranks(1)), [each], 1e-3) for each in (batch, light)
    )
    assert light.loss_mask.sum() < 1
    assert small.loss == pytest.approx(whole.loss, rel=1e-12)
    assert small.grad_norm == pytest.approx(whole.grad_norm, rel=1e-12)


def uneven_ranks(tensor_size: int) -> StepResult:
    """One data rank has nothing to count; the others' gradients are the mean all the same."""
    mesh = mesh_of_ranks(tensor_size)
    batch = samples(2)
    batch.loss_mask[1] = 0
    return train_step(tiny_state(mesh), micro_batches(batch, mesh, 1), 1e-3)


def test_a_rank_may_have_no_counted_token(gloo: Pool) -> None:
    expected = uneven_ranks(1)
    for result in gloo.run(2, uneven_ranks, 1):
        assert result.tokens == expected.tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)


def curve(tensor_size: int, dtype: torch.dtype) -> list[float]:
    """Losses of 30 steps on the same 4 samples, which the model learns by heart."""
    state = tiny_state(mesh_of_ranks(tensor_size), dtype=dtype)
    batches = micro_batches(samples(4), state.mesh, 4)
    return [train_step(state, batches, 5e-3).loss for _ in range(30)]


def test_narrow_formats_learn(gloo: Pool) -> None:
    """bf16 keeps 8 bits: each loss within 2 %, on a curve that falls by more than half."""
    wide = curve(1, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        for narrow in [curve(1, dtype), *gloo.run(2, curve, 2, dtype)]:
            assert narrow[-1] < 0.5 * narrow[0]
            assert dtype == torch.float16 or narrow == pytest.approx(wide, rel=0.02)
            assert narrow != wide


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    state = tiny_state(mesh_of_ranks(1), tiny_config(hidden_dropout=0.5))
    state.model.eval()
    first = step(state, 0).loss
    assert state.model.training
    plain = tiny_state(mesh_of_ranks(1))
    assert first != step(plain, 0).loss


class Halved:
    """An objective whose gradient the loss's own kernel cannot know ahead."""

    def __init__(self, model: Any) -> None:
        self.terms, self.denominators, self.whole = model.terms, model.denominators, model.loss

    def loss(self, *arguments: Any) -> Tensor:
        return self.whole(*arguments) / 2


@pytest.mark.parametrize(("kind", "draw"), [(tiny_config, samples), (bert_config, bert_samples)])
def test_the_host_waits_for_the_device_once_a_step(kind: Any, draw: Any) -> None:
    state = tiny_state(mesh_of_ranks(1), kind(hidden_dropout=0.1, attention_dropout=0.1))
    batches = micro_batches(draw(4), state.mesh, 1)
    with host_reads() as found:
        train_step(state, batches, 1e-3)
    assert found.total() == 1
    state.objective = Halved(state.model)
    with host_reads() as found:
        train_step(state, batches, 1e-3)
    assert found.total() == 1 + len(batches)


def test_bert_losses_are_means_over_masked_tokens_and_samples() -> None:
    """models/test_huggingface.py compares logits and gradients with those of transformers."""
    state, batch = tiny_state(serial_mesh(), bert_config()), bert_samples(4)
    assert len(set(batch.loss_mask.sum(axis=1).tolist())) > 1, "samples differ in masked tokens"
    moved = on_device(batch, torch.device("cpu"))
    with torch.no_grad():
        masked, order = state.model(moved)
    places = moved.loss_mask.flatten() > 0
    mlm = F.cross_entropy(masked[places, :VOCABULARY], moved.labels.flatten()[places])
    sop = F.cross_entropy(order, moved.is_swapped)
    result = train_step(state, micro_batches(batch, state.mesh, 1), 0.0)
    assert result.terms == pytest.approx({"mlm_loss": mlm.item(), "sop_loss": sop.item()})
    assert result.loss == pytest.approx((mlm + sop).item(), rel=1e-12)
    assert result.tokens == batch.is_real.sum()


def test_the_loss_is_the_mean_over_the_counted_tokens_of_those_that_are_read() -> None:
    batch = samples(4)
    batch.loss_mask[1:, 3:] = 0
    state = tiny_state(serial_mesh())
    result = train_step(state, micro_batches(batch, state.mesh, 2), 1e-3, return_outputs=True)
    assert result.tokens == 4 * 16
    assert result.outputs is not None
    logits, labels = (each.flatten(0, 1) for each in vars(result.outputs).values())
    counted = torch.from_numpy(batch.loss_mask).flatten().bool()
    expected = F.cross_entropy(logits[counted], labels[counted]).item()
    assert result.loss == pytest.approx(expected, rel=1e-12)
    narrow = tiny_state(state.mesh, dtype=torch.bfloat16)
    result = train_step(narrow, micro_batches(batch, state.mesh, 2), 1e-3, return_outputs=True)
    assert result.outputs is not None
    assert result.outputs.logits.dtype == torch.float32
