"""This tree beside another commit of the project: CPU seconds of a training step, and losses.

    python benchmarks/commits.py --against COMMIT [--starts 10] [--dropout 0.1] [--json FILE]
    python benchmarks/commits.py --against COMMIT --losses 50

The first prints the ratio of CPU seconds, this tree's over the other's, for two models, two
precisions and one and two ranks. Processes of the same code differ by several per cent, so each
start makes new ones of both trees; they take turns, and a start gives one ratio. The table has the
median over the starts, its 95 % bootstrap interval, and the memory at its peak, above that of the
start. The second trains the quickstart's model in fp32 on random tokens, on one rank, at t = 2 and
at d = 2, and compares the logged losses.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import OURS, Case
from benchmarks.comparison import ROOT
from benchmarks.machine import JsonFile, facts, markdown, told, write_json
from benchmarks.train_step import read_case
from benchmarks.turns import Contender
from tools.data_files import IndexedDatasetWriter

PRESETS = {"gpt2_30m": 8192, "quickstart": 2048}  # and the size of the vocabulary
WARM_UP_STEPS = 3


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of this commit, or `commit` itself where it is a folder."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


@contextmanager
def started(tree: Path, case: Case, dtype: str, ranks: int, dropout: float) -> Iterator[Contender]:
    """The processes of this project's contender of train_step.py, from the code of `tree`; with
    dropout, that of recomputation.py."""
    threads = 2 // ranks
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        settings = {
            "case": case.written(),
            "dtype": dtype,
            "device": "cpu",
            "threads": threads,
            "tensor_parallel": ranks,
            "stub_communication": False,
            "has_peers": True,
            "model": {"attention_dropout": dropout, "hidden_dropout": dropout},
        }
        file.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "benchmarks.contenders", OURS, str(file)]
        commands = [[*command, str(rank)] for rank in range(ranks)]
        if dropout:
            commands = [[sys.executable, "-m", "benchmarks.recomputing", str(file)]]
        environ = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(tree)}
        contender = Contender(tree.name, commands, environ, tree)
        try:
            yield contender
        finally:
            contender.stop()


def one_start(
    trees: list[Path], case: Case, dtype: str, ranks: int, rounds: int, dropout: float
) -> tuple[float, list[float]]:
    """(CPU seconds of a step of the first tree over those of the second, peak MB of a rank of
    each), of fresh processes."""
    with ExitStack() as stack:
        both = [stack.enter_context(started(tree, case, dtype, ranks, dropout)) for tree in trees]
        for contender in both:
            contender.ask("losses", steps=WARM_UP_STEPS)
        seconds: list[list[float]] = [[], []]
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                answers = both[which].ask("time", steps=3)
                seconds[which].append(sum(answer["cpu"] for answer in answers))
        peaks = [max(each["bytes"] for each in tree.ask("memory")) / 1e6 for tree in both]
    return float(np.median(seconds[0]) / np.median(seconds[1])), peaks


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def losses(
    tree: Path, data: Path, folder: Path, ranks: int, tensor_parallel: int, steps: int
) -> list[float]:
    """Of the first steps of the quickstart's preset, as the record has them."""
    record = folder / f"{tree.name}_{ranks}_{tensor_parallel}.jsonl"
    words = [
        *("--preset", "scripts/presets/quickstart.toml", "--no-bf16", "--data-path", str(data)),
        *("--split", "9,1,0", "--eval-iters", "0", "--micro-batch-size", "2"),
        *("--tensor-model-parallel-size", str(tensor_parallel), "--train-iters", str(steps)),
        *("--lr-decay-iters", "1000", "--log-interval", "1", "--metrics-file", str(record)),
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "pretrain_gpt2.py", *words]
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tree, env=environ, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, record.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def write_text(prefix: Path) -> None:
    """A data set of 100 documents of random tokens, as many kinds as the quickstart's tokenizer."""
    size, rng = PRESETS["quickstart"], np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(100):
            tokens = np.append(rng.integers(1, size, 2000), 0).astype(np.uint16)
            writer.add(tokens, np.array([len(tokens)], np.int32))
        writer.commit(
            tokenizer_type="random",
            tokenizer_fingerprint="random",
            vocab_size=size,
            eod=0,
            shuffled=True,
        )


def compare_losses(trees: list[Path], steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text_document")
        for ranks, tensor in ((1, 1), (2, 2), (2, 1)):
            ours, theirs = (
                np.array(losses(tree, folder / "text_document", folder, ranks, tensor, steps))
                for tree in trees
            )
            assert len(ours) == len(theirs) == steps
            name = f"d = {ranks // tensor}, t = {tensor}"
            print(f"{name}: largest difference of {steps} losses {abs(ours - theirs).max()}")


def commits(
    against: str,
    losses: int | None = None,
    starts: int = 10,
    rounds: int = 4,
    presets: tuple[str, ...] = tuple(PRESETS),
    dtypes: tuple[str, ...] = ("fp32", "bf16"),
    tensor_parallel: tuple[int, ...] = (1, 2),
    dropout: float = 0.0,
    json_file: JsonFile = None,
) -> None:
    """Compare and print.

    Args:
        against: a commit, or a folder that holds another tree.
        losses: compare so many losses, and time nothing.
        starts: times that new processes are made of both.
        rounds: turns of three steps that each has, of each start.
        presets: names of presets, keys of PRESETS.
        dtypes: fp32, bf16.
        tensor_parallel: ranks.
        dropout: of attention's probabilities, embeddings and residuals; on one rank.
        json_file: where every ratio is written.
    """
    record = facts("torch") | {"dropout": dropout}
    print(told(record))
    if dropout and tensor_parallel != (1,):
        raise SystemExit("error: --dropout is measured on one rank: --tensor-parallel 1")
    with checked_out(against) as other:
        trees = [ROOT, other]
        if losses is not None:
            compare_losses(trees, losses)
            return
        rows, record["ratios"], record["peaks"] = [], {}, {}
        for preset in presets:
            file = ROOT / "scripts" / "presets" / f"{preset}.toml"
            case = replace(read_case(file, PRESETS[preset], None, False), name=preset)
            for dtype in dtypes:
                for ranks in tensor_parallel:
                    found = [
                        one_start(trees, case, dtype, ranks, rounds, dropout) for _ in range(starts)
                    ]
                    ratios, peaks = [each[0] for each in found], [each[1] for each in found]
                    low, high = interval(ratios)
                    name = f"{preset}, {dtype}, t = {ranks}"
                    ours, theirs = np.median(peaks, axis=0)
                    rows.append(
                        [
                            name,
                            f"{np.median(ratios):.3f}",
                            f"{low:.3f} to {high:.3f}",
                            f"{ours:.0f} and {theirs:.0f}",
                        ]
                    )
                    record["ratios"][name], record["peaks"][name] = ratios, peaks
                    header = ["", "ratio", "95 %", "peak MB, here and there"]
                    print(markdown(header, rows[-1:]).splitlines()[-1], flush=True)
    write_json(json_file, {"against": against, **record})


if __name__ == "__main__":
    tyro.cli(commits)
