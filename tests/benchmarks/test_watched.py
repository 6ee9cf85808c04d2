"""A program with its children: seconds, memory, and how it ends."""

import os
from pathlib import Path

import pytest

from benchmarks.watched import watched
from tests.dist import PATIENCE

# A fork server, and two of its processes that hold 50 MB each at the same time.
TOGETHER = """
import time
from multiprocessing import get_context
def work(barrier):
    held, start = b'x' * 50_000_000, time.process_time()
    barrier.wait()
    while time.process_time() - start < 0.3: pass
if __name__ == '__main__':
    context = get_context('forkserver')
    barrier = context.Barrier(2)
    both = [context.Process(target=work, args=(barrier,)) for _ in range(2)]
    for each in both: each.start()
    for each in both: each.join()
"""
LEFT = "import os, time; open({0!r}, 'w').write(str(os.getpid())); time.sleep({1})"
LEAVES = """
import os, subprocess, sys
subprocess.Popen([sys.executable, '-c', {0!r}], start_new_session=True)
while not os.path.exists({1!r}): pass
"""


def test_seconds_and_memory_are_those_of_all_processes_and_the_limit_is(tmp_path: Path) -> None:
    """benchmarks/test_corpus.py has a process that alone exceeds the limit."""
    file = tmp_path / "together.py"
    file.write_text(TOGETHER)
    used = watched(file)
    assert used["cpu"] >= 0.6
    assert 100e6 < used["peak_bytes"] < 200e6
    with pytest.raises(MemoryError):
        watched(file, limit=90_000_000)


def test_what_is_left_behind_ends(tmp_path: Path) -> None:
    file = str(tmp_path / "process")
    watched("-c", LEAVES.format(LEFT.format(file, PATIENCE), file))
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(file).read_text()), 0)


def test_a_failure_says_status_and_output() -> None:
    with pytest.raises(RuntimeError, match="status 3\nthe reason"):
        watched("-c", "import sys; print('the reason'); sys.exit(3)")
