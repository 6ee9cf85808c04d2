"""The first failure is the message: each fault, in real processes, and the rank that is named."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.train.watch import Report, Wait, find_behind
from tests.train.ranks import DUMP, Ended, run_ranks, write_program

ROOT = Path(__file__).resolve().parents[2]
HANG = 6.0  # seconds

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
KILL = "if last and rank == {0}: os.kill(os.getpid(), 9)\n"
STOP = "if last and rank == {0}: os.kill(os.getpid(), signal.SIGSTOP)\n"


@dataclass(frozen=True)
class Fault:
    """Where it is, and what the one message names (patterns)."""

    body: str
    named: tuple[str, ...]
    statuses: tuple[int, ...] = (1, 1)  # of the ranks that are not `stopped`
    world: int = 2
    limit: float = 60
    agent: bool = False
    stopped: tuple[int, ...] = ()
    first: str = ""


FOUR = {"statuses": (1,) * 4, "world": 4}
STALLED = r"\b6 s: rank {} of {} .*\n"
FAULTS = {
    "all ranks raise": Fault(
        f"if last: {RAISE}", (r"^rank \d of 4 \(data \d, tensor \d\) .*\nTraceback",), **FOUR
    ),
    "an error of torch, of the kind that a broken connection raises": Fault(
        f"if last and rank == 1: torch.ones(2) @ torch.ones(3)\n{STEP}",
        ("rank 1 of 2 .*\nTraceback", "RuntimeError"),
    ),
    "a rank is killed": Fault(
        KILL.format(1) + STEP, (r"^rank 1 of 2 \(data 0, tensor 1\)", "rank 0 of 2 .* 5"), (1, -9)
    ),
    "the rank that keeps the store is killed": Fault(
        KILL.format(0) + STEP,
        (r"(?m)^rank 0 of 2 \(data 0, tensor 0\)", r"rank 1 of 2 \(data 0, tensor 1\) .* 5"),
        (-9, 1),
    ),
    "a rank is killed whose store the launcher keeps": Fault(
        KILL.format(0) + STEP, (r"^rank 0 of 2 \(data 0, tensor 0\)", "rank 1 of 2 .* 5"), (-9, 1),
        agent=True,
    ),
    "a rank sleeps": Fault(
        f"if last and rank == 1: time.sleep(600)\n{STEP}",
        (r"\b6 s: rank 1 of 4 \(data 0, tensor 1\) .*\n", r"\n->  rank 1 .* 5 +train step",
         r"\n    rank 0 .* tensor: all_reduce of \[4, 2\], number 6"),
        **FOUR, limit=HANG, agent=True,
    ),
    "a rank sleeps and polls": Fault(
        f"while last and rank == 1: time.sleep(0.01)\n{STEP}", (STALLED.format(1, 2),), limit=HANG
    ),
    "a thread that saves sleeps": Fault(
        STEP + SAVE, (STALLED.format(1, 2), "save: gather of int, number 1"), limit=HANG
    ),
    "a rank skips a collective of an axis": Fault(
        SKIP,
        (r"\b6 s: rank 3 of 4 \(data 1, tensor 1\) .*\n",
         r"\n    rank 1 .* data: all_reduce of \[3\], number 6",
         r"\n->  rank 3 .* control: gather of int, number 2"),
        **FOUR, limit=HANG,
    ),
    "a process is stopped": Fault(
        STOP.format(1) + STEP, (STALLED.format(1, 2), "->  rank 1 "), (1,), limit=HANG, stopped=(1,)
    ),
    "the process that keeps the store is stopped": Fault(
        STOP.format(0) + STEP, (r"^rank 0 of 2 \(data 0, tensor 0\)", "rank 1 of 2 .* 5"), (1,),
        limit=HANG, stopped=(0,),
    ),
    "a rank is killed before it connects": Fault(
        STEP, (r"^rank 1 of 2 on ", r"rank 0 of 2 on .* 0"), (1, -9),
        first=IN_GROUPS.format("init_process_group", 1, "SIGKILL"),
    ),
    "the rank that keeps the store is killed between two process groups": Fault(
        STEP, (r"(?m)^rank 0 ", r"rank 1 of 2 on .* 0"), (-9, 1),
        first=IN_GROUPS.format("new_group", 0, "SIGKILL"),
    ),
    "a process is stopped between two process groups": Fault(
        STEP, (STALLED.format(1, 2), "->  rank 1 "), (1,), limit=HANG, stopped=(1,),
        first=IN_GROUPS.format("new_group", 1, "SIGSTOP"),
    ),
    "a rank leaves early": Fault(
        f"if last and rank == 1: sys.exit(0)\n{STEP}",
        ("rank 1 of 2 .* 0", r"rank 0 of 2 .* tensor: all_reduce of \[4, 2\], number 6"),
    ),
    "a rank leaves early, as a signal asks": Fault(
        f"if last and rank: sys.exit(75)\n{STEP}", ("rank 1 of 2 .* 75",), (75, 75)
    ),
    "a rank is interrupted": Fault(
        f"if last and rank: raise KeyboardInterrupt\n{STEP}",
        (r"^rank 1 of 2 \(data 0, tensor 1\) .*\n$",), (130, 130),
    ),
}  # fmt: skip


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
def test_a_fault_ends_the_run_and_names_the_rank(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    program = write_program(tmp_path, fault.body, limit=fault.limit, first=fault.first)
    ended = run_ranks(program, fault.world, agent=fault.agent, stopped=fault.stopped)
    text = message(ended)
    for pattern in fault.named:
        assert re.search(pattern, text), (pattern, [each.text for each in ended])
    assert tuple(each.status for each in ended) == fault.statuses
    dumped = {path.stem.removeprefix(DUMP) for path in tmp_path.glob(f"{DUMP}*.json")}
    stalled = range(fault.world) if text.startswith("no progress") and not fault.first else ()
    assert dumped == {str(rank) for rank in stalled if rank not in fault.stopped}


WORK = """
def compute(depth): return 1 + (compute(depth - 1) if depth else sum(i * i for i in range(99)))
if last and rank == 1:
    end = time.monotonic() + 2 * {limit}
    while time.monotonic() < end:
        for depth in range(20): compute(depth)
