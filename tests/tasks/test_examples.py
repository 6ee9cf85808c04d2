"""The parts of fine-tuning: loss, order, layouts, padding, and what a start needs."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron.checkpoint.load import verify
from megatron.config.model import FinetunedConfig, ResidualOrder
from megatron.data.bert import BertBatch
from megatron.models.gpt import dropout_keys
from megatron.optim.schedule import learning_rate
from megatron.parallel.mesh import Axis, serial_mesh
from megatron.parallel.sharding import gather_whole
from megatron.train.executor import on_device
from megatron.train.state import DTYPES, TrainState
from megatron.train.step import train_step
from tasks.finetune import Steps, finetuned_config, optimizer_config, start
from tasks.protocol import Example, Head
from tasks.score import logits_of, make_batch
from tests.dist import Pool
from tests.refusals import refusal
from tests.tasks import made
from tests.tasks.made import make_examples, small_section, write_model
from tests.tiny import (
    assert_relative,
    mesh_of_ranks,
    run_whole,
    set_weights,
    tiny_model,
    tiny_weights,
    whole_weights,
)

HEADS: tuple[Head, ...] = get_args(Head)
ORDERS: tuple[ResidualOrder, ...] = get_args(ResidualOrder)
LABELS = {"classifier": ("key", "alike"), "choice": (), "span": ()}
EXAMPLES, BATCH, EPOCHS = 21, 8, 2  # the last step of an epoch has 5


def config_of(head: Head, **changes: Any) -> FinetunedConfig:
    return finetuned_config(small_section(**changes), head, LABELS[head])


SETTINGS = made.Settings(
    valid_data=(Path("x"),), epochs=EPOCHS, lr=1e-3, lr_warmup_fraction=0.25, seq_length=24
)


def steps_of(head: Head, micro_batch_size: int = BATCH, **changes: Any) -> Steps:
    sizes = {"global_batch_size": BATCH, "micro_batch_size": micro_batch_size}
    settings: dict[str, Any] = {"epochs": EPOCHS, "seed": 5, **sizes, **changes}
    return Steps(**{"examples": make_examples(head, EXAMPLES, 1), **settings})


OPTIMIZER = optimizer_config(SETTINGS, 6)


def begin(path: Path, config: FinetunedConfig, seed: int = 5) -> TrainState:
    mesh = serial_mesh()
    return start(verify(path, mesh), config, OPTIMIZER, "fp32", seed, mesh)


Outcome = tuple[list[float], list[NDArray[np.float32]], dict[str, Tensor]]


def outcome(
    folder: Path, head: Head, tensor_size: int | str, micro: int, cuts: bool, zero: int
) -> Outcome:
    """(the loss of each step, logits after the last, weights whole) of a run in fp64."""
    mesh = mesh_of_ranks(tensor_size, sequence_parallel=cuts)
    config, steps = config_of(head), steps_of(head, micro)
    with patch.dict(DTYPES, {"fp64": torch.float64}):  # of no program: exact enough to compare
        state = start(verify(folder, mesh), config, OPTIMIZER, "fp64", 5, mesh, zero)
    set_weights(state, tiny_weights(state.model))
    losses = []
    for step in range(len(steps)):
        lr = learning_rate(OPTIMIZER, step + 1, len(steps) + 1)
        losses.append(train_step(state, steps.micro_batches(step, mesh), lr).loss)
    # By twos five batches, of which two ranks have unequal numbers.
    examples = [*make_examples(head, 8, 2), replace(make_examples(head, 1, 3)[0], label=())]
    state.model.train()
    logits = logits_of(state.model, config, mesh, examples, micro, "")
    assert state.model.training, "left as it was found"
    for row, example in zip(logits, examples, strict=True):
        assert row.shape == {"classifier": (2,), "choice": (3,), "span": (example.longest, 2)}[head]
    weights = {each.key: gather_whole(each.local, each.spec) for each in state.weights()}
    return losses, logits, weights


def outcomes(
    folder: Path, tensor_size: int | str, micro: int, cuts: bool = False, zero: int = 0
) -> list[Outcome]:
    """cuts: whether the sequence is cut, too. zero: the stage of ZeRO."""
    return [outcome(folder, head, tensor_size, micro, cuts, zero) for head in HEADS]


def test_every_layout_and_split_gives_the_same_run(gloo: Pool, pretrained: Path) -> None:
    expected = outcomes(pretrained, 1, BATCH)
    found = [outcomes(pretrained, 1, 3)]
    for world, *layout in (
        (2, 2, 4), (2, 1, 2), (2, 2, 3, True), (4, "4:2d", 2), (8, "8:3d", 2),
        *((2, 1, 2, False, stage) for stage in (1, 2, 3)),
    ):  # fmt: skip
        found += gloo.run(world, outcomes, pretrained, *layout)
    for each in chain(*(zip(every, expected, strict=True) for every in found)):
        (losses, logits, weights), (their_losses, their_logits, their_weights) = each
        assert losses == pytest.approx(their_losses, rel=1e-10)
        for one, other in zip(logits, their_logits, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        for name, weight in weights.items():
            assert_relative(weight, their_weights[name], 1e-9, name)


def one_by_one(model: Any, example: Example) -> Tensor:
    """The loss of an example whose sequences are read alone and without padding."""
    rows = []
    for each in example.options:
        tokens = torch.tensor([list(each.tokens)])
        types = (torch.arange(len(each.tokens)) >= each.second).long()[None]
        is_real = torch.ones_like(tokens, dtype=torch.bool)
        rows.append(model(BertBatch(tokens=tokens, token_types=types, is_real=is_real)))
    if rows[0].shape[-1] == 2:  # [1, s, 2]
        ends = zip(rows[0][0].T, example.label, strict=True)
        return torch.stack([F.cross_entropy(x, torch.tensor(y)) for x, y in ends]).mean()
    scores = torch.cat([row.flatten() for row in rows])
    return F.cross_entropy(scores, torch.tensor(example.label[0]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_the_mean_of_examples_read_alone_and_padding_does_not_count(
    head: Head, order: ResidualOrder
) -> None:
    mesh, config = (
        serial_mesh(),
        config_of(head, hidden_dropout=0.0, attention_dropout=0.0, residual_order=order),
    )
    model = tiny_model(mesh, config)
    examples = make_examples(head, 6, 3)
    batch = make_batch([*examples, examples[0]], counted=6)
    assert batch.tokens.shape[-1] == max(each.longest for each in examples)
    total = run_whole(model, model, batch, mesh.device, torch.ones(1))
    loss = total / model.denominators(batch)[0]
    expected = torch.stack([one_by_one(model, each) for each in examples]).mean()
    assert_relative(loss, expected[None], 1e-12)
    assert batch.num_tokens == sum(len(o.tokens) for each in examples for o in each.options)


def test_an_epoch_has_every_example_once_in_an_order_of_its_own() -> None:
    orders = []
    for steps in (steps_of("classifier"), steps_of("classifier", seed=6)):
        assert (steps.per_epoch, len(steps)) == (3, 6)
        numbers = [steps.numbers(step).tolist() for step in range(6)]
        assert [len(each) for each in numbers] == [8, 8, 5] * 2
        orders += [[*chain(*numbers[:3])], [*chain(*numbers[3:])]]
    assert all(sorted(each) == list(range(EXAMPLES)) for each in orders)
    assert len({tuple(each) for each in orders}) == 4


def test_dropout_of_the_embeddings_and_offload_are_those_of_fine_tuning() -> None:
    pretrained = small_section(embedding_dropout=0.3, cpu_offload_activations=True)
    config = finetuned_config(pretrained, "span", (), hidden_dropout=0.0)
    assert (config.dropout_of_embeddings, config.cpu_offload_activations) == (0, False)


def test_every_example_of_every_epoch_drops_other_elements() -> None:
    steps, found = steps_of("choice", 3), list[int]()
    for step in range(len(steps)):
        for batch in steps.micro_batches(step, serial_mesh()):
            found += batch.numbers[batch.counted > 0].tolist()
    assert sorted(found) == list(range(EPOCHS * EXAMPLES))
    keys = dropout_keys(on_device(batch, torch.device("cpu")))  # of each option of its own
    assert len(keys.unique()) == batch.tokens.size


def test_the_order_is_that_of_earlier_versions() -> None:
    """Recorded at 98c61ae: kept figures depend on it."""
    assert steps_of("classifier").numbers(4).tolist() == [9, 4, 19, 11, 20, 7, 0, 13]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_ranks_have_as_many_batches_of_one_size_and_every_example_once(
    ranks: int, micro: int, count: int
) -> None:
    steps = steps_of("choice", micro, examples=make_examples("choice", count, 1))
    axes = [Axis("batch", ranks, rank) for rank in range(ranks)]
    meshes = [replace(serial_mesh(), batch=axis) for axis in axes]
    shares = [steps.micro_batches(0, mesh) for mesh in meshes]
    assert len({len(share) for share in shares}) == 1
    batches = [*chain(*shares)]
    (size,) = {len(batch.tokens) for batch in batches}
    assert size <= micro
    rows = [row for batch in batches for row in [*chain(*batch.tokens[batch.counted > 0])]]
    wanted = [tuple(o.tokens) for example in steps.examples for o in example.options]
    assert sorted(tuple(row[row > 0]) for row in rows) == sorted(wanted)


def test_the_learning_rate_rises_and_falls_to_zero_after_the_last_step() -> None:
    rates = [learning_rate(OPTIMIZER, update, 7) for update in range(1, 8)]
    assert rates == pytest.approx([5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 0.0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head", HEADS)
def test_all_but_the_head_is_of_the_checkpoint_and_the_head_of_the_seed(
    tmp_path: Path, head: Head, order: ResidualOrder
) -> None:
    path = write_model(tmp_path, small_section(residual_order=order))
    one, other = (
        whole_weights(begin(path, config_of(head, residual_order=order), seed).model)
        for seed in (5, 6)
    )
    kept = {name for name in one if torch.equal(one[name], other[name])}
    assert one.keys() - kept == {"head.weight"}
    assert ("pooler.dense.weight" in one) == (head != "span")
    assert ("encoder.embedding_norm.weight" in one) == (order == "post-ln")
    theirs = begin(path, config_of("choice", residual_order=order))
    word = "encoder.word_embedding.weight"
    assert torch.equal(whole_weights(theirs.model)[word], one[word])


@pytest.mark.parametrize(
    ("head", "without", "beside", "named"),
    [
        ("span", "encoder.final_norm.bias", None, "encoder.final_norm.bias"),
        ("classifier", "pooler.dense.weight", None, "pooler.dense.weight"),
        ("choice", None, "encoder.odd.weight", "encoder.odd.weight"),
        ("choice", None, "head.weight", "head.weight"),
        ("span", None, "extra", "extra"),
        # A span's model needs no pooler, and no model the heads of pretraining.
        ("span", "pooler.dense.bias", None, None),
        ("classifier", "mlm.dense.weight", None, None),
    ],
)
def test_a_weight_too_few_or_too_many_is_named(
    tmp_path: Path, head: Head, without: str | None, beside: str | None, named: str | None
) -> None:
    path = write_model(tmp_path, without=without, beside=beside)
    if named:
        assert f" {named}, " in str(refusal(lambda: begin(path, config_of(head))))
    else:
        begin(path, config_of(head))


def test_the_optimizer_has_the_decay_and_the_clip_of_the_task() -> None:
    config = optimizer_config(replace(SETTINGS, weight_decay=0.3, clip_grad=0.7), len(HEADS))
    assert (config.weight_decay, config.clip_grad) == (0.3, 0.7)
