"""Runs under faults: final weights, causes, what is planted against it, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.programs import ROOT
from tests.refusals import refusal, refused
from tests.test_faults import at_call
from tests.tools.chaos.ranks import calm, chaos
from tools.chaos import __main__ as program
from tools.chaos.schedule import read_schedule
from tools.chaos.supervise import Events, RunFailed, outermost

STEPS = "--log-interval 1 --lr 1e-3 --lr-decay-iters 300 --check-replicas-interval 1"
STEPS += " --attention-dropout 0.1 --hidden-dropout 0.1 --distributed-timeout-minutes 0.1"
STEPS += " --micro-batch-size 4"
ONE = f"{STEPS} --train-iters 6 --save-interval 2 --eval-iters 0"  # of one rank
SPLIT = f"{STEPS} --tensor-model-parallel-size 2"
HEAD = "every_steps = 3\nin_turn = true\n"
KILL = '[[fault]]\nkind = "kill"\n'

FAULTS = [  # (keys of its table, whether it ends the run)
    ('kind = "kill"\nduring = "train"', True),
    ('kind = "stop"\nseconds = 0.2', False),
    ('kind = "terminate"\nduring = "evaluation"', True),
    ('kind = "truncate"', True),
    ('kind = "terminate"\nrank = "all"\nduring = "save"', True),
    ('kind = "full_disk"', True),
    ('kind = "drop"', True),
    ('kind = "flip_weight"', True),
    ('kind = "kill"\nrank = "all"', True),
    ('kind = "terminate"\nrank = "all"\nduring = "start"', True),
    ('kind = "terminate"\nduring = "train"', True),
    ('kind = "flip_file"', True),
    ('kind = "slow"\nseconds = 0.5', False),
    ('kind = "memory"', True),
    ('kind = "stop"\nseconds = 600', True),
]


def table(keys: str) -> str:
    return f"[[fault]]\n{keys}\n"


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
@pytest.mark.parametrize("count", [8, pytest.param(15, marks=pytest.mark.sweep)])
def test_faults_change_no_bit_and_are_named(small_disk: Path, tmp_path: Path, count: int) -> None:
    chosen = FAULTS[:count]
    faults = f"count = {count}\n{HEAD}" + "".join(table(keys) for keys, _ in chosen)
    words = f"{SPLIT} --train-iters {3 * count + 5} --save-interval 2 --eval-interval 2"
    words += " --eval-iters 4 --keep-checkpoints 3"
    report = chaos(faults, words, tmp_path / "forked", save=small_disk)
    assert report["status"] == 0, (report["weights"], report["failure"], report["unnamed"])
    assert not report["not_injected"]
    rows = {row["number"]: row for row in report["faults"]}
    assert sorted(rows) == [*range(1, count + 1)]
    for number, (keys, ends) in enumerate(chosen, 1):
        row = rows[number]
        assert row["ended"] == ends, (keys, row)
        # A damaged checkpoint, or a step that is not yet saved, costs another interval.
        assert not ends or row["steps_repeated"] <= 4, row
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_seconds"])
    written = json.loads((tmp_path / "forked" / "chaos" / "report.json").read_text())
    assert written["faults"] == report["faults"]
    assert b"<svg" in (tmp_path / "forked" / "chaos" / "report.html").read_bytes()


@pytest.mark.sweep
@pytest.mark.parametrize("small_disk", ["32m"], indirect=True)  # 1,000 steps record 2 MB
@pytest.mark.parametrize(
    ("seed", "count", "torchrun"), [(1, 100, True), *((seed, 250, False) for seed in range(1, 5))]
)
def test_many_faults(
    small_disk: Path, tmp_path: Path, seed: int, count: int, torchrun: bool
) -> None:
    faults = f"seed = {seed}\ncount = {count}\nevery_steps = 4\n"
    faults += "".join(map(table, [*dict(FAULTS), 'kind = "kill"\nduring = "save"']))
    if torchrun:
        faults += '[[fault]]\nkind = "kill"\nrank = "launcher"\nweight = 2\n'
    words = f"{SPLIT} --train-iters {4 * count} --save-interval 2 --eval-interval 4 --eval-iters 4"
    words += " --keep-checkpoints 3"
    report = chaos(faults, words, tmp_path / "swept", save=small_disk, torchrun=torchrun)
    assert report["status"] == 0, (report["weights"], report["failure"], report["unnamed"])
    assert len(report["faults"]) + len(report["not_injected"]) == count
    assert len(report["faults"]) >= 0.97 * count, report["not_injected"]
    assert max(row["steps_repeated"] or 0 for row in report["faults"]) <= 6


@pytest.mark.slow
def test_a_layout_that_changes_at_each_start(tmp_path: Path) -> None:
    layouts = "".join(
        f"[[layout]]\nnproc-per-node = {size}\ntensor-model-parallel-size = {split}\n"
        for size, split in ((2, 2), (1, 1))
    )
    faults = f"count = 1\n{HEAD}{KILL}{layouts}"
    words = f"{SPLIT} --train-iters 6 --save-interval 2 --eval-iters 0"
    report = chaos(faults, words, tmp_path)
    assert report["status"] == 0, report["weights"]
    assert 0 < report["weights"]["largest"] < report["weights"]["tolerance"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of ONE."""
    return calm(ONE, tmp_path_factory.mktemp("one"))


