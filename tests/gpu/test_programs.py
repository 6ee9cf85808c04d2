"""Each program for 20 steps, and resumed after 10."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import write_folder
from tests.programs import SHAPE, lines_of, pretrain

pytestmark = pytest.mark.gpu
STEPS, HALF = 20, 10
COMMON = f"--mock-data --train-iters {STEPS} --log-interval 1 --lr 1e-3"
OWN = f"{SHAPE} --vocab-size 64"
PROGRAMS = {  # and their words
    "gpt2": ("pretrain_gpt2", OWN),
    "gpt2-fp16": ("pretrain_gpt2", f"{OWN} --fp16 --initial-loss-scale 2**8 --loss-scale-window 4"),
    "bert": ("pretrain_bert", OWN),
    "llama": ("pretrain", f"--model llama --num-query-groups 2 {OWN}"),
    "huggingface": ("pretrain", "--model huggingface --hf-model {folder}/model"),
}


def hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def run(folder: Path, device: torch.device, names: list[str], words: dict[str, str]) -> None:
    """These programs side by side, each into the folders of `words`: what takes time on a GPU is to
    compile."""
    with ExitStack() as stack:
        runs = []
        for name in names:
            program, own = PROGRAMS[name]
            precision = "" if "fp16" in own else "--bf16"
            for save, more in words.items():
                place = folder / name / save
                place.mkdir(parents=True, exist_ok=True)
                text = f"{COMMON} {precision} --save {place} {more.format(place=place)}"
                options: dict[str, Any] = {"program": program, "folder": place}
                options["before"] = hide_gpus if device.type == "cpu" else None
                shape = own.format(folder=folder)
                runs.append(stack.enter_context(pretrain(text, shape=shape, **options)))
        for each in runs:
            assert each.wait() == [0], each.text()


def record(place: Path) -> tuple[list[dict[str, Any]], dict[int, tuple[float, float]]]:
    """(what each start says of itself, loss and norm by step)."""
    steps = lines_of(place, "grad_norm")
    by_step = {line["step"]: (line["loss"], line["grad_norm"]) for line in steps}
    assert len(by_step) == len(steps)
    return lines_of(place, "started"), by_step


@pytest.mark.parametrize("names", [["gpt2"], [*PROGRAMS][1:]], ids=["gpt2", "others"])
def test_a_resumed_run_is_the_uninterrupted_one(
    device: torch.device, names: list[str], tmp_path: Path
) -> None:
    """On a CPU bit for bit, and on a GPU too but where a kernel adds up by atomic operations, as
    attention's backward does: a last bit of bf16 that differs in 20 updates of 1e-3."""
    write_folder(tmp_path / "model", "gpt2")
    run(tmp_path, device, names, {"whole": "", "half": f"--exit-interval {HALF}"})
    run(tmp_path, device, names, {"half": "--load {place}"})
    for name in names:
        (one,), wanted = record(tmp_path / name / "whole")
        starts, found = record(tmp_path / name / "half")
        for start in (one, *starts):
            is_gpu = device.type == "cuda"
            assert start["device"].startswith(torch.cuda.get_device_name() if is_gpu else "cpu")
            assert start["compiled"] == (device.type == "cuda" and name != "huggingface")
        assert len(starts) == 2
        assert [*found] == [*wanted] == [*range(1, STEPS + 1)]
        exact = device.type == "cpu"
        for step, numbers in wanted.items():
            close = pytest.approx(numbers, rel=1e-2)
            assert found[step] == (numbers if exact else close), (name, step)
        assert len({*wanted.values()}) == STEPS
