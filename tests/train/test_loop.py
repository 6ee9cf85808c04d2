"""The loop: batches in order, metrics, evaluation, saving and exits."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config import TrainingConfig
from megatron.train.launch import launch
from megatron.train.loop import Loop, train
from megatron.train.metrics import Metrics
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, tiny_state
from tests.train.test_evaluate import Split


class Recorded(Split):
    """Remembers what was asked for; training reads on without end."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, numbers: range) -> Any:
        self.asked += numbers
        return super().batch(numbers)


def run(tensor_size: int, directory: Path, **settings: Any) -> tuple[list[int], list[int], int]:
    """(samples read for training, steps at which it was saved, steps done)."""
    mesh = mesh_of_ranks(tensor_size)
    state = tiny_state(mesh)
    data, saved = Recorded(), []
    with Metrics(directory / "m.jsonl", is_first=mesh.is_first, start=0, steps=6) as metrics:
        loop = Loop(
            training=TrainingConfig(
                **{"train_iters": 6, "log_interval": 2, "eval_interval": 4, "eval_iters": 1}
                | settings
            ),
            global_batch_size=4,
            learning_rate=lambda step: 1e-3 * step,
            train_data=data,
            validation_data=Split(),
            metrics=metrics,
            save=lambda: saved.append(state.step),
            save_interval=5,
        )
        train(state, loop)
    return data.asked, saved, state.step


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "m.jsonl").read_text().splitlines()]


def test_it_logs_evaluates_and_saves_at_its_intervals(tmp_path: Path) -> None:
    asked, saved, steps = run(1, tmp_path)
    assert (asked, saved, steps) == (list(range(24)), [5, 6], 6)
    steps_of = {
        key: [line["step"] for line in lines(tmp_path) if key in line]
        for key in ("loss", "validation_loss")
    }
    assert steps_of == {"loss": [2, 4, 6], "validation_loss": [4, 6]}
    first = lines(tmp_path)[0]
    keys = {"step", "samples", "loss", "lr", "grad_norm", "tokens_per_second", "elapsed_seconds"}
    assert keys <= first.keys()
    assert (first["samples"], first["lr"]) == (8, pytest.approx(2e-3))


def test_layouts_read_the_same_samples_and_write_the_same_numbers(
    gloo: Pool, tmp_path: Path
) -> None:
    run(1, tmp_path)
    expected = lines(tmp_path)
    for world, tensor_size in ((2, 2), (2, 1)):
        directory = tmp_path / f"{world}-{tensor_size}"
        directory.mkdir()
        ranks = gloo.run(world, run, tensor_size, directory)
        read = sorted({sample for asked, _, _ in ranks for sample in asked})
        assert read == list(range(24))
        assert len(ranks[0][0]) == 24 // (world // tensor_size)
        for line, wanted in zip(lines(directory), expected, strict=True):
            assert line.keys() == wanted.keys()
            for key in {"loss", "grad_norm", "validation_loss"} & line.keys():
                assert line[key] == pytest.approx(wanted[key], rel=1e-10)


def test_it_leaves_when_told_to_and_saves(tmp_path: Path) -> None:
    assert run(1, tmp_path, exit_interval=3)[1:] == ([3], 3)
    assert run(1, tmp_path, exit_duration_in_mins=1e-9)[1:] == ([1], 1)


def test_one_process_needs_no_launcher_and_several_are_asked_for() -> None:
    with launch(1, {}) as mesh:
        assert mesh.size == 1
    with (
        pytest.raises(ValueError, match="-parallel-size 2.*torchrun --nproc-per-node 2"),
        launch(2, {}),
    ):
        pass
