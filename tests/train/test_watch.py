"""The first failure is the message: each fault, in real processes, and what is told of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.ranks import Ended, environment, run_ranks, write_program

HANG = 5.0  # seconds

STEP = """
all_reduce(torch.ones(4, 2), mesh.tensor)
all_reduce(torch.ones(3), mesh.data)
"""


def told(ended: list[Ended]) -> str:
    """What the one rank that told the verdict wrote; rank 0 may have pointed to it, in a line."""
    texts = [each.errors for each in ended if each.errors]
    full = [text for text in texts if not text.startswith("rank 0 ends: ")]
    assert len(full) == 1, texts
    assert all(len(text.splitlines()) == 1 for text in texts if text not in full)
    return full[0]


def statuses(ended: list[Ended]) -> list[int]:
    return [each.status for each in ended]


def test_a_run_without_faults_ends_without_a_word(tmp_path: Path) -> None:
    program = write_program(tmp_path, STEP + "if last: print('done')")
    assert run_ranks(program, 2) == [Ended(0, "done\n", "")] * 2


def test_the_rank_that_raises_is_what_is_shown(tmp_path: Path) -> None:
    fault = """
if last and rank == 3:
    error = ZeroDivisionError('no loss')
    error.add_note('in vain')
    raise error
"""
    ended = run_ranks(write_program(tmp_path, f"{fault}\n{STEP}"), 4)
    text = told(ended)
    assert text.startswith("rank 3 of 4 (data 1, tensor 1) on ")
    assert "Traceback" in text
    assert "raise error" in text
    assert "in vain" in text
    assert text == ended[3].errors
    assert "failed: ZeroDivisionError: no loss" in ended[0].errors
    assert statuses(ended) == [1] * 4


def test_all_leave_with_the_status_they_ask_for(tmp_path: Path) -> None:
    ended = run_ranks(write_program(tmp_path, f"{STEP}\nif last: sys.exit(75)"), 2)
    assert ended == [Ended(75, "", "")] * 2


def test_the_status_of_one_that_leaves_before_the_others_is_that_of_all(tmp_path: Path) -> None:
    """A signal reaches Python only after the collective in which a rank waits."""
    ended = run_ranks(write_program(tmp_path, f"if last and rank: sys.exit(75)\n{STEP}"), 2)
    assert "left the run, with exit status 75, before the others" in told(ended)
    assert statuses(ended) == [75, 75]


def test_a_rank_that_leaves_early_is_not_waited_for(tmp_path: Path) -> None:
    program = write_program(
        tmp_path, f"if last and rank == 1: sys.exit(0)\n{STEP}", tensor=2, limit=60
    )
    ended = run_ranks(program, 2)
    text = told(ended)
    assert "rank 1 of 2 (data 0, tensor 1) on " in text
    assert "left the run, with exit status 0, before the others" in text
    assert "rank 0 waits for it in collective 6 on the tensor axis, all_reduce of [4, 2]" in text
    assert statuses(ended) == [1, 1]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_and_who_is_left_says_where_it_stands(
    tmp_path: Path, killed: int
) -> None:
    """Rank 0 keeps the store as well, so that its death is told by whom it leaves without."""
    fault = f"if last: time.sleep(3)\nif last and rank == {killed}: os.kill(os.getpid(), 9)"
    ended = run_ranks(write_program(tmp_path, f"{fault}\n{STEP}"), 2)
    text = told(ended)
    # Torch may warn of the broken store before.
    assert f"\nrank {killed} of 2 (data 0, tensor {killed}) on " in f"\n{text}"
    assert "vanished: its process was killed or crashed" in text
    assert "in Python, after collective 5 on the tensor axis, all_reduce of [4, 2] Float" in text
    assert f"rank {1 - killed} of 2 (data 0, tensor {1 - killed}) on " in text
    assert sorted(statuses(ended)) == [-9, 1]


def test_an_error_of_torch_is_told_too(tmp_path: Path) -> None:
    """It is of the kind that a broken connection raises, but nobody vanished."""
    fault = "if last and rank == 1: torch.ones(2) @ torch.ones(3)"
    ended = run_ranks(write_program(tmp_path, f"{fault}\n{STEP}"), 2)
    assert "inconsistent tensor size" in told(ended)


def test_who_sleeps_is_named_with_its_stack(tmp_path: Path) -> None:
    """Four ranks wait, for each other too; the one for whom all wait is behind."""
    fault = "if last and rank == 1: time.sleep(600)"
    ended = run_ranks(write_program(tmp_path, f"{fault}\n{STEP}", limit=HANG), 4)
    text = told(ended)
    first = text.splitlines()[0]
    assert first.startswith("nothing moved for 5 s: rank 1 of 4 (data 0, tensor 1) on ")
    assert first.endswith(" is behind")
    assert (
        "rank 0 waits for it in collective 6 on the tensor axis, all_reduce of [4, 2] Float; "
        "it has made 5"
    ) in text
    assert "time.sleep(600)" in text
    assert text.rstrip().endswith(
        "--distributed-timeout-minutes N, with an N greater than 0.0833333"
    )
    assert statuses(ended) == [1] * 4


def test_who_polls_in_vain_is_named(tmp_path: Path) -> None:
    fault = """
