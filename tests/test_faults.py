"""Faults of weeks of training, done for real to whole runs of pretrain_gpt2.py."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saving import flip
from tests.programs import (
    arguments_of,
    assert_equal_bits,
    finished,
    lines_of,
    newest,
    pretrain,
    some_data,
)

ROOT = Path(__file__).resolve().parents[1]
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
SPLIT = "--tensor-model-parallel-size 2"
PLAIN = "--attention-dropout 0 --hidden-dropout 0"


def train(words: str, folder: Path, world: int = 1) -> str:
    """One run to its end; returns what it printed."""
    return finished(words, world=world, folder=folder)


def flags(save: Path, steps: int, more: str = DROPOUT) -> str:
    way = f"--save {save} --load {save} --lr-decay-iters 300 --eval-iters 0"
    return f"{way} --micro-batch-size 2 --train-iters {steps} {more}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def at_call(
    target: str, number: int, ranks: Sequence[int], action: Callable[[], None], instead: bool = True
) -> None:
    """Let `action` happen on these ranks instead of a call of "module:function", or before it, the
    number-th one (from 1); other calls are as they were."""
    module, name = target.split(":")
    owner = import_module(module)
    original, calls = getattr(owner, name), itertools.count(1)

    def patched(*arguments: Any, **more: Any) -> Any:
        if next(calls) == number and int(os.environ.get("RANK", "0")) in ranks:
            result = action()
            if instead:
                return result
        return original(*arguments, **more)

    setattr(owner, name, patched)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that nothing disturbs, with a checkpoint of each of its four steps."""
    save = tmp_path_factory.mktemp("whole")
    train(flags(save, 4, f"{DROPOUT} --save-interval 1"), folder)
    return save


