"""A program with its children: seconds, memory, and how it ends."""

import os
from pathlib import Path

import pytest

from benchmarks.watched import watched
from tests.dist import PATIENCE

BURN = "import time\nwhile time.process_time() < {}: pass\n"
HOLD = "import time; held = b'x' * {}; time.sleep({})"
TOGETHER = HOLD.format(80_000_000, PATIENCE)
START = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', '''{}''']{})\n"
APART = ", start_new_session=True"
POOL = """
import time
from multiprocessing import get_context
def burn(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds: pass
if __name__ == '__main__':
    with get_context('forkserver').Pool(2) as pool:
        pool.map(burn, [0.3] * 3)
"""


def test_cpu_seconds_are_those_of_all_processes(tmp_path: Path) -> None:
    code = START.format(BURN.format(0.4), APART) + BURN.format(0.4)
    assert watched("-c", code + "child.wait()")["cpu"] >= 0.8
    file = tmp_path / "pool.py"  # a fork server and its workers
    file.write_text(POOL)
    assert watched(file)["cpu"] >= 0.9


def test_memory_is_that_of_all_processes_at_a_time() -> None:
    hold = HOLD.format(50_000_000, 3)
    used = watched("-c", START.format(hold, "") + hold + "; child.wait()")
    assert 100e6 < used["peak_bytes"] < 150e6


@pytest.mark.parametrize(
    "code",
    [
        "held = b'x' * 10**9",
        START.format("x = b'x' * 10**9", "") + "sys.exit(child.wait())",
        START.format(TOGETHER, "") + TOGETHER,
    ],
    ids=["one", "its child", "both together"],
)
def test_no_program_gets_more_than_the_limit(code: str) -> None:
    with pytest.raises(MemoryError):
        watched("-c", code, limit=10**8)


def test_what_is_left_behind_ends_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "process"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid()))\n" + BURN.format(
        PATIENCE
    )
    wait = f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\n"
    used = watched("-c", START.format(code, APART) + wait + BURN.format(0.5))
    assert used["cpu"] > 0.5
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_failure_says_status_and_output() -> None:
    with pytest.raises(RuntimeError, match="status 3\nthe reason"):
        watched("-c", "import sys; print('the reason'); sys.exit(3)")
