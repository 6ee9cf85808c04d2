"""Every step of the corpus pipeline, and the chain of all, on growing corpora under a memory limit.

The text is generated (`corpus_generator.py`). Steps run one by one (`python -m tools.corpus run
FILE --until STEP`, each on what the one before it has written), the chain is the same in one
command, without its estimate; urls reads a list of its own, a URL for every 2,000 bytes of text, of
which about every twentieth has been there. Memory is what all processes of a step hold together
(anonymous and shared, no pages of files); a step that goes over the limit ends, and the run fails
(`watched.py`). CPU seconds are those of all processes, start and imports included; beside them
stand those of the tasks alone, as run.json has them, and the power of the size with which these
grow from the smallest corpus on. MB are 10^6 bytes of JSON lines.
"""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.corpus_generator import corpora
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, ask, cli
from benchmarks.report import Results
from benchmarks.tokenise import Vocabulary
from benchmarks.watched import ROOT, watched
from tools.corpus.pipeline import STEPS
from tools.corpus.settings import parse_size

CHAIN, URLS = "chain", "urls"
URL_EVERY = 2000  # bytes of the corpus
CPU, SPEED, PEAK = "CPU seconds", "MB per second", "peak MB"


def describe(steps: Sequence[str], text: Path, output: Path, words: list[str], given: Any) -> str:
    """The run as TOML. words: of the vocabulary."""
    tokenizer = {"vocab_file": words[0], "merge_file": words[1]}
    tables: dict[str, dict[str, Any]] = {
        "extract.generated": {"input": [str(text)], "format": "jsonl", "source": "generated"},
        "clean": tokenizer,
        "decontaminate": {**tokenizer, "evaluation": given["evaluation"]},
        "dedup": {},
        "split": {},
        "tokenise": {**tokenizer, "append_eod": True},
        "report": {},
    }
    head = {"output": str(output), "workers": given["workers"]}
    if "extract" not in steps:
        head["input"] = [str(text)]
    if given["memory"]:
        head["memory"] = given["memory"]
        tables["split"]["shard_size"] = f"{parse_size('--memory', given['memory']) // 4}B"
    lines = [f"{key} = {json.dumps(value)}" for key, value in head.items()]
    for name, table in tables.items():
        if name.partition(".")[0] in steps:
            lines += [f"[{name}]", *(f"{key} = {json.dumps(each)}" for key, each in table.items())]
    return "\n".join(lines) + "\n"


def write_urls(file: Path, count: int) -> None:
    with file.open("wb") as lines:
        for start in range(0, count, 100_000):
            random = np.random.default_rng([1234, start])
            pages = random.integers(10 * count, size=min(100_000, count - start)).tolist()
            lines.writelines(
                b"https://www.site%d.org/articles/%d.html\n" % (page % 99_991, page)
                for page in pages
            )


