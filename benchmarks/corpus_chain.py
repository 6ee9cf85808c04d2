"""The whole chain, clean to .bin, on fresh text: wall time, and the CPU time of each step.

    python benchmarks/corpus_chain.py --text FILE --vocab-file vocab.json --merge-file merges.txt \\
        --evaluation FILE [FILE...] [--size 100MB] [--workers N] [--rounds N] [--json FILE]

One command, `python -m tools.corpus run`, without the estimate before it.  The text of every round
is made by corpus_generator.py from another seed.  MB are of the JSON lines that go in; CPU seconds
of a step are those of its tasks, as its run.json has them, and those of all processes (start and
imports too) stand beside their sum.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_generator import generate
from benchmarks.corpus_watch import Usage, run_watched, size_of
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from tools.corpus.settings import parse_size

STEPS = ("clean", "decontaminate", "dedup", "split", "tokenise")
PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "gigatoken", "orjson")


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the steps need beside the text."""

    vocab_file: Path
    """The tokenizer's vocabulary (vocab.json)."""

    merge_file: Path
    """The byte-pair encoding's merges (merges.txt)."""

    evaluation: tuple[Path, ...]
    """Evaluation files whose n-grams are cut out of the text."""


def describe_run(
    files: Files,
    text: Path,
    output: Path,
    workers: int,
    steps: Sequence[str] = STEPS,
    memory: str | None = None,
) -> str:
    """The TOML file of the run.  memory: of each task; None leaves it to the steps."""
    tokenizer = {"vocab_file": files.vocab_file, "merge_file": files.merge_file}
    tables: dict[str, dict[str, Any]] = {
        "extract.generated": {"input": [text], "format": "jsonl", "source": "generated"},
        "clean": tokenizer,
        "decontaminate": {**tokenizer, "evaluation": files.evaluation},
        "dedup": {},
        "split": {},
        "tokenise": {**tokenizer, "append_eod": True},
        "report": {},
    }
    head: dict[str, Any] = {"output": output, "workers": workers}
    if "extract" not in steps:
        head["input"] = [text]
    if memory is not None:
        head["memory"] = memory
        tables["split"]["shard_size"] = f"{parse_size('--memory', memory) // 4}B"
    lines = keys(head)
    for name, table in tables.items():
        if name.partition(".")[0] in steps:
            lines += [f"[{name}]", *keys(table)]
    return "\n".join(lines) + "\n"


def keys(table: dict[str, Any]) -> list[str]:
    """Of TOML; paths become whole, for the run starts elsewhere."""
    return [f"{name} = {json.dumps(value, default=whole)}" for name, value in table.items()]


def whole(path: Path) -> str:
    return str(path.resolve())


def run_command(description: Path, until: str | None = None) -> list[str]:
    last = ["--until", until] if until else []
    return [sys.executable, "-m", "tools.corpus", "run", str(description), "--no-plan", *last]


def stages_of(folder: Path) -> list[dict[str, Any]]:
    """Of all runs that have filled the folder or those in it."""
    files = sorted(folder.rglob("run.json"))
    return [stage for file in files for stage in json.loads(file.read_bytes())["stages"]]


def step_cpu_seconds(folder: Path) -> float:
    return sum(stage["cpu_seconds"] for stage in stages_of(folder))


@dataclass(frozen=True)
class Round:
    megabytes: float
    usage: Usage
    steps: dict[str, float]
    """CPU seconds of the tasks of each."""

    @property
    def speed(self) -> float:
        """MB per second by the clock."""
        return self.megabytes / self.usage.wall_seconds


def run_round(
    files: Files, text: Path, size: str, workers: int, seed: int, steps: Sequence[str]
) -> Round:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate((text,), folder / "made", size, seed=seed, workers=workers)
        shards, output, log = folder / "made" / "shards", folder / "out", folder / "log"
        description = folder / "run.toml"
        description.write_text(describe_run(files, shards, output, workers, steps))
        usage = run_watched(run_command(description), log)
        if usage.status:
            raise RuntimeError(f"the chain failed: {log.read_text()[-3000:]}")
        spent = {step: step_cpu_seconds(output / step) for step in steps}
        return Round(size_of(shards) / 1e6, usage, spent)


def chain(
    files: tyro.conf.OmitArgPrefixes[Files],
    text: Path,
    size: str = "100MB",
    workers: int = 2,
    rounds: int = 3,
    steps: tuple[str, ...] = STEPS,
    json_file: JsonFile = None,
) -> None:
    """Run and print.

    Args:
        text: JSON lines of real text, or a folder of them.
        size: of the text of each round.
        workers: processes of every step.
        rounds: times the chain is run, each on text of its own.
        steps: those that are run, in their order.
        json_file: where every round's figures are written.
    """
    done = [run_round(files, text, size, workers, seed, steps) for seed in range(rounds)]
    record = facts(*PACKAGES) | {"size": size, "workers": workers, "rounds": rounds}
    print(told(record))
    print(table(steps, done))
    write_json(json_file, record | {"runs": [asdict(each) for each in done]})


def table(steps: Sequence[str], done: Sequence[Round]) -> str:
    sums = [sum(each.steps.values()) for each in done]
    cells = [f"{median(each.steps[step] for each in done):.1f}" for step in steps]
    cells += [
        f"{median(sums):.1f}",
        f"{median(each.usage.cpu_seconds for each in done):.1f}",
        f"{median(each.usage.wall_seconds for each in done):.1f}",
        spread([each.speed for each in done], 2),
        f"{max(each.usage.anonymous for each in done) / 1e6:.0f}",
    ]
    header = [f"{step}, CPU s" for step in steps]
    header += ["sum", "all processes, CPU s", "wall, s", "MB/s by the clock", "peak, MB"]
    return markdown(header, [cells])


if __name__ == "__main__":
    tyro.cli(chain)
