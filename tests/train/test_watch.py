"""The first failure is the message: each fault, in real processes, and the rank that is named."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from megatron.config.launch import RankInfo
from megatron.train.watch import (
    Progress,
    Report,
    Wait,
    Watch,
    find_behind,
    name_ranks,
    note,
    start_seconds,
)
from tests.programs import ROOT, Run, run_python, start_ranks
from tests.train.ranks import DUMP, Ended, begin, end, run_ranks, write_program

HANG = 6.0  # seconds
BEGUN = "begun"  # the end of the name of a file that a run makes in its first step

STEP = """
all_reduce(torch.ones(4, 2), mesh.tensor)
all_reduce(torch.ones(3), mesh.data)
"""
SAVE = """
if step == 0: others = mesh.control.another()
def save():
    if rank == 1: time.sleep(600)
    try: others.gather(1)
    except RuntimeError: time.sleep(600)  # the other rank has ended
if last:
    thread = threading.Thread(target=save, name="save", daemon=True)
    thread.start()
    thread.join()
"""


# Rank {1} gets the signal {2} when it begins to call {0}.
IN_GROUPS = """
from torch.distributed import distributed_c10d
make = distributed_c10d.{0}
def {0}(*given, **more):
    if rank == {1}: os.kill(os.getpid(), signal.{2})
    return make(*given, **more)
distributed_c10d.{0} = torch.distributed.{0} = {0}
"""
SKIP = """
all_reduce(torch.ones(4, 2), mesh.tensor)
if (rank, step) != (3, 3): all_reduce(torch.ones(3), mesh.data)
if last: mesh.control.gather(1)
"""
RAISE = "raise ZeroDivisionError('no loss')"
AGREED = """
from megatron.parallel.agree import AgreedError
error = AgreedError("no loss")
error.add_note("a note")
if last: raise error
"""
KILL = "if last and rank == {0}: os.kill(os.getpid(), 9)\n"
STOP = "if last and rank == {0}: os.kill(os.getpid(), signal.SIGSTOP)\n"


@dataclass(frozen=True)
class Case:
    """A run: the body of each step of its ranks, and what comes of it. named: in the one message
    (patterns); else each rank prints `output` alone."""

    body: str
    named: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (1, 1)  # of the ranks that are not `stopped`
    world: int = 2
    limit: float = 60
    agent: bool = False
    stopped: tuple[int, ...] = ()
    first: str = ""
    output: str = ""


FOUR = {"statuses": (1,) * 4, "world": 4}
STALLED = r"\b6 s: rank {} of {} .*\n"
FAULTS = {
    "the process that keeps the store is stopped": Case(
        STOP.format(0) + STEP, (r"^rank 0 of 2 \(data 0, tensor 0\)", "rank 1 of 2 .* 5"), (1,),
        limit=HANG, stopped=(0,),
    ),
    "a rank sleeps": Case(
        f"if last and rank == 1: time.sleep(600)\n{STEP}",
        (r"\b6 s: rank 1 of 4 \(data 0, tensor 1\) .*\n", r"\n->  rank 1 .* 5 +train step",
         r"\n    rank 0 .* tensor: all_reduce of \[4, 2\], number 6"),
        **FOUR, limit=HANG, agent=True,
    ),
    "a rank sleeps and polls": Case(
        f"while last and rank == 1: time.sleep(0.01)\n{STEP}", (STALLED.format(1, 2),), limit=HANG
    ),
    "a thread that saves sleeps": Case(
        STEP + SAVE, (STALLED.format(1, 2), "save: gather of int, number 1"), limit=HANG
    ),
    "a rank skips a collective of an axis": Case(
        SKIP,
        (r"\b6 s: rank 3 of 4 \(data 1, tensor 1\) .*\n",
         r"\n    rank 1 .* data: all_reduce of \[3\], number 6",
         r"\n->  rank 3 .* control: gather of int, number 2"),
        **FOUR, limit=HANG,
    ),
    "a process is stopped": Case(
        STOP.format(1) + STEP, (STALLED.format(1, 2), "->  rank 1 "), (1,), limit=HANG, stopped=(1,)
    ),
    "all ranks raise": Case(
        f"if last: {RAISE}", (r"^rank \d of 4 \(data \d, tensor \d\) .*\nTraceback",), **FOUR
    ),
    "all ranks raise an error whose message is enough": Case(
        AGREED, (r"^error: no loss \(a note\)\n$",)
    ),
    "an error of torch, of the kind that a broken connection raises": Case(
        f"if last and rank == 1: torch.ones(2) @ torch.ones(3)\n{STEP}",
        ("rank 1 of 2 .*\nTraceback", "RuntimeError"),
    ),
    "a rank is killed": Case(
        KILL.format(1) + STEP, (r"^rank 1 of 2 \(data 0, tensor 1\)", "rank 0 of 2 .* 5"), (1, -9)
    ),
    "the rank that keeps the store is killed": Case(
        KILL.format(0) + STEP,
        (r"(?m)^rank 0 of 2 \(data 0, tensor 0\)", r"rank 1 of 2 \(data 0, tensor 1\) .* 5"),
        (-9, 1),
    ),
    "a rank is killed whose store the launcher keeps": Case(
        KILL.format(0) + STEP, (r"^rank 0 of 2 \(data 0, tensor 0\)", "rank 1 of 2 .* 5"), (-9, 1),
        agent=True,
    ),
    "a rank is killed before it connects": Case(
        STEP, (r"^rank 1 of 2 on ", r"rank 0 of 2 on .* 0"), (1, -9),
        first=IN_GROUPS.format("init_process_group", 1, "SIGKILL"),
    ),
    "the rank that keeps the store is killed between two process groups": Case(
        STEP, (r"(?m)^rank 0 ", r"rank 1 of 2 on .* 0"), (-9, 1),
        first=IN_GROUPS.format("new_group", 0, "SIGKILL"),
    ),
    "a rank leaves early": Case(
        f"if last and rank == 1: sys.exit(0)\n{STEP}",
        ("rank 1 of 2 .* 0", r"rank 0 of 2 .* tensor: all_reduce of \[4, 2\], number 6"),
    ),
    "a rank leaves early, as a signal asks": Case(
        f"if last and rank: sys.exit(75)\n{STEP}", ("rank 1 of 2 .* 75",), (75, 75)
    ),
    "a rank is interrupted": Case(
        f"if last and rank: raise KeyboardInterrupt\n{STEP}",
        (r"^rank 1 of 2 \(data 0, tensor 1\) .*\n$",), (130, 130),
    ),
    "a process is stopped between two process groups": Case(
        STEP, (STALLED.format(1, 2), "->  rank 1 "), (1,), limit=HANG, stopped=(1,),
        first=IN_GROUPS.format("new_group", 1, "SIGSTOP"),
    ),
}  # fmt: skip

WORK = """
def compute(depth): return 1 + (compute(depth - 1) if depth else sum(i * i for i in range(99)))
if last and rank == 1:
    end = time.monotonic() + {}
    while time.monotonic() < end:
        for depth in range(20): compute(depth)
