"""Stages and schedules of a run, and steps of pipelines: what the stages agree on. The matrix of
tests/layouts shows that every layout computes what one process computes."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import read_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.config.training import PrecisionConfig
from megatron.optim.adam import LossScaler
from megatron.parallel.mesh import build_mesh, serial_mesh
from megatron.parallel.partition import partition
from megatron.parallel.schedules import KINDS, Action, Lists, PipelinePlan, schedule
from megatron.parallel.sharding import ShardingSpec, TensorSlice
from megatron.train.diagnose import NonFiniteError
from megatron.train.evaluate import Outputs
from megatron.train.pipelining import plan_of_run, plan_pipeline
from megatron.train.state import TrainState
from megatron.train.step import StepResult, train_step
from tests.dist import Pool, on_ranks
from tests.refusals import refusal, refused
from tests.tiny import micro_batches, samples, tiny_config, tiny_state
from tests.train import test_diagnose, test_replicas, test_step

VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
SMALL = "--num-layers 12 --hidden-size 16 --num-attention-heads 4 --seq-length 1 --train-iters 9"
VOCABULARY = 768  # whose logits take the time of 4 layers of hidden size 16


def read(
    words: str | list[str], settings: type[PretrainConfig] = PretrainGPT2Config
) -> PipelinePlan:
    """The plan of 12 layers on two copies of the stages that `words` name."""
    given = words.split() if isinstance(words, str) else words
    config = parse(settings, [*SMALL.split(), *given], {})
    world = 2 * config.parallel.pipeline_model_parallel_size
    config.check(world)
    return plan_of_run(config, VOCABULARY, world)


def sizes(plan: PipelinePlan) -> list[int]:
    """Layers of each stage, which come one after the other."""
    numbers = [number for each in plan.layers for number in each]
    assert numbers == list(range(len(numbers)))
    return [len(each) for each in plan.layers]


def test_a_plan_evaluates_each_virtual_stage() -> None:
    plan = read(f"--pipeline-model-parallel-size 2 {VIRTUAL} 3")
    for rank in range(2):
        actions = [each for each in plan.evaluation(rank, 4) if isinstance(each, Action)]
        assert Counter(each.stage for each in actions) == dict.fromkeys(range(rank, 6, 2), 4)


def test_the_settings_know_every_schedule() -> None:
    for kind in KINDS:
        virtual = f"{VIRTUAL} 2" if kind == "interleaved" else ""
        plan = read(f"--pipeline-model-parallel-size 2 --pipeline-schedule {kind} {virtual}")
        assert plan.kind == kind


@pytest.mark.parametrize(("words", "expected"), [
    ("", []),
    ("--pipeline-schedule 1f1b", []),
    ("--pipeline-model-parallel-size 2", [8, 4]),
    ("--pipeline-model-parallel-size 4", [4, 4, 3, 1]),
    ("--pipeline-model-parallel-size 2 --pipeline-partition uniform", [6, 6]),
    ("--pipeline-model-parallel-size 5 --pipeline-partition uniform", [2, 2, 2, 3, 3]),
    (f"--pipeline-model-parallel-size 2 {VIRTUAL} 2", [4, 4, 3, 1]),
    (f"--pipeline-model-parallel-size 4 {VIRTUAL} 2 --pipeline-partition uniform",
     [1, 1, 2, 2, 1, 1, 2, 2]),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", [3, 3, 3, 3]),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", [1, 5, 5, 1]),
    ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3", [9, 3]),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
     "--decoder-last-pipeline-num-layers 3", [2, 4, 3, 3]),
])  # fmt: skip
def test_layers_of_each_stage(words: str, expected: list[int]) -> None:
    assert sizes(read(words)) == expected


def test_a_head_of_few_tokens_weighs_less() -> None:
    words = "--pipeline-model-parallel-size 2 --mask-prob"
    assert sizes(read(f"{words} 1", PretrainBertConfig)) == [8, 4]
    assert sizes(read(f"{words} 0.5", PretrainBertConfig)) == [7, 5]


@pytest.mark.parametrize(("layers", "preset", "vocabulary"), [
    ([25, 23], "gpt2_xl_colossalai", 50_304), ([12] * 8, "gpt3_175b", 51_200),
])  # fmt: skip
def test_layers_of_presets(layers: list[int], preset: str, vocabulary: int) -> None:
    config = parse(PretrainGPT2Config, ["--preset", preset], {})
    plan = plan_of_run(config, vocabulary, math.prod(config.parallel.sizes.values()))
    assert sizes(plan) == layers


def with_custom(lists: Lists, words: str = "") -> PipelinePlan:
    """The plan of two stages with a schedule of one's own."""
    flags = f"{SMALL} --pipeline-model-parallel-size 2 {words}"
    config = parse(PretrainGPT2Config, flags.split(), {})
    sizes = {"seq_length": 1, "vocab_size": VOCABULARY}
    return plan_pipeline(config.parallel, config.model, **sizes, custom_schedule=lists)


