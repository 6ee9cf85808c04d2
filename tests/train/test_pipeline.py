"""Steps of pipelines: what the stages agree on, what is said of one, and torch's own as an oracle.

That every layout computes what one process computes is shown in tests/layouts.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from megatron.checkpoint.format import read_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.config.checks import UsageError
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import PrecisionConfig
from megatron.data.gpt2 import GPT2Batch
from megatron.models.build import build_model
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import build_mesh, serial_mesh
from megatron.parallel.pipeline import PipelinePlan, partition
from megatron.parallel.schedules import schedule
from megatron.parallel.sharding import ShardingSpec, TensorSlice, gather_whole, sharding_specs
from megatron.train.diagnose import NonFiniteError
from megatron.train.executor import on_device
from megatron.train.inputs import mock_inputs, random_text
from megatron.train.pipelining import plan_of_run
from megatron.train.pretrain import refuse_differing
from megatron.train.state import TrainState
from megatron.train.step import Outputs, StepResult, count, forward_backward, train_step
from tests.dist import Pool
from tests.tiny import (
    SEED,
    SEQUENCE,
    VOCABULARY,
    micro_batches,
    samples,
    scatter_weights,
    tiny_section,
    tiny_state,
    tiny_weights,
    whole_gradients,
)
from tests.train import test_diagnose, test_replicas
from tests.train.test_replicas import Drift

CPU = torch.device("cpu")
EMBEDDING = "model.word_embedding.weight"


def staged(
    ranks: int,
    kind: str = "1f1b",
    virtual: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    precision: PrecisionConfig | None = None,
    **section: Any,
) -> TrainState:
    """A model of one layer more than stages, over all ranks of this call."""
    stages = ranks * virtual
    config = tiny_section(num_layers=stages + 1, **section)
    plan = PipelinePlan(ranks, virtual, kind, partition(stages + 1, stages, head=0.0))
    mesh = build_mesh({"pipeline": ranks}, CPU) if ranks > 1 else serial_mesh()
    return tiny_state(mesh, config, precision=precision, dtype=dtype, pipeline=plan)


def step(state: TrainState, number: int = 0, **more: Any) -> StepResult:
    batch = samples(4, first=4 * number)
    return train_step(state, micro_batches(batch, state.mesh, 1), 1e-3, **more)


class TorchStage(nn.Module):
    """A virtual stage of our layers, whose gradients autograd leaves in `.grad`; the last one gives
    the loss of each label, [1, n]."""

    def __init__(self, model: Any, plan: PipelinePlan, stage: int) -> None:
        super().__init__()
        self.model, self.numbers = model, plan.layers[stage]
        self.is_first, self.is_last = stage == 0, stage == plan.stages - 1

    def forward(self, x: Tensor, **fields: Tensor) -> Tensor:
        batch = GPT2Batch(**fields)
        x = self.model.embed(batch) if self.is_first else x[0]
        x = self.model.layers(x, batch, numbers=self.numbers)
        return (self.model.losses(x, batch) if self.is_last else x)[None]


def differences_from_torch(kind: str, virtual: int, m: int) -> tuple[float, dict[str, float]]:
    """(of the loss, of each gradient of this rank), relative."""
    ours = staged(2, kind, virtual, untie_embeddings_and_output_weights=True)
    plan, mesh = ours.pipeline, ours.mesh
    batch = samples(m)
    batches = micro_batches(batch, mesh, 1)
    totals = forward_backward(ours, batches, counts := count(ours, batches))
    section = tiny_section(num_layers=2 * virtual + 1, untie_embeddings_and_output_weights=True)
    model = build_model(section, mesh, VOCABULARY, seed=SEED, dtype=torch.float64, pipeline=plan)
    scatter_weights(model, tiny_weights(model))
    moved = on_device(batch, CPU)
    stream = torch.empty(
        1, SEQUENCE, section.hidden_size, dtype=torch.float64, device="meta", requires_grad=True
    )
    losses = torch.empty(1, SEQUENCE, dtype=torch.float64, device="meta", requires_grad=True)
    numbers = range(mesh.pipeline.rank, plan.stages, plan.ranks)
    stages = [
        PipelineStage(
            TorchStage(model, plan, number),
            number,
            plan.stages,
            CPU,
            input_args=(moved.tokens[:1].to("meta") if number == 0 else stream,),
            output_args=(losses if number == plan.stages - 1 else stream,),
            group=mesh.pipeline.group,
        )
        for number in numbers
    ]

    def loss(output: Tensor, mask: Tensor) -> Tensor:
        return (output * mask).sum() / counts[1]

    of_torch: Any
    if virtual == 1:
        of_torch = Schedule1F1B(stages[0], m, loss, scale_grads=False)
    else:
        of_torch = ScheduleInterleaved1F1B([*stages], m, loss, scale_grads=False)
    fields = {"tokens": moved.tokens, "positions": moved.positions, "labels": moved.labels}
    first = (moved.tokens,) if 0 in numbers else ()
    is_last = plan.stages - 1 in numbers
    target = {"target": moved.loss_mask.double(), "losses": []} if is_last else {}
    of_torch.step(*first, **target, **fields, return_outputs=False)
    table, grads = sharding_specs(model), {n: p.grad for n, p in model.named_parameters()}
    theirs = {name: gather_whole(each, table[name]) for name, each in grads.items()}
    own = whole_gradients(ours.gradients)
    assert own.keys() == theirs.keys()
    total = sum(target["losses"]).item() if is_last else 0.0
    difference = abs(total - float(totals[0] / counts[1])) / (abs(total) or 1.0)
    norm = torch.nn.utils.get_total_norm(theirs.values())
    return difference, {
        name: float((own[name] - each).norm() / max(each.norm(), 1e-3 * norm))
        for name, each in theirs.items()
    }


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("interleaved", 2)])
def test_torch_pipelining_computes_the_same(gloo: Pool, kind: str, virtual: int) -> None:
    for loss, gradients in gloo.run(2, differences_from_torch, kind, virtual, 4):
        assert loss < 1e-12
        assert gradients
        assert max(gradients.values()) < 1e-10, gradients


def tensors(state: TrainState) -> dict[str, Tensor]:
    return {each.key: each.local.clone() for each in state.slices()}


def overflow(ranks: int, bad: int, what: str) -> tuple[bool, float, int, int]:
    """(whether the bad step left all tensors alone, the scale after it; steps, updates) of a run in
    fp16 whose second step overflows on one stage, and whose third does not."""
    precision = PrecisionConfig(fp16=True, initial_loss_scale="256", hysteresis=1)
    state = staged(ranks, dtype=torch.float16, precision=precision)
    model, rank = state.model, state.mesh.pipeline.rank
    assert not step(state, 0).skipped
    before = tensors(state)
    if rank == bad and what == "gradient":
        (*_, layer) = model.transformer.layers.values()
        hook = layer.mlp.up.bias.register_hook(lambda gradient: gradient + torch.inf)
    elif rank == bad:
        hook = model.head.register_forward_hook(lambda module, inputs, total: total + torch.inf)
    result = step(state, 1)
    assert result.skipped
    assert isfinite(result.grad_norm) == (what == "loss")
    kept = all(torch.equal(before[key], each) for key, each in tensors(state).items())
    scale = state.scaler.scale
    if rank == bad:
        hook.remove()
    assert not step(state, 2).skipped
    return kept, scale, state.step, state.updates


@pytest.mark.parametrize(
    ("ranks", "bad", "what"),
    [(2, 0, "gradient"), (2, 1, "gradient"), (3, 1, "gradient"), (3, 2, "loss")],
)
def test_all_stages_skip_a_step_when_one_overflows(
    gloo: Pool, ranks: int, bad: int, what: str
) -> None:
    for answer in gloo.run(ranks, overflow, ranks, bad, what):
        assert answer == (True, 128.0, 3, 2)


def outputs(ranks: int, order: str = "") -> Outputs:
    """order: reversed, by a schedule of one's own, which takes the last micro-batch first."""
    state = staged(ranks) if ranks > 1 else whole_of_two()
    if order == "reversed":
        lists = schedule("1f1b", ranks, 4)
        own = (
            tuple(each._replace(micro_batch=3 - each.micro_batch) for each in actions)
            for actions in lists
        )
        state.pipeline = replace(state.pipeline, own=tuple(own))
    found = step(state, return_outputs=True).outputs
    assert found is not None
    return found


