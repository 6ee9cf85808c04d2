"""The stages and the schedule that settings come to, and what is refused."""

from collections import Counter
from pathlib import Path

import pytest

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.parallel.schedules import KINDS, Action, Lists, PipelinePlan, schedule
from megatron.train.pipelining import plan_of_run, plan_pipeline
from tests.refusals import refusal, refused

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
    return plan_of_run(config, VOCABULARY)


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
    plan = plan_of_run(config, vocabulary)
    assert sizes(plan) == layers


def with_custom(lists: Lists, words: str = "") -> PipelinePlan:
    """The plan of two stages with a schedule of one's own."""
    flags = f"{SMALL} --pipeline-model-parallel-size 2 {words}"
    config = parse(PretrainGPT2Config, flags.split(), {})
    return plan_pipeline(
        config.parallel,
        config.model,
        seq_length=1,
        vocab_size=VOCABULARY,
        custom_schedule=lists,
    )


def test_a_schedule_of_ones_own() -> None:
    lists = schedule("gpipe", 2, 3)
    plan = with_custom(lists)
    assert (plan.custom_schedule, plan.ranks, plan.virtual) == (lists, 2, 1)
    assert plan.layers == read("--pipeline-model-parallel-size 2").layers
    lists = schedule("interleaved", 2, 3, 2)
    plan = with_custom(lists, f"{VIRTUAL} 2")
    assert (plan.custom_schedule, plan.virtual) == (lists, 2)
    assert with_custom(schedule("zb-h1", 2, 2)).lists(2) == schedule("zb-h1", 2, 2)


WRONG: dict[str, tuple[Lists, str]] = {
    "other ranks": (schedule("1f1b", 4, 2), ""),
    "other stages": (schedule("1f1b", 2, 2), f"{VIRTUAL} 2"),
    "halves with full recomputation": (schedule("zb-h1", 2, 2), "--checkpoint-activations full"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_schedule_of_ones_own_that_does_not_fit_is_refused(name: str) -> None:
    assert isinstance(refusal(lambda: with_custom(*WRONG[name])), ValueError)


def test_a_file_is_no_schedule(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"actions": [["0F0", "0B0"], ["1F0", "1B0"]]}')
    words = f"--pipeline-model-parallel-size 2 --pipeline-schedule {file}"
    assert refused(read, words) == "--pipeline-schedule"


def test_a_rank_has_every_so_many_th_virtual_stage() -> None:
    layers = (range(2), range(2, 4), range(4, 5), range(5, 6))
    plan = PipelinePlan(2, 2, "interleaved", layers)
    assert [plan.numbers(rank) for rank in (0, 1)] == [(0, 1, 4), (2, 3, 5)]
