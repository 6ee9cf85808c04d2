"""The scripts of scripts/slurm under an srun and a scontrol that stand in for Slurm's."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.programs import Run, run_python, start_ranks
from tests.refusals import field_of

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
SLURM = {
    "SLURM_JOB_ID": "40007",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
}
CHECKPOINTS = ["--save", "C/lr=1", "--load=C/lr=1"]

# Both tell what they were called with. srun's status is that of the ranks, of which there is none.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
echo "$*" >> calls
exit "${STATUS:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> calls
[[ "$*" == *hostnames* ]] && printf 'node1\\nnode2\\n'
[[ "$*" == *"show node"* ]] && echo "NodeName=node1 $ADDRESS NodeHostName=node1"
exit 0
"""


def submit(
    folder: Path, script: str, *words: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm would in a copy of the repository that has no more than scripts."""
    for file, text in ((folder / "bin" / "srun", SRUN), (folder / "bin" / "scontrol", SCONTROL)):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "calls").touch()
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environ = {"PATH": path, "PYTHON": "/bin/true", "ADDRESS": "NodeAddr=10.0.0.1", **environ}
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *words],
        cwd=folder, env=SLURM | environ, capture_output=True, text=True,
    )  # fmt: skip


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("script", "words", "program"),
    [
        ("pretrain_gpt2.sh", CHECKPOINTS, "pretrain_gpt2.py"),
        ("pretrain_bert.sh", CHECKPOINTS, "pretrain_bert.py"),
        ("finetune.sh", ["--save", "C"], "tasks/main.py"),
        ("evaluate.sh", ["--task", "a b"], "tasks/main.py"),
        ("scaling.sh", ["--json", "x.json"], "benchmarks/scaling.py"),
    ],
)
@pytest.mark.parametrize("status", [1, 75])
def test_one_launcher_a_node_meets_at_the_first_node_and_a_stopped_job_is_queued_again(
    tmp_path: Path, script: str, words: list[str], program: str, status: int
) -> None:
    ended = submit(tmp_path, script, *words, STATUS=str(status))
    assert ended.returncode == status, ended.stderr
    assert (ROOT / program).exists()
    launch = f"/bin/true scripts/slurm/node.py 2 4 10.0.0.1 10007 {program} {' '.join(words)}"
    assert calls(tmp_path)[2] == launch
    goes_on = status == 75 and script not in ("evaluate.sh", "scaling.sh")
    assert calls(tmp_path)[3:] == ["requeue 40007"] * goes_on


def test_a_first_word_names_a_preset(tmp_path: Path) -> None:
    submit(tmp_path, "finetune.sh", "finetune/mnli_336m", "--save", "C")
    assert "tasks/main.py --preset finetune/mnli_336m --save C" in calls(tmp_path)[2]


# Environment, words, and what the error names: a flag, a variable or a command to copy.
REFUSALS = [
    ({"SLURM_JOB_ID": ""}, CHECKPOINTS, "sbatch --nodes 2"),
    ({"PYTHON": "nowhere"}, CHECKPOINTS, "bash scripts/setup.sh"),
    ({"SLURM_NTASKS_PER_NODE": ""}, CHECKPOINTS, "--ntasks-per-node"),
    ({"SLURM_NTASKS": "7"}, CHECKPOINTS, "--ntasks 8"),
    ({"SLURM_GPUS_ON_NODE": "8"}, CHECKPOINTS, "--ntasks-per-node 8"),
    ({"ADDRESS": ""}, CHECKPOINTS, "NodeAddr"),
    ({}, [], "--save DIR --load DIR"),
    ({}, ["--save", "C"], "--save C --load C"),
    ({}, ["--save", "C", "--load", "B"], "--save C --load C"),
    ({}, [*CHECKPOINTS, "--save", "D"], "--save D --load D"),
]


@pytest.mark.parametrize(("environ", "words", "named"), REFUSALS)
def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, environ: dict[str, str], words: list[str], named: str
) -> None:
    ended = submit(tmp_path, "pretrain_gpt2.sh", *words, **environ)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert named in ended.stderr
    assert not any("node.py" in call for call in calls(tmp_path))


def test_fine_tuning_of_a_pretrained_model_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    words = ["--load", "PRETRAINED", "--finetune", "--save", "TUNED"]
    assert submit(tmp_path, "pretrain_gpt2.sh", *words).returncode == 0
    assert not any("requeue" in each for each in calls(tmp_path))  # it is through
    (tmp_path / "scripts").unlink()
    ended = submit(tmp_path, "finetune.sh", "--load", "PRETRAINED")
    assert ended.returncode == 2
    assert field_of(ended.stderr) == "--save"


def test_a_job_submitted_outside_the_root_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["bash", str(SCRIPTS / "finetune.sh")], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "\nerror: " in ended.stderr


def test_a_step_of_other_nodes_or_gpus_than_the_job_is_refused() -> None:
    words = ["2", "4", "10.0.0.1", "10007", "absent.py"]
    for variable, numbers in (("SLURM_STEP_NUM_NODES", ["1", "2"]), ("SLURM_GPUS_ON_NODE", "14")):
        ended = subprocess.run(
            [sys.executable, str(SCRIPTS / "node.py"), *words],
            env={"SLURM_NODEID": "1", variable: "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 2
        given = re.findall(r"\d+", ended.stderr.partition("Slurm")[2])
        assert given == [*numbers]  # what there is, and what the job has


# A rank that ends with 75 at a signal, and says when it can get one.
RANK = """
import os, signal, sys, time
received, parent = [], os.getppid()
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(number))
open(f"{sys.path[0]}/ready_{os.environ['RANK']}_of_{os.environ['WORLD_SIZE']}", "w").close()
while not received and os.getppid() == parent:
    time.sleep(0.05)
sys.exit(75)
"""
NODE = [str(SCRIPTS / "node.py"), "1", "2", "127.0.0.1", "0"]  # a port that is free


def as_node(program: Path) -> None:
    os.environ["SLURM_NODEID"] = "0"
    run_python([*NODE, str(program)])


def node(folder: Path, text: str) -> AbstractContextManager[Run]:
    """A job of this node alone, with two ranks of this program, which do not outlive it."""
    program = folder / "rank.py"
    program.write_text(text)
    return start_ranks(partial(as_node, program), [0], 1, folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_alone_reaches_its_ranks_whose_status_it_takes(
    tmp_path: Path, number: signal.Signals
) -> None:
    with node(tmp_path, RANK) as run:
        run.wait_for(lambda: len(list(tmp_path.glob("ready_*_of_2"))) == 2)
        run.signal(number)
        assert run.wait() == [75], run.text()


@pytest.mark.parametrize(
    ("program", "status"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)]
)
def test_the_status_of_a_node_is_that_of_its_ranks(
    tmp_path: Path, program: str, status: int
) -> None:
    with node(tmp_path, program) as run:
        assert run.wait() == [status], run.text()


def catches(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Whether it has a handler for the signal by now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def test_a_signal_before_there_are_ranks_ends_with_the_status_of_a_stopped_run() -> None:
    environ = os.environ | {"SLURM_NODEID": "0"}
    process = subprocess.Popen([sys.executable, *NODE, "absent.py"], env=environ)
    while not catches(process, signal.SIGUSR1):  # torch takes seconds more
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 75
