"""The jobs of scripts/slurm on a real Slurm of four nodes, disturbed in every way that matters."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.samples import write_texts, write_tokenizer
from tests.programs import arguments_of, assert_equal_bits, finished, lines_of, newest, some_data
from tests.slurm.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm

GPT2 = "scripts/slurm/pretrain_gpt2.sh"
FLAGS = "--attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 0 --lr-decay-iters 300"
FLAGS += " --micro-batch-size 2 --save-interval 5"
SPLIT = "--tensor-model-parallel-size 2"


def submit(cluster: Cluster, folder: Path, more: str, *words: str) -> str:
    """A job that trains a GPT-2 for long, its checkpoints in folder/save. more: its other flags;
    words: of sbatch."""
    (folder / "preset.toml").write_text("train_iters = 100_000\n")
    flags = f"--save {folder / 'save'} --load {folder / 'save'} --log-interval 1 {FLAGS} {more}"
    made = arguments_of(flags, some_data(folder))
    return cluster.submit(folder / "log", *words, GPT2, str(folder / "preset.toml"), *made)


def wait_for_steps(cluster: Cluster, folder: Path, starts: int) -> None:
    """Until the job has been started so many times and has saved another checkpoint."""

    def has_saved() -> bool:
        if not (folder / "save" / "metrics.jsonl").exists():
            return False
        begun, done = (lines_of(folder / "save", key) for key in ("started", "loss"))
        return len(begun) == starts and bool(done) and done[-1]["step"] > begun[-1]["step"] + 5

    cluster.wait_for(has_saved, f"steps of start {starts}, of {folder / 'log'}")


@pytest.mark.parametrize("ends", [("first node", "USR1"), ("other node",)], ids="-".join)
def test_a_job_goes_on_from_what_it_saved_whatever_ends_it(
    ends: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    """One of two nodes dies, the one that runs the job's script or the other one, and the job goes
    on with a spare one; or a signal comes; at last the user cancels it. Not one bit is another than
    of an undisturbed run.

    A node that died comes back only at the end: within a minute, Slurm repeats its order to end the
    first run's step, which would meet the second's.
    """
    save, log, dead = tmp_path / "save", tmp_path / "log", []
    job = submit(cluster, tmp_path, SPLIT, "--ntasks-per-node=1")
    for starts, end in enumerate(ends, 1):
        wait_for_steps(cluster, tmp_path, starts)
        if end == "USR1":
            cluster.ask("scancel", "--signal=USR1", job)
        else:
            fields = cluster.job(job)
            nodes, first = fields["NodeList"].split(","), fields["BatchHost"]
            dead += [node for node in nodes if (node == first) == (end == "first node")]
            cluster.kill_node(dead[-1])
            if end == "other node":  # its peer fails before Slurm knows why; the script waits
                cluster.wait_for(lambda: "Exited with exit code 1" in log.read_text(), "its end")
            cluster.set_down(dead[-1])
        cluster.start_again(job)
    wait_for_steps(cluster, tmp_path, len(ends) + 1)
    cluster.ask("scancel", job)
    cluster.wait_for(lambda: "ended by SIGTERM" in log.read_text(), "the end of the ranks")
    assert cluster.wait_for_state(job, "CANCELLED")["Restarts"] == str(len(ends))
    for node in dead:
        cluster.start_node_again(node)
    cluster.wait_until_idle()

    ended = [(line["ended"], line["exit_code"]) for line in lines_of(save, "ended")]
    assert ended == [("SIGUSR1", 75)] * ends.count("USR1") + [("SIGTERM", 75)]
    steps = int(newest(save).name[-8:])
    assert [line["step"] for line in lines_of(save)] == list(range(1, steps + 1))
    assert f"going on from {save / 'step_'}" in log.read_text()
    calm = f"--save {tmp_path / 'calm'} --train-iters {steps} {FLAGS} {SPLIT}"
    finished(calm, world=2, folder=tmp_path)
    assert newest(save).name == newest(tmp_path / "calm").name
    assert_equal_bits(newest(tmp_path / "calm"), newest(save))


def test_a_world_that_does_not_fit_is_refused_and_not_queued_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    """By each of the ranks, two a node."""
    more = "--num-attention-heads 3 --hidden-size 48 --tensor-model-parallel-size 3"
    job = submit(cluster, tmp_path, more)
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED")["JobState"] == "FAILED"
    cluster.wait_for((tmp_path / "log").exists, "the log")
    text = (tmp_path / "log").read_text()
    assert "4 ranks on 2 nodes, meeting at 127.0.0.1:" in text
    assert "--tensor-model-parallel-size" in text
    assert not (tmp_path / "save").exists()


def test_two_nodes_tokenise_what_one_process_does(cluster: Cluster, tmp_path: Path) -> None:
    texts = (f"the thing number {i} in the inn. " * (1 + i % 9) for i in range(1000))
    vocabulary, merges = write_tokenizer(tmp_path)
    raw = write_texts(tmp_path / "raw.jsonl", texts)
    flags = ["--input", raw, "--append-eod", "--shard-size", "75KB"]
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
