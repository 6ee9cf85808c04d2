"""The jobs of scripts/slurm on a real Slurm of three nodes, disturbed in every way that matters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.train.metrics import read_metrics
from tests.data.samples import write_tokenizer
from tests.programs import REST, SHAPE, assert_equal_bits, newest, some_data
from tests.slurm.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm

STEPS = 80  # which go on for some seconds after what a test waits for
GPT2 = "scripts/slurm/pretrain_gpt2.sh"
MORE = "--attention-dropout 0.1 --hidden-dropout 0.1 --tensor-model-parallel-size 2 --eval-iters 0"


def words(folder: Path, save: Path) -> list[str]:
    """Of a job that trains a GPT-2 of t = 2, d = 2 for STEPS steps."""
    run = f"--train-iters {STEPS} --lr-decay-iters 300 --log-interval 1 --save-interval 5"
    flags = f"{SHAPE} {REST} {MORE} {run} --save {save} --load {save}"
    return [GPT2, *flags.split(), "--data-path", str(some_data(folder))]


def wait_for_step(cluster: Cluster, log: Path, step: int) -> None:
    def is_there() -> bool:
        return log.exists() and f"step {step}/" in log.read_text()

    cluster.wait_for(is_there, f"step {step} in {log}")


@pytest.fixture(scope="session")
def calm(cluster: Cluster, folder: Path) -> Path:
    """The checkpoint that an undisturbed job left."""
    save, log = folder / "calm", folder / "calm.log"
    job = cluster.submit(log, *words(folder, save))
    ended = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", log.read_text()
    assert "4 ranks on 2 nodes, meeting at 127.0.0.1:" in log.read_text()
    assert "ranks data 2 x tensor 2" in log.read_text()
    return newest(save)


def begun(cluster: Cluster, folder: Path, place: Path, step: int) -> tuple[Path, Path, str]:
    """(checkpoints, log, number) of a job that has come to this step."""
    save, log = place / "save", place / "log"
    job = cluster.submit(log, *words(folder, save))
    wait_for_step(cluster, log, step)
    return save, log, job


def assert_finished_as(calm: Path, save: Path, cluster: Cluster, job: str, log: Path) -> None:
    """The job is through, and not one bit is another than of the undisturbed one."""
    ended = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", log.read_text()
    assert newest(save).name == calm.name == f"step_{STEPS:08d}"
    assert_equal_bits(calm, newest(save))


def test_a_signal_saves_and_the_job_queues_itself_again(
    cluster: Cluster, folder: Path, calm: Path, tmp_path: Path
) -> None:
    save, log, job = begun(cluster, folder, tmp_path, 7)
    cluster.ask("scancel", "--signal=USR1", job)
    cluster.start_again(job)
    assert_finished_as(calm, save, cluster, job, log)
    assert cluster.job(job)["Restarts"] == "1"
    lines = read_metrics(save / "metrics.jsonl")
    ends = [(line["ended"], line["exit_code"]) for line in lines if "ended" in line]
    assert ends[0] == ("SIGUSR1", 75)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def test_what_a_user_cancels_saves_and_stays_so_until_it_is_queued_by_hand(
    cluster: Cluster, folder: Path, calm: Path, tmp_path: Path
) -> None:
    save, log, job = begun(cluster, folder, tmp_path, 6)
    cluster.ask("scancel", job)
    cluster.wait_for(lambda: "ended by SIGTERM" in log.read_text(), "the end of the ranks")
    assert cluster.wait_for_state(job, "CANCELLED")["Restarts"] == "0"
    cluster.wait_until_idle()
    cluster.ask("scontrol", "requeue", job)
    cluster.start_again(job)
    assert_finished_as(calm, save, cluster, job, log)


@pytest.mark.parametrize("node", ["first", "second"])
def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(
    cluster: Cluster, folder: Path, calm: Path, tmp_path: Path, node: str
) -> None:
    """The first runs the job's script too.

    The job goes on with the spare node. The one that died comes back only after it: within a
    minute, Slurm repeats its order to end the first run's step, which would meet the second's.
    """
    save, log, job = begun(cluster, folder, tmp_path, 7)
    cluster.kill_node(node)
    cluster.start_again(job)
    assert_finished_as(calm, save, cluster, job, log)
    assert cluster.job(job)["Restarts"] == "1"
    assert f"going on from {save / 'step_'}" in log.read_text()
    cluster.start_node(node)
    cluster.wait_until_idle()


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ("--nodes=2 --ntasks=3", "--ntasks 4"),
        ("--nodes=1 --ntasks-per-node=1", "--tensor-model-parallel-size 2"),
    ],
)
def test_another_world_is_refused_before_anything_is_built(
    cluster: Cluster, folder: Path, tmp_path: Path, size: str, named: str
) -> None:
    save, log = tmp_path / "save", tmp_path / "log"
    job = cluster.submit(log, *size.split(), *words(folder, save))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED")["JobState"] == "FAILED"
    cluster.wait_for(log.exists, "the log")
    assert named in log.read_text()
    assert not save.exists()


def test_two_nodes_tokenise_what_one_process_does(cluster: Cluster, tmp_path: Path) -> None:
    texts = (f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(4000))
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "raw.jsonl").write_text("".join(lines))
    vocabulary, merges = write_tokenizer(tmp_path)
    flags = ["--input", str(tmp_path / "raw.jsonl"), "--append-eod", "--shard-size", "300KB"]
    flags += ["--vocab-file", str(vocabulary), "--merge-file", str(merges)]
    job = cluster.submit(
        tmp_path / "log", "--ntasks-per-node=1", "--cpus-per-task=2", "scripts/slurm/preprocess.sh",
        *flags, "--output-prefix", str(tmp_path / "cluster"),
    )  # fmt: skip
    command = [sys.executable, "-m", "tools.preprocess_data", *flags]
    prefix = ["--output-prefix", str(tmp_path / "alone")]
    subprocess.run([*command, *prefix, "--workers", "1"], cwd=ROOT, check=True)
    ended = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    written = sorted(tmp_path.glob("alone_*.bin")) + sorted(tmp_path.glob("alone_*.idx"))
    assert len(written) > 2
    for file in written:
        theirs = file.with_name(file.name.replace("alone", "cluster"))
        assert theirs.read_bytes() == file.read_bytes(), file.name
