"""Holds a trainer to the exact figures of tiny models, at any layout.

    python -m conformance.run --adapter conformance.adapters.megatron:Adapter --layout tensor=2
    python -m conformance.run --adapter mine:Adapter --layout data=2 --model gpt2 --resume 3

Starts the ranks by torchrun, gives each the adapter's five steps, and compares losses, gradient
norms, the first gradients and the weights with those of one process in fp64. Says which known
fault a difference looks like, and whether the ranks divide the work.

--resume STEP stops after that step, saves, and goes on in new processes, maybe of another layout.

Exit status: 0 agreement, 1 a difference, 2 a wrong argument or the trainer's own failure or
refusal, 3 figures without content (dead gradients, or a layout that is ignored).
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30A0000:
    sys.exit(f"error: Python 3.10 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from conformance.compare import (
    CAPS,
    Difference,
    Named,
    Tolerance,
    dead,
    differences,
    division,
    largest,
    nearest,
    tolerance,
    without_gradient,
)
from conformance.fixture import (
    AXES,
    NAMES,
    NOT_RANKS,
    STEPS,
    Figures,
    Fixture,
    ranks,
    read_figures,
    read_fixture,
)

WORDS = {0: "agreement", 1: "difference", 2: "failure", 3: "no content"}
GRACE = 10.0  # seconds that torchrun has to end its ranks
TAIL = 30  # lines of a failed run's output


class Failure(Exception):  # noqa: N818
    """The trainer raised, hung, died or refused; the message says which."""


@dataclass
class Result:
    """The result of one model's run; status as the exit status."""

    model: str
    status: int
    reason: str = ""  # of a failure, or of agreement without content
    differences: list[Difference] = field(default_factory=list)
    tolerance: Tolerance | None = None
    fault: Named | None = None
    division: list[dict[str, Any]] = field(default_factory=list)  # of each layout that ran
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{self.model}: {WORDS[self.status]}"]
        if self.reason:
            words.append(self.reason)
        if self.tolerance and self.differences:
            worst = largest(self.differences)
            words.append(", ".join(str(each) for each in worst.values()))
            words.append(f"rounding is up to {self.tolerance.first:.0e} in the first step")
            words[-1] += f" (spread {self.tolerance.spread:.0e}) and {self.tolerance.cap:.0e} later"
        for each in self.division:
            found = ", ".join(
                f"{kind} {each[kind]['times']:.2f}" for kind in each if each[kind]["times"]
            )
            words.append(f"the fullest rank over an equal share: {found}")
        if self.fault:
            words.append(f"looks like {self.fault}")
        elif self.status == 1:
            words.append("no known fault is near")
        return "; ".join(dict.fromkeys(words))