def resume_beside(steps: int) -> None:
    """Let a resumed run count so many steps more than it has done."""
    from megatron.train.state import TrainState

    original = TrainState.load

    def load(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.step, self.samples = self.step + steps, self.samples + 4 * steps

    TrainState.load = load  # type: ignore[method-assign]


@pytest.mark.parametrize(("beside", "status"), [(1, 1), (0, 0)])
def test_a_doubled_update_is_seen(one: Path, tmp_path: Path, beside: int, status: int) -> None:
    faults, before = f"count = 1\n{HEAD}{KILL}", partial(resume_beside, beside)
    report = chaos(faults, ONE, tmp_path, world=1, before=before, undisturbed=one)
    assert report["status"] == status
    assert bool(report["weights"]["differ"]) == bool(status)


TRAIN_STEP = "megatron.train.loop:train_step"
NONE = f"count = 1\nevery_steps = 100\n{KILL}"  # it does not come


def test_an_end_without_a_fault_is_a_failure(one: Path, tmp_path: Path) -> None:
    before = partial(at_call, TRAIN_STEP, 2, [0], partial(truediv, 1, 0))
    report = chaos(NONE, ONE, tmp_path, world=1, before=before, undisturbed=one)
    assert report["status"] == 1
    assert "ZeroDivisionError" in report["failure"]


def test_a_hang_ends(one: Path, tmp_path: Path) -> None:
    before = partial(at_call, TRAIN_STEP, 1, [0], signal.pause)
    report = chaos(NONE, ONE, tmp_path, world=1, before=before, undisturbed=one, patience=1.0)
    assert report["status"] == 1
    assert "hangs" in report["failure"]


# Adds up its steps; a checkpoint has the sum. "late" counts a step more when it resumes.
OTHER = """
import json, os, sys, time
from pathlib import Path

save, way = Path(sys.argv[1]), sys.argv[2]
events = Path(os.environ["CHAOS_EVENTS"], "rank_0.jsonl").open("ab", buffering=0)

def note(event, **facts):
    line = {"time": time.monotonic(), "pid": os.getpid(), "event": event, **facts}
    events.write(json.dumps(line).encode() + b"\\n")

note("start")
step = total = 0
for each in sorted(save.glob("[0-9]*")):
    step, total = json.loads((each / "sum.json").read_text())
step += way == "late" and step > 0
note("loaded", step=step)
while step < 60:
    time.sleep(0.01)
    step, total = step + 1, total + step
    note("step", step=step)
    if step % 5 == 0:
        note("save", step=step, at="begin")
        folder = save / f".{step:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sum.json").write_text(json.dumps([step, total]))
        folder.rename(save / f"{step:04d}") if not (save / f"{step:04d}").exists() else None
        note("save", step=step, at="end")
note("end", step=step)
"""


def sums(save: Path) -> dict[str, Any]:
    """The array of the trainer OTHER."""
    return {"sum": json.loads((max(save.glob("[0-9]*")) / "sum.json").read_text())[1]}


@pytest.mark.parametrize(("way", "status"), [("well", 0), ("late", 1)])
def test_another_trainer_in_one_process(tmp_path: Path, way: str, status: int) -> None:
    """Killed, and stopped while it goes on; without weights there is nothing to compare."""
    script, file = tmp_path / "other.py", tmp_path / "faults.toml"
    script.write_text(OTHER)
    stop = '[[fault]]\nkind = "stop"\nseconds = 0.1\n'
    file.write_text(f"every_steps = 13\nin_turn = true\ncount = 3\n{KILL}{stop}")
    words = ["--faults", str(file), "--output", str(tmp_path / "new")]
    command = ["--", sys.executable, str(script), "{save}", way]
    weights = ["--weights", f"{__name__}:sums"]
    assert program.main([*words, *weights, *command], {}) == status
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert [row["ended"] for row in report["faults"]] == [True, False, True]
    assert [row["rank"] for row in report["faults"]] == [0, 0, 0]
    if way == "well":
        words[-1] = str(tmp_path / "again")
        words += ["--undisturbed", str(tmp_path / "new" / "undisturbed")]
        assert program.main([*words, *command], {}) == 3


@pytest.mark.slow
def test_ranks_name_torchrun_that_was_killed(tmp_path: Path) -> None:
    faults, words = f'count = 1\n{HEAD}{KILL}rank = "launcher"\n', f"{SPLIT} --train-iters 8"
    report = chaos(faults, f"{words} --save-interval 2 --eval-iters 0", tmp_path, torchrun=True)
    assert report["status"] == 0, (report["weights"], report["failure"], report["unnamed"])
    assert [row["ended"] for row in report["faults"]] == [True]


def test_the_outermost_process_of_each_rank() -> None:
    """10 is the launcher, 11 and 12 its ranks, 13 a loader of 12, 14 one whose rank has ended."""
    parents = {10: 1, 11: 10, 12: 10, 13: 12, 14: 1}
    ranks = {11: 0, 12: 1, 13: 1, 14: 2}
    assert outermost(parents, ranks, 10, set()) == {0: 11, 1: 12}
    orphans = {11: 1, 12: 1, 13: 12, 14: 1}  # the launcher has been killed
    assert outermost(orphans, ranks, 10, {11, 12}) == {0: 11, 1: 12}
    assert outermost({10: 1}, {10: 0}, 10, set()) == {0: 10}


@pytest.mark.parametrize("line", ["3", "{", "{}", '{"event": "step", "time": 1}'])
def test_a_line_that_is_no_event_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "rank_1.jsonl").write_text(f'{{"event": "start", "time": 1}}\n{line}\n')
    with pytest.raises(RunFailed, match=r"rank_1\.jsonl, line 2"):
        Events(tmp_path).read()


