"""What goes wrong in weeks of training, done for real to whole runs of pretrain_gpt2.py."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.train.metrics import read_metrics
from megatron.train.signals import StopSignals
from tests.programs import REST, SHAPE, assert_equal_bits, newest, pretrain, some_data

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
SPLIT = "--tensor-model-parallel-size 2"
PLAIN = "--attention-dropout 0 --hidden-dropout 0"


def train(words: str, folder: Path, world: int = 1, codes: tuple[int, ...] = (0,)) -> str:
    """One run to its end; returns what it printed."""
    with pretrain(words, world=world, folder=folder) as run:
        assert set(run.wait()) == set(codes), run.text()
        return run.text()


def flags(save: Path, steps: int, more: str = DROPOUT) -> str:
    way = f"--save {save} --load {save} --lr-decay-iters 300 --eval-iters 0"
    return f"{way} --train-iters {steps} {more}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def test_kill_9_at_random_moments_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    """Of one rank or of both, while starting, training and saving, until the run is through."""
    steps, more = 60, f"{DROPOUT} --save-interval 3 --keep-checkpoints 2 {SPLIT}"
    train(flags(tmp_path / "calm", steps, more), folder, world=2)
    save, chance, kills, codes = tmp_path / "killed", random.Random(1), 0, [1, 1]
    while any(codes):
        way = " --async-save" if chance.random() < 0.7 else ""
        far = last_step(save) + 3 * chance.randrange(4)
        with pretrain(flags(save, steps, more) + way, world=2, folder=folder) as run:
            deadline = time.monotonic() + 60
            while run.is_alive() and last_step(save) < far and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.4))
            kills += run.is_alive()
            run.signal(signal.SIGKILL, chance.choice([[0], [1], [0, 1]]))
            if "samples consumed" not in run.text():
                run.signal(signal.SIGTERM)  # as torchrun does; later they end by themselves
            codes = run.wait(timeout=60)
        assert kills < 60, run.text()
    assert kills >= 5
    assert_equal_bits(newest(tmp_path / "calm"), newest(save))
    recorded = [line["step"] for line in read_metrics(save / "metrics.jsonl") if "loss" in line]
    assert recorded == sorted(set(recorded))


def last_step(save: Path) -> int:
    return max((int(folder.name[5:]) for folder in save.glob("step_????????")), default=0)


@pytest.mark.parametrize(("world", "tensor_size"), [(1, 1), (2, 2), (2, 1)])
def test_half_a_run_and_its_other_half_equal_a_whole_one(
    folder: Path, tmp_path: Path, world: int, tensor_size: int
) -> None:
    more = f"{DROPOUT} --save-interval 4 --tensor-model-parallel-size {tensor_size}"
    train(flags(tmp_path / "whole", 8, more), folder, world)
    save = tmp_path / "halves"
    with pretrain(flags(save, 8, more), world=world, folder=folder) as run:
        run.wait_for((save / "step_00000004" / "manifest.json").exists)
        run.signal(signal.SIGKILL)
    shutil.rmtree(save / "step_00000008", ignore_errors=True)  # where it was quicker than the kill
    text = train(flags(save, 8, more), folder, world)
    assert re.search(
        r"step 4, 16 samples consumed, learning rate [\d.e-]+, data [0-9a-f]{12}", text
    )
    assert_equal_bits(tmp_path / "whole" / "step_00000008", save / "step_00000008")


def say_ready() -> None:
    """Once signals are handled: before, Python itself has hardly begun."""
    enter = StopSignals.__enter__

    def entered(signals: StopSignals) -> StopSignals:
        enter(signals)
        print("ready", flush=True)
        return signals

    StopSignals.__enter__ = entered  # type: ignore[method-assign]


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0])
def test_a_signal_while_a_run_starts_ends_it_with_75(
    folder: Path, tmp_path: Path, seconds: float
) -> None:
    words = flags(tmp_path, 100_000, PLAIN)
    with pretrain(words, folder=folder, before=say_ready) as run:
        run.wait_for(lambda: "ready" in run.text())
        time.sleep(seconds)
        run.signal(signal.SIGUSR1)
        assert run.wait() == [75], run.text()
        assert "Traceback" not in run.text()


def test_ctrl_c_saves_and_is_no_reason_to_requeue(folder: Path, tmp_path: Path) -> None:
    words = flags(tmp_path, 100_000, f"{PLAIN} {SPLIT} --log-interval 1")
    with pretrain(words, world=2, folder=folder) as run:
        run.wait_for(lambda: "step 3 |" in run.text(0))
        run.signal(signal.SIGINT)
        assert run.wait() == [130, 130], run.text()
        assert "ended by SIGINT; the same command with --load goes on" in run.text()
    assert list(tmp_path.glob("step_*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_ends_all_with_75(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    save, more = tmp_path / "stopped", f"{PLAIN} --tensor-model-parallel-size 2 --log-interval 1"
    with pretrain(flags(save, 100_000, more), world=2, folder=folder) as run:
        run.wait_for(lambda: "step 3 |" in run.text(0))
        run.signal(number, [1])
        assert run.wait() == [75, 75], run.text()
    lines = read_metrics(save / "metrics.jsonl")
    assert (lines[-1]["ended"], lines[-1]["exit_code"]) == (number.name, 75)
    step = lines[-1]["step"]
    assert newest(save).name == f"step_{step:08d}"
    train(flags(save, step + 3, more), folder, world=2)
    train(flags(tmp_path / "calm", step + 3, more), folder, world=2)
    assert_equal_bits(newest(save), newest(tmp_path / "calm"))


def test_damage_is_passed_over_by_name_and_nothing_is_deleted(folder: Path, tmp_path: Path) -> None:
    save = tmp_path / "damaged"
    train(flags(save, 12, f"{PLAIN} --save-interval 3"), folder)
    shutil.copytree(save, tmp_path / "calm")
    flipped = save / "step_00000012" / "shard_00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    short = save / "step_00000009" / "shard_00000.safetensors"
    short_size = len(content) - 7
    short.write_bytes(short.read_bytes()[:short_size])
    (save / "step_00000006" / "shard_00000.safetensors").unlink()
    text = train(flags(save, 12, PLAIN), folder)
    for name in (str(flipped), str(short), "step_00000006"):
        assert re.search(rf"passed over: .*{name}", text), text
    assert "going on from" in text
    assert "step 3, 12 samples consumed" in text
    assert_equal_bits(newest(save), tmp_path / "calm" / "step_00000012")
    for name, size in (("step_00000012", len(content)), ("step_00000009", short_size)):
        aside = save / f"{name}.abandoned" / "shard_00000.safetensors"
        assert aside.stat().st_size == size
    assert (save / "step_00000006.abandoned" / "manifest.json").exists()


def test_a_full_disk_ends_all_ranks_by_name_and_keeps_what_was_there(
    folder: Path, small_disk: Path, tmp_path: Path
) -> None:
    more = f"{PLAIN} {SPLIT} --save-interval 2 --async-save --hidden-size 40"
    record = f" --metrics-file {tmp_path / 'metrics.jsonl'}"
    with pretrain(flags(small_disk, 40, more) + record, world=2, folder=folder) as run:
        assert run.wait() == [1, 1], run.text()
        assert re.search(r"saving failed on rank .*shard_0000.*it needs [\d,]+ bytes", run.text())
    kept = sorted(each.name for each in small_disk.iterdir())
    assert kept == ["latest", newest(small_disk).name]
    assert (small_disk / "latest").read_text().strip() == kept[1]
    room = flags(small_disk, 40, more).replace(f"--save {small_disk}", f"--save {tmp_path / 'b'}")
    assert f"going on from {small_disk / kept[1]}" in train(room, folder, 2)


def sleep_in_step_3() -> None:
    break_step_3(lambda: time.sleep(1000))


def raise_in_step_3() -> None:
    def fail() -> None:
        raise ArithmeticError("the cause")

    break_step_3(fail)


def flip_in_step_3() -> None:
    import torch

    from megatron.train import loop

    original = loop.train_step

    def broken(state, *arguments, **more):  # type: ignore[no-untyped-def]
        result = original(state, *arguments, **more)
        if state.step == 3 and os.environ["RANK"] == "1":
            weight = state.model.transformer.layers["1"].mlp_norm.weight
            weight.data.view(torch.int32)[5] ^= 1
        return result

    loop.train_step = broken


def break_step_3(action) -> None:  # type: ignore[no-untyped-def]
    """On rank 1 alone."""
    from megatron.train import loop

    original = loop.train_step

    def broken(state, *arguments, **more):  # type: ignore[no-untyped-def]
        if state.step == 2 and os.environ["RANK"] == "1":
            action()
        return original(state, *arguments, **more)

    loop.train_step = broken


def test_the_rank_that_raises_is_what_the_user_sees(folder: Path, tmp_path: Path) -> None:
    words = flags(tmp_path, 9, f"{PLAIN} --tensor-model-parallel-size 2")
    with pretrain(words, world=2, folder=folder, before=raise_in_step_3) as run:
        assert all(run.wait(timeout=30))
        assert re.search(r"rank 1 .*data 0, tensor 1", run.text(1))
        assert "ArithmeticError: the cause" in run.text(1)
        assert run.text().count("Traceback") == 1, run.text()


def test_the_rank_that_hangs_is_named_with_its_stack(folder: Path, tmp_path: Path) -> None:
    words = flags(tmp_path, 9, f"{PLAIN} --distributed-timeout-minutes 0.15")
    with pretrain(words, world=2, folder=folder, before=sleep_in_step_3) as run:
        assert all(run.wait(timeout=40))
        assert re.search(r"rank 1 .*data 1, tensor 0", run.text()), run.text()
        assert "time.sleep(1000)" in run.text(), run.text()


def test_a_flipped_bit_stops_the_run_by_name(folder: Path, tmp_path: Path) -> None:
    words = flags(
        tmp_path, 9, f"{PLAIN} --tensor-model-parallel-size 2 --check-replicas-interval 1"
    )
    with pretrain(words, world=2, folder=folder, before=flip_in_step_3) as run:
        assert all(run.wait(timeout=30))
        assert "transformer.layers.1.mlp_norm.weight" in run.text(), run.text()
        assert not list(tmp_path.glob("step_*"))


def torchrun(words: str, save: Path, folder: Path, *launcher: str) -> subprocess.Popen[str]:
    """The program under torchrun on two ranks, once it has saved for the first time."""
    program = Path(__file__).parents[1] / "pretrain_gpt2.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *launcher]
    command += ["--nproc-per-node=2", str(program), *SHAPE.split(), *REST.split()]
    command += ["--data-path", str(some_data(folder)), *words.split()]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(save.glob("step_*")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return process


@pytest.mark.slow
def test_torchrun_restarts_into_a_clean_resume(folder: Path, tmp_path: Path) -> None:
    steps, more = 150, f"{DROPOUT} {SPLIT} --save-interval 2"
    train(flags(tmp_path / "calm", steps, more), folder, world=2)
    save = tmp_path / "restarted"
    process = torchrun(flags(save, steps, more), save, folder, "--max-restarts=2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children, "it was through before it could be killed"
    os.kill(int(children[0]), signal.SIGKILL)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "going on from" in text
    assert_equal_bits(newest(tmp_path / "calm"), newest(save))


@pytest.mark.slow
def test_a_script_can_stop_what_torchrun_started_and_read_that_it_should_go_on(
    folder: Path, tmp_path: Path
) -> None:
    """As docs/operations.md says: torchrun's own status is 1 in any case."""
    process = torchrun(flags(tmp_path, 100_000, f"{PLAIN} --save-interval 2"), tmp_path, folder)
    subprocess.run(["pkill", "-USR1", "-P", str(process.pid)], check=True)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["ended"], last["exit_code"]) == ("SIGUSR1", 75)
    assert newest(tmp_path).name == f"step_{last['step']:08d}"