def whole_of_two() -> TrainState:
    """What two stages have, in one process."""
    return tiny_state(serial_mesh(), tiny_section(num_layers=3))


@pytest.mark.parametrize("order", ["", "reversed"])
def test_outputs_are_known_on_every_stage(gloo: Pool, order: str) -> None:
    expected = outputs(1)
    for found in gloo.run(2, outputs, 2, order):
        assert torch.equal(found.labels, expected.labels)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-12, atol=1e-12)


# Where it goes wrong in the third micro-batch of the second step, and what is found.
FIRST: dict[str, tuple[str, str, int, str]] = {
    "an output of stage 1": ("output", "mlp.up", 1, "the output of {}"),
    "a gradient of stage 1": ("gradient", "mlp.up", 1, "the gradient at {}"),
    "a gradient of a weight of stage 1": (
        *("weight gradient", "mlp.up", 1),
        "the gradient of the weight {}.weight",
    ),
    "an output of stage 0": ("output", "mlp.up", 0, "the output of {}"),
    "a gradient of stage 0": ("gradient", "mlp.up", 0, "the gradient at {}"),
}


def first_found(kind: str, name: str) -> tuple[str, str]:
    """(what is found first, on which rank), with what stage 1 spoils on stage 0 and back."""
    fault, module, bad, _ = FIRST[name]
    state = staged(2, kind)
    step(state, 0)
    if state.mesh.pipeline.rank == bad:
        layer = state.model.get_submodule(f"transformer.layers.{2 * bad}.{module}")
        test_diagnose.FAULTS[fault][0](state, layer)
    state.scaler = LossScaler()
    with pytest.raises(NonFiniteError) as raised:
        step(state, 1)
    found = raised.value.found
    assert found is not None
    return found.what, found.coordinates


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("name", FIRST)
def test_the_stage_that_spoils_the_others_is_named(gloo: Pool, kind: str, name: str) -> None:
    _, module, bad, what = FIRST[name]
    expected = what.format(f"transformer.layers.{2 * bad}.{module}")
    for found in gloo.run(2, first_found, kind, name):
        assert found == (expected, f"pipeline {bad}, data 0, tensor 0")