"""
OPEN = """
from megatron.train.watch import without_limit
if last:
    with without_limit("opening data"):
        time.sleep(10)
"""
JUMP = "now = time.monotonic\nif last: time.monotonic = lambda: now() + 3600"
# The launcher's store ends with the first node's ranks, as torchrun's does where they end with
# another status than 0; a rank of another node is slow to see that all have left.
ANOTHER_NODE = """
import torch.distributed as dist
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
if rank == 0:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
else:
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(max(seconds, 2.0))
"""
DONE = f"{STEP}\nif last: print('done')"
LEAVES = {"statuses": (75, 75)}
ENDS = {"statuses": (0, 0), "output": "done\n"}
QUIET = {
    # For six limits; another rank needs one and 5 s to find out.
    "a rank computes while the other waits": Case(f"{WORK.format(9)}\n{DONE}", limit=2, **ENDS),
    "ranks wait for the file that another process makes": Case(f"{OPEN}\n{DONE}", limit=2, **ENDS),
    "all ranks are stopped for an hour, as by Ctrl-Z": Case(
        f"{JUMP}\n{WORK.format(2)}\n{DONE}", limit=HANG, **ENDS
    ),
    "ranks end": Case(DONE, **ENDS),
    "ranks end with a status": Case(f"{STEP}\nif last: sys.exit(75)", **LEAVES),
    "a rank of another node ends with its own status": Case(
        f"{STEP}\nif last and rank == 0: time.sleep(1)\nif last: sys.exit(75)",
        first=ANOTHER_NODE, **LEAVES,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Run]]]:
    """All of them side by side, as most of them wait, with their folders; each begins after the
    first step of the one before."""
    with ExitStack() as stack:
        found = {}
        for name, case in (QUIET | FAULTS).items():
            folder = tmp_path_factory.mktemp("run")
            body = f"open(__file__ + {BEGUN!r}, 'w').close()\n{case.body}"
            program = write_program(folder, body, limit=case.limit, first=case.first)
            run = stack.enter_context(begin(program, case.world, agent=case.agent))
            while not case.first and run.is_alive() and not [*folder.glob(f"*{BEGUN}")]:
                time.sleep(0.01)
            found[name] = folder, run
        yield found


@pytest.mark.parametrize("name", QUIET)
def test_a_run_without_faults_says_nothing(runs: dict[str, tuple[Path, Run]], name: str) -> None:
    case, (_, run) = QUIET[name], runs[name]
    assert end(run) == [Ended(status, case.output) for status in case.statuses]


def message(ended: list[Ended]) -> str:
    """The text of the one rank that prints the cause, less the stacks of a stall."""
    texts = [each.text for each in ended]
    if any("no progress for" in text for text in texts):
        causes = [text[text.index("no progress") :] for text in texts if "no progress" in text]
        assert all(": stacks\n" in text for text in texts), texts
    else:
        causes = [text for text in texts if text]
    assert len(causes) == 1, texts
    return causes[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_and_names_the_rank(
    runs: dict[str, tuple[Path, Run]], name: str
) -> None:
    fault, (folder, run) = FAULTS[name], runs[name]
    ended = end(run, fault.stopped)
    text = message(ended)
    for pattern in fault.named:
        assert re.search(pattern, text), (pattern, [each.text for each in ended])
    assert tuple(each.status for each in ended) == fault.statuses
    dumped = {path.stem.removeprefix(DUMP) for path in folder.glob(f"{DUMP}*.json")}
    stalled = range(fault.world) if text.startswith("no progress") and not fault.first else ()
    assert dumped == {str(rank) for rank in stalled if rank not in fault.stopped}


def torchrun(words: Sequence[str]) -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    run_python(["-m", "torch.distributed.run", *words])


def test_torchrun_summary_names_the_first_failure(tmp_path: Path) -> None:
    attempt = "os.environ['TORCHELASTIC_RESTART_COUNT']"
    fault = f"if last and rank == 1: raise ZeroDivisionError('attempt ' + {attempt})"
    program = write_program(tmp_path, f"{fault}\n{STEP}")
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(program)]
    with start_ranks(partial(torchrun, words), range(1), 1, tmp_path) as run:
        assert run.wait() == [1], run.text()
        said = run.text()
    above, _, cause = said.partition("Root Cause")
    assert above.count("Traceback (most recent call last):\n  File") == 3, said  # + its own
    assert re.search(r"rank 1 of 2 \(data 0, tensor 1\) on .*ZeroDivisionError: attempt 1", cause)


def test_collectives_are_compiled_whole(tmp_path: Path) -> None:
    body = """
