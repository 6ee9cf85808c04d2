"""Every step of the corpus pipeline, and the chain, on growing corpora under a memory limit.

    python benchmarks/corpus_scale.py --text FILE --vocab-file vocab.json --merge-file merges.txt \\
        --evaluation FILE [FILE...] --work DIR [--sizes 100MB 1GB 5GB] [--limit 1.5GB]
        [--out docs/results]

The corpora are made by corpus_generator.py, and kept in --work, as are the results: what was done
is not done again by the same command (take another --work when the code has changed).  The steps
run one by one (`python -m tools.corpus run FILE --until STEP`), then once more as one command, the
chain; urls has a list of its own, a URL for every 2,000 bytes.  benchmarks/corpus_watch.py says how
memory is limited and measured.  Leaves corpus_scale.json, .md and .png; ends with status 1 where
something failed or went over the limit.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import tyro

mpl.use("Agg")
from matplotlib import pyplot as plt

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus_chain import Files, describe_run, run_command, step_cpu_seconds
from benchmarks.corpus_generator import generate
from benchmarks.corpus_watch import Usage, run_watched, size_of
from benchmarks.machine import facts, markdown, told
from tools.corpus.settings import parse_size
from tools.corpus.shards import placed

STEPS = ("extract", "clean", "decontaminate", "dedup", "split", "tokenise", "report")
CHAIN, URLS = "chain", "urls"
URL_EVERY = 2000  # bytes of the corpus
PACKAGES = ("numpy", "numba", "ftfy", "pycld2", "gigatoken", "orjson")
METHOD = (
    "RLIMIT_DATA for each process, and a watcher of /proc that ends the run when all processes "
    "together hold more than the limit (anonymous and shared memory, no pages of files)"
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one step took on one corpus; memory of all its processes together."""

    step: str
    size: int
    """Bytes of the corpus, as JSON lines."""
    task_cpu_seconds: float
    """As run.json has them: without starting and importing."""
    usage: Usage

    @property
    def failed(self) -> bool:
        return self.usage.over_limit or self.usage.status != 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    files: Files
    text: Path
    work: Path
    steps: tuple[str, ...]
    workers: int
    memory: str | None
    limit: int


def measure_size(setup: Setup, name: str) -> Iterator[Point]:
    """All that is asked for on a corpus of this size, up to a step that fails."""
    folder = setup.work / name
    if not (folder / "made").exists():
        shutil.rmtree(folder / "corpus", ignore_errors=True)
        generate((setup.text,), folder / "corpus", name, workers=setup.workers)
        (folder / "made").touch()
    chained = [step for step in STEPS if step in setup.steps]
    unknown = [step for step in chained if not kept(folder, step).exists()]
    if unknown and not (folder / "steps").exists():  # what they would read is gone
        for step in chained:
            kept(folder, step).unlink(missing_ok=True)
    for step in chained:
        point = measured(setup, folder, step, chained, folder / "steps" / step)
        yield point
        if point.failed:
            return
    shutil.rmtree(folder / "steps", ignore_errors=True)
    for step in (CHAIN, URLS):
        if step in setup.steps:
            yield measured(setup, folder, step, chained, folder / step)
            shutil.rmtree(folder / step, ignore_errors=True)


def kept(folder: Path, step: str) -> Path:
    return folder / f"{step}.json"


def measured(setup: Setup, folder: Path, step: str, chained: Sequence[str], output: Path) -> Point:
    """Run it from its beginning, or take what an earlier command has measured."""
    if kept(folder, step).exists():
        return read_point(kept(folder, step))
    shutil.rmtree(output, ignore_errors=True)
    command = command_of(setup, folder, step, chained)
    usage = run_watched(command, folder / f"{step}.log", setup.limit, folder)
    tasks = step_cpu_seconds(output) if output.is_dir() else 0.0
    size = size_of(folder / "corpus" / "shards")
    point = Point(step=step, size=size, task_cpu_seconds=tasks, usage=usage)
    print(line_of(point), flush=True)
    if point.failed:
        print((folder / f"{step}.log").read_text()[-2000:], file=sys.stderr)
        return point
    with placed(kept(folder, step)) as file:
        file.write(json.dumps(asdict(point)).encode())
    return point