def test_custom_schedule() -> None:
    lists = schedule("gpipe", 2, 3)
    plan = with_custom(lists)
    assert (plan.custom_schedule, plan.ranks, plan.virtual) == (lists, 2, 1)
    assert plan.layers == read("--pipeline-model-parallel-size 2").layers
    lists = schedule("interleaved", 2, 3, 2)
    plan = with_custom(lists, f"{VIRTUAL} 2")
    assert (plan.custom_schedule, plan.virtual) == (lists, 2)
    halves = schedule("zb-h1", 2, 2)
    assert with_custom(halves).lists(2) == halves
    refusal(lambda: with_custom(halves, "--checkpoint-activations full"), kind=ValueError)


def test_a_file_is_no_schedule(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"actions": [["0F0", "0B0"], ["1F0", "1B0"]]}')
    words = f"--pipeline-model-parallel-size 2 --pipeline-schedule {file}"
    assert refused(read, words) == "--pipeline-schedule"


def test_virtual_stages_of_a_rank() -> None:
    layers = (range(2), range(2, 4), range(4, 5), range(5, 6))
    plan = PipelinePlan(2, 2, "interleaved", layers)
    assert [plan.numbers(rank) for rank in (0, 1)] == [(0, 1, 4), (2, 3, 5)]


CPU = torch.device("cpu")
EMBEDDING = "model.word_embedding.weight"


def staged(
    ranks: int,
    kind: str = "1f1b",
    virtual: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    precision: PrecisionConfig | None = None,
    **changes: Any,
) -> TrainState:
    """A model of one layer more than stages, over all ranks of this call."""
    stages = ranks * virtual
    config = tiny_config(num_layers=stages + 1, **changes)
    plan = PipelinePlan(ranks, virtual, kind, partition(stages + 1, stages, head=0.0))
    mesh = build_mesh({"pipeline": ranks}, CPU) if ranks > 1 else serial_mesh()
    return tiny_state(mesh, config, precision=precision, dtype=dtype, pipeline=plan)


def step(state: TrainState, number: int = 0, **more: Any) -> StepResult:
    batch = samples(4, first=4 * number)
    return train_step(state, micro_batches(batch, state.mesh, 1), 1e-3, **more)


@pytest.mark.parametrize(
    ("ranks", "bad", "fault"), [(2, 0, "gradient"), (3, 1, "gradient"), (3, 2, "loss")]
)
@on_ranks("ranks")
def test_all_stages_skip_an_overflow(ranks: int, bad: int, fault: str) -> None:
    """In fp16."""
    precision = PrecisionConfig(fp16=True, initial_loss_scale="256", hysteresis=1)
    state = staged(ranks, dtype=torch.float16, precision=precision)
    test_step.skip_an_overflow(state, fault, state.mesh.pipeline.rank == bad)


def outputs(ranks: int, order: str = "") -> Outputs:
    """order: reversed, by a schedule of one's own, which takes the last micro-batch first."""
    state = staged(ranks) if ranks > 1 else whole_of_two()
    if order == "reversed":
        custom = tuple(
            tuple(each._replace(micro_batch=3 - each.micro_batch) for each in actions)
            for actions in schedule("1f1b", ranks, 4)
        )
        state.pipeline = replace(state.pipeline, custom_schedule=custom)
    return step(state, return_outputs=True).outputs


