"""Whole training steps of one GPT-2 by this project and by what people would use instead.

    python benchmarks/train_step.py --preset FILE --dtype fp32|bf16 --threads N
        [--tensor-parallel N] [--json FILE] [--picture FILE] [--profile FOLDER]

A step is forward, backward, reduction, clipping by the global norm and fused AdamW, without
dropout, from the same weights on the same batches; losses of the first steps are compared before
anything is timed. Contenders run on processes of their own and take turns, and so does the floor:
the step's matrix products alone, each in the layout that is fastest on this machine.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import tyro

if __name__ == "__main__":  # run as a file, only benchmarks/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import FLOOR, OURS, Case
from benchmarks.machine import JsonFile, facts, markdown, spread, told, write_json
from benchmarks.turns import Contender
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config

ROOT = Path(__file__).resolve().parents[1]
COMPARED_STEPS = 3
# Of the losses of the compared steps, about 10 each.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
# Dense products in bf16, from NVIDIA's datasheets of H100 SXM and H200 (half of "with sparsity").
PEAKS = {"H100": 989e12, "H200": 989e12}
MFU = "(6 n (12 L h^2 + v h) + 12 n s h L) / (seconds x peak)"


@dataclass(kw_only=True)
class Result:
    """Of one contender; times are of one step, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak_memory: int = 0


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


def read_case(
    preset: Path, vocab_size: int, batch: int | None, checkpoint_activations: bool
) -> Case:
    """The model of a preset for pretrain_gpt2.py, and its micro-batch unless one is given."""
    config = parse(PretrainGPT2Config, ["--preset", str(preset)], {})
    model, optimizer = config.model, config.optimizer
    return Case(
        name=preset.stem,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        vocab_size=model.vocab_size or vocab_size,
        batch=batch or config.training.micro_batch_size,
        sequence=config.data.seq_length,
        divisible_by=model.make_vocab_size_divisible_by,
        checkpoint_activations=checkpoint_activations,
        epsilon=model.layernorm_epsilon,
        weight_decay=optimizer.weight_decay,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
    )


def contenders(settings: Settings) -> list[str]:
    """Who runs in this setting."""
    if settings.tensor_parallel > 1:
        return [OURS, "DTensor"]
    names = [OURS, "plain torch"]
    if find_spec("transformers"):
        names.append("transformers")
        if settings.device == "cuda":
            names.append("transformers, compiled")
    return names