def command_of(setup: Setup, folder: Path, step: str, chained: Sequence[str]) -> list[str]:
    if step == URLS:
        write_urls(folder / "urls.txt", parse_size("--sizes", folder.name) // URL_EVERY)
        given = ["--input", str(folder / "urls.txt"), "--output", str(folder / URLS)]
        given += ["--workers", str(setup.workers)]
        given += ["--memory", setup.memory] if setup.memory else []
        return [sys.executable, "-m", "tools.corpus.urls", *given]
    output = folder / (CHAIN if step == CHAIN else "steps")
    description, text = folder / f"{output.name}.toml", folder / "corpus" / "shards"
    description.write_text(
        describe_run(setup.files, text, output, setup.workers, chained, setup.memory)
    )
    return run_command(description, None if step == CHAIN else step)


def write_urls(file: Path, count: int) -> None:
    """A list in which every twentieth URL or so is there before."""
    with placed(file) as lines:
        for start in range(0, count, 100_000):
            random = np.random.default_rng([1234, start])
            pages = random.integers(10 * count, size=min(100_000, count - start)).tolist()
            lines.writelines(
                b"https://www.site%d.org/articles/%d.html\n" % (page % 99_991, page)
                for page in pages
            )


def check_work(setup: Setup) -> None:
    """ValueError, naming --work, where it holds what other settings have measured."""
    names = ("workers", "memory", "limit", "steps")
    settings = json.loads(json.dumps({name: getattr(setup, name) for name in names}))
    file = setup.work / "settings.json"
    if not file.exists():
        with placed(file) as stream:
            stream.write(json.dumps(settings).encode())
    found = json.loads(file.read_bytes())
    if found != settings:
        raise ValueError(f"--work {setup.work} holds results of {found}; another folder would work")


def read_point(file: Path) -> Point:
    content = json.loads(file.read_bytes())
    return Point(**content | {"usage": Usage(**content["usage"])})


def growth(points: Sequence[Point]) -> float:
    """Exponent of the CPU time between the two largest corpora; 1 is linear."""
    before, last = sorted(points, key=lambda point: point.size)[-2:]
    times = math.log(last.usage.cpu_seconds / before.usage.cpu_seconds)
    return times / math.log(last.size / before.size)


def line_of(point: Point) -> str:
    used = point.usage
    return (
        f"{point.step}, {point.size / 1e6:.0f} MB: {used.wall_seconds:.1f} s, CPU "
        f"{used.cpu_seconds:.1f} s, peak {used.anonymous / 1e6:.0f} MB"
        + (" OVER THE LIMIT" if used.over_limit else f" FAILED: {used.status}" * point.failed)
    )


def table(by_step: dict[str, list[Point]]) -> str:
    rows = []
    for step, points in by_step.items():
        for point in points:
            used = point.usage
            outcome = "over the limit" if used.over_limit else f"status {used.status}"
            rows.append(
                [
                    step,
                    f"{point.size / 1e6:.0f}",
                    f"{used.wall_seconds:.1f}",
                    f"{used.cpu_seconds:.1f}",
                    f"{point.task_cpu_seconds:.1f}",
                    f"{used.anonymous / 1e6:.0f}",
                    f"{used.resident / 1e6:.0f}",
                    f"{used.largest_process / 1e6:.0f}",
                    f"{growth(points):.2f}" if point is points[-1] and len(points) > 1 else "",
                    outcome if point.failed else "",
                ]
            )
    header = ["step", "MB", "wall, s", "CPU, s", "of it tasks", "peak, MB", "with pages of files"]
    return markdown([*header, "largest process", "CPU grows with size to the power", ""], rows)


def draw(by_step: dict[str, list[Point]], limit: int, file: Path) -> None:
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(12, 6), layout="constrained")
    for step, points in by_step.items():
        sizes = [point.size / 1e6 for point in points]
        style: dict[str, Any] = {"marker": "o", "linewidth": 2.5 if step == CHAIN else 1.2}
        peaks = [point.usage.anonymous / 1e6 for point in points]
        memory.plot(sizes, peaks, label=step, **style)
        (line,) = seconds.plot(sizes, [point.usage.cpu_seconds for point in points], **style)
        walls = [point.usage.wall_seconds for point in points]
        seconds.plot(sizes, walls, linestyle=":", color=line.get_color())
        linear = [points[-1].usage.cpu_seconds * size / sizes[-1] for size in sizes]
        seconds.plot(sizes, linear, color="grey", linewidth=0.5)
    memory.axhline(limit / 1e6, color="black", linestyle="--", label="limit")
    memory.set(ylabel="MB", title="peak memory of all processes together")
    seconds.set(ylabel="seconds", title="CPU time (dotted: wall time; grey: linear in size)")
    ticks = sorted({round(point.size / 1e6) for points in by_step.values() for point in points})
    for panel in (memory, seconds):
        panel.set(xscale="log", yscale="log", xlabel="MB of JSON lines")
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def scale(
    files: tyro.conf.OmitArgPrefixes[Files],
    text: Path,
    work: Path,
    sizes: tuple[str, ...] = ("100MB", "1GB", "5GB"),
    limit: str = "1.5GB",
    workers: int = 2,
    memory: str | None = None,
    steps: tuple[str, ...] = (*STEPS, CHAIN, URLS),
    out: Path = Path("docs/results"),
) -> None:
    """Run, draw and print.

    Args:
        text: JSON lines of real text, or a folder of them.
        work: folder for corpora, outputs and what was measured; about eight times the largest size.
        sizes: of the corpora.
        limit: memory that all processes of a step together may hold.
        workers: processes of every step.
        memory: the steps' own --memory, of each task; their default if it is not given.
        steps: what is measured.
        out: folder for corpus_scale.json, .md and .png.
    """
    bound = parse_size("--limit", limit)
    setup = Setup(
        files=files,
        text=text,
        work=work.resolve(),
        steps=steps,
        workers=workers,
        memory=memory,
        limit=bound,
    )
    check_work(setup)
    points = [point for size in sizes for point in measure_size(setup, size)]
    by_step = {step: [point for point in points if point.step == step] for step in steps}
    record: dict[str, Any] = facts(*PACKAGES) | {"workers": workers, "memory": memory or "default"}
    record |= {"limit": limit, "limited by": METHOD}
    report = f"{told(record)}\n\n{table(by_step)}\n"
    print(report)
    out.mkdir(parents=True, exist_ok=True)
    (out / "corpus_scale.md").write_text(report)
    record["points"] = [asdict(point) for point in points]
    (out / "corpus_scale.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(by_step, bound, out / "corpus_scale.png")
    if any(point.failed for point in points):
        sys.exit(1)


if __name__ == "__main__":
    try:
        tyro.cli(scale)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