def whole_of_two() -> TrainState:
    """The model of two stages, in one process."""
    return tiny_state(serial_mesh(), tiny_config(num_layers=3))


@pytest.mark.parametrize("order", ["", "reversed"])
def test_outputs_are_known_on_every_stage(gloo: Pool, order: str) -> None:
    expected = outputs(1)
    for found in gloo.run(2, outputs, 2, order):
        assert torch.equal(found.labels, expected.labels)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-12, atol=1e-12)


# A fault in the third micro-batch of the second step, and the value that is found first.
FOUND = {
    "output": "the output of {}",
    "gradient": "the gradient at {}",
    "weight gradient": "the gradient of the weight {}.weight",
}


@pytest.mark.parametrize(
    ("kind", "fault", "stage"),
    [
        *(("1f1b", fault, stage) for fault in ("output", "gradient") for stage in (0, 1)),
        *(("1f1b", "weight gradient", 1), ("gpipe", "output", 1), ("gpipe", "gradient", 0)),
        *(("zb-h1", "gradient", stage) for stage in (0, 1)),
        ("zb-h1", "weight gradient", 1),
    ],
)
@on_ranks(2)
def test_the_stage_that_spoils_the_others_is_named(kind: str, fault: str, stage: int) -> None:
    """Stage 1 spoils values of stage 0, and is spoilt by it."""
    state, name = staged(2, kind), f"transformer.layers.{2 * stage}.mlp.up"
    step(state, 0)
    if state.mesh.pipeline.rank == stage:
        test_diagnose.FAULTS[fault][0](state, state.model.get_submodule(name))
    state.scaler = LossScaler()
    with pytest.raises(NonFiniteError) as raised:
        step(state, 1)
    assert raised.value.found.what == FOUND[fault].format(name)
    assert raised.value.found.coordinates == f"pipeline {stage}, data 0, tensor 0"


@on_ranks(2)
def test_the_first_stage_with_a_nan_weight_is_named() -> None:
    """After a good step a weight of either stage is no number."""
    state = staged(2)
    step(state, 0)
    state.scaler = LossScaler()
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if name.endswith("attention_norm.weight"):
                parameter[0] = torch.nan
    with pytest.raises(NonFiniteError) as raised:
        step(state, 1)
    named = "the weight transformer.layers.0.attention_norm.weight itself"
    assert raised.value.found.what == named


@on_ranks(2)
def test_a_weight_that_no_stage_has_is_refused(tmp_path: Path) -> None:
    state = staged(2)
    stray = TensorSlice("model.stray", ShardingSpec(shape=(1,)), torch.zeros(1))
    slices = [*state.slices(), *[stray] * state.mesh.is_first]
    report = save_checkpoint(tmp_path, 0, slices, {"counters": state.counters()}, state.mesh)
    assert "stray" in str(refusal(lambda: state.load(read_checkpoint(report.path))))


@on_ranks(2)
def test_a_tied_embedding_counts_once() -> None:
    alone = tiny_state(serial_mesh(), tiny_config(num_layers=3))
    assert staged(2).describe()["parameters"] == alone.describe()["parameters"]


@pytest.mark.parametrize(("ranks", "axis"), [(2, "pipeline"), (3, "embedding_group")])
@on_ranks("ranks")
def test_a_tied_embedding_that_drifts_is_named(ranks: int, axis: str) -> None:
    """A bit of the last stage's word embedding is flipped."""
    state = staged(ranks)
    step(state)
    assert test_replicas.found(state, []) is None
    if state.mesh.pipeline.rank == ranks - 1:
        test_replicas.flip(test_replicas.tensor(state, EMBEDDING), 5, 3)
    camps = [[f"(pipeline {rank}, data 0, tensor 0)"] for rank in (0, ranks - 1)]
    assert test_replicas.found(state, []) == ([EMBEDDING], (axis,), camps)