from megatron.parallel.collectives import start_all_reduce, start_broadcast, start_gather
from megatron.parallel.regions import reduce_from
if last:
    def both(x): return reduce_from((x * 2)[:, 1], mesh.tensor)
    def of_slices(x):
        all_reduce(x[:, 1], mesh.tensor)
        each = start_gather(x.T, mesh.tensor), start_all_reduce(x[:, 1:], mesh.tensor)
        each += (start_broadcast(x + rank, mesh.tensor, 1),)
        return [wait() for wait in each]
    both, of_slices = (
        torch.compile(each, fullgraph=True, backend="aot_eager") for each in (both, of_slices)
    )
    x = torch.ones(3, 2, requires_grad=True)
    y = both(x)
    y.sum().backward()
    x, table = x.grad, torch.tensor([[1, 10, 100], [2, 20, 200]])
    print(*(each.tolist() for each in (y, x, *of_slices(table), table)))
"""
    ended = run_ranks(write_program(tmp_path, body), 2)
    column, rows = [[0.0, 2.0]] * 3, [[1, 2], [20, 40], [100, 200]] * 2
    twice, table = [[40, 200], [80, 400]], [[1, 20, 100], [2, 40, 200]]
    sent = [[each + 1 for each in row] for row in table]  # by the second rank
    assert ended == [Ended(0, f"{[4.0] * 3} {column} {rows} {twice} {sent} {table}\n")] * 2


# The ranks that are behind, from where each rank stands: t = 2, d = 2.
GROUPS = [
    {"tensor": [rank - rank % 2, rank - rank % 2 + 1], "data": [rank % 2, rank % 2 + 2]}
    | {all_ranks: [0, 1, 2, 3] for all_ranks in ("control", "save")}
    for rank in range(4)
]


def stand(rank: int, tensor: int, data: int, *waits: str, control: int = 0) -> Report:
    begun = {"tensor": tensor, "data": data, "control": control, "save": control}
    found = [Wait(axis, begun[axis], "all_reduce of [2]", GROUPS[rank][axis]) for axis in waits]
    return Report(f"rank {rank}", 5, "train step", begun, found, idle=60)


LATE = [stand(0, 6, 5, "tensor"), stand(1, 5, 5), stand(2, 6, 6, "data"), stand(3, 6, 6, "data")]
SKIPPED, SAVING = (
    [
        stand(0, 6, 6, "tensor"),
        *(stand(rank, 5 + (rank > 1), 6, all_ranks, control=1) for rank in (1, 2, 3)),
    ]
    for all_ranks in ("control", "save")
)
CIRCLE = [
    *(stand(0, 6, 5, "tensor"), stand(1, 5, 6, "data")),
    *(stand(2, 5, 6, "data"), stand(3, 6, 5, "tensor")),
]
ALONE = [stand(rank, 5, 5) for rank in range(4)]


def test_waits_lead_to_the_ranks_that_are_behind() -> None:
    for reports, working, silent, behind in (
        (LATE, (), (), [1]),
        (LATE, (1,), (), []),
        (LATE, (), (1,), [1]),
        (LATE, (), (3,), [1, 3]),
        ([stand(0, 6, 6, "tensor", "data"), LATE[1], stand(2, 5, 5), LATE[3]], (1,), (), [2]),
        (SKIPPED, (), (), [1]),
        (SAVING, (), (), [1]),
        (CIRCLE, (), (), [0, 1, 2, 3]),
        (CIRCLE, (2,), (), []),
        (ALONE, (), (), [0, 1, 2, 3]),
        (ALONE, (2,), (), []),
        (ALONE, (), (2,), [2]),
        ([*ALONE[:2], stand(2, 5, 4), ALONE[3]], (), (), [2]),  # on a GPU: nobody is seen to wait
    ):
        assert find_behind(dict(enumerate(reports)), silent, working)[0] == behind


@pytest.mark.parametrize(("started", "is_blamed"), [(5, True), (6, False)])
def test_a_rank_that_left_is_waited_for_until_its_part_is_there(
    monkeypatch: pytest.MonkeyPatch, started: int, is_blamed: bool
) -> None:
    store, said = HashStore(), list[str]()
    watch = Watch(store, RankInfo(0, 2, "host", 1, is_host=True), 60, None, "")
    monkeypatch.setattr(watch, "_end", lambda verdict: said.append(verdict.text))
    left = replace(stand(1, started, 5), left=0)
    store.set("report/1", json.dumps(asdict(left)))
    store.add("left", 1)
    watch._find_leaver(stand(0, 6, 5, "tensor"))
    assert ["tensor: all_reduce of [2], number 6" in text for text in said] == [True] * is_blamed


def test_a_phase_that_comes_again_takes_the_time_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([3.0, 5.0, 9.0])
    monkeypatch.setattr("megatron.train.watch.time", SimpleNamespace(monotonic=lambda: next(now)))
    for name, value in (("phase", "model"), ("began", 2.0), ("seconds", {})):
        monkeypatch.setattr(Progress, name, value)
    note("data")
    note("model")
    assert start_seconds() == {"model": 1.0 + 4.0, "data": 2.0}


def test_four_of_many_ranks_are_named() -> None:
    named = name_ranks(dict(enumerate(ALONE)), [3, 2, 1, 0, 5, 6])
    assert named == "rank 3, rank 2, rank 1, rank 0 and 2 more"
