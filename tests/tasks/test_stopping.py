"""Seeds of a fine-tuned task that a signal stops: what is said, kept, and done with it later."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.checkpoints import step_folders
from megatron.train.loader import shard
from megatron.train.metrics import read_metrics
from tasks import seeds as seeds_of
from tasks.main import main
from tests.tasks.program import TASK, Capture, evaluating, result, told


def stop(
    words: list[str],
    number: signal.Signals,
    at: tuple[int, int],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, str]:
    """(the status, stderr) of a run that the signal reaches; at: (seed, epoch from 0)."""
    train_epoch = seeds_of.train_epoch

    def stopped(state: Any, course: Any, epoch: int, tell: Any) -> float:
        if (course.seed, epoch) == at:
            signal.raise_signal(number)
        return train_epoch(state, course, epoch, tell)

    capsys.readouterr()
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(seeds_of, "train_epoch", stopped)
        with pytest.raises(SystemExit) as ended:
            main(["--task", TASK, *words], {})
    assert signal.getsignal(number) is before
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_a_stopped_seed_is_told_of_when_it_stops_is_loaded_and_begins_anew(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "save"
    words = [*words, "--epochs", "3", "--seeds", "2", "--save", str(save)]
    status, error = stop(words, signal.SIGTERM, (1235, 1), capsys, monkeypatch)
    assert status == 75
    assert error.splitlines()[-1] == (
        "seed 1235 stopped in epoch 2: the same command begins it anew; finished: 1234"
    )
    seed = save / "seed_1235"
    assert read_metrics(seed / "metrics.jsonl")[-1]["exit_code"] == 75
    (step,) = step_folders(seed)
    for flag in ("--load", "--ensemble"):
        line = told([flag, str(seed), *evaluating(save)], capsys)[-1]
        assert line == (
            f"warning: {flag} {seed}: seed 1235 is not finished, and this is its epoch 1 of 3; its "
            f"command, repeated, finishes it, and {flag} {step} takes that epoch as it is"
        )
    assert told(["--load", str(step), *evaluating(save)], capsys) == []
    assert told(["--load", str(save / "seed_1234"), *evaluating(save)], capsys) == []
    main(["--task", TASK, *words], {})
    error = capsys.readouterr().err
    assert f"seed 1234 is finished in {save / 'seed_1234'}" in error
    assert f"{seed}: this seed was interrupted and begins anew" in error
    assert told(["--load", str(seed), *evaluating(save)], capsys) == []


def test_without_save_a_stopped_run_keeps_nothing(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, error = stop(words, signal.SIGINT, (1234, 0), capsys, monkeypatch)
    assert status == 130
    assert error.splitlines()[-1] == "seed 1234 stopped in epoch 1: without --save nothing is kept"


def test_an_ensemble_of_one_model_is_told(tuned: tuple[Path, Any], capsys: Capture) -> None:
    save, _ = tuned
    (line,) = told(["--ensemble", str(save / "seed_1234"), *evaluating(save)], capsys)
    assert "is a single model, whose figures --load would give" in line


def test_logs_have_no_bar_and_speed_as_pretraining_tells_it(
    words: list[str], capsys: Capture
) -> None:
    result(words, capsys)
    main(["--task", TASK, *words], {})
    error = capsys.readouterr().err
    assert " tokens/s | " in error
    assert "tokens_per_second" not in error
    assert "%|" not in error


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_for_a_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    mesh: Any = SimpleNamespace(is_first=True, data=SimpleNamespace(rank=0, size=1))
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    assert list(shard([1, 3, 2], 2, mesh, "some")) == [[1, 2], [0]]
    assert ("some: 100%" in capsys.readouterr().err) == is_terminal


@pytest.mark.parametrize(
    ("task", "pieces"),
    [
        ("MNLI", ["gold_label", "dev_matched.tsv: matched_accuracy", "text_a"]),
        ("QQP", ["is_duplicate", "a.tsv: a_accuracy", "text_a"]),
        ("RACE", ["middle/", "middle_accuracy", '"article"']),
        ("SQUAD", ["train-v1.1.json", "exact_match", '"paragraphs"']),
    ],
)
def test_the_help_of_a_task_has_the_formats_of_its_files(
    task: str, pieces: list[str], capsys: Capture
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--task", task, "--help"], {})
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for piece in pieces:
        assert piece in words