def test_a_signal_ends_all_that_was_started(tmp_path: Path) -> None:
    script, file, started = tmp_path / "waits.py", tmp_path / "faults.toml", tmp_path / "pid"
    file.write_text(f"every_steps = 1\n{KILL}")
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "place.with_suffix('.new').write_text(str(os.getpid()))\n"
        "place.with_suffix('.new').rename(place)\n"
        "signal.pause()\n"
    )
    words = ["--faults", str(file), "--output", str(tmp_path / "new"), "--"]
    words += [sys.executable, str(script), str(started), "{save}"]
    process = subprocess.Popen([sys.executable, "-m", "tools.chaos", *words], cwd=ROOT)
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    pid = int(started.read_text())
    lives = Path(f"/proc/{pid}").exists()
    if lives:
        os.kill(pid, signal.SIGKILL)
    assert not lives


REFUSED = {  # arguments after --faults FILE --output DIR, with the field that they are refused for
    "": "--",
    "-- python train.py --save here": "--save",
    "-- python train.py --load=here": "--load",
    "-- no_such_program --to {save}": "--",
    "--patience 0 -- python train.py": "--patience",
    "--restart-seconds -1 -- python train.py": "--restart-seconds",
    "--tolerance -1 -- python train.py": "--tolerance",
    "--weights nowhere:weights -- python train.py": "--weights",
    "--undisturbed OTHER -- python train.py": "--undisturbed",
    "--save OTHER -- python train.py": "--save",
}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments(words: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    file = tmp_path / "faults.toml"
    file.write_text(f"every_seconds = 60\n{KILL}")
    start = ["--faults", str(file), "--output", str(tmp_path / "new")]
    words = words.replace("OTHER", str(other))
    run = partial(program.main, environ={})
    assert refused(run, [*start, *words.split()], retry=accepted) == REFUSED[words.replace(
        str(other), "OTHER")]  # fmt: skip


def accepted(words: list[str]) -> None:
    """The settings alone: what follows would train."""
    program.parse(program.Settings, words[: words.index("--")], {})


FILES = {  # a faults file that is refused, and a word that the message has to name
    "every_seconds = 60\n": "fault",
    KILL: "or every_steps",
    f"every_seconds = 0\n{KILL}": "above 0",
    'every_seconds = 60\n[[fault]]\nkind = "fire"\n': "flip_weight",
    f'every_seconds = 60\n{KILL}rank = "second"\n': "launcher",
    'every_seconds = 60\n[[fault]]\nkind = "drop"\nrank = "all"\n': "random",
    f"every_seconds = 60\n{KILL}second = 3\n": "seconds",
    f'every_seconds = "60"\n{KILL}': "a number",
    "every_seconds = 60\n[[fault]]\nweight = 1\n": "kind",
    f"every_seconds = 60\n{KILL}[[layout]]\nnproc-per-node = 2\n": "nproc-per-node",
    "every_seconds = 60\nfault = 3\n": "[[fault]]",
    "every_seconds": "TOML",
}


@pytest.mark.parametrize("content", FILES)
def test_a_faults_file_that_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(content)
    words = ["python", "train.py", "--last"]
    error = refusal(lambda: program.check(read_schedule(file), words), FILES[content], lines=1)
    assert error.flag == "--faults"


def test_a_full_disk_is_refused_where_others_use_it(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    file.write_text('every_seconds = 60\n[[fault]]\nkind = "full_disk"\n')
    words = ["--faults", str(file), "--output", str(tmp_path / "new"), "--", "python", "train.py"]
    assert refused(partial(program.main, environ={}), words) == "--save"


def test_the_same_seed_draws_the_same_faults(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    drawn = []
    for seed in (1, 1, 2):
        kinds = f'{KILL}weight = 3\n[[fault]]\nkind = "stop"\nseconds = 5\n'
        file.write_text(f"seed = {seed}\ncount = 400\nevery_seconds = 60\n{kinds}")
        drawn.append(read_schedule(file).faults())
    assert drawn[0] == drawn[1] != drawn[2]
    labels = [fault.label for fault in drawn[0]]
    assert {*labels} == {"kill", "stop 5 s"}
    assert len({fault.draw for fault in drawn[0]}) == 400  # each hits a rank of its own
    assert labels.count("kill") == pytest.approx(300, abs=40)
    assert fmean(fault.gap for fault in drawn[0]) == pytest.approx(60, rel=0.2)


def test_the_command_gets_the_folder_and_the_probe() -> None:
    save = Path("a/run")
    assert program.completed(["other", "--to={save}/x"], save) == ["other", "--to=a/run/x"]
    made = program.completed(["python", "p.py", "--callbacks", "m:Own", "--lr", "1"], save)
    at = made.index("--callbacks")
    assert made.count("--callbacks") == 1
    assert {*made[at + 1 : at + 3]} == {program.PROBE, "m:Own"}
    assert made[made.index("--save") + 1] == made[made.index("--load") + 1] == "a/run"
