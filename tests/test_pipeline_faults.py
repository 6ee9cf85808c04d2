"""What goes wrong in a pipeline, done for real to whole runs of pretrain_gpt2.py."""

import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron.train.metrics import read_metrics
from tests.programs import newest, pretrain
from tests.test_faults import DROPOUT, PLAIN, at_call, die, flags, train

STAGES = "--num-layers 4 --pipeline-model-parallel-size"
STEP = 4  # micro-batches, of one sample each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def on_message(
    name: str, rank: int, step: int, of_step: int, number: int, action: Callable[[], None]
) -> Callable[[], None]:
    """Let `action` happen on a rank instead of a message of a step (from 1): which one (from 0), of
    how many the rank has in each."""
    target = f"megatron.train.executor:{name}"
    return partial(at_call, target, (step - 1) * of_step + number + 1, [rank], action)


@pytest.mark.parametrize(
    ("world", "fault", "more", "named"),
    [
        (
            3,
            on_message("start_receive", 1, 3, 2 * STEP, 3, die),
            "",
            [r"rank 1 of 3 \(pipeline 1, data 0, tensor 0\)"],
        ),
        (
            2,  # the fourth input of its step is never sent
            on_message("start_send", 0, 3, STEP, 3, partial(time.sleep, 1000)),
            "--distributed-timeout-minutes 0.15",
            [
                r"9 s: rank 0 of 2 \(pipeline 0, .*\)",
                r"rank 1 of 2 .* pipeline 0 -> 1: .* stage 1, micro-batch 3 ",
            ],
        ),
    ],
    ids=["a middle stage is killed", "a stage waits for its input"],
)
def test_a_fault_of_one_stage_ends_all_and_is_named(
    folder: Path, tmp_path: Path, world: int, fault: Callable[[], None], more: str, named: list[str]
) -> None:
    words = flags(tmp_path, 9, f"{PLAIN} {STAGES} {world} {more}")
    with pretrain(words, world=world, folder=folder, before=fault) as run:
        codes = run.wait()
        assert all(codes), run.text()
        assert codes.count(-signal.SIGKILL) == (not more), run.text()
        for each in named:
            assert re.search(each, run.text()), run.text()
        assert run.text().count("Traceback") <= 1, run.text()
    assert not list(tmp_path.glob("step_*"))


def losses(save: Path) -> dict[int, tuple[float, float]]:
    """(loss, norm of the gradient) by step."""
    lines = (line for line in read_metrics(save / "metrics.jsonl") if "loss" in line)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_a_run_goes_on_with_other_stages_as_if_it_had_had_them_always(
    folder: Path, tmp_path: Path
) -> None:
    more = f"{DROPOUT} --log-interval 1 --lr 1e-2 --num-layers 4"
    train(flags(tmp_path / "whole", 6, more), folder)
    save = tmp_path / "stages"
    virtual = "--num-layers-per-virtual-pipeline-stage 1"
    train(flags(save, 2, f"{more} {STAGES} 2 {virtual}"), folder, world=2)
    train(flags(save, 4, f"{more} {STAGES} 3"), folder, world=3)
    train(flags(save, 6, more), folder)
    assert newest(save).name == "step_00000006"
    expected = losses(tmp_path / "whole")
    assert [*expected] == [1, 2, 3, 4, 5, 6]
    for step, found in losses(save).items():
        assert found == pytest.approx(expected[step], rel=1e-5), step
