"""The same result from this process, a pool, Dask and Slurm, and when workers die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist import PATIENCE
from tests.tools.corpus.lines import content, write_jsonl
from tests.tools.corpus.steps_of_tests import Settings, run
from tools.corpus import scheduler
from tools.corpus.scheduler import ATTEMPTS, HEADROOM, Call, InProcess, LocalPool, open_scheduler

ROOT = Path(__file__).parents[3]


def corpus(folder: Path, fatal: int = 20) -> Path:
    """60 documents; what happens at the fatal one is told by files beside them."""
    texts = ["fatal" if k == fatal else f"document {k}" for k in range(60)]
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in texts])
    return folder


def toy(folder: Path, output: Path, **more: Any) -> Settings:
    return Settings(input=(folder / "a.jsonl",), output=output, unit="100B", **more)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    run(toy(corpus(tmp_path / "in"), tmp_path / "expected", workers=1))
    return content(tmp_path / "expected")


def test_a_worker_that_dies_is_replaced(tmp_path: Path, expected: dict[str, bytes]) -> None:
    (tmp_path / "in" / "kill-once").touch()
    run(toy(tmp_path / "in", tmp_path / "out", workers=2))
    assert not (tmp_path / "in" / "kill-once").exists()
    assert content(tmp_path / "out") == expected


def test_work_that_always_kills_its_worker_ends_with_the_cure(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    (tmp_path / "in" / "kill-always").touch()
    with pytest.raises(RuntimeError, match=f"a worker died {ATTEMPTS} times .*fewer --workers"):
        run(toy(tmp_path / "in", tmp_path / "out", workers=2))
    (tmp_path / "in" / "kill-always").unlink()
    run(toy(tmp_path / "in", tmp_path / "out", workers=2))
    assert content(tmp_path / "out") == expected


def test_workers_say_nothing_of_their_own(tmp_path: Path, expected: dict[str, bytes]) -> None:
    ended = program(tmp_path / "in", tmp_path / "out", "--workers", "2", "--unit", "100B")
    assert ended.stderr == (f"toy: 60 documents in, 60 out to {tmp_path / 'out'}; dropped: none\n")
    assert content(tmp_path / "out") == expected


def program(folder: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.tools.corpus.steps_of_tests"]
    command += ["--input", str(folder / "a.jsonl"), "--output", str(output), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def die_once(folder: str, number: int) -> int:
    """Kill the worker in every odd call, once each."""
    flag = Path(folder) / str(number)
    if number % 2 and not flag.exists():
        flag.touch()
        os._exit(1)
    return number


def test_deaths_of_many_workers_in_a_long_stage_do_not_add_up(tmp_path: Path) -> None:
    calls = [Call(die_once, (str(tmp_path), k)) for k in range(4 * ATTEMPTS)]
    results = dict(LocalPool(1).run(calls))
    assert results == {k: k for k in range(4 * ATTEMPTS)}
    assert len(list(tmp_path.iterdir())) == 2 * ATTEMPTS > ATTEMPTS


def fail_at(number: int, at: int) -> int:
    if number == at:
        raise KeyError(f"call {number}")
    return number


@pytest.mark.parametrize("pool", [InProcess(), LocalPool(2)])
def test_the_exception_of_a_call_comes_out(pool: scheduler.Scheduler) -> None:
    assert sorted(pool.run([Call(fail_at, (k, -1)) for k in range(5)])) == [
        (k, k) for k in range(5)
    ]
    with pytest.raises(KeyError, match="call 3"):
        list(pool.run([Call(fail_at, (k, 3)) for k in range(5)]))


def wait_in(folder: str, number: int) -> int:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(PATIENCE)
    return number


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Or they would go on writing beside the run that comes after."""
    code = (
        "from tests.tools.corpus.test_scheduler import *\n"
        f"calls = [Call(wait_in, ({str(tmp_path)!r}, k)) for k in range(4)]\n"
        "list(LocalPool(2).run(calls))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    run.kill()
    run.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def wait_until(condition: Any) -> None:
    """Or fail after `PATIENCE`."""
    for _ in range(int(PATIENCE * 20)):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited in vain")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_nothing_but_the_processes_of_this_machine_needs_dask(tmp_path: Path) -> None:
    modules = sorted(path.stem for path in (ROOT / "tools" / "corpus").glob("*.py"))
    modules = [name for name in modules if not name.startswith("__")]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module('tools.corpus.' + name)\n"
        "from tools.corpus.program import program\n"
        "program('tests.tools.corpus.steps_of_tests')\n"
        "found = [name for name in sys.modules if name.split('.')[0] in "
        "('dask', 'distributed', 'dask_jobqueue')]\n"
        "assert not found, found\n"
    )
    corpus(tmp_path)
    flags = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    flags += ["--workers", "2", "--scheduler", "local"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()


def test_without_dask_a_cluster_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    for name in ("slurm", "tcp://host:8786"):
        with pytest.raises(ValueError, match="--scheduler"):
            run(toy(corpus(tmp_path / "in"), tmp_path / "out", scheduler=name))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two worker processes of Dask."""
    distributed = pytest.importorskip("dask.distributed")
    dask = pytest.importorskip("dask")
    # Of 30 s by default, for which a worker that is gone may be waited for.
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "3s"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster


def test_a_dask_cluster_writes_the_same_bytes(
    tmp_path: Path, expected: dict[str, bytes], cluster: Any
) -> None:
    run(toy(tmp_path / "in", tmp_path / "out", scheduler=cluster.scheduler_address))
    assert content(tmp_path / "out") == expected


def test_relative_paths_mean_the_same_to_workers_in_other_folders(
    tmp_path: Path, expected: dict[str, bytes], cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the workers stay where they were started
    (tmp_path / "words").touch()
    settings = toy(
        Path("in"), Path("out"), scheduler=cluster.scheduler_address, words=Path("words")
    )
    assert settings.words == tmp_path / "words"
    run(settings)
    assert content(tmp_path / "out").keys() == expected.keys()
    assert (tmp_path / "out" / "part-00000.jsonl").read_bytes() == expected["part-00000.jsonl"]


def test_a_dask_worker_that_is_killed_changes_nothing(
    tmp_path: Path, expected: dict[str, bytes], cluster: Any
) -> None:
    (tmp_path / "in" / "kill-once").touch()
    run(toy(tmp_path / "in", tmp_path / "out", scheduler=cluster.scheduler_address))
    assert not (tmp_path / "in" / "kill-once").exists()
    assert content(tmp_path / "out") == expected


def test_an_error_on_a_dask_worker_is_that_of_the_task(
    tmp_path: Path, expected: dict[str, bytes], cluster: Any
) -> None:
    (tmp_path / "in" / "raise").touch()
    with pytest.raises(ValueError, match="a fatal document"):
        run(toy(tmp_path / "in", tmp_path / "out", scheduler=cluster.scheduler_address))
    (tmp_path / "in" / "raise").unlink()
    run(toy(tmp_path / "in", tmp_path / "out", workers=1))
    assert content(tmp_path / "out") == expected


def fail_or_write(folder: str, number: int) -> None:
    """The first call fails once another is under way, which ends when it is waited for."""
    begun, ended, waited = (Path(folder) / name for name in ("begun", "ended", "waited"))
    if number == 0:
        wait_until(lambda: any(begun.iterdir()))
        raise ValueError("the first")
    (begun / str(number)).touch()
    wait_until(waited.exists)
    (ended / str(number)).touch()


def test_nothing_is_at_work_after_an_error_on_a_dask_worker(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dask import distributed

    begun, ended = (tmp_path / name for name in ("begun", "ended"))
    begun.mkdir()
    ended.mkdir()
    wait = distributed.wait

    def waits(futures: list[Any]) -> None:
        (tmp_path / "waited").touch()
        wait(futures)

    monkeypatch.setattr(distributed, "wait", waits)
    calls = [Call(fail_or_write, (str(tmp_path), number)) for number in range(20)]
    with (
        open_scheduler(cluster.scheduler_address, 1, 1) as dask,
        pytest.raises(ValueError, match="the first"),
    ):
        list(dask.run(calls))
    written = {path.name for path in ended.iterdir()}
    assert {path.name for path in begun.iterdir()} == written != set()


def test_work_that_always_kills_its_dask_worker_ends_with_the_cure(
    tmp_path: Path, expected: dict[str, bytes], cluster: Any
) -> None:
    (tmp_path / "in" / "kill-always").touch()
    with pytest.raises(RuntimeError, match=r"a worker died .*fewer --workers"):
        run(toy(tmp_path / "in", tmp_path / "out", scheduler=cluster.scheduler_address))


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:9",
        "tcp://127.0.0.1",
        "ftp://127.0.0.1:9",
        "tcp://no.such.host.invalid:8786",
        "nonsense",
        "",
    ],
)
def test_an_address_where_nobody_answers_is_named(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ANSWER", 0.3)
    with pytest.raises(ValueError, match="--scheduler"):
        run(toy(corpus(tmp_path / "in"), tmp_path / "out", scheduler=address))


def test_slurm_without_sbatch_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    ended = program(corpus(tmp_path / "in"), tmp_path / "out", "--scheduler", "slurm")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: --scheduler slurm")


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
    tmp_path: Path, expected: dict[str, bytes], slurm: Path
) -> None:
    run(toy(tmp_path / "in", tmp_path / "out", scheduler="slurm", workers=2, memory="600MB"))
    assert content(tmp_path / "out") == expected
    assert json.loads((tmp_path / "out" / "run.json").read_bytes())["settings"] == {
        "workers": 2, "scheduler": "slurm",
    }  # fmt: skip
    jobs = [path.read_text() for path in slurm.glob("job-*.sh")]
    assert 1 <= len(jobs) <= 2  # the first may have done it all before the second is submitted
    for job in jobs:
        assert f"export PYTHONPATH={ROOT}:$PYTHONPATH" in job
        assert "#SBATCH --cpus-per-task=1" in job
        assert f"--memory-limit {(600_000_000 + HEADROOM) / 2**30:.2f}GiB" in job
        assert re.search(r"#SBATCH --mem=\d+G", job)


def test_local_work_of_one_worker_stays_in_this_process() -> None:
    with open_scheduler("local", 1, 1) as local:
        assert list(local.run([Call(os.getpid, ())])) == [(0, os.getpid())]
    with open_scheduler("local", 2, 1) as local:
        [(_, worker)] = local.run([Call(os.getpid, ())])
        assert worker != os.getpid()
