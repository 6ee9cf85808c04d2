"""The stages and the schedule that settings come to, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron.config.parallel import SCHEDULES
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from megatron.parallel.pipeline import PipelinePlan
from megatron.parallel.schedules import (
    KINDS,
    Action,
    Lists,
    ScheduleError,
    program,
    schedule,
    to_json,
)
from megatron.train.pipelining import plan_of_run
from pretrain_gpt2 import main
from tests.refusals import field_of, refusal, refused

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
    return plan_of_run(config, world, VOCABULARY)


def sizes(plan: PipelinePlan) -> list[int]:
    """Layers of each stage, which come one after the other."""
    numbers = [number for each in plan.layers for number in each]
    assert numbers == list(range(len(numbers)))
    return [len(each) for each in plan.layers]


def test_a_plan_evaluates_each_virtual_stage_and_has_its_own_micro_batches() -> None:
    plan = read(f"--pipeline-model-parallel-size 2 {VIRTUAL} 3")
    for rank in range(2):
        actions = [each for each in plan.evaluation(rank, 4) if isinstance(each, Action)]
        assert Counter(each.stage for each in actions) == dict.fromkeys(range(rank, 6, 2), 4)
    plan = PipelinePlan(2, 1, "own.json", (range(1), range(1, 2)), schedule("1f1b", 2, 4))
    assert plan.program(1, 4) == program(schedule("1f1b", 2, 4), 1)
    with pytest.raises(ScheduleError):
        plan.program(1, 5)


def test_the_settings_know_every_schedule() -> None:
    assert SCHEDULES == KINDS
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
    plan = plan_of_run(config, 64, vocabulary)
    assert sizes(plan) == layers


def file_of(folder: Path, lists: Lists) -> str:
    file = folder / "own.json"
    file.write_text(json.dumps(to_json(lists)))
    return str(file)


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    lists = schedule("gpipe", 2, 3)
    words = "--pipeline-model-parallel-size 2 --global-batch-size 6 --pipeline-schedule "
    plan = read(words + file_of(tmp_path, lists))
    assert (plan.own, plan.ranks, plan.virtual) == (lists, 2, 1)
    virtual = f"{VIRTUAL} 2 {words}"
    plan = read(virtual + file_of(tmp_path, schedule("interleaved", 2, 3, 2)))
    assert (plan.own, plan.virtual) == (schedule("interleaved", 2, 3, 2), 2)


GOOD = schedule("1f1b", 2, 2)
WRONG: dict[str, tuple[Lists, str]] = {
    "dead-lock": ((GOOD[0][::-1], GOOD[1]), ""),
    "an action is missing": ((GOOD[0][:-1], GOOD[1]), ""),
    "another rank's": ((GOOD[1], GOOD[0]), ""),
    "other ranks": (schedule("1f1b", 4, 2), ""),
    "other stages": (schedule("interleaved", 2, 2, 2), ""),
    "other stages, fewer": (GOOD, f"{VIRTUAL} 2"),
    "no backward": (tuple(actions[:1] for actions in schedule("gpipe", 2, 1)), ""),
    "halves with full recomputation": (schedule("zb-h1", 2, 2), "--checkpoint-activations full"),
}


OTHER_NUMBER = "--micro-batch-size 3"  # whose micro-batches are another number


@pytest.mark.parametrize("others", [OTHER_NUMBER, *WRONG])
def test_a_schedule_that_does_not_work_is_refused(others: str, tmp_path: Path) -> None:
    """The batch that has as many micro-batches as the schedule is suggested."""
    lists, more = WRONG.get(others, (GOOD, f"--global-batch-size 6 {OTHER_NUMBER}"))
    batch = "" if others == OTHER_NUMBER else "--global-batch-size 4"
    words = f"{more} {batch} --pipeline-model-parallel-size 2 --pipeline-schedule"
    flag = "--global-batch-size" if others == OTHER_NUMBER else "--pipeline-schedule"
    assert refused(read, f"{words} {file_of(tmp_path, lists)}") == flag


@pytest.mark.parametrize("text", ["", "[]", '{"actions": [["0F0"], ["1X0"]]}'])
def test_a_file_that_is_none_ends_the_program(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(text)
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mock-data"
    words += f" --train-iters 1 --pipeline-schedule {tmp_path / 'own.json'}"
    assert field_of(refusal(lambda: main(words.split(), {}), lines=1)) == "--pipeline-schedule"


def test_a_rank_has_every_so_many_th_virtual_stage() -> None:
    layers = (range(2), range(2, 4), range(4, 5), range(5, 6))
    plan = PipelinePlan(2, 2, "interleaved", layers)
    assert [plan.numbers(rank) for rank in (0, 1)] == [(0, 1, 4), (2, 3, 5)]