while last and rank == 1:
    time.sleep(0.01)
"""
    ended = run_ranks(write_program(tmp_path, f"{fault}\n{STEP}", limit=HANG), 2)
    text = told(ended)
    assert text.startswith("nothing moved for 5 s: rank 1 of 2 (data 0, tensor 1) on ")
    assert "time.sleep(0.01)" in text


def test_who_computes_for_three_limits_is_let_be(tmp_path: Path) -> None:
    """While the other rank waits for it."""
    work = """
end = time.monotonic() + 3 * 4
def compute(depth): return 1 + (compute(depth - 1) if depth else sum(i * i for i in range(99)))
while last and rank == 1 and time.monotonic() < end:
    for depth in range(20): compute(depth)
"""
    program = write_program(tmp_path, f"{work}\n{STEP}\nif last: print('done')", limit=4)
    assert run_ranks(program, 2) == [Ended(0, "done\n", "")] * 2


def test_a_save_that_hangs_is_named_with_its_threads_stack(tmp_path: Path) -> None:
    """Over a group that the saver made for itself."""
    body = """
if step == 0: others = mesh.control.another()
def save():
    if rank == 1: time.sleep(600)
    try: others.gather(1)
    except RuntimeError: time.sleep(600)  # the other rank has ended with its verdict
if last:
    thread = threading.Thread(target=save, name="save", daemon=True)
    thread.start()
    thread.join()
"""
    text = told(run_ranks(write_program(tmp_path, f"{STEP}\n{body}", limit=HANG), 2))
    assert text.startswith("nothing moved for 5 s: rank 1 of 2 (data 0, tensor 1) on ")
    assert "rank 0 waits for it in collective 1 on the save axis" in text
    assert "its thread that saves:" in text
    assert "time.sleep(600)" in text


@pytest.mark.parametrize(("axis", "partner"), [("tensor", 2), ("data", 1)])
def test_who_skips_a_collective_is_named(tmp_path: Path, axis: str, partner: int) -> None:
    body = STEP.replace(
        f"all_reduce(torch.ones({'4, 2' if axis == 'tensor' else 3}), mesh.{axis})",
        f"if not (rank == 3 and step == 3): all_reduce(torch.ones(3), mesh.{axis})",
    )
    program = write_program(tmp_path, f"{body}\nif last: mesh.control.gather(1)", limit=HANG)
    ended = run_ranks(program, 4)
    text = told(ended)
    assert "rank 3 of 4 (data 1, tensor 1) on " in text.splitlines()[0]
    assert (
        f"rank {partner} waits for it in collective 6 on the {axis} axis, all_reduce of [3] Float; "
        "it has made 5"
    ) in text
    assert "mesh.control.gather(1)" in text


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named_without_its_stack(tmp_path: Path, stopped: int) -> None:
    """The others have heard of its place by then: they beat once a second."""
    fault = f"""
if last: time.sleep(3)
if last and rank == {stopped}: os.kill(os.getpid(), signal.SIGSTOP)
"""
    program = write_program(tmp_path, f"{fault}\n{STEP}", limit=HANG)
    [other] = run_ranks(program, 2, stopped=(stopped,))
    assert other.status == 1
    assert f"rank {stopped} of 2 (data 0, tensor {stopped}) on " in other.errors
    assert "its process is stopped, or its host is gone" in other.errors


def test_torchruns_summary_names_the_first_failure(tmp_path: Path) -> None:
    """And a restart by torchrun, which keeps the store, starts anew."""
    attempt = "os.environ['TORCHELASTIC_RESTART_COUNT']"
    fault = f"if last and rank == 1: raise ZeroDivisionError('attempt ' + {attempt})"
    program = write_program(tmp_path, f"{fault}\n{STEP}")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=1", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    cause = ended.stderr.partition("Root Cause")[2]
    assert "rank 1 of 2 (data 0, tensor 1) on " in cause
    assert "ZeroDivisionError: attempt 1" in cause


def test_the_recorder_stays_small_and_lets_collectives_be_compiled(tmp_path: Path) -> None:
    body = """
from megatron.parallel.collectives import copy_to, reduce_from
if last:
    def both(x): return reduce_from(copy_to(x, mesh.tensor) * 2, mesh.tensor)
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(x)
    compiled.sum().backward()
    print(compiled.tolist(), x.grad.tolist())
    for _ in range(100): all_reduce(torch.ones(1), mesh.tensor)
    entries = torch._C._distributed_c10d._dump_fr_trace_json()
    print(0 < entries.count(b"all_reduce") <= 64)
"""
    ended = run_ranks(write_program(tmp_path, body), 2)
    assert ended == [Ended(0, "[4.0, 4.0, 4.0] [4.0, 4.0, 4.0]\nTrue\n", "")] * 2


def test_the_error_file_is_as_torchrun_reads_it(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from megatron.config.failure import write_error_file

    path = tmp_path / "error.json"
    write_error_file(str(path), "rank 1 failed", "its traceback")
    failure = ProcessFailure(local_rank=1, pid=os.getpid(), exitcode=1, error_file=str(path))
    assert failure.timestamp > 0
    assert json.loads(path.read_text())["message"]["message"] == "rank 1 failed"
