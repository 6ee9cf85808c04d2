"""Useful time under injected faults.

tools/chaos injects faults of one kind, a minute apart, into a run of the miniature's GPT-2 (fp32,
mock data) on two data-parallel ranks under torchrun, which starts its ranks again by itself. The
peer is plain torch: DistributedDataParallel and asynchronous saves by torch's DCP (plain_ddp.py),
with the same model, batch, save interval and times of the faults. Useful is the time of steps whose
update is in the final weights, over the wall time, which has the first start. Weights are those of
the last checkpoint, compared bit for bit with those of an undisturbed run of the same trainer. Some
faults only the process itself can make, by this project's probe. Restart is the time from the end
of the old ranks to the end of the first step; the first start has that of torchrun, too. torchrun
gives each restart of the peer a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): in the
shared one, its default, they find addresses of ranks that have ended, and fail to connect (issue
135712 of pytorch). Its ranks then do not notice that the launcher has ended; tools.chaos kills them
after 10 s.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import ROOT

OURS, PEER = "this project", "plain torch, DCP"
USEFUL, RATIO, EQUAL = "useful time, %", "this project / its", "runs with equal weights, %"
FAULTS = {  # {fault: its table in a faults file}
    "a rank killed": 'kind = "kill"',
    "all ranks killed": 'kind = "kill"\nrank = "all"',
    "launcher killed": 'kind = "kill"\nrank = "launcher"',
    "SIGTERM": 'kind = "terminate"\nrank = "all"',
    "stopped for 5 s": 'kind = "stop"\nseconds = 5',
    "stopped for ever": 'kind = "stop"\nseconds = 10000',
    "slow for 20 s": 'kind = "slow"\nseconds = 20',
    "out of memory": 'kind = "memory"',
    "file truncated": 'kind = "truncate"',
    "bit of a file flipped": 'kind = "flip_file"',
    "connections dropped": 'kind = "drop"',
    "bit of a weight flipped": 'kind = "flip_weight"',
    "disk full": 'kind = "full_disk"',
}
LONGEST = 450  # seconds of a turn, more than twice what most take
BY_PROBE = ("connections dropped", "bit of a weight flipped")
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = f"{Path(sys.executable).parent / 'torchrun'} --standalone --nproc-per-node 2"
TORCHRUN += " --max-restarts 1000"
COMMANDS = {
    OURS: "pretrain_gpt2.py --preset miniature_gpt2 --mock-data --vocab-size 8192 --no-bf16 "
    "--micro-batch-size 2 --eval-iters 0 --async-save --keep-checkpoints 2 --train-iters {steps} "
    "--save-interval {interval} --check-replicas-interval {interval} --log-interval {interval} "
    "--distributed-timeout-minutes 0.25",
    PEER: "benchmarks/plain_ddp.py --save {save} --steps {steps} --save-interval {interval} "
    "--timeout-minutes 0.25",
}


def dcp_weights(folder: Path) -> dict[str, Any]:
    """{name: array} of the peer's newest checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch import empty
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from benchmarks.plain_ddp import folders

    reader = dcp.FileSystemReader(folders(folder)[-1])
    saved = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: each for name, each in saved if isinstance(each, TensorStorageMetadata)}
    state: dict[str, Any] = {
        name: empty(each.size, dtype=each.properties.dtype)
        for name, each in tensors.items()
        if name.startswith("model.")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def disturbed(rank: Rank, name: str, words: list[str], faults: str, folder: str, disk: str) -> Turn:
    base = Path(folder)
    file, output = base / "faults.toml", base / f"round_{rank.round}"
    options = ["--faults", file, "--output", output, "--undisturbed", base.parent / "undisturbed"]
    if "full_disk" in faults:
        options += ["--save", Path(disk, base.parent.name)]
    if name == PEER:
        options += ["--weights", "benchmarks.useful_time:dcp_weights"]

    def turn() -> Figures:
        base.mkdir(parents=True, exist_ok=True)
        file.write_text(faults)
        command = [sys.executable, "tools/chaos.py", *map(str, options), "--", *words]
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (OWN_STORE if name == PEER else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = run.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            run.terminate()  # tools.chaos ends all that it has started
            printed, _ = run.communicate()
            printed += f"\nended after {LONGEST} s"
        finally:
            if "full_disk" in faults:
                shutil.rmtree(Path(disk, base.parent.name), ignore_errors=True)
        report = output / "report.json"
        if not report.exists():  # it would restart for ever, or chaos itself has failed
            rank.notes.append(printed.strip().rpartition("\n")[2])
            return {"useful": 0.0, "faults": printed.count("fault "), "equal": 0.0}
        found = json.loads(report.read_text())
        rows = [row for row in found["faults"] if row["ended"]]
        weights = found["weights"]  # None after a failure
        if found["failure"]:
            rank.notes.append(found["failure"].splitlines()[0])
        figures: Figures = {
            "useful": 100 * found["useful_share"],
            "faults": len(found["faults"]),
            "unnamed": len(found["unnamed"]),
            "cold": found["cold_start_seconds"],
            "equal": 100 * bool(weights and weights["equal"]),
        }
        for key in ("detection_seconds", "first_step_seconds", "steps_repeated"):
            values = [row[key] for row in rows if row[key] is not None]
            if values:
                figures[key] = sum(values) / len(values)
        return figures

    return turn


def contenders(
    flags: Flags,
    faults: tuple[str, ...] = (),
    steps: int = 260,
    interval: int = 10,
    seconds: float = 60.0,
    disk: str = "",
) -> Iterator[Contender]:
    """Run the miniature's GPT-2 and its peer with faults.

    Args:
        faults: kinds of faults, by their names in the table; all if not given.
        steps: of each run.
        interval: steps between two saves.
        seconds: between two faults.
        disk: folder on a file system of its own, of at most 1 GB, for a full disk.
    """
    for fault in faults or FAULTS:
        for name in (OURS, PEER):
            missing = ""
            if name == PEER and fault in BY_PROBE:
                missing = "it has no probe"
            if fault == "disk full" and not disk:
                missing = "needs --disk"
            table = f"seed = 1\ncount = 1000\nevery_seconds = {seconds}\nfixed = true\n[[fault]]\n"
            folder = scratch() / name.partition(",")[0].replace(" ", "_") / fault.replace(" ", "_")
            command = f"{TORCHRUN} {COMMANDS[name]}".replace("{steps}", str(steps))
            words = command.replace("{interval}", str(interval)).split()
            arguments = {"name": name, "words": words, "faults": f"{table}{FAULTS[fault]}\n"}
            arguments |= {"folder": str(folder), "disk": disk}
            yield Contender(name, disturbed, arguments, group=fault, missing=missing)


def sentence(found: Any) -> str:
    fault = next(iter(FAULTS))
    values = [found.median(fault, name, USEFUL) for name in (OURS, PEER)]
    if any(isnan(value) for value in values):
        return f'No fault of "{fault}" was measured for both.'
    return (
        f"With a rank killed each minute this project spends {values[0]:.0f} % of the time on "
        f"useful steps, plain torch with asynchronous saves {values[1]:.0f} %."
    )


def failure(found: Any) -> str:
    wrong = []
    for fault in FAULTS:
        for figures in found.rounds.get((fault, OURS), []):
            if figures.get("equal", 100) < 100 or figures.get("unnamed"):
                wrong.append(fault)
    what = "weights differ, a cause is not named, or the run failed"
    return f"{what}: {', '.join(dict.fromkeys(wrong))}" if wrong else ""


QUESTION = Question(
    contenders,
    (
        Column(USEFUL, "useful", "{:.1f}"),
        Column(RATIO, "useful", "{:.2f}", "first / its"),
        Column("faults", "faults", "{:.0f}"),
        Column("detection, s", "detection_seconds", "{:.1f}"),
        Column("restart, s", "first_step_seconds", "{:.1f}"),
        Column("restart / first start", "first_step_seconds", "{:.2f}", per="cold"),
        Column("steps repeated", "steps_repeated", "{:.1f}"),
        Column(EQUAL, "equal", "{:.0f}"),
    ),
    sentence,
    failure=failure,
    rounds=1,
    warm_up=0,
    together=False,
    picture="",
)

if __name__ == "__main__":
    QUESTION.run()
