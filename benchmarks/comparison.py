"""A run of `train_step.py`: its contenders' processes, their losses, and their times by turns."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.cases import (
    COMPILED,
    COORDINATES,
    DTENSOR,
    FLOOR,
    KERNEL,
    MEGATRON,
    OURS,
    PLAIN,
    TRANSFORMERS,
    VARIANTS,
    Case,
)
from benchmarks.turns import Answer, Contender, OutOfMemoryError

ROOT = Path(__file__).resolve().parents[1]
COMPARED_STEPS = 3
# Of the losses of the compared steps, about 10 each.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(kw_only=True)
class Result:
    """Of one contender; times are of one step, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak_memory: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for."""

    case: Case
    dtype: str
    threads: int
    tensor_parallel: int
    device: str
    rounds: int
    steps: int
    stub_communication: bool = False  # one rank is run, and its peers are not there
    megatron_core: Path | None = None  # a Python in whose environment it is installed

    @property
    def ranks(self) -> int:
        """Processes of a contender."""
        return 1 if self.stub_communication else self.tensor_parallel


def usual_contenders(settings: Settings) -> list[str]:
    """Who runs in this setting, unless it is said."""
    if settings.stub_communication:
        return [OURS]
    other = [MEGATRON] if settings.megatron_core else []
    if settings.tensor_parallel > 1:
        return [OURS, DTENSOR, *other]
    # The plain model has nothing that is computed again.
    names = [OURS] if settings.case.checkpoint_activations else [OURS, PLAIN]
    compiled = [COMPILED] if settings.device == "cuda" else []
    return [*names, TRANSFORMERS, *compiled, *other]


@contextmanager
def started(settings: Settings, names: Sequence[str]) -> Iterator[dict[str, Contender]]:
    """The processes of all of them, which end with the context."""
    threads = max(1, settings.threads // settings.ranks)
    environ = {"OMP_NUM_THREADS": str(threads)}
    if settings.device == "cuda":  # which several share: none holds more than it needs
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    found: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        told = {
            "case": settings.case.written(),
            "dtype": settings.dtype,
            "device": settings.device,
            "threads": threads,
            "tensor_parallel": settings.tensor_parallel,
            "stub_communication": settings.stub_communication,
            "has_peers": bool({*names} - {*VARIANTS, FLOOR}),
        }
        file.write_text(json.dumps(told))
        try:
            for name in names:
                command, changes = start_of(name, settings, file)
                commands = [[*command, str(rank)] for rank in range(settings.ranks)]
                found[name] = Contender(name, commands, environ | changes, ROOT)
            yield found
        finally:
            for contender in found.values():
                contender.stop()


def start_of(name: str, settings: Settings, file: Path) -> tuple[list[str], dict[str, str]]:
    """The command but for its rank, and the variables of its environment."""
    if name != MEGATRON:
        return [sys.executable, "-m", "benchmarks.contenders", name, str(file)], {}
    from benchmarks.own import write_initial_weights

    weights = file.with_suffix(".npz")
    write_initial_weights(settings.case, weights)
    script = str(ROOT / "benchmarks" / "megatron_core_gpt2.py")
    # Where `megatron` is found has to be theirs.
    return [str(settings.megatron_core), script, str(file), str(weights)], {"PYTHONPATH": ""}


def ask_all(
    found: dict[str, Contender], names: Sequence[str], command: str, **arguments: object
) -> dict[str, list[Answer]]:
    """The answers of these contenders, at the same time; who has run out of memory is removed from
    `found`, with a line."""
    for name in names:
        found[name].send(command, **arguments)
    answers = {}
    for name in names:
        try:
            answers[name] = found[name].answers()
        except OutOfMemoryError as error:
            print(f"{name}: out of memory ({str(error).splitlines()[-1]})", flush=True)
            found.pop(name).stop()
    return answers


def compare_losses(settings: Settings, found: dict[str, Contender]) -> float | None:
    """Largest difference of the contenders' losses from this project's, of those without dropout;
    None where this project has dropped out. The steps warm all up."""
    names = [name for name in found if name != FLOOR]
    answers = ask_all(found, names, "losses", steps=COMPARED_STEPS)
    compared = answers.keys() - {COORDINATES, KERNEL}
    losses = {name: answers[name][0]["losses"] for name in compared}
    if OURS not in losses:
        return None
    largest = float(max(np.abs(np.subtract(each, losses[OURS])).max() for each in losses.values()))
    if not largest <= TOLERANCES[settings.dtype]:
        raise SystemExit(f"error: these are not the same model: losses {losses}")
    return largest


def measure(settings: Settings, found: dict[str, Contender]) -> dict[str, Result]:
    """All of them in turn; every round begins with another one."""
    results = {name: Result() for name in found}
    for number in range(settings.rounds):
        names = list(found)
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            for answers in ask_all(found, [name], "time", steps=settings.steps).values():
                results[name].wall.append(max(answer["wall"] for answer in answers))
                results[name].cpu.append(sum(answer["cpu"] for answer in answers))
    for name, answers in ask_all(found, [*found.keys() - {FLOOR}], "memory").items():
        results[name].peak_memory = sum(each["bytes"] for each in answers)
        results[name].notes = answers[0].get("notes", [])
    return {name: result for name, result in results.items() if name in found}


def pool(starts: Sequence[dict[str, Result]]) -> dict[str, Result]:
    """The rounds of all starts, of who was in each of them."""
    return {
        name: Result(
            wall=[wall for results in starts for wall in results[name].wall],
            cpu=[cpu for results in starts for cpu in results[name].cpu],
            peak_memory=max(results[name].peak_memory for results in starts),
            notes=starts[0][name].notes,
        )
        for name in starts[0]
        if all(name in results for results in starts)
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}