def first_weight() -> str:
    """What is found first, after a good step, where a weight of either stage is no number."""
    state = staged(2)
    step(state, 0)
    state.scaler = LossScaler()
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if name.endswith("attention_norm.weight"):
                parameter[0] = torch.nan
    with pytest.raises(NonFiniteError) as raised:
        step(state, 1)
    assert raised.value.found is not None
    return raised.value.found.what


def test_of_weights_that_are_no_numbers_the_first_stage_s_is_named(gloo: Pool) -> None:
    for found in gloo.run(2, first_weight):
        assert found == "the weight transformer.layers.0.attention_norm.weight itself"


def load_with_a_surplus(folder: Path) -> str:
    """What is wrong with a checkpoint that has a weight no stage knows."""
    state = staged(2)
    stray = TensorSlice("model.stray", ShardingSpec(shape=(1,)), torch.zeros(1))
    slices = [*state.slices(), *[stray] * state.mesh.is_first]
    report = save_checkpoint(folder, 0, slices, {"counters": state.counters()}, state.mesh)
    with pytest.raises(ValueError, match="stray") as raised:
        state.load(read_checkpoint(report.path))
    return str(raised.value)


def test_a_weight_that_no_stage_has_is_refused(gloo: Pool, tmp_path: Path) -> None:
    one, other = gloo.run(2, load_with_a_surplus, tmp_path)
    assert one == other


def differing_plans() -> str:
    mesh = build_mesh({"pipeline": 2}, CPU)
    words = ["--mock-data", "--vocab-size", "101", "--pipeline-model-parallel-size", "2"]
    words += ["--num-layers", "5", "--hidden-size", "32", "--num-attention-heads", "4"]
    words += ["--train-iters", "1", "--decoder-first-pipeline-num-layers"]
    config = parse(PretrainGPT2Config, [*words, str(2 + mesh.pipeline.rank)], {})
    inputs = mock_inputs(config, random_text)
    with pytest.raises(UsageError) as raised:
        refuse_differing(config, inputs, plan_of_run(config, 2, 101), mesh)
    return raised.value.flag


def test_ranks_with_other_stages_are_refused(gloo: Pool) -> None:
    assert gloo.run(2, differing_plans) == ["--pipeline-model-parallel-size"] * 2


def drift_of_a_tie(ranks: int) -> tuple[Drift | None, Drift | None]:
    """Of a run, and where a bit of the last stage's word embedding is flipped then."""
    state = staged(ranks)
    step(state)
    before = test_replicas.found(state, [])
    if state.mesh.pipeline.rank == ranks - 1:
        test_replicas.flip(test_replicas.tensor(state, EMBEDDING), 5, 3)
    return before, test_replicas.found(state, [])


@pytest.mark.parametrize(("ranks", "axis"), [(2, "pipeline"), (3, "embedding_group")])
def test_a_tied_embedding_that_differs_between_stages_is_named(
    gloo: Pool, ranks: int, axis: str
) -> None:
    camps = [[f"(pipeline {rank}, data 0, tensor 0)"] for rank in (0, ranks - 1)]
    for before, after in gloo.run(ranks, drift_of_a_tie, ranks):
        assert before is None
        assert after == ([EMBEDDING], (axis,), camps)
