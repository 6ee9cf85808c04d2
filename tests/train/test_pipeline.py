"""Steps of pipelines: what the stages agree on, and what is said of one.

That every layout computes what one process computes is shown in tests/layouts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import read_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.config.training import PrecisionConfig
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import build_mesh, serial_mesh
from megatron.parallel.partition import partition
from megatron.parallel.schedules import PipelinePlan, schedule
from megatron.parallel.sharding import ShardingSpec, TensorSlice
from megatron.train.diagnose import NonFiniteError
from megatron.train.evaluate import Outputs
from megatron.train.inputs import mock_inputs, random_text
from megatron.train.pretrain import plan_on_all_ranks
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step
from tests.dist import Pool
from tests.refusals import field_of, refusal
from tests.tiny import micro_batches, samples, tiny_section, tiny_state
from tests.train import test_diagnose, test_replicas, test_step
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


def overflow(ranks: int, bad: int, fault: str) -> test_step.Skip:
    """Of a run in fp16."""
    precision = PrecisionConfig(fp16=True, initial_loss_scale="256", hysteresis=1)
    state = staged(ranks, dtype=torch.float16, precision=precision)
    return test_step.overflow(state, fault, state.mesh.pipeline.rank == bad)


@pytest.mark.parametrize(
    ("ranks", "bad", "fault"),
    [(2, 0, "gradient"), (2, 1, "gradient"), (3, 1, "gradient"), (3, 2, "loss")],
)
def test_all_stages_skip_an_overflow(gloo: Pool, ranks: int, bad: int, fault: str) -> None:
    for answer in gloo.run(ranks, overflow, ranks, bad, fault):
        assert answer == (True, 128.0, 3, 2, 12)


def outputs(ranks: int, order: str = "") -> Outputs:
    """order: reversed, by a schedule of one's own, which takes the last micro-batch first."""
    state = staged(ranks) if ranks > 1 else whole_of_two()
    if order == "reversed":
        lists = schedule("1f1b", ranks, 4)
        custom = (
            tuple(each._replace(micro_batch=3 - each.micro_batch) for each in actions)
            for actions in lists
        )
        state.pipeline = replace(state.pipeline, custom_schedule=tuple(custom))
    return step(state, return_outputs=True).outputs


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
    "a gradient of a weight": (
        "weight gradient", "mlp.up", 1, "the gradient of the weight {}.weight"),
    "an output of stage 0": ("output", "mlp.up", 0, "the output of {}"),
    "a gradient of stage 0": ("gradient", "mlp.up", 0, "the gradient at {}"),
}  # fmt: skip


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
    return str(refusal(lambda: state.load(read_checkpoint(report.path))))


def test_a_weight_that_no_stage_has_is_refused(gloo: Pool, tmp_path: Path) -> None:
    one, other = gloo.run(2, load_with_a_surplus, tmp_path)
    assert "stray" in one == other


def differing_plans() -> str:
    mesh = build_mesh({"pipeline": 2}, CPU)
    words = "--mock-data --vocab-size 101 --pipeline-model-parallel-size 2 --num-layers 5 "
    words += "--hidden-size 32 --num-attention-heads 4 --train-iters 1 "
    words += f"--decoder-first-pipeline-num-layers {2 + mesh.pipeline.rank}"
    config = parse(PretrainGPT2Config, words.split(), {})
    inputs = mock_inputs(config, random_text)
    return field_of(refusal(lambda: plan_on_all_ranks(config, inputs, mesh)))


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
def test_a_tied_embedding_that_drifts_is_named(gloo: Pool, ranks: int, axis: str) -> None:
    camps = [[f"(pipeline {rank}, data 0, tensor 0)"] for rank in (0, ranks - 1)]
    for before, after in gloo.run(ranks, drift_of_a_tie, ranks):
        assert before is None
        assert after == ([EMBEDDING], (axis,), camps)
