"""Checkpoints in shared memory: what is lost with a process, a host or a bit, and what is found.

Each "host" is a folder, in which its ranks find their shared memory. Whole runs are at the end.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import nan
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.checkpoint import memory
from megatron.checkpoint.format import read_manifest, step_folders
from megatron.checkpoint.load import verify
from megatron.checkpoint.memory import ID_FILE, MemoryCheckpoints, recover
from megatron.checkpoint.save import own_slices, save_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import UsageError
from megatron.train.monitors import MemorySaves
from megatron.train.state import TrainState
from tests.checkpoint.saving import SAVE_FILE, contents, flip, fresh, names, train
from tests.dist import Pool, on_ranks
from tests.files import before_calls, cut_off, failing
from tests.programs import assert_equal_bits, finished, lines_of, newest, pretrain
from tests.refusals import refusal
from tests.test_faults import DROPOUT, PLAIN, SPLIT, at_call, die, flags, flip_in_step_3
from tests.tiny import assert_exact, tensors

FILES = {"vocab.json": b"{}", "merges.txt": b""}
TWO_HOSTS = ("host_0", "host_0", "host_1", "host_1")  # of the ranks


@contextmanager
def shared_memory(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "SHARED_MEMORY", folder)
        yield


def facts_of(state: TrainState) -> dict[str, Any]:
    """Those of a rank: each draws an id of the run, and that of the first rank counts."""
    return {**state.facts(), "kind": "gpt2", "run": f"of rank {state.mesh.control.rank}"}


def begin(save: Path, state: TrainState) -> MemoryCheckpoints:
    config = CheckpointConfig(save=str(save), load=str(save), memory_checkpoint_interval=1)
    return MemoryCheckpoints.begin(config, state.slices(), state.mesh)


def keep(base: Path, hosts: Sequence[str], tensor_size: int, steps: int) -> None:
    """Train, keep each step in memory, and save it on disk under "calm"."""
    state = fresh(tensor_size, zero_stage=1)
    save = base / "save"
    with shared_memory(base / hosts[state.mesh.control.rank]):
        kept = begin(save, state)
        for _ in range(steps):
            train(state)
            kept.save(state.step, state.slices(), facts_of(state), FILES)
            arguments = state.step, state.slices(), facts_of(state), state.mesh, FILES
            save_checkpoint(base / "calm", *arguments)


def start(
    base: Path, hosts: Sequence[str], more: str = "", name: str = "save"
) -> tuple[list[str], int]:
    """The messages of a start, and the step that it loads; -1 for none."""
    save, state = base / name, fresh(len(hosts) if len(hosts) < 3 else 1)
    config = CheckpointConfig(save=str(save), load=f"{save}{more}", memory_checkpoint_interval=1)
    with shared_memory(base / hosts[state.mesh.control.rank]):
        lines = recover(config, state.mesh)
    found = step_folders(save)
    if found:
        state.load(verify(found[0], state.mesh))
    return [line.replace(str(base), "") for line in lines], state.step if found else -1


def steps_in(host: Path) -> list[Path]:
    """The folders of steps in the memory of a host, the newest first."""
    (folder,) = host.glob("megatron-*")
    return step_folders(folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, gloo: Pool) -> tuple[Path, Path]:
    """(a folder, its content after four ranks on two hosts have kept steps 1 to 3)."""
    base = tmp_path_factory.mktemp("memory") / "base"
    (base / "save").mkdir(parents=True)
    gloo.run(4, keep, base, TWO_HOSTS, 2, 3)
    return base, shutil.copytree(base, base.with_name("template"))


@pytest.fixture
def base(kept: tuple[Path, Path]) -> Path:
    place, template = kept
    shutil.rmtree(place)
    return shutil.copytree(template, place)


def lose(*hosts: str) -> Callable[[Path], None]:
    def act(base: Path) -> None:
        for host in hosts:
            shutil.rmtree(base / host)

    return act


def spoil(file: str, *places: tuple[str, int], act: Callable[[Path], object] = flip) -> Any:
    """Damage a file of (host, 0 for the newest step or 1 for the one before)."""

    def spoil_all(base: Path) -> None:
        for host, number in places:
            act(steps_in(base / host)[number] / file)

    return spoil_all


def unfinished(base: Path) -> None:
    """Host 1 was killed before its rename: neither host has its files of step 3."""
    step = steps_in(base / "host_1")[0]
    step.rename(step.with_name(f".{step.name}.partial"))
    for name in ("shard_00002.safetensors", "shard_00003.safetensors"):
        (steps_in(base / "host_0")[0] / name).unlink()


def damaged_on_disk(base: Path) -> None:
    """The newest step, too."""
    saved = shutil.copytree(base / "calm" / "step_00000003", base / "save" / "step_00000003")
    flip(saved / SHARD)


BOTH_HOSTS, SHARD = ("host_0", "host_1"), "shard_00002.safetensors"  # of a rank of host 1
EVERY = [(host, number) for host in BOTH_HOSTS for number in (0, 1)]
NEWEST = EVERY[::2]

# A change to the memory, the step from which the run starts, and a part of a line that says so.
LOSSES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "nothing": (lambda base: None, 3, "/save/step_00000003"),
    "the first host": (lose("host_0"), 3, "save/step_00000003"),
    "the second host": (lose("host_1"), 3, "save/step_00000003"),
    "both hosts": (lose(*BOTH_HOSTS), -1, "these hosts"),
    "one copy of a shard": (spoil(SHARD, NEWEST[0]), 3, SHARD),
    "the other copy": (spoil(SHARD, NEWEST[1]), 3, SHARD),
    "both copies": (spoil(SHARD, *NEWEST), 2, SHARD),
    "both copies of all steps": (spoil(SHARD, *EVERY), -1, SHARD),
    "a manifest": (spoil("manifest.json", NEWEST[0]), 3, "manifest.json"),
    "both manifests": (spoil("manifest.json", *NEWEST), 2, "manifest.json"),
    "both files of the tokenizer": (spoil("vocab.json", *NEWEST, act=Path.unlink), 2, "vocab.json"),
    "a save that was not finished": (unfinished, 2, SHARD),
    # As a run that went on without these hosts leaves it.
    "newer on disk": (
        lambda base: shutil.copytree(base / "calm" / "step_00000003", base / "save/step_00000004"),
        3,
        "",
    ),
    "the same step on disk": (damaged_on_disk, 3, SHARD),
    "SAVE begun anew": (lambda base: shutil.rmtree(base / "save"), -1, ""),
    "another run": (lambda base: (base / "save" / ID_FILE).write_text("0" * 32), -1, "these hosts"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_newest_whole_step_is_found(gloo: Pool, base: Path, loss: str) -> None:
    act, step, named = LOSSES[loss]
    act(base)
    (base / "save").mkdir(exist_ok=True)
    # Two ranks, where four have saved.
    answers = gloo.run(2, start, base, BOTH_HOSTS)
    assert answers == [answers[0]] * 2
    lines, found = answers[0]
    assert found == step, lines
    assert (named in "\n".join(lines)) if named else not lines
    if step > 0 and loss != "newer on disk":
        ours, calm = (base / name / f"step_{step:08d}" for name in ("save", "calm"))
        ours_all, calm_all = contents(ours), contents(calm)
        del ours_all["manifest.json"], calm_all["manifest.json"]
        assert ours_all == calm_all
        assert (base / "save" / "latest").read_text() == f"{ours.name}\n"
    assert not [name for name in names(base / "save") if name.startswith(".") or name == ID_FILE]
    left = [folder for host in BOTH_HOSTS for folder in (base / host).glob("megatron-*")]
    assert not left or loss in ("SAVE begun anew", "another run")


@pytest.mark.parametrize("way", ["", "/../link"])
def test_going_back_on_purpose_leaves_memory_out(base: Path, way: str) -> None:
    shutil.copytree(base / "calm" / "step_00000001", base / "save" / "step_00000001")
    (base / "link").symlink_to("save")
    assert start(base, ["host_0"], f"{way}/step_00000001") == ([], 1)


def test_a_copy_of_the_folder_is_another_run(base: Path) -> None:
    shutil.copytree(base / "save", base / "copy")
    assert start(base, ["host_0"], name="copy")[1] == -1
    assert start(base, ["host_0"])[1] == 3


@pytest.mark.parametrize("hosts", ["012", "001"])
def test_one_host_of_three_ranks_may_be_lost(gloo: Pool, tmp_path: Path, hosts: str) -> None:
    """Each of three hosts holds the files of two; together they have one manifest."""
    place, template = tmp_path / "base", tmp_path / "template"
    names_of_hosts = [f"host_{number}" for number in hosts]
    (place / "save").mkdir(parents=True)
    gloo.run(3, keep, place, names_of_hosts, 1, 1)
    place.rename(template)
    for lost in ("", *{*names_of_hosts}):
        shutil.copytree(template, place)  # whose path is part of the name of the memory
        if lost:
            shutil.rmtree(place / lost)
        for _, step in gloo.run(3, start, place, names_of_hosts):
            assert step == 1, lost
        assert read_manifest(place / "save" / "step_00000001")["run"] == "of rank 0"
        shutil.rmtree(place)


@pytest.mark.parametrize("loads", [True, False])
def test_a_start_without_the_flag_uses_the_memory_up(base: Path, loads: bool) -> None:
    """Otherwise a later start with it would go back to a branch that the run has left. One that
    loads nothing removes the memory."""
    save = str(base / "save")
    config = CheckpointConfig(save=save, load=save if loads else None)
    with shared_memory(base / "host_0"):
        assert bool(recover(config, fresh(1).mesh)) == loads
        assert not list((base / "host_0").iterdir())
    assert names(base / "save") == ["latest", "step_00000003"] * loads


def test_a_damaged_step_on_disk_does_not_count(base: Path) -> None:
    """It has the step of memory, or a later one."""
    for name in ("step_00000003", "step_00000004"):
        shutil.copytree(base / "calm" / "step_00000003", base / "save" / name)
        flip(base / "save" / name / SHARD)
    config = CheckpointConfig(save=str(base / "save"), load=str(base / "save"))
    flushed = list[Path]()

    def note(_: str, given: Sequence[int]) -> None:
        flushed.append(Path(f"/proc/self/fd/{given[0]}").readlink())

    with shared_memory(base / "host_0"), before_calls(note, "os.fsync"):
        lines = recover(config, fresh(1).mesh)
    assert base / "save" / ".step_00000003.partial" / SHARD in flushed
    assert "step 3 was in memory" in "\n".join(lines)
    assert [str(base / "save") in line for line in lines if "passed over" in line] == [True] * 2
    assert_equal_bits(base / "save" / "step_00000003", base / "calm" / "step_00000003")
    assert (base / "save" / "step_00000003.abandoned").is_dir()


@on_ranks(2)
def test_a_copy_that_fails_leaves_the_step_before(tmp_path: Path) -> None:
    """Two steps on two hosts; the copy of the second to the partner fails on one of them."""
    state = fresh(1)
    host = tmp_path / f"host_{state.mesh.control.rank}"
    with shared_memory(host):
        kept = begin(tmp_path / "save", state)
        for number in range(2):
            train(state)
            fails = number and state.mesh.control.rank == 1
            with suppress(OSError), failing("os.posix_fallocate") if fails else nullcontext():
                kept.save(state.step, state.slices(), facts_of(state), FILES)
    assert [step.name for step in steps_in(host)] == ["step_00000001"]


FILE_CALLS = [
    *(f"pathlib.Path.{name}" for name in ("mkdir", "glob", "rename", "replace", "chmod", "unlink")),
    *("os.fsync", "shutil.rmtree", SAVE_FILE, "megatron.checkpoint.memory.copyfile"),
]


@pytest.mark.parametrize("phase", ["keep", "write"])
def test_a_kill_at_any_call_leaves_a_step(tmp_path: Path, phase: str) -> None:
    """While a third step is kept, and while the next start writes it to disk."""
    base, state = tmp_path / "base", fresh(1)
    save = str(base / "save")
    (base / "save").mkdir(parents=True)
    config = CheckpointConfig(save=save, load=save, memory_checkpoint_interval=1)

    def keep_step() -> None:
        kept.save(state.step, state.slices(), facts_of(state), {})

    with shared_memory(base / "host"):
        kept = begin(base / "save", state)
        for _ in range(2):
            train(state)
            keep_step()
        former = shutil.copytree(steps_in(base / "host")[0], tmp_path / "step_00000002")
        train(state)
        if phase == "write":
            keep_step()
        shutil.copytree(base, tmp_path / "template")
        for number in count():
            shutil.rmtree(base)
            shutil.copytree(tmp_path / "template", base)
            with cut_off(number, *FILE_CALLS) as lost:
                keep_step() if phase == "keep" else recover(config, state.mesh)
            recover(config, state.mesh)
            (found,) = step_folders(base / "save")
            if found.name == former.name:
                assert phase == "keep"
                assert lost
                assert_equal_bits(found, former)
            else:
                assert found.name == "step_00000003"
                again = fresh(1)
                again.load(verify(found, again.mesh))
                assert_exact(tensors(again), tensors(state))
            assert not list((base / "host").iterdir())
            if not lost:
                break
        assert number > 5


def begin_with_room(base: Path, hosts: Sequence[str], missing: int) -> None:
    """Begin where each host has as many bytes free as two checkpoints of all hosts take, less
    `missing`."""
    state = fresh(len(hosts))
    own = [box for s in own_slices(state.slices(), state.mesh) for box, _ in s.spec.boxes(s.local)]
    needed = 2 * sum(state.mesh.control.gather(sum(part.nbytes for part in own)))
    host = base / hosts[state.mesh.control.rank]
    with shared_memory(host), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "disk_usage", lambda _: SimpleNamespace(free=needed - missing))
        if not missing:
            begin(base, state).remove()
            return
        error = refusal(lambda: begin(base, state))
    assert isinstance(error, UsageError)
    assert error.flag == "--memory-checkpoint-interval"
    assert not list(host.iterdir())


def test_a_host_without_room_is_refused(gloo: Pool, tmp_path: Path) -> None:
    """It needs room for two of its own checkpoints and for two of another host."""
    for missing in (0, 1):
        begin_with_room(tmp_path, ["host_0"], missing)
        gloo.run(2, begin_with_room, tmp_path, BOTH_HOSTS, missing)


def test_a_step_in_memory_has_the_loss_of_its_own_evaluation(tmp_path: Path) -> None:
    found, state = list[float | None](), fresh(1)
    settings: Any = SimpleNamespace(
        checkpoint=CheckpointConfig(
            save=str(tmp_path), load=str(tmp_path), memory_checkpoint_interval=1
        ),
        training=SimpleNamespace(check_replicas_interval=0),
    )
    with shared_memory(tmp_path / "host"):
        saves, result = MemorySaves(settings, state, {}, {}), cast(Any, None)
    kept: Any = SimpleNamespace(save=lambda *given: found.append(given[2]["validation_loss"]))
    saves.memory = kept
    training = {"paused": nullcontext, "is_urgent": bool, "add": lambda *_, **__: None}
    saves.training = cast(Any, SimpleNamespace(state=state, **training))
    saves.pre_train()
    for losses in ([], [0.5], [], [nan]):
        saves.pre_step([])
        saves.post_step(result)
        for loss in losses:
            saves.post_evaluation(loss)
    saves.pre_step([])
    assert found == [None, 0.5, None, None]
    for is_async in (False, True):  # one that is still being written may be lost
        settings.checkpoint = replace(settings.checkpoint, async_save=is_async)
        saves.post_step(result)
        saves.post_save()
        saves.pre_step([])
        assert len(found) == 4 + is_async


def test_a_place_that_is_not_our_own_is_refused(tmp_path: Path) -> None:
    state = fresh(1)
    with shared_memory(tmp_path / "host"):
        begin(tmp_path, state)
        (folder,) = (tmp_path / "host").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        start_id = (tmp_path / ID_FILE).read_text()
        refusal(lambda: MemoryCheckpoints(tmp_path, state.mesh, start_id), str(folder))


# Whole runs


def break_run(hosts: Path, of_its_own: bool, fault: Callable[[], None] | None = None) -> None:
    """In each process first: give the ranks of a host, or each rank, a shared memory."""
    folder = hosts / (os.environ["RANK"] if of_its_own else "0")
    folder.mkdir(parents=True, exist_ok=True)
    memory.SHARED_MEMORY = folder
    if fault is not None:
        fault()


# The calls at which a rank or both are killed, start after start, and the steps from which starts
# go on; a start that is killed while it writes the memory to disk is not among them.
STEP, KEEP = "megatron.train.loop:train_step", "megatron.checkpoint.memory:save_checkpoint"
KILLS = {
    "one host": (SPLIT, [(KEEP, 2, [1]), ("os:fsync", 4, [0]), (STEP, 4, [0, 1])], [0, 2, 4]),
    "two hosts": (
        "--zero-stage 1",
        # A host that lives needs no copy of its files.
        [(STEP, 4, [0, 1]), ("torch.distributed:isend", 1, [0]), (STEP, 3, [1])],
        [0, 2, 4, 6],
    ),
}


@pytest.mark.parametrize("name", KILLS)
def test_kill_9_changes_no_bit(tmp_path: Path, name: str) -> None:
    layout, kills, expected = KILLS[name]
    save, calm = tmp_path / "killed", tmp_path / "calm"
    more = f"{DROPOUT} {layout} --log-interval 1"
    finished(flags(calm, 7, more), world=2, folder=tmp_path)
    words = flags(save, 7, f"{more} --memory-checkpoint-interval 2 --save-interval 20")
    before = partial(break_run, tmp_path / "hosts", name == "two hosts")
    for kill in kills:
        fault = partial(before, partial(at_call, *kill, die))
        with pretrain(words, world=2, folder=tmp_path, before=fault) as run:
            assert wait_for_any([process.sentinel for process in run.processes])
            run.signal(signal.SIGKILL)
            assert -signal.SIGKILL in run.wait(), (kill, run.text())
    finished(words, world=2, folder=tmp_path, before=before)
    assert [line["step"] for line in lines_of(save, "started")] == expected
    assert_equal_bits(newest(calm), newest(save))
    assert [line["step"] for line in lines_of(save)] == list(range(1, 8))
    assert not list((tmp_path / "hosts").glob("*/*"))  # nothing is left where the run has ended
    assert ID_FILE not in names(save)


def test_a_drifted_replica_is_not_kept(tmp_path: Path) -> None:
    more = f"{PLAIN} {SPLIT} --check-replicas-interval 5 --memory-checkpoint-interval 1"
    fault = partial(break_run, tmp_path / "hosts", False, flip_in_step_3)
    with pretrain(flags(tmp_path / "s", 9, more), world=2, folder=tmp_path, before=fault) as run:
        assert all(run.wait())
    assert [step.name[-1] for step in steps_in(tmp_path / "hosts" / "0")] == ["2", "1"]


def fail_to_write(*_: object) -> None:
    raise OSError("no room")


def test_a_step_that_is_not_kept_ends_no_run(tmp_path: Path) -> None:
    more = f"{PLAIN} {SPLIT} --memory-checkpoint-interval 2"
    fault = partial(at_call, "megatron.checkpoint.save:save_file", 1, [0], fail_to_write)
    before = partial(break_run, tmp_path / "hosts", False, fault)
    save = tmp_path / "s"
    text = finished(flags(save, 5, more), world=2, folder=tmp_path, before=before)
    assert "no room" in text
    assert newest(save).name == "step_00000005"