# Evaluations of four groups of micro-batches, after the third and the last of six steps.
EVALUATED = f"{DROPOUT} {SPLIT} --eval-iters 20 --eval-interval 3 --check-replicas-interval 4"


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two ranks that nothing disturbs."""
    save = tmp_path_factory.mktemp("calm")
    train(flags(save, 6, EVALUATED), folder, world=2)
    return save


def test_kill_9_at_any_moment_changes_no_bit(folder: Path, tmp_path: Path, calm: Path) -> None:
    """One rank or both are killed while starting, training and saving, until the run is through."""
    steps, more = 6, f"{DROPOUT} --save-interval 2 --keep-checkpoints 2 {SPLIT}"
    save = tmp_path / "killed"
    moments = [
        ("megatron.train.launch:launch", 1, [0, 1]),
        ("os:fsync", 2, [1]),
        ("megatron.train.loop:train_step", 4, [0, 1]),
        ("os:fsync", 5, [0]),
        ("os:rename", 2, [0]),
    ]
    for number, moment in enumerate(moments):
        way = " --async-save" if number in (1, 4) else ""
        before = partial(at_call, *moment, die)
        with pretrain(flags(save, steps, more) + way, world=2, folder=folder, before=before) as run:
            assert wait_for_any([process.sentinel for process in run.processes])
            codes = [process.exitcode for process in run.processes]
            run.signal(signal.SIGKILL)
            run.wait()
            assert -signal.SIGKILL in codes, (moment, run.text())
    train(flags(save, steps, more), folder, world=2)
    assert_equal_bits(newest(calm), newest(save))
    recorded = [line["step"] for line in lines_of(save)]
    assert recorded == sorted(set(recorded))


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 3)])
def test_two_halves_of_a_run_equal_a_whole_one(
    folder: Path, tmp_path: Path, whole: Path, world: int, zero: int
) -> None:
    more = f"{DROPOUT} --save-interval 2 --zero-stage {zero}"
    if world > 1:
        whole = tmp_path / "whole"
        train(flags(whole, 4, more), folder, world)
    save = tmp_path / "halves"
    before = time.monotonic()
    train(flags(save, 2, more), folder, world)
    assert str(save / "step_00000002") in train(flags(save, 4, more), folder, world)
    passed = time.monotonic() - before
    assert_equal_bits(whole / "step_00000004", save / "step_00000004")
    starts = lines_of(save, "start_seconds")
    assert [line["step"] for line in starts] == [1, 3]
    phases = ["imports", "opening data", "reading the checkpoint", "building the model"]
    phases += ["first step"] + ["meeting the other ranks", "making process groups"] * (world > 1)
    for line in starts:
        assert line["start_seconds"].keys() == {*phases}
        assert min(line["start_seconds"].values()) >= 0
    assert 0 < sum(sum(line["start_seconds"].values()) for line in starts) < passed


@pytest.mark.parametrize("target", ["train.launch:launch", "train.state:build_state"])
def test_a_signal_at_the_start_ends_with_75(folder: Path, tmp_path: Path, target: str) -> None:
    words = flags(tmp_path, 100_000, PLAIN)
    come = partial(signal.raise_signal, signal.SIGUSR1)
    before = partial(at_call, f"megatron.{target}", 1, [0], come)
    with pretrain(words, folder=folder, before=before) as run:
        assert run.wait() == [75], run.text()
        assert "Traceback" not in run.text()


def test_ctrl_c_saves_and_is_no_reason_to_requeue(folder: Path, tmp_path: Path) -> None:
    words = flags(tmp_path, 100_000, f"{PLAIN} {SPLIT} --log-interval 1")
    with pretrain(words, world=2, folder=folder) as run:
        run.wait_for(lambda: "step 3/" in run.text(0))
        run.signal(signal.SIGINT)
        assert run.wait() == [130, 130], run.text()
        assert "ended by SIGINT" in run.text()
    assert list(tmp_path.glob("step_*"))


SIGNALLED = [  # (signal to rank 1, the call during which it comes, the step that is saved)
    (signal.SIGUSR1, "megatron.train.step:count", 2, 2),
    (signal.SIGTERM, "megatron.train.evaluate:Executor", 2, 3),
    (signal.SIGTERM, "megatron.train.replicas:digest", 9, 4),
    (signal.SIGTERM, "megatron.train.evaluate:Executor", 2, 6),  # the last one, made later
]


def test_a_signal_to_one_rank_saves_and_ends_all_with_75(
    folder: Path, tmp_path: Path, calm: Path
) -> None:
    """In a step, in evaluations, in a check of replicas."""
    save, words = tmp_path / "stopped", flags(tmp_path / "stopped", 6, EVALUATED)
    for number, target, call, step in SIGNALLED:
        come = partial(signal.raise_signal, number)
        before = partial(at_call, target, call, [1], come, instead=False)
        with pretrain(words, world=2, folder=folder, before=before) as run:
            assert run.wait() == [75, 75], run.text()
        *_, last = lines_of(save, "step")
        assert last == {"step": step, "ended": number.name, "exit_code": 75}
        assert newest(save).name == f"step_{step:08d}"
    train(words, folder, world=2)
    assert_equal_bits(newest(save), newest(calm))
    ours, theirs = (
        [(line["step"], line["validation_loss"]) for line in lines_of(each, "validation_loss")]
        for each in (save, calm)
    )
    assert ours == theirs


def test_damage_is_passed_over_by_name_and_nothing_is_deleted(
    folder: Path, tmp_path: Path, whole: Path
) -> None:
    save = shutil.copytree(whole, tmp_path / "damaged")
    flipped = save / "step_00000004" / "shard_00000.safetensors"
    size = flipped.stat().st_size
    flip(flipped, size // 2)
    short = save / "step_00000003" / "shard_00000.safetensors"
    os.truncate(short, size - 7)
    (save / "step_00000002" / "shard_00000.safetensors").unlink()
    text = train(flags(save, 4), folder)
    for name in (str(flipped), str(short), "step_00000002", str(save / "step_00000001")):
        assert name in text, text
    assert_equal_bits(newest(save), whole / "step_00000004")
    for name, kept in (("step_00000004", size), ("step_00000003", size - 7)):
        aside = save / f"{name}.abandoned" / "shard_00000.safetensors"
        assert aside.stat().st_size == kept
    assert (save / "step_00000002.abandoned" / "manifest.json").exists()


def assert_one_error(text: str) -> None:
    assert "Traceback" not in text, text
    assert len(re.findall(r"(?m)^error: ", text)) == 1, text


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_diverges_says_so_in_one_line(folder: Path, tmp_path: Path, world: int) -> None:
    more = f"{PLAIN} --lr 1e30 --tensor-model-parallel-size {world}"
    with pretrain(flags(tmp_path, 9, more), world=world, folder=folder) as run:
        assert run.wait() == [1] * world, run.text()
        assert_one_error(run.text())
    *_, last = lines_of(tmp_path, "step")
    assert (last["ended"], last["exit_code"]) == ("NonFiniteError", 1)


def test_a_full_disk_ends_all_ranks(folder: Path, small_disk: Path, tmp_path: Path) -> None:
    more = f"{PLAIN} {SPLIT} --save-interval 2 --async-save --hidden-size 40"
    record = f" --metrics-file {tmp_path / 'metrics.jsonl'}"
    with pretrain(flags(small_disk, 8, more) + record, world=2, folder=folder) as run:
        assert run.wait() == [1, 1], run.text()
        assert re.search(r"rank data 0, tensor \d: .*shard_0000\d", run.text()), run.text()
        assert_one_error(run.text())
    kept = sorted(each.name for each in small_disk.iterdir())
    assert kept == ["latest", newest(small_disk).name]
    assert (small_disk / "latest").read_text().strip() == kept[1]
    room = flags(small_disk, 8, more).replace(f"--save {small_disk}", f"--save {tmp_path / 'b'}")
    assert str(small_disk / kept[1]) in train(room, folder, 2)


def flip_in_step_3() -> None:
    import torch

    from megatron.train import loop

    original = loop.train_step

    def broken(state: Any, *arguments: Any, **more: Any) -> Any:
        result = original(state, *arguments, **more)
        if state.step == 3 and os.environ["RANK"] == "1":
            weight = state.model.transformer.layers["1"].mlp_norm.weight
            weight.data.view(torch.int32)[5] ^= 1
        return result

    loop.train_step = broken


IN_STEP_3 = partial(at_call, "megatron.train.loop:train_step", 3, [1])
STAGES = "--num-layers 4 --pipeline-model-parallel-size"
STEP = 2  # micro-batches


def on_message(
    name: str, rank: int, step: int, of_step: int, number: int, action: Callable[[], None]
) -> Callable[[], None]:
    """Let `action` happen on a rank instead of a message of a step (from 1): which one (from 0), of
    how many the rank has in each."""
    target = f"megatron.train.executor:{name}"
    return partial(at_call, target, (step - 1) * of_step + number + 1, [rank], action)


# Ranks, what goes wrong in the third step, flags, and what is named. Ranks that raise, sleep, leave
# or skip a collective: train/test_watch.py; one that raises in a run: train/test_callbacks.py.
FAULTS: dict[str, tuple[int, Callable[[], None], str, list[str]]] = {
    "a rank holds a flipped bit": (
        2, flip_in_step_3, f"{SPLIT} --check-replicas-interval 1", ["layers.1.mlp_norm.weight"]
    ),
    "a middle stage is killed": (
        3, on_message("start_receive", 1, 3, 2 * STEP, 1, die), f"{STAGES} 3",
        [r"rank 1 of 3 \(pipeline 1, data 0, tensor 0\)"],
    ),
    "the second input of a stage is never sent": (
        2, on_message("start_send", 0, 3, STEP, 1, partial(time.sleep, 1000)),
        f"{STAGES} 2 --distributed-timeout-minutes 0.1",
        [r"6 s: rank 0 of 2 \(pipeline 0, .*\)",
         r"rank 1 of 2 .* pipeline 0 -> 1: .* stage 1, micro-batch 1 "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_ends_all_and_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    world, fault, more, named = FAULTS[name]
    words = flags(tmp_path, 9, f"{PLAIN} {more}")
    with pretrain(words, world=world, folder=folder, before=fault) as run:
        codes = run.wait()
        assert all(codes), run.text()
        assert codes.count(-signal.SIGKILL) == ("killed" in name), run.text()
        for each in named:
            assert re.search(each, run.text()), run.text()
        assert run.text().count("Traceback") <= 1, run.text()
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.slow
def test_torchrun_restarts_into_a_clean_resume_and_a_script_can_stop_it(
    folder: Path, tmp_path: Path
) -> None:
    """Rank 1 is killed in its third step, once. The script does as docs/operations.md says:
    torchrun's own status is 1 in any case."""
    more = f"{DROPOUT} {SPLIT} --save-interval 2"
    save, calm, program = tmp_path / "restarted", tmp_path / "calm", tmp_path / "program.py"
    program.write_text(
        "import os, runpy\n"
        "from tests.test_faults import IN_STEP_3, die\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    IN_STEP_3(die)\n"
        f"runpy.run_path({str(ROOT / 'pretrain_gpt2.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(program)]
    command += arguments_of(flags(save, 100_000, more), some_data(folder))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=environ, text=True, **pipes)
    while not (save / "step_00000004").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    subprocess.run(["pkill", "-USR1", "-P", str(process.pid)], check=True)
    text, _ = process.communicate()
    assert process.returncode == 1, text
    *_, last = lines_of(save, "step")
    assert (last["ended"], last["exit_code"]) == ("SIGUSR1", 75)
    assert [line["step"] for line in lines_of(save, "started")] == [0, 2]
    train(flags(calm, last["step"], more), folder, world=2)
    assert newest(save).name == newest(calm).name
    assert_equal_bits(newest(calm), newest(save))


def test_requeued_fine_tuning_goes_on_where_it_was(
    folder: Path, tmp_path: Path, whole: Path
) -> None:
    tuned = tmp_path / "tuned"
    words = f"--load {whole} --save {tuned} --finetune --train-iters 4 --save-interval 2"
    words += f" --eval-iters 0 --log-interval 1 --seed 8 {PLAIN}"
    text = train(words, folder)
    assert str(whole / "step_00000004") in text
    shutil.copytree(tuned, tmp_path / "calm")
    shutil.rmtree(tuned / "step_00000004")
    text = train(words, folder)
    assert str(tuned / "step_00000002") in text
    assert_equal_bits(tuned / "step_00000004", tmp_path / "calm" / "step_00000004")
    assert [line["step"] for line in lines_of(tuned)] == [1, 2, 3, 4]
