"""Which checkpoints are kept: the newest that can be read back, and the best."""

from pathlib import Path

import pytest

from megatron.config.checkpoints import step_folders
from megatron.train import checkpoint as checkpoint_module
from megatron.train import folder, retention
from megatron.train.retention import surplus_of
from megatron.train.saver import SaveReport
from tests.dist import Pool
from tests.train.saving import BOTH, fail, flip, fresh, names, save_steps, saver_into


def save_and_keep(tensor_size: int, directory: Path, asynchronous: bool) -> list[SaveReport]:
    state = fresh(tensor_size)
    saver = saver_into(directory, state, asynchronous=asynchronous, keep=2)
    return save_steps(saver, state, [1, 2, 3, 4, 5], {1: 3.0, 2: 1.5, 4: 2.0})


@BOTH
def test_the_newest_and_the_best_are_kept(gloo: Pool, tmp_path: Path, asynchronous: bool) -> None:
    reports, others = gloo.run(2, save_and_keep, 2, tmp_path, asynchronous)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000004", "step_00000005"]
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
    removed = [report.removed for report in reports]
    assert removed == [(), (), ("step_00000001",), (), ("step_00000003",)]
    assert removed == [report.removed for report in others]


def test_a_damaged_checkpoint_is_kept_told_and_does_not_count(tmp_path: Path) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1, 2, 3])
    shard = tmp_path / "step_00000002" / "shard_00000.safetensors"
    flip(shard)
    # Another process, which has not yet read any of them back.
    saver = saver_into(tmp_path, state, keep=2, start_step=3)
    first, second = save_steps(saver, state, [4, 5])
    assert any(str(shard) in note and "kept" in note for note in first.notes)
    assert first.removed == ("step_00000001",)  # 3 and 4 are whole
    assert (second.notes, second.removed) == ((), ("step_00000003",))
    assert {path.name for path in step_folders(tmp_path)} == {
        "step_00000002",
        "step_00000004",
        "step_00000005",
    }


def test_nothing_is_removed_before_as_many_newer_ones_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()
    saver = saver_into(tmp_path, state, keep=2)
    save_steps(saver, state, [1, 2])
    set_aside = checkpoint_module.set_aside

    def damage_and_set_aside(final: Path, step: int | None) -> tuple[str, ...]:
        flip(final.with_name(f".{final.name}.partial") / "shard_00000.safetensors")
        return set_aside(final, step)

    monkeypatch.setattr(checkpoint_module, "set_aside", damage_and_set_aside)
    reports = save_steps(saver, state, [3, 4])
    assert [report.removed for report in reports] == [(), ()]
    assert [len(report.notes) for report in reports] == [1, 1]
    assert len(step_folders(tmp_path)) == 4


def test_what_is_no_step_folder_is_never_removed(tmp_path: Path) -> None:
    for name in ("step_1", "step_00000001.abandoned", "step_00000001.bak", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000002").write_text("a file")
    before = names(tmp_path)
    state = fresh()
    save_steps(saver_into(tmp_path, state, keep=2), state, [3, 4, 5, 6])
    assert names(tmp_path) == sorted([*before, "latest", "step_00000005", "step_00000006"])


def test_one_that_cannot_be_removed_is_told_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fresh()

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is not yours")

    monkeypatch.setattr(folder.shutil, "rmtree", refuse)
    *_, third, fourth = save_steps(saver_into(tmp_path, state, keep=2), state, [1, 2, 3, 4])
    assert (third.removed, fourth.removed) == ((), ())
    assert "step_00000001 is not removed" in third.notes[0]
    assert ".step_00000001.removed, of a former save, is not removed" in fourth.notes[0]


def test_checkpoints_of_another_run_are_kept_and_told_once(tmp_path: Path) -> None:
    state = fresh()
    save_steps(saver_into(tmp_path, state, run="other"), state, [1, 2])
    saver = saver_into(tmp_path, state, keep=2, start_step=2)
    reports = save_steps(saver, state, [3, 4, 5, 6])
    assert [len(report.notes) for report in reports] == [2, 0, 0, 0]
    assert f"{tmp_path / 'step_00000002'} is of another run; it is kept" in reports[0].notes[0]
    removed = [report.removed for report in reports]
    assert removed == [(), (), ("step_00000003",), ("step_00000004",)]


def save_twice_where_rank_0_fails(directory: Path, broken: str) -> list[SaveReport]:
    state = fresh(2)
    saver = saver_into(directory, state, keep=2)
    working = getattr(retention, broken)
    if state.mesh.is_first:
        setattr(retention, broken, fail)
    try:
        return save_steps(saver, state, [1, 2])
    finally:
        setattr(retention, broken, working)


@pytest.mark.parametrize("broken", ["step_folders", "read_manifest"])
def test_what_fails_after_a_save_is_told_and_ends_no_run(
    gloo: Pool, tmp_path: Path, broken: str
) -> None:
    ours, theirs = gloo.run(2, save_twice_where_rank_0_fails, tmp_path, broken)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.notes == other.notes
        assert "no luck" in mine.notes[0]
        assert mine.removed == other.removed == ()
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_the_surplus_is_neither_new_nor_best() -> None:
    whole = [("e", 3.0), ("d", None), ("c", 1.0), ("b", 1.0), ("a", None)]
    assert surplus_of(whole, 2) == ["b", "a"]
    assert surplus_of(whole, 5) == []
    assert surplus_of([("b", None), ("a", None)], 1) == ["a"]
