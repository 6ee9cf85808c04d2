"""The loop: batches in order, metrics, evaluation, checks, saving and exits."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.launch import Stopped, StopSignals
from megatron.config.training import PrecisionConfig, TrainingConfig
from megatron.parallel.mesh import Mesh
from megatron.train import loop as loop_module
from megatron.train.inputs import prefetch
from megatron.train.loop import Loop, train
from megatron.train.metrics import Metrics
from megatron.train.monitors import usual
from tests.dist import Pool
from tests.programs import finished
from tests.tiny import mesh_of_ranks, tiny_state
from tests.train.test_evaluate import Recorded, Split


class Saves:
    """In place of a Saver: remembers the steps, and whether the weights had been evaluated."""

    failed = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def save(self, state: Any, validation_loss: float | None) -> None:
        self.asked.append((state.step, validation_loss is not None))

    def reports(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def loop_of(
    metrics: Metrics, mesh: Mesh, settings: dict[str, Any], data: Any = None, **more: Any
) -> Loop:
    """A loop over the samples of tests.tiny in micro-batches of one; settings: of the training."""
    training = TrainingConfig(**settings)
    batches = prefetch(
        data or Split(),
        range(0, 4 * training.train_iters, 4),
        micro_batch_size=1,
        data_rank=mesh.batch.rank,
        data_size=mesh.batch.size,
    )
    parts: dict[str, Any] = {
        "learning_rate": lambda update: 1e-3,
        "evaluate": lambda state: 1.0,
        "save": Saves().save,
        "signals": StopSignals(),
        "facts": lambda state: {},
    }
    return Loop(training=training, batches=batches, metrics=metrics, **(parts | more))


def run(
    tensor_size: int,
    directory: Path,
    signal_at: tuple[int, int] | None = None,
    stops_at: int | None = None,
    precision: PrecisionConfig | None = None,
    **settings: Any,
) -> tuple[list[int], list[tuple[int, bool]], int, str]:
    """(samples read for training, saves, steps done, what ended it). signal_at: in this step one
    comes to this rank. stops_at: after this step one comes to the last rank while the others
    evaluate."""
    mesh = mesh_of_ranks(tensor_size)
    dtype = torch.float64 if precision is None else torch.float16
    state = tiny_state(mesh, precision=precision, dtype=dtype)
    data, saves, signals = Recorded(), Saves(), StopSignals()

    def learning_rate(update: int) -> float:
        if signal_at == (update, mesh.control.rank):
            signals.ask("SIGUSR1")
        return 1e-3 * update

    callbacks = usual("test", 2)
    with Metrics(directory / "m.jsonl", mesh, start=0, callbacks=callbacks) as metrics:

        def evaluate(state: Any) -> float:
            if state.step == stops_at:
                if mesh.control.rank == mesh.size() - 1:
                    signals.ask("SIGUSR1")
                raise Stopped
            metrics.write({"step": state.step, "validation_loss": 1.0})
            return 1.0

        loop = loop_of(
            metrics,
            mesh,
            {"train_iters": 6, "eval_interval": 4} | settings,
            data,
            learning_rate=learning_rate,
            evaluate=evaluate,
            save=saves.save,
            saver=saves,
            signals=signals,
            facts=lambda state: {"samples": state.samples},
            log_interval=2,
            save_interval=5,
            evaluate_first=stops_at == 0,
        )
        end = train(state, loop)
    return data.asked, saves.asked, state.step, end


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "m.jsonl").read_text().splitlines()]


def test_it_logs_evaluates_and_saves_at_its_intervals(tmp_path: Path) -> None:
    asked, saved, steps, end = run(1, tmp_path)
    assert (asked, steps, end) == (list(range(24)), 6, "train_iters")
    assert saved == [(5, False), (6, True)]
    steps_of = {
        key: [line["step"] for line in lines(tmp_path) if key in line]
        for key in ("loss", "validation_loss")
    }
    assert steps_of == {"loss": [2, 4, 6], "validation_loss": [4, 6]}
    first = lines(tmp_path)[0]
    keys = "step samples loss lr grad_norm tokens_per_second tokens_per_second_per_device"
    keys += " step_seconds data_wait_share elapsed_seconds seconds_left peak_memory_bytes"
    keys += " peak_memory_bytes_by_rank"
    keys += " median_seconds median_rank median_host median_phases"
    keys += " slowest_seconds slowest_rank slowest_host slowest_phases"
    assert set(keys.split()) == first.keys()
    assert (first["samples"], first["lr"]) == (8, pytest.approx(2e-3))


def test_it_leaves_when_told_to_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(1, tmp_path, exit_interval=3)[1:] == ([(3, True)], 3, "exit_interval")
    late = run(1, tmp_path, exit_duration_in_mins=1e-9)
    assert late[1:] == ([(1, True)], 1, "exit_duration_in_mins")
    monkeypatch.setattr(Saves, "failed", True)
    assert run(1, tmp_path)[1:] == late[1:]
    assert not [each for each in threading.enumerate() if each.name.startswith("prefetch")]


def test_a_signal_in_an_evaluation_saves(gloo: Pool, tmp_path: Path) -> None:
    for step, saves in ((0, []), (4, [(4, False)]), (6, [(5, False), (6, False)])):
        for answer in gloo.run(2, run, 1, tmp_path, None, step):
            assert answer[1:] == (saves, step, "SIGUSR1")


def test_a_signal_in_a_step_saves_and_in_the_last_one_changes_nothing(tmp_path: Path) -> None:
    """A signal to one rank of several: tests/test_faults.py."""
    assert run(1, tmp_path, (3, 0))[1:] == ([(3, False)], 3, "SIGUSR1")
    assert run(1, tmp_path, (6, 0))[1:] == ([(5, False), (6, True)], 6, "train_iters")


def test_replicas_are_compared_at_their_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for interval, expected in ((2, [2, 4, 5, 6]), (100, [5, 6]), (0, [])):
        checked: list[int] = []
        monkeypatch.setattr(
            loop_module, "check_replicas", lambda state, *_, seen=checked: seen.append(state.step)
        )
        run(1, tmp_path, check_replicas_interval=interval)
        assert checked == expected


def test_fp16_logs_scale_and_skipped_steps(tmp_path: Path) -> None:
    """The first overflows at so high a scale, and with hysteresis 1 each of them halves it."""
    config = PrecisionConfig(fp16=True, initial_loss_scale="2**40", hysteresis=1)
    run(1, tmp_path, precision=config)
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["skipped_steps"] for line in steps] == [2, 4, 6]
    assert [line["loss_scale"] for line in steps] == [2.0**38, 2.0**36, 2.0**34]
    assert [line["lr"] for line in steps] == pytest.approx([1e-3] * 3), "the schedule stands still"


def test_a_run_records_how_it_ended(tmp_path: Path) -> None:
    words = f"--train-iters 2 --exit-interval 1 --metrics-file {tmp_path}/m.jsonl"
    one, own = tmp_path / "saved", tmp_path / "own"
    says = {"": False, f"--save {one}": True, f"--save {own} --load {own}": False}
    for more, says_load in says.items():
        text = finished(f"{words} {more}", folder=tmp_path)
        assert ("--load" in text.splitlines()[-1]) == says_load
        assert lines(tmp_path)[-1] == {"step": 1, "ended": "exit_interval", "exit_code": 0}
