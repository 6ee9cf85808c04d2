"""Everything that can go wrong on a disk, while saving, after it, and in the writer's own process.

A save that fails leaves the former checkpoint, a name without a dot is whole, and every rank gets
the error (promises 5 and 19).
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest

from megatron.checkpoint.format import seal, step_folders
from megatron.checkpoint.load import newest_whole, verify
from tests.checkpoint.saving import (
    BOTH,
    SAVE_FILE,
    SHARD,
    contents,
    flip,
    fresh,
    load,
    names,
    save,
    save_steps,
    saver_into,
)
from tests.dist import Pool
from tests.files import before_calls, failing
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks

# Every call that a save makes on the file system, and of which file.
CALLS = {
    "remove what killed saves left": ("pathlib.Path.glob", ""),
    "make the folder": ("pathlib.Path.mkdir", ".partial"),
    "write the tensors": (SAVE_FILE, SHARD),
    "let others read them": ("pathlib.Path.chmod", SHARD),
    "hash them": ("hashlib.file_digest", ""),
    "flush": ("os.fsync", ""),
    "write the manifest": ("pathlib.Path.replace", "manifest.json"),
    "write latest": ("pathlib.Path.open", "latest"),
    "set aside": ("pathlib.Path.rename", ".abandoned"),
    "rename": ("pathlib.Path.rename", ".partial"),
}


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_a_failed_save_leaves_the_former_one(tmp_path: Path, name: str, asynchronous: bool) -> None:
    state, (call, of) = fresh(), CALLS[name]
    save_steps(saver_into(tmp_path, state), state, [1, 2])
    before = names(tmp_path), contents(tmp_path / "step_00000001")
    saver = saver_into(tmp_path, state, asynchronous=asynchronous, start_step=1)
    with failing(call, of=of):
        error = refusal(lambda: save_steps(saver, state, [3]))
    assert "rank data 0, tensor 0: " in str(error)
    if name != "rename":  # which comes when checkpoints have been set aside
        assert names(tmp_path) == before[0]
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert contents(tmp_path / "step_00000001") == before[1]
    (report,) = save_steps(saver, state, [3])  # and what it did not set aside, this one does
    kept = ["latest", "step_00000001", "step_00000002.abandoned", "step_00000003"]
    assert names(tmp_path) == kept
    assert len(report.notes) == (name != "rename")
    load(state, report.path)


@pytest.mark.parametrize("number", range(4))
def test_a_kill_between_renames_leaves_a_checkpoint(tmp_path: Path, number: int) -> None:
    """While step 1 is saved again: former one aside, new one in; `latest`."""
    state, calls = fresh(), count()
    saver = saver_into(tmp_path, state)
    save_steps(saver, state, [1])

    def die(_: str, given: Sequence[Path]) -> None:
        if given[0].suffix != ".part" and next(calls) == number:
            raise KeyboardInterrupt

    killed = pytest.raises(KeyboardInterrupt) if number < 3 else nullcontext()
    with killed, before_calls(die, "pathlib.Path.rename", "pathlib.Path.replace"):
        save_steps(saver, state, [1])
    former = "step_00000001" if number == 0 else "step_00000001.abandoned"
    load(state, tmp_path / former)
    there = {former} | ({"step_00000001"} if number > 1 else set())
    assert {path.name for path in tmp_path.glob("*step_*")} == there
    save_steps(saver, state, [2])
    assert not list(tmp_path.glob("latest.*"))
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


def fail_on_rank_1(directory: Path, asynchronous: bool) -> str:
    state = fresh(2)
    saver = saver_into(directory, state, asynchronous=asynchronous)
    save_steps(saver, state, [1])
    with failing(SAVE_FILE) if state.mesh.control.rank == 1 else nullcontext():
        return str(refusal(lambda: save_steps(saver, state, [2])))


@BOTH
def test_a_failed_rank_fails_all(gloo: Pool, tmp_path: Path, asynchronous: bool) -> None:
    for message in gloo.run(2, fail_on_rank_1, tmp_path, asynchronous):
        assert all(each in message for each in ("data 0, tensor 1", "shard_00001.safetensors"))
    assert names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize(("asynchronous", "attached"), [(True, False), (False, True)])
def test_a_full_disk_is_named(small_disk: Path, asynchronous: bool, attached: bool) -> None:
    small, large = fresh(num_layers=1, hidden_size=8), fresh(hidden_size=96, num_layers=4)
    save_steps(saver_into(small_disk, small), small, [1])
    before = contents(small_disk / "step_00000001")
    needed = sum(each.spec.real(each.local).nbytes for each in large.slices())
    extra, state, file = {}, large, SHARD
    if attached:
        extra, state, file = {"vocab.json": b"x" * 2_000_000}, small, "vocab.json"
        needed = 2_000_000
    saver = saver_into(small_disk, state, asynchronous=asynchronous, start_step=1, attached=extra)
    refusal(lambda: save_steps(saver, state, [2]), file, f"{needed:,}")
    assert names(small_disk) == ["latest", "step_00000001"]
    assert contents(small_disk / "step_00000001") == before
    save_steps(saver_into(small_disk, small, start_step=1), small, [3])  # this one has room
    load(small, small_disk / "step_00000003")


def test_a_save_removes_what_killed_ones_left(tmp_path: Path) -> None:
    """Kill -9 while one writes is tested in tests/test_faults.py, in whole runs."""
    state = fresh()
    save_steps(saver_into(tmp_path, state), state, [1])
    for folder in (".step_00000002.partial", ".step_00000007.removed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / SHARD).write_bytes(b"half")
    for file in ("latest.tmp123", ".claim-123"):
        (tmp_path / file).touch()
    assert step_folders(tmp_path) == [tmp_path / "step_00000001"]
    save_steps(saver_into(tmp_path, state, start_step=1), state, [2])
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    load(state, tmp_path / "step_00000002")


def save_and_fail(directory: Path) -> None:
    state = fresh()
    with saver_into(directory, state, asynchronous=True) as saver:
        save(saver, state)
        raise ZeroDivisionError


def test_error_in_training_waits_for_the_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        save_and_fail(tmp_path / "a")
    assert names(tmp_path / "a") == ["latest", "step_00000000"]
    with failing(SAVE_FILE), pytest.raises(ZeroDivisionError) as caught:
        save_and_fail(tmp_path / "b")
    assert any(SHARD in note for note in caught.value.__notes__)
    assert names(tmp_path / "b") == []
    is_short, ends = patch("megatron.checkpoint.save.GRACE", 0.01), Event()
    with is_short, before_calls(lambda *_: ends.wait(10), SAVE_FILE):
        with pytest.raises(ZeroDivisionError) as caught:
            save_and_fail(tmp_path / "c")
        ends.set()
    assert caught.value.__notes__ == ["the save that was being written was given up"]


def test_a_failed_save_is_seen_before_it_is_raised(tmp_path: Path) -> None:
    state = fresh()
    saver = saver_into(tmp_path, state, asynchronous=True)
    assert not saver.failed
    with failing(SAVE_FILE):
        save(saver, state)
        while not saver.failed:
            time.sleep(0.01)
    assert SHARD in str(refusal(saver.reports))
    assert not saver.failed
    saver.close()


MANIFEST = "manifest.json"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def repeat_slices(manifest: Path, times: int) -> None:
    """Another number of slices, in a manifest that is sealed none the less."""
    content = json.loads(manifest.read_text())
    content["tensors"]["model.final_norm.bias"]["slices"] *= times
    manifest.write_text(json.dumps(seal(content)))


# Damage to a file after it was saved: the error names the file.
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "short shard": (SHARD, cut),
    "flipped header": (SHARD, lambda file: flip(file, 20)),
    "flipped byte": (SHARD, lambda file: flip(file, 40_000)),
    "flipped last byte": (SHARD, flip),
    "no shard": (SHARD, Path.unlink),
    "unreadable shard": (SHARD, replace_by_folder),
    "flipped tokenizer": ("vocab.json", lambda file: flip(file, 0)),
    "short manifest": (MANIFEST, cut),
    "no manifest": (MANIFEST, Path.unlink),
    "hole": (MANIFEST, lambda file: repeat_slices(file, 0)),
    "overlap": (MANIFEST, lambda file: repeat_slices(file, 2)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints of `fresh`."""
    directory, state = tmp_path_factory.mktemp("saved"), fresh()
    save_steps(saver_into(directory, state, attached={"vocab.json": b"{}"}), state, [1, 2])
    return directory


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """The later of the two, in a copy."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True) / "step_00000002"


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named_and_passed_over(path: Path, damage: str) -> None:
    mesh, (name, spoil) = mesh_of_ranks(1), DAMAGE[damage]
    assert verify(path, mesh).path == path
    spoil(path / name)
    error = refusal(lambda: verify(path, mesh), field=str(path / name))
    newest, passed_over = newest_whole(step_folders(path.parent), mesh, any_loop=True)
    assert (newest.path.name, newest.manifest["counters"]["step"]) == ("step_00000001", 1)
    assert passed_over == [str(error)]
    spoil(newest.path / name)
    find = partial(newest_whole, step_folders(path.parent), mesh, "--from", any_loop=True)
    refusal(find, str(path), str(newest.path), field="--from", lines=9)


def newest_of(path: Path) -> str:
    """Each rank has another order of the folders."""
    mesh, folders = mesh_of_ranks(2), step_folders(path.parent)
    ordered = folders if mesh.is_first else folders[::-1]
    return newest_whole(ordered, mesh, any_loop=True)[0].path.name


def test_the_folders_of_the_first_rank_are_looked_at(gloo: Pool, path: Path) -> None:
    assert gloo.run(2, newest_of, path) == [path.name] * 2


def damage_found(path: Path) -> str:
    return str(refusal(lambda: verify(path, mesh_of_ranks(2))))


def test_damage_that_one_rank_finds_is_known_to_all(gloo: Pool, path: Path) -> None:
    flip(path / SHARD)
    answers = gloo.run(4, damage_found, path)
    assert answers == [answers[0]] * 4
    assert str(path / SHARD) in answers[0]


def test_another_model_is_refused(saved: Path) -> None:
    path = saved / "step_00000002"
    for changes, named in (
        ({"hidden_size": 64}, ("[101, 32]", "[101, 64]", "word_embedding.weight")),
        ({"num_layers": 3}, ("model.transformer.layers.2",)),
    ):
        refusal(lambda changes=changes: load(fresh(**changes), path), *named)