def test_requeued_fine_tuning_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    pretrained, tuned = tmp_path / "pretrained", tmp_path / "tuned"
    train(flags(pretrained, 4, f"{PLAIN} --seed 7"), folder)
    words = f"--load {pretrained} --save {tuned} --finetune --train-iters 6 --save-interval 3"
    words += f" --eval-iters 0 --log-interval 1 --seed 8 {PLAIN}"
    text = train(words, folder)
    assert f"starting at step 0 from the weights of {pretrained / 'step_00000004'}" in text
    shutil.copytree(tuned, tmp_path / "calm")
    shutil.rmtree(tuned / "step_00000006")
    text = train(words, folder)
    assert f"going on from {tuned / 'step_00000003'}" in text
    assert "changed:" not in text
    assert_equal_bits(tuned / "step_00000006", tmp_path / "calm" / "step_00000006")
    steps = [line["step"] for line in read_metrics(tuned / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_other_data_needs_to_be_asked_for(folder: Path, tmp_path: Path) -> None:
    train(flags(tmp_path, 2, PLAIN), folder)
    text = train(flags(tmp_path, 4, f"{PLAIN} --seed 5"), folder, codes=(2,))
    assert "--seed is 5" in text
    assert "1234" in text
    assert "--override-data" in text
    text = train(flags(tmp_path, 4, f"{PLAIN} --seed 5 --override-data"), folder)
    assert "step 2, 8 samples consumed" in text
    assert "changed: --seed is 5 (was 1234)" in text