def layout_of(text: str) -> dict[str, int]:
    """tensor=2,data=2. Raises argparse.ArgumentTypeError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"([a-z_]\w*)=(\d+)", part.strip())):
            raise argparse.ArgumentTypeError(f"{part!r} is no NAME=SIZE, such as tensor=2,data=2")
        if match[1] not in (*AXES, *NOT_RANKS):
            known = ", ".join((*AXES, *sorted(NOT_RANKS)))
            raise argparse.ArgumentTypeError(f"{match[1]} is none of {known}")
        if match[1] in AXES and not int(match[2]):
            raise argparse.ArgumentTypeError(f"{match[1]} has no ranks")
        if match[1] in sizes:
            raise argparse.ArgumentTypeError(f"{match[1]} has two sizes")
        sizes[match[1]] = int(match[2])
    if ranks(sizes) > 1024:
        raise argparse.ArgumentTypeError(f"{ranks(sizes)} ranks are more than 1024")
    return sizes


def adapter_of(text: str) -> str:
    """module:name. Raises argparse.ArgumentTypeError."""
    module, _, name = text.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no module:name, such as my.module:Adapter")
    return text


def lack_of(adapter: str) -> str:
    """Why this Python does not find the adapter, or "". The module itself is not imported."""
    module, _, name = adapter.partition(":")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return f"no module {module} is found from {Path.cwd()}"
    source = Path(spec.origin).read_text(errors="replace")
    if re.search(rf"^(class |def |from .*\b)?{name}\b", source, re.MULTILINE):
        return ""
    classes = re.findall(r"^class (\w+)", source, re.MULTILINE)
    has = f"; it has {', '.join(classes)}" if classes else ""
    return f"{module} has no {name}{has}"


def python_of(text: str) -> str:
    found = shutil.which(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is no program that can be run")
    return str(Path(found).absolute())


def file_of(text: str) -> Path:
    file = Path(text)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file that can be written")
    return file


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Ends with status 2 and one line where an argument is wrong."""
    parser = Parser(
        prog="python -m conformance.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--adapter", type=adapter_of, required=True, metavar="MODULE:NAME")
    add("--layout", type=layout_of, required=True, metavar="NAME=SIZE,...")
    add("--model", nargs="+", choices=NAMES, default=list(NAMES), help="by default all")
    add("--dtype", choices=list(CAPS), default="float64")
    add("--resume", type=int, choices=range(1, STEPS), metavar="STEP", help="stop, save and go on")
    add("--resume-layout", type=layout_of, metavar="NAME=SIZE,...", help="of the new processes")
    add("--python", type=python_of, default=sys.executable, help="of the trainer's environment")
    add("--json", type=file_of, metavar="FILE", help="all results")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of each start of ranks")
    options = parser.parse_args(arguments)
    if options.python == sys.executable and (lack := lack_of(options.adapter)):
        parser.error(f"argument --adapter: {lack}")
    if options.resume_layout and options.resume is None:
        parser.error("argument --resume-layout: needs --resume STEP")
    if not 0 < options.timeout < 1e6:
        parser.error(f"argument --timeout: {options.timeout:g} is no number of seconds")
    options.model = list(dict.fromkeys(options.model))
    return options


