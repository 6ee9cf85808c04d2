"""scripts/slurm/pretrain.sh under an srun and a scontrol that stand in for Slurm's."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Two tasks, as srun would start them; its status is the highest of theirs.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "$@" &
    tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do
    wait "$task"
    status=$?
    ((status > highest)) && highest=$status
done
exit $highest
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
[[ $1 == show ]] && echo 127.0.0.1
exit 0
"""
# In place of the environment's python: tells what it was started with, and ends as it is told.
PYTHON = """#!/usr/bin/env bash
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $@" >> "$CALLS"
exit "$STATUS"
"""


@pytest.mark.parametrize(("status", "requeues"), [(0, 0), (75, 1), (1, 0)])
def test_a_job_that_a_signal_stopped_is_queued_again(
    tmp_path: Path, status: int, requeues: int
) -> None:
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    for file, text in (
        (tools / "srun", SRUN),
        (tools / "scontrol", SCONTROL),
        (tmp_path / ".venv" / "bin" / "python", PYTHON),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm" / "pretrain.sh"), "--seed", "5 6"],
        env=os.environ
        | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "STATUS": str(status),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "20007",
            "SLURM_JOB_NODELIST": "node[1-2]",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert ended.returncode == status, ended.stderr
    lines = calls.read_text().splitlines()
    assert lines[0] == "show hostnames node[1-2]"
    assert sorted(lines[1:3]) == [
        f"{rank}/2 {rank}/2 127.0.0.1:20007 pretrain_gpt2.py --seed 5 6" for rank in (0, 1)
    ]
    assert lines[3:] == ["requeue 20007"] * requeues