def run(
    rank: Rank, step: str, folder: str, steps: list[str], words: list[str], given: Figures
) -> Turn:
    """folder: of the corpora of one size."""
    made, limit = Path(folder, str(rank.round)), given["limit"]
    size = sum(file.stat().st_size for file in (made / "shards").iterdir())
    output = made / (step if step in (CHAIN, URLS) else "steps")
    done = output / step if step in steps else output
    if step == URLS:
        write_urls(made / "urls.txt", size // URL_EVERY)
        command = [sys.executable, "-m", "tools.corpus.urls", "--input", str(made / "urls.txt")]
        command += ["--output", str(output), "--workers", str(given["workers"])]
        command += ["--memory", given["memory"]] if given["memory"] else []
    else:
        file = made / f"{output.name}.toml"
        file.write_text(describe(steps, made / "shards", output, words, given))
        command = [sys.executable, "-m", "tools.corpus", "run", str(file), "--no-plan"]
        before = steps[: steps.index(step)] if step in steps else []
        if before:  # what is done already is not done again
            watched([*command, "--until", before[-1]], limit=limit)
        command += ["--until", step] if step in steps else []

    def turn() -> dict[str, Any]:
        shutil.rmtree(done, ignore_errors=True)
        used = watched(command, limit=limit)
        runs = [json.loads(file.read_bytes()) for file in done.rglob("run.json")]
        if done == output:
            shutil.rmtree(output)
        tasks = sum(stage["cpu_seconds"] for each in runs for stage in each["stages"])
        return {**vars(used), "bytes": size, "tasks": tasks}

    return turn


def power(own: Figures, first: Figures) -> float | None:
    if own is first or not first or not own["tasks"] or not first["tasks"]:
        return None
    return math.log(own["tasks"] / first["tasks"]) / math.log(own["bytes"] / first["bytes"])


def failure(found: Results) -> str:
    failed = [" ".join(row) for row, reason in found.reasons.items() if reason]
    return f"Over the limit of memory: {', '.join(failed)}" if failed else ""


def result(found: Results) -> str:
    if failed := failure(found):
        return failed
    largest = found.rows[-1][1]
    peak = found.range(PEAK, "{:.0f}").split()[-1]
    if (CHAIN, largest) not in found.rows:
        return f"No step takes more than {peak} MB."
    seconds, speed = (found.median(CHAIN, largest, each) for each in ("seconds", SPEED))
    return (
        f"{largest} go through the whole chain in {seconds:.1f} s, {speed:.1f} MB/s by the clock; "
        f"no step takes more than {peak} MB."
    )


def main(
    flags: Flags,
    vocabulary: Vocabulary,
    text: tuple[Path, ...] = (),
    evaluation: tuple[Path, ...] = (ROOT / "README.md", ROOT / "docs" / "reproduce.md"),
    sizes: tuple[str, ...] = ("20MB",),
    steps: tuple[str, ...] = (*STEPS, CHAIN, URLS),
    workers: int = 2,
    memory: str = "",
    limit: str = "1.5GB",
    work: Path | None = None,
) -> None:
    """Measure steps.

    Args:
        text: JSON lines of real text, or folders of them; by default English of this Python.
        evaluation: files whose n-grams are cut out of the text; by default this project's own.
        sizes: of the corpora, the smallest first.
        steps: what is measured; the chain is of those named.
        workers: processes of every step.
        memory: the steps' own --memory, of each task; by default theirs.
        limit: memory that all processes of a step together may hold.
        work: folder for corpora and outputs, about twelve times the sizes; by default a temporary
            one.
    """
    if unknown := {*steps} - {*STEPS, CHAIN, URLS}:
        raise ValueError(f"--steps {sorted(unknown)[0]}: there are {[*STEPS, CHAIN, URLS]}")
    chained = [step for step in STEPS if step in steps]
    given = {"workers": workers, "memory": memory, "limit": parse_size("--limit", limit)}
    given["evaluation"] = [str(each.resolve()) for each in evaluation]
    common = {"steps": chained, "words": vocabulary.files, "given": given}
    made = {each: each for each in sizes}
    with corpora(made, flags.rounds or 1, text, workers=workers, work=work) as folder:
        contenders = [
            Contender(
                name=size,
                group=step,
                run=run,
                arguments={**common, "step": step, "folder": str(folder / size)},
                x=parse_size("--sizes", size) / 1e6,
            )
            for step in (*chained, *(each for each in (CHAIN, URLS) if each in steps))
            for size in sizes
        ]
        question = Question(
            title="Steps of the corpus pipeline against size",
            method=__doc__,
            contenders=contenders,
            columns=(
                Column(CPU, "cpu", "{:.1f}"),
                Column("of tasks", "tasks", "{:.1f}"),
                Column("seconds", "wall", "{:.1f}"),
                Column(SPEED, "bytes", "{:.1f}", per="wall", unit=1e6),
                Column(PEAK, "peak_bytes", "{:,.0f}", unit=1e6),
                Column("tasks grow with size to the power", power, "{:.2f}"),
            ),
            result=result,
            failure=failure,
            rounds=1,
            warm_up=0,
            together=False,
            packages=("numpy", "numba", "ftfy", "pycld2", "gigatoken", "orjson"),
            settings={"workers": workers, "memory": memory or "default", "limit": limit},
            picture="lines",
            drawn=(f"{CPU} | seconds | {PEAK}",),
        )
        ask(question, flags)


if __name__ == "__main__":
    cli(main)