def start(python: str, job: Mapping[str, Any], folder: Path, timeout: float) -> list[Any]:
    """Runs a job of conformance.worker on the ranks of its layout; returns the report of each.

    Raises Failure.
    """
    folder.mkdir()
    file, output = folder / "job.json", folder / "output"
    file.write_text(json.dumps({**job, "output": str(folder)}))
    number = ranks(job["layout"])
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(number), "-m", "conformance.worker", str(file)]
    # The other Python finds only this one of the project's folders.
    packages = folder / "packages"
    packages.mkdir()
    (packages / "conformance").symlink_to(Path(__file__).resolve().parent)
    path = [str(Path.cwd()), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        hung, said = False, None
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            hung, said = True, output.stat().st_size  # torchrun has more to say when it is ended
        finally:
            if process.poll() is None:
                _end(process, folder)
    reports = {
        rank: json.loads(each.read_text())
        for rank in range(number)
        if (each := folder / f"{rank}.json").is_file()
    }
    if ended := [each for each in reports.values() if "time" in each]:
        first = min(ended, key=lambda each: each["time"])  # others fail because it did
        if "refused" in first:
            raise Failure(f"refused: {first['refused']}")
        text = first["failed"].strip()
        raise Failure(f"the trainer fails: {text.splitlines()[-1]}\n{text}")
    if hung or process.returncode or len(reports) < number:
        lines = [f"no end within {timeout:g} seconds" if hung else "the ranks died"]
        lines += output.read_bytes()[:said].decode(errors="replace").splitlines()[-TAIL:]
        for file in sorted(folder.glob("*.stack")):
            if text := file.read_text().strip():
                lines += [f"rank {file.stem}: {text}"]
        raise Failure("\n".join(lines))
    return [reports[rank] for rank in range(number)]


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Has each rank write its stack and torchrun end the ranks; kills those that are left."""

    def send(number: signal.Signals) -> None:
        for file in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                # torchrun starts each rank in a session of its own.
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    send(signal.SIGUSR1)
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        send(signal.SIGKILL)
        process.kill()
        process.wait()


def run_model(fixture: Fixture, options: argparse.Namespace, flops: int) -> Result:
    """Starts the ranks, once more to resume, and judges what they give. flops: of one process."""
    job = {
        "adapter": options.adapter,
        "fixture": str(fixture.folder.resolve()),
        "dtype": options.dtype,
        "layout": options.layout,
        "steps": [1, options.resume or STEPS],
        "load": None,
        "save": None,
    }
    with tempfile.TemporaryDirectory() as place:
        jobs = [job]
        if options.resume:
            saved = Path(place) / "saved"
            saved.mkdir()
            again = {"layout": options.resume_layout or options.layout, "load": str(saved)}
            jobs = [{**job, "save": str(saved)}]
            jobs += [{**job, **again, "steps": [options.resume + 1, STEPS]}]
        figures, divided = Figures(), []
        versions: dict[str, str] = {}
        try:
            for number, each in enumerate(jobs):
                folder = Path(place) / str(number)
                reports = start(options.python, each, folder, options.timeout)
                figures.add(read_figures(folder / "figures.safetensors"))
                counts = [rank["division"] for rank in reports]
                divided.append(division(counts, each["layout"], fixture, flops))
                versions = reports[0]["versions"]
        except Failure as error:
            return Result(fixture.name, 2, str(error), versions=versions)
    return judge(fixture, figures, options, divided, versions)


def judge(
    fixture: Fixture,
    figures: Figures,
    options: argparse.Namespace,
    divided: list[dict[str, Any]],
    versions: dict[str, str],
) -> Result:
    facts = fixture.facts
    found = differences(figures, fixture.expected(), facts, options.dtype)
    empty = dead(figures, facts)
    ignored = [
        f"a rank's {kind} are {each[kind]['times']:.2f} times an equal share, so the trainer"
        " ignores the layout or a part of it"
        if each[kind]["times"]
        else f"no {kind} were counted: local_tensors() of the adapter may name them"
        for each in divided
        for kind in each
        if each[kind]["ignored"]
    ]
    reasons = [*empty, *(f"{name} has no gradient" for name in without_gradient(figures, facts))]
    result = Result(
        fixture.name,
        0,
        "; ".join(dict.fromkeys([*reasons, *ignored])),
        differences=found,
        tolerance=tolerance(facts, options.dtype),
        division=divided,
        versions=versions,
    )
    if empty:
        result.status = 3
    elif any(each.is_fault for each in found):
        result.status = 1
        number = max(ranks(options.layout), ranks(options.resume_layout or {}))
        result.fault = nearest(figures, fixture, number)
    elif result.reason:
        result.status = 3
    return result


def flops_of(fixture: Fixture) -> int:
    """FLOPs of one step of the plain trainer, which is one process."""
    from conformance.plain import Trainer
    from conformance.worker import Matmuls

    trainer = Trainer(fixture)
    with Matmuls() as counted:
        trainer.step(0)
    return counted.flops


def as_json(results: Sequence[Result], options: argparse.Namespace, status: int) -> dict[str, Any]:
    def of(result: Result) -> dict[str, Any]:
        data = asdict(result)
        data["largest"] = {name: asdict(each) for name, each in largest(result.differences).items()}
        data["word"] = WORDS[result.status]
        return data

    return {
        "adapter": options.adapter,
        "layout": options.layout,
        "resume": options.resume,
        "resume_layout": options.resume_layout,
        "dtype": options.dtype,
        "status": status,
        "models": {each.model: of(each) for each in results},
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the models one after another; returns the exit status."""
    options = options_of(arguments)
    results = []
    for name in options.model:
        fixture = read_fixture(name)
        results.append(run_model(fixture, options, flops_of(fixture)))
        print(results[-1], flush=True)
    found = {each.status for each in results}
    status = next((each for each in (1, 2, 3) if each in found), 0)
    if options.json:
        text = json.dumps(as_json(results, options, status))
        # The difference of a missing figure is infinite, which JSON has no number for.
        record = json.loads(text, parse_constant=lambda _: None)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:  # status 1 would be a difference
        traceback.print_exc()
        sys.exit(2)