@contextmanager
def started(settings: Settings, names: Sequence[str]) -> Iterator[dict[str, Contender]]:
    """The processes of all of them, which end with the context."""
    ranks = settings.tensor_parallel
    threads = max(1, settings.threads // ranks)
    found: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        file.write_text(
            json.dumps(
                {
                    "case": settings.case.written(),
                    "dtype": settings.dtype,
                    "device": settings.device,
                    "threads": threads,
                    "tensor_parallel": ranks,
                }
            )
        )
        environ = {"OMP_NUM_THREADS": str(threads)}
        try:
            for name in names:
                command = [sys.executable, "-m", "benchmarks.contenders", name, str(file)]
                commands = [[*command, str(rank)] for rank in range(ranks)]
                found[name] = Contender(name, commands, environ, ROOT)
            yield found
        finally:
            for contender in found.values():
                contender.stop()


def compare_losses(settings: Settings, found: dict[str, Contender]) -> float:
    """Largest difference of the contenders' losses from this project's; the steps warm all up."""
    losses = {
        name: contender.ask("losses", steps=COMPARED_STEPS)[0]["losses"]
        for name, contender in found.items()
        if name != FLOOR
    }
    largest = float(max(np.abs(np.subtract(each, losses[OURS])).max() for each in losses.values()))
    if not largest <= TOLERANCES[settings.dtype]:
        raise SystemExit(f"error: these are not the same model: losses {losses}")
    return largest


def measure(settings: Settings, found: dict[str, Contender]) -> dict[str, Result]:
    """All of them in turn; every round begins with another one."""
    results = {name: Result() for name in found}
    for number in range(settings.rounds):
        order = list(found)[number % len(found) :] + list(found)[: number % len(found)]
        for name in order:
            answers = found[name].ask("time", steps=settings.steps)
            results[name].wall.append(max(answer["wall"] for answer in answers))
            results[name].cpu.append(sum(answer["cpu"] for answer in answers))
    for name, result in results.items():
        if name != FLOOR:
            result.peak_memory = sum(each["bytes"] for each in found[name].ask("memory"))
    return results


def quantiles(values: Sequence[float]) -> dict[str, float]:
    low, high = np.quantile(values, [0.1, 0.9])
    return {"median": median(values), "p10": float(low), "p90": float(high)}


def ratios(results: dict[str, Result], name: str) -> list[float]:
    """This project's tokens/s over those of another, round by round."""
    pairs = zip(results[name].wall, results[OURS].wall, strict=True)
    return [theirs / own for theirs, own in pairs]


def figures(settings: Settings, results: dict[str, Result], peak: float | None) -> dict[str, Any]:
    """What the JSON file says of each contender."""
    floor, case = results[FLOOR], settings.case
    written: dict[str, Any] = {}
    for name, result in results.items():
        if name == FLOOR:
            continue
        shares = [f / own for f, own in zip(floor.wall, result.wall, strict=True)]
        written[name] = {
            "tokens_per_second": quantiles([case.tokens / each for each in result.wall]),
            "step_seconds": quantiles(result.wall),
            "cpu_seconds": quantiles(result.cpu),
            "peak_memory_bytes": result.peak_memory,
            "floor_seconds": median(floor.wall),
            "share_of_floor": median(shares),
            "ours_over_it": quantiles(ratios(results, name)),
            "mfu": case.flops / (median(result.wall) * peak) if peak else None,
        }
    return written


def table(written: dict[str, Any], results: dict[str, Result]) -> str:
    """Medians; of a ratio median and quartiles of the rounds."""
    header = ["", "tokens/s", "this project's / its", "seconds", "CPU seconds", "share of floor"]
    rows: list[list[object]] = []
    has_mfu = written[OURS]["mfu"] is not None
    for name, each in written.items():
        rows.append(
            [
                name,
                f"{each['tokens_per_second']['median']:,.0f}",
                "" if name == OURS else spread(ratios(results, name), 3),
                f"{each['step_seconds']['median']:.4f}",
                f"{each['cpu_seconds']['median']:.4f}",
                f"{100 * each['share_of_floor']:.1f} %",
                *([f"{100 * each['mfu']:.1f} %"] if has_mfu else []),
                f"{each['peak_memory_bytes'] / 2**20:,.0f}",
            ]
        )
    floor = results[FLOOR]
    times = [f"{median(kind):.4f}" for kind in (floor.wall, floor.cpu)]
    rows.append([FLOOR, "", "", *times, "", *([""] if has_mfu else []), ""])
    return markdown([*header, *(["MFU"] if has_mfu else []), "peak MiB"], rows)


def draw(file: Path, settings: Settings, written: dict[str, Any]) -> None:
    """Tokens/s of each, with the tenth and ninetieth percentile, and the floor's."""
    from matplotlib.figure import Figure

    names = list(written)[::-1]
    speeds = [written[name]["tokens_per_second"] for name in names]
    middle = [each["median"] for each in speeds]
    errors = [
        [each["median"] - each["p10"] for each in speeds],
        [each["p90"] - each["median"] for each in speeds],
    ]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    colors = ["#c44e52" if name == OURS else "#8c9aae" for name in names]
    axes.barh(names, middle, xerr=errors, color=colors, ecolor="#333333", capsize=3)
    limit = settings.case.tokens / written[OURS]["floor_seconds"]
    axes.axvline(limit, color="#333333", linestyle="--", linewidth=1)
    axes.annotate(
        "matrix products alone",
        (limit, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
    )
    axes.set_xlim(0, 1.08 * max(limit, *middle))
    size = settings.tensor_parallel
    axes.set_xlabel(f"tokens/s, {settings.case.name}, {settings.dtype}, t = {size}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def write_profiles(folder: Path, found: dict[str, Contender], steps: int) -> None:
    """A trace of every rank, and a table of where the time of rank 0 goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contender in found.items():
        if name == FLOOR:
            continue
        stem = name.replace(" ", "_").replace(",", "")
        trace = str((folder / stem).resolve())
        first = contender.ask("profile", steps=steps, trace=trace)[0]
        total = sum(first["kinds"].values())
        kinds = [
            [kind, f"{1000 * seconds:.2f}", f"{100 * seconds / total:.1f} %"]
            for kind, seconds in first["kinds"].items()
        ]
        operators = [
            [operator, f"{1000 * seconds:.2f}", f"{times:g}"]
            for operator, seconds, times in first["operators"]
        ]
        text = (
            f"# {name}\n\n{markdown(['', 'ms a step', 'share'], kinds)}\n\n"
            f"{markdown(['operator', 'ms a step', 'calls'], operators)}\n"
        )
        (folder / f"{stem}.md").write_text(text)
        print(text)


def gpu_peak(device: str) -> tuple[str | None, float | None]:
    """(name, FLOP/s of its datasheet) of the GPU; None for a device that is not known."""
    if device != "cuda":
        return None, None
    import torch

    name = torch.cuda.get_device_name()
    return name, next((peak for known, peak in PEAKS.items() if known in name), None)


def train_step(
    preset: Path,
    dtype: Literal["fp32", "bf16"] = "fp32",
    threads: int = 2,
    tensor_parallel: int = 1,
    vocab_size: int = 50304,
    micro_batch_size: int | None = None,
    checkpoint_activations: bool = False,
    rounds: int = 8,
    steps: int = 3,
    device: Literal["cpu", "cuda"] = "cpu",
    json_file: JsonFile = None,
    picture: Path | None = None,
    profile: Path | None = None,
) -> None:
    """Compare and print.

    Args:
        preset: of pretrain_gpt2.py; model and micro-batch are read from it.
        dtype: of weights and activations; the peers compute under autocast.
        threads: of all ranks of a contender together.
        tensor_parallel: ranks that the model is cut over.
        vocab_size: where the preset has none; for the peers it is best a multiple of 128.
        micro_batch_size: samples of a step, if not the preset's.
        checkpoint_activations: recompute each layer in the backward pass.
        rounds: times that every contender has its turn.
        steps: of a turn.
        device: cpu or cuda.
        json_file: where every figure is written.
        picture: PNG of the comparison.
        profile: folder for traces, and tables of where the time goes.
    """
    settings = Settings(
        case=read_case(preset, vocab_size, micro_batch_size, checkpoint_activations),
        dtype=dtype,
        threads=threads,
        tensor_parallel=tensor_parallel,
        device=device,
        rounds=rounds,
        steps=steps,
    )
    gpu, peak = gpu_peak(device)
    record: dict[str, Any] = {
        **facts("torch", "transformers"),
        **({"gpu": gpu, "peak": peak, "mfu": MFU} if gpu else {}),
        "dtype": dtype,
        "threads": threads,
        "tensor_parallel": tensor_parallel,
        "rounds": rounds,
        "steps": steps,
        "case": json.loads(settings.case.written()),
    }
    with started(settings, [*contenders(settings), FLOOR]) as found:
        record["loss_difference"] = compare_losses(settings, found)
        print(told(record))
        results = measure(settings, found)
        record["products"] = found[FLOOR].ask("products")[0]["products"]
        if profile is not None:
            write_profiles(profile, found, steps)
    record["contenders"] = figures(settings, results, peak)
    record["seconds"] = {name: result.wall for name, result in results.items()}
    print(table(record["contenders"], results))
    write_json(json_file, record)
    if picture is not None:
        draw(picture, settings, record["contenders"])


if __name__ == "__main__":
    tyro.cli(train_step)
