from dataclasses import asdict
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.load import verify
from megatron.config.launch import Stopped
from megatron.models.registry import config_of
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, mean_losses, validate, whole_logits
from tests.bert import bert_config, bert_samples
from tests.dist import Pool
from tests.parallel.test_mesh import rank_of
from tests.tiny import (
    VOCABULARY,
    Communication,
    mesh_of_ranks,
    rows,
    samples,
    save_state,
    state_at,
    tiny_config,
    tiny_model,
    tiny_state,
)


class Split:
    """The samples of tests.tiny as a data set."""

    samples_per_epoch = 7

    def batch(self, numbers: range) -> Any:
        return rows(samples(numbers.stop), slice(numbers.start, numbers.stop, numbers.step))


class BertSplit(Split):
    def batch(self, numbers: range) -> Any:
        return rows(bert_samples(numbers.stop), slice(numbers.start, numbers.stop, numbers.step))


def losses_of_seven(micro_batch_size: int) -> dict[str, float]:
    """The losses of a GPT-2 and of a BERT."""
    mesh, losses = serial_mesh(), {}
    for config, data in (
        (tiny_config(hidden_dropout=0.5), Split()),
        (bert_config(hidden_dropout=0.5), BertSplit()),
    ):
        state = tiny_state(mesh, config)
        for is_training in (False, True):
            state.model.train(is_training)
            losses |= mean_losses(state.model, state.objective, data, 7, micro_batch_size, mesh)
            assert state.model.training == is_training, "the mode is put back"
    return losses


def test_the_mean_loss_does_not_depend_on_the_batch_size() -> None:
    """The matrix evaluates at every layout."""
    expected = losses_of_seven(7)
    assert expected.keys() == {"loss", "mlm_loss", "sop_loss"}
    for size in (1, 3):
        assert losses_of_seven(size) == pytest.approx(expected, rel=1e-12)


class Recorded(Split):
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, numbers: range) -> Any:
        self.asked += numbers
        return super().batch(numbers)


def read_until_a_stop(layout: str) -> list[int]:
    """Numbers read of 100 samples, where the last rank wants to stop before its third group."""
    state, data = state_at(layout), Recorded()
    mesh, plan = state.mesh, state.pipeline
    votes = iter([False, False, mesh.control.rank == mesh.size() - 1])
    with pytest.raises(Stopped):
        mean_losses(state.model, state.objective, data, 100, 2, mesh, plan, votes.__next__)
    return data.asked


def test_evaluation_stops_on_all_ranks(gloo: Pool) -> None:
    for layout, world, copies, group in (("data=2", 2, 2, 16), ("pipeline=2,tensor=2", 4, 1, 32)):
        read = gloo.run(world, read_until_a_stop, layout)
        assert {*map(len, read)} == {2 * group}
        assert {number for each in read for number in each} == {*range(2 * group * copies)}


def sent_by(rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """The traffic of one of two ranks that evaluate seven samples at ZeRO 3: the first has four."""
    with rank_of(2, rank) as mesh:
        state = tiny_state(mesh, zero_stage=3)
        with Communication() as communication:
            mean_losses(state.model, state.objective, Split(), 7, 1, mesh)
    return communication.calls


def test_ranks_with_fewer_batches_gather_as_often() -> None:
    """Else the others would wait for them for ever."""
    gathers = sent_by(0)
    assert len(gathers) > 4 * 2
    assert sent_by(1) == gathers


def logits_of_seven_tokens(layout: int | str) -> Tensor:
    mesh = mesh_of_ranks(layout)
    return whole_logits(tiny_model(mesh).eval(), mesh, torch.from_numpy(samples(3).tokens[:, :7]))


def test_logits_are_whole_where_the_ranks_do_not_divide_a_text(gloo: Pool) -> None:
    expected = logits_of_seven_tokens(1)
    assert expected.shape == (3, 7, VOCABULARY)
    for world, layout in ((2, "context=2"), (4, "tensor=2,context=2:p2p")):
        for found in gloo.run(world, logits_of_seven_tokens, layout):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_model_of_a_checkpoint_needs_no_kernels_of_the_run(tmp_path: Path) -> None:
    mesh, config = serial_mesh(), {"model": asdict(tiny_config(layernorm_impl="apex"))}
    facts = {"kind": "gpt2", "config": config, "vocab_size": VOCABULARY}
    save_state(state_at("serial"), tmp_path, **facts)
    model = load_model(verify(tmp_path / "step_00000000", mesh), mesh, torch.bfloat16)
    assert not model.training
    tokens = torch.from_numpy(samples(1).tokens[:, :7])
    assert whole_logits(model, mesh, tokens).dtype == torch.float32


def test_a_validation_says_what_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a split smaller than --eval-iters is read whole."""
    found = {"loss": 1.5, "top1": 0.5, "top5": 0.75}
    monkeypatch.setattr("megatron.train.evaluate.mean_losses", lambda *_: found)
    objective = SimpleNamespace(terms=("loss",), measured=SimpleNamespace(terms=tuple(found)))
    facts = {"step": 3, "samples": 6, "model": None, "mesh": None, "pipeline": None}
    state: Any = SimpleNamespace(**facts, objective=objective)
    data: Any = SimpleNamespace(samples_per_epoch=5)
    written, said = list[dict[str, Any]](), list[str]()
    sizes = {"samples": 8, "micro_batch_size": 2}
    validate(state, data, **sizes, wants_stop=bool, write=written.append, log=said.append)
    assert said == ["step 3 | validation loss 1.5000 (top1 0.5000, top5 0.7500)"]
    assert [line["validation_samples"] for line in written] == [5]
    state.objective, found["loss"] = objective.measured, 800.0  # of which math has no exponential
    validate(state, data, **sizes, wants_stop=bool, write=written.append, log=said.append)
    assert written[-1]["validation_perplexity"] == inf


@pytest.mark.parametrize(("was", "granularity"), [(False, "none"), (True, "full")])
def test_checkpoint_activations_of_old_checkpoints(was: bool, granularity: str) -> None:
    settings = asdict(tiny_config()) | {"checkpoint_activations": was}
    del settings["recompute_granularity"]
    manifest = {"kind": "gpt2", "config": {"model": settings}}
    assert config_of(manifest) == tiny_config(recompute_granularity=granularity)
