"""Steps of the corpus pipeline against size.

The text is generated (`corpus_generator.py`). Steps run one by one (`python tools/corpus.py run
FILE --until STEP`, each on the previous step's output), with two workers; the chain is the same in
one command, without its estimate. Memory is that of all processes of a step together (anonymous and
shared, no pages of files); a step that exceeds the limit is ended, and the run fails
(`watched.py`). CPU seconds are those of all processes, start and imports included; the table also
has those of the tasks only, from run.json, and the power of the corpus size by which these grow
from the smallest corpus on. MB are 10^6 bytes of JSON lines.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.corpus_generator import generate
from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.processes import ROOT
from benchmarks.report import Results
from benchmarks.watched import watched
from tools.corpus.pipeline import STEPS
from tools.corpus.settings import parse_size

CHAIN, PEAK = "chain", "peak MB"


def describe(text: Path, output: Path, given: Figures) -> str:
    """The settings of the run, as TOML."""
    folder = given["tokenizer"]
    words = f'vocab_file = "{folder}/vocab.json"\nmerge_file = "{folder}/merges.txt"\n'
    tables = {
        "extract": f'generated = {{input = ["{text}"], format = "jsonl", source = "generated"}}\n',
        "clean": words,
        "decontaminate": f"{words}evaluation = {json.dumps(given['evaluation'])}\n",
        "tokenise": words,
    }
    read = "" if "extract" in given["steps"] else f'input = ["{text}"]\n'
    own = [f"[{step}]\n{tables.get(step, '')}" for step in given["steps"]]
    return f'output = "{output}"\nworkers = 2\n{read}{"".join(own)}'


def run(rank: Rank, step: str, size: str, folder: str, given: Figures) -> Turn:
    made, steps, limit = Path(folder, size, str(rank.round)), given["steps"], given["limit"]
    written = sum(file.stat().st_size for file in (made / "shards").iterdir())
    output = filled = made / (CHAIN if step == CHAIN else "steps")
    settings = output.with_suffix(".toml")
    settings.write_text(describe(made / "shards", output, given))
    words: list[object] = ["tools/corpus.py", "run", settings, "--no-plan"]
    if step != CHAIN:
        if before := steps[: steps.index(step)]:
            watched(*words, "--until", before[-1], limit=limit)  # finished steps are not repeated
        words += ["--until", step]
        filled = output / step

    def turn() -> Figures:
        shutil.rmtree(filled, ignore_errors=True)
        used = watched(*words, limit=limit)
        runs = [json.loads(each.read_bytes()) for each in filled.rglob("run.json")]
        tasks = sum(stage["cpu_seconds"] for each in runs for stage in each["stages"])
        return {**used, "bytes": written, **({"tasks": tasks} if tasks else {})}

    return turn


def power(own: Figures, first: Figures) -> float:
    tasks, size = (own[key] / first[key] for key in ("tasks", "bytes"))
    return math.log(tasks) / math.log(size)


def failure(found: Results) -> str:
    failed = [" ".join(row) for row, each in found.contenders.items() if each["reason"]]
    return f"Not measured: {', '.join(failed)}" if failed else ""


def result(found: Results) -> str:
    size, peak = found.rows[-1][1], found.range(PEAK, "{:.0f}").split()[-1]
    chain = found.cell(CHAIN, size, "seconds")
    said = f"{size} go through the whole chain in {chain.median:.1f} s. " if chain else ""
    return failure(found) or f"{said}No step takes more than {peak} MB."


def contenders(
    flags: Flags,
    tokenizer: Path = Path("runs/quickstart/tokenizer"),
    text: tuple[Path, ...] = (),
    evaluation: tuple[Path, ...] = (ROOT / "README.md",),
    sizes: tuple[str, ...] = ("20MB",),
    steps: tuple[str, ...] = (*STEPS, CHAIN),
    limit: str = "1.5GB",
) -> Iterator[Contender]:
    """Measure steps on text generated from JSON lines, by default English of this Python's files.

    Args:
        tokenizer: folder with vocab.json and merges.txt.
        evaluation: files whose n-grams are removed from the text.
        limit: largest memory of all processes of a step together.
    """
    if unknown := {*steps} - {*STEPS, CHAIN}:
        raise ValueError(f"--steps {sorted(unknown)[0]}: there are {[*STEPS, CHAIN]}")
    if {*steps} & {"clean", "decontaminate", "tokenise"}:
        (tokenizer / "vocab.json").stat()  # raises if it is missing, before text is generated
    given: Figures = {"steps": [step for step in STEPS if step in steps]}
    given |= {"tokenizer": str(tokenizer.resolve()), "limit": parse_size("--limit", limit)}
    given |= {"evaluation": [str(file.resolve(strict=True)) for file in evaluation]}
    for size in sizes:
        for seed in range(flags.rounds or QUESTION.rounds):
            generate(scratch() / size / str(seed), text, size, seed)
    for step in steps:
        for size in sizes:
            arguments = {"step": step, "size": size, "folder": str(scratch()), "given": given}
            x = parse_size("--sizes", size) / 1e6
            yield Contender(size, run, arguments, group=step, x=x)


QUESTION = Question(
    contenders,
    (
        Column("CPU seconds", "cpu", "{:.1f}"),
        Column("of tasks", "tasks", "{:.1f}"),
        Column("seconds", "wall", "{:.1f}"),
        Column("MB per second", "bytes", "{:.1f}", per="wall", unit=1e6),
        Column(PEAK, "peak_bytes", "{:,.0f}", unit=1e6),
        Column("tasks grow with size to the power", power, "{:.2f}"),
    ),
    result,
    failure=failure,
    rounds=1,
    warm_up=0,
    together=False,
    picture="lines",
    drawn=(f"CPU seconds | seconds | {PEAK}",),
)

if __name__ == "__main__":
    QUESTION.run()
