"""The same result from this process, a pool, Dask and Slurm, and when workers die."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.dist import PATIENCE
from tests.refusals import refused
from tests.tools.corpus.lines import content, wait_until
from tests.tools.corpus.steps_of_tests import TOY, corpus, run, toy
from tools.corpus.scheduler import ATTEMPTS, HEADROOM, open_scheduler, run_in_pool
from tools.corpus.settings import program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    run(toy(corpus(tmp_path / "in", files=1, fatal=0), tmp_path / "expected"))
    return content(tmp_path / "expected")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two worker processes of Dask."""
    distributed = pytest.importorskip("dask.distributed")
    dask = pytest.importorskip("dask")
    # In place of 30 s, for which a worker that is gone may be waited for.
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "3s"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster.scheduler_address


@pytest.mark.parametrize(
    ("where", "fault", "kind"),
    [
        ("pool", "kill-once", None), ("pool", "raise", ValueError),
        ("pool", "kill-always", RuntimeError), ("dask", "kill-always", RuntimeError),
    ],
)  # fmt: skip
def test_workers_that_fail_change_nothing(
    where: str, fault: str, kind: type[Exception] | None, tmp_path: Path,
    expected: dict[str, bytes], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    name = "local" if where == "pool" else request.getfixturevalue("cluster")
    settings = toy(tmp_path / "in", tmp_path / "out", scheduler=name, workers=2)
    (tmp_path / "in" / fault).touch()
    if kind is None:
        run(settings)
    else:
        with pytest.raises(kind) as error:
            run(settings)
        assert ("--workers" in str(error.value)) == (fault == "kill-always")
        assert ("a fatal document" in str(error.value)) == (fault == "raise")
    assert (tmp_path / "in" / fault).exists() == (fault != "kill-once")
    (tmp_path / "in" / fault).unlink(missing_ok=True)
    run(toy(tmp_path / "in", tmp_path / "out"))
    assert content(tmp_path / "out") == expected


def die_once(folder: str, number: int) -> int:
    """Kill the worker in every odd call, once each."""
    flag = Path(folder) / str(number)
    if number % 2 and not flag.exists():
        flag.touch()
        os._exit(1)
    return number


@pytest.mark.parametrize(
    ("workers", "numbers"),
    [
        (1, [*range(4 * ATTEMPTS)]),
        (6, [1, *range(0, 60, 2)]),  # CPython's pool may wait for one that starts while it breaks
    ],
    ids=["more deaths than attempts", "while others start"],
)
def test_dead_workers_are_replaced(workers: int, numbers: list[int], tmp_path: Path) -> None:
    for attempt in range(2 if workers > 1 else 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        calls = [partial(die_once, str(folder), number) for number in numbers]
        assert dict(run_in_pool(workers, calls)) == dict(enumerate(numbers))


def wait_in(folder: str, number: int) -> int:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(PATIENCE)
    return number


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Or they would go on writing beside the run that comes after."""
    code = (
        "from tests.tools.corpus.test_scheduler import *\n"
        f"calls = [partial(wait_in, {str(tmp_path)!r}, k) for k in range(4)]\n"
        "list(run_in_pool(2, calls))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    run.kill()
    run.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_local_work_needs_no_dask_and_one_worker_no_process() -> None:
    code = (
        "import os, sys, tools.corpus.run\n"
        "from functools import partial\n"
        "from tools.corpus.scheduler import open_scheduler\n"
        "for workers in (1, 2):\n"
        "    with open_scheduler('local', workers, 1) as local:\n"
        "        [(_, worker)] = local([partial(os.getpid)])\n"
        "    assert (worker == os.getpid()) == (workers == 1)\n"
        "assert not {'dask', 'distributed', 'dask_jobqueue'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("lacking", ["dask", "sbatch", "answer"])
def test_a_cluster_that_cannot_be_asked_is_refused_and_what_is_there_stays(
    lacking: str, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "slurm" if lacking == "sbatch" else "tcp://127.0.0.1:9"
    monkeypatch.setattr("tools.corpus.scheduler.ANSWER", 1)
    if lacking == "dask":
        monkeypatch.setitem(sys.modules, "dask.distributed", None)
    elif lacking == "sbatch":
        pytest.importorskip("dask_jobqueue")
        monkeypatch.setenv("PATH", "")
    words = ["--input", str(tmp_path / "in" / "0.jsonl"), "--output", str(tmp_path / "expected")]
    words += ["--workers", "1", "--mark", "?", "--overwrite", "--scheduler", name]
    assert refused(partial(program, TOY), words) == "--scheduler"
    assert content(tmp_path / "expected") == expected


def fail_or_write(folder: str, number: int) -> None:
    """The first call fails once another is under way; that one ends when others are cancelled."""
    begun, ended = (Path(folder) / name for name in ("begun", "ended"))
    if number == 0:
        wait_until(lambda: any(begun.iterdir()))
        raise ValueError("the first")
    (begun / str(number)).touch()
    wait_until((Path(folder) / "cancelled").exists)
    (ended / str(number)).touch()


def test_nothing_is_at_work_after_an_error_on_a_dask_worker(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dask.distributed import Client

    begun, ended = (tmp_path / name for name in ("begun", "ended"))
    begun.mkdir()
    ended.mkdir()
    calls = [partial(fail_or_write, str(tmp_path), number) for number in range(20)]
    cancel = Client.cancel

    def cancel_and_note(client: Client, futures: list[Any]) -> None:
        cancel(client, futures)
        (tmp_path / "cancelled").touch()

    monkeypatch.setattr(Client, "cancel", cancel_and_note)
    with open_scheduler(cluster, 1, 1) as dask:
        with pytest.raises(ValueError, match="the first"):
            list(dask(calls))
        written = {path.name for path in ended.iterdir()}
        assert {path.name for path in begun.iterdir()} == written != set()


SBATCH = """#!{python}
import os, subprocess, sys
from pathlib import Path
script = Path(sys.argv[-1]).read_text()
job = os.getpid()  # jobs are submitted side by side
path = Path({folder!r}) / f"job-{{job}}.sh"
path.write_text(script)
started = subprocess.Popen(
    ["bash", str(path)], start_new_session=True, cwd="/",
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
(Path({folder!r}) / f"pid-{{job}}").write_text(str(started.pid))
print(f"Submitted batch job {{job}}")
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where the jobs land that are submitted: sbatch runs them here, at once."""
    pytest.importorskip("dask_jobqueue")
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH.format(python=sys.executable, folder=str(folder)))
    (folder / "scancel").write_text("#!/bin/sh\n")
    for name in ("sbatch", "scancel"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield folder
    for pid in folder.glob("pid-*"):
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_slurm_runs_the_step_in_jobs(
    tmp_path: Path, expected: dict[str, bytes], slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With relative paths, which jobs get from the root: they run in another folder."""
    monkeypatch.chdir(tmp_path)
    assert toy(Path("in"), Path("out"), scheduler="tcp://a:1").output == tmp_path / "out"
    run(toy(Path("in"), Path("out"), scheduler="slurm", workers=2, memory="600MB"))
    assert content(tmp_path / "out") == expected
    facts = json.loads((tmp_path / "out" / "run.json").read_bytes())
    assert facts["settings"] == {"workers": 2, "scheduler": "slurm"}
    jobs = [path.read_text() for path in slurm.glob("job-*.sh")]
    assert 1 <= len(jobs) <= 2  # the first may have done it all before the second is submitted
    for job in jobs:
        assert "#SBATCH --cpus-per-task=1" in job
        assert f"--memory-limit {(600_000_000 + HEADROOM) / 2**30:.2f}GiB" in job