"""
OPEN = """
from megatron.train.watch import without_limit
if last:
    with without_limit("opening data"):
        time.sleep(1.5 * {limit})
"""
JUMP = "now = time.monotonic\nif last: time.monotonic = lambda: now() + 3600"


@pytest.mark.parametrize(
    ("body", "limit", "status", "output"),
    [
        (f"{STEP}\nif last: print('done')", 60.0, 0, "done\n"),
        (f"{STEP}\nif last: sys.exit(75)", 60.0, 75, ""),
        # A rank that computes while the other one waits for it is let be for six limits.
        (f"{WORK.format(limit=HANG)}\n{STEP}\nif last: print('done')", HANG, 0, "done\n"),
        # Ranks wait for the file that another process makes.
        (f"{OPEN.format(limit=HANG)}\n{STEP}\nif last: print('done')", HANG, 0, "done\n"),
        # All ranks are stopped for an hour, as by Ctrl-Z, and go on.
        (f"{JUMP}\n{WORK.format(limit=1)}\n{STEP}\nif last: print('done')", HANG, 0, "done\n"),
    ],
)
def test_a_run_without_faults_says_nothing(
    tmp_path: Path, body: str, limit: float, status: int, output: str
) -> None:
    program = write_program(tmp_path, body, limit=limit)
    assert run_ranks(program, 2) == [Ended(status, output)] * 2


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


def test_a_rank_of_another_node_leaves_with_its_own_status(tmp_path: Path) -> None:
    body = f"{STEP}\nif last and rank == 0: time.sleep(1)\nif last: sys.exit(75)"
    program = write_program(tmp_path, body, first=ANOTHER_NODE)
    assert run_ranks(program, 2) == [Ended(75, "")] * 2


def test_torchrun_summary_names_the_first_failure(tmp_path: Path) -> None:
    attempt = "os.environ['TORCHELASTIC_RESTART_COUNT']"
    fault = f"if last and rank == 1: raise ZeroDivisionError('attempt ' + {attempt})"
    program = write_program(tmp_path, f"{fault}\n{STEP}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=1", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    above, _, cause = ended.stderr.partition("Root Cause")
    assert above.count("Traceback (most recent call last):\n  File") == 3, ended.stderr  # + its own
    assert re.search(r"rank 1 of 2 \(data 0, tensor 1\) on .*ZeroDivisionError: attempt 1", cause)


def test_collectives_are_compiled_whole(tmp_path: Path) -> None:
    body = """
