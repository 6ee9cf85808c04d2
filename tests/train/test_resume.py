"""How a run starts: the same on every rank, whatever each of them sees."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import load
from megatron.checkpoint.resume import Start
from megatron.config.checks import UsageError
from megatron.train import state as state_module
from megatron.train.pretrain import ResumePoint, find_resume_point, resume
from megatron.train.state import TrainState, choose_precision, environment
from tests.config.test_checks import settings
from tests.dist import Pool
from tests.tiny import VOCABULARY, mesh_of_ranks, save_state, tiny_section, tiny_state

CONFIG = asdict(settings())  # trains to step 3
FACTS = {"config": CONFIG, "vocab_size": VOCABULARY, "tokenizer": "f", "data": []}


def fresh(**changes: Any) -> TrainState:
    return tiny_state(mesh_of_ranks(1), tiny_section(**changes), dtype=torch.float32)


def accept(*_: Any, **__: Any) -> None:
    pass


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("it does not fit")


def save(directory: Path, *steps: int, **facts: Any) -> tuple[Path, ...]:
    """Checkpoints of `fresh`, the last of `steps` first."""
    state = fresh()
    for state.step in steps:
        state.samples = 4 * state.step
        every = {**FACTS, "environment": environment(state.mesh), "run": "one"} | facts
        save_state(state, directory, **every)
    return tuple(directory / f"step_{step:08d}" for step in reversed(steps))


def start(
    state: TrainState, folders: tuple[Path, ...], finetune: bool = False, check: Any = accept
) -> tuple[ResumePoint | None, list[str]]:
    """(what the state starts from, messages), with another --lr than that of the checkpoints."""
    point = find_resume_point(Start(folders=folders, finetune=finetune), check, state.mesh)
    return point, resume(state, point, FACTS | {"config": asdict(settings(lr=3.0))})


def test_a_run_starts_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert start(fresh(), ())[0] is None
    newest, oldest = folders = save(tmp_path, 2, 4)
    state = fresh()
    point, messages = start(state, folders, finetune=True)
    assert (point.checkpoint.path, point.finetune, state.step) == (newest, True, 0)
    assert not any("--lr" in each for each in messages)

    (newest / "manifest.json").unlink()
    point, messages = start(state, folders)
    assert (point.checkpoint.path, point.checkpoint.manifest["run"]) == (oldest, "one")
    assert (state.step, state.samples) == (2, 8)
    passed_over, where, changed, *_ = messages
    assert str(newest / "manifest.json") in passed_over
    assert str(oldest) in where
    assert "--lr is 3.0 (was 0.00015)" in changed


def test_a_checkpoint_at_the_target_leaves_nothing_to_train(tmp_path: Path) -> None:
    for step, is_done in ((2, False), (3, True), (40, True)):
        _, messages = start(fresh(), save(tmp_path / str(step), step))
        assert any(f"--train-iters {2 * step}" in each for each in messages) == is_done


def start_from(lists: list[tuple[Path, ...]]) -> tuple[Path | None, int]:
    """lists: the folders that each rank finds."""
    state = fresh()
    point, _ = start(state, lists[state.mesh.control.rank])
    return point and point.checkpoint.path, state.step


def test_the_folders_that_the_first_rank_finds_hold_for_all(gloo: Pool, tmp_path: Path) -> None:
    newest, oldest = folders = save(tmp_path, 2, 4)
    for first, second, expected in (
        (folders, (oldest,), (newest, 4)),
        ((oldest,), folders, (oldest, 2)),
        (folders, (), (newest, 4)),
        ((), folders, (None, 0)),
    ):
        assert gloo.run(2, start_from, [first, second]) == [expected] * 2


def start_where_folders_differ(other: Path, folders: tuple[Path, ...]) -> tuple[Path, str, int]:
    """The second rank finds in `other` what the first finds beside the folders."""
    state = fresh()
    with pytest.MonkeyPatch.context() as patch:
        if state.mesh.control.rank == 1:
            read = load.read_checkpoint
            patch.setattr(load, "read_checkpoint", lambda path: read(other / path.name))
        point, _ = start(state, folders)
    return point.checkpoint.path, point.passed_over[0], state.step


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_not_the_same_to_all_ranks_is_passed_over_by_all(
    gloo: Pool, tmp_path: Path, is_there: bool
) -> None:
    newest, oldest = folders = save(tmp_path / "one", 2, 4)
    shutil.copytree(oldest, tmp_path / "other" / oldest.name)
    if is_there:
        save(tmp_path / "other", 4, run="two")
    ours, theirs = gloo.run(2, start_where_folders_differ, tmp_path / "other", folders)
    assert ours == theirs
    path, reason, step = ours
    assert (path, step) == (oldest, 2)
    assert newest.name in reason


def refusal(folders: tuple[Path, ...], fault: str, finetune: bool) -> str:
    """The error of each rank where the second one alone meets the fault."""
    state = fresh(num_layers=3 if fault == "larger model" else 2)
    is_broken = state.mesh.control.rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if fault == "unreadable" and is_broken:
            patch.setattr(load, "safe_open", refuse)
        check = refuse if fault == "another run" and is_broken else accept
        with pytest.raises(ValueError, match="fit|layers") as error:
            start(state, folders, finetune, check)
    return str(error.value)


@pytest.mark.parametrize("finetune", [False, True])
def test_what_one_rank_refuses_is_refused_by_all(
    gloo: Pool, tmp_path: Path, finetune: bool
) -> None:
    folders = save(tmp_path, 2)
    for fault in ("another run", "unreadable", "larger model"):
        first, second = gloo.run(2, refusal, folders, fault, finetune)
        assert first == second


def chosen(given: str | None, devices: list[str]) -> str:
    mesh = mesh_of_ranks(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "default_precision", lambda _: devices[mesh.control.rank])
        try:
            return choose_precision(given, mesh, "--bf16", "--no-bf16")
        except UsageError as error:
            return error.flag


def test_ranks_compute_in_one_precision_or_not_at_all(gloo: Pool) -> None:
    mixed = ["bf16", "fp32"]
    assert gloo.run(2, chosen, "fp16", mixed) == ["fp16"] * 2
    assert gloo.run(2, chosen, None, ["fp32"] * 2) == ["fp32"] * 2
    assert gloo.run(2, chosen, None, mixed) == ["--bf16"] * 2