from megatron.parallel.collectives import start_all_reduce, start_gather
from megatron.parallel.regions import reduce_from
if last:
    def both(x): return reduce_from((x * 2)[:, 1], mesh.tensor)
    def of_slices(x):
        all_reduce(x[:, 1], mesh.tensor)
        each = start_gather(x.T, mesh.tensor), start_all_reduce(x[:, 1:], mesh.tensor)
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
    assert ended == [Ended(0, f"{[4.0] * 3} {column} {rows} {twice} {table}\n")] * 2


# The ranks that are behind, from where each rank stands: t = 2, d = 2.
GROUPS = [
    {"tensor": [rank - rank % 2, rank - rank % 2 + 1], "data": [rank % 2, rank % 2 + 2]}
    | {"control": [0, 1, 2, 3]}
    for rank in range(4)
]


def stand(rank: int, tensor: int, data: int, *waits: str, control: int = 0) -> Report:
    begun = {"tensor": tensor, "data": data, "control": control}
    found = [Wait(axis, begun[axis], "all_reduce of [2]", GROUPS[rank][axis]) for axis in waits]
    return Report(f"rank {rank}", 5, "train step", begun, found, idle=60)


LATE = [stand(0, 6, 5, "tensor"), stand(1, 5, 5), stand(2, 6, 6, "data"), stand(3, 6, 6, "data")]
SKIPPED = [
    stand(0, 6, 6, "tensor"),
    *(stand(rank, 5 + (rank > 1), 6, "control", control=1) for rank in (1, 2, 3)),
]
CIRCLE = [
    *(stand(0, 6, 5, "tensor"), stand(1, 5, 6, "data")),
    *(stand(2, 5, 6, "data"), stand(3, 6, 5, "tensor")),
]
ALONE = [stand(rank, 5, 5) for rank in range(4)]


@pytest.mark.parametrize(
    ("reports", "working", "silent", "behind"),
    [
        (LATE, (), (), [1]),
        (LATE, (1,), (), []),
        (LATE, (), (1,), [1]),
        (LATE, (), (3,), [1, 3]),
        ([stand(0, 6, 6, "tensor", "data"), LATE[1], stand(2, 5, 5), LATE[3]], (1,), (), [2]),
        (SKIPPED, (), (), [1]),
        (CIRCLE, (), (), [0, 1, 2, 3]),
        (CIRCLE, (2,), (), []),
        (ALONE, (), (), [0, 1, 2, 3]),
        (ALONE, (2,), (), []),
        (ALONE, (), (2,), [2]),
        ([*ALONE[:2], stand(2, 5, 4), ALONE[3]], (), (), [2]),  # on a GPU: nobody is seen to wait
    ],
)
def test_waits_lead_to_the_ranks_that_are_behind(
    reports: list[Report], working: tuple[int, ...], silent: tuple[int, ...], behind: list[int]
) -> None:
    assert find_behind(dict(enumerate(reports)), silent, working)[0] == behind
