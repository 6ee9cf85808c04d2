"""What `train_step.py` says of its contenders: figures, a table, a picture, and profiles."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import on_paper
from benchmarks.cases import FLOOR, OURS, SETTINGS, Case
from benchmarks.comparison import Result, Settings, quantiles
from benchmarks.machine import markdown, spread
from benchmarks.turns import Contender

# Dense products in bf16, from NVIDIA's datasheets of H100 SXM and H200 (half of "with sparsity").
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
MFU = "(6 n (12 L h^2 + v h) + 12 n s h L) / (t x seconds x peak)"
HFU = "the same with the padded vocabulary and what is computed again / (t x seconds x peak)"


def gpu_peak(device: str) -> tuple[str | None, float | None]:
    """(name, FLOP/s of its datasheet) of the GPU; None for a device that is not known."""
    if device != "cuda":
        return None, None
    import torch

    name = torch.cuda.get_device_name()
    return name, PEAKS.get(name)


def ratios(walls: dict[str, list[float]], name: str) -> list[float]:
    """This project's tokens/s over those of another, round by round; walls: seconds of a step."""
    return [theirs / own for theirs, own in zip(walls[name], walls[OURS], strict=True)]


def figures(settings: Settings, results: dict[str, Result], peak: float | None) -> dict[str, Any]:
    """What the JSON file says of each contender; null where the floor, this project or the GPU's
    peak is missing."""
    written = {}
    walls = {name: result.wall for name, result in results.items()}
    floor = walls.get(FLOOR)
    for name, result in results.items():
        if name == FLOOR:
            continue
        pairs = zip(floor, result.wall, strict=True) if floor else ()
        shares = [least / own for least, own in pairs]
        written[name] = {
            "tokens_per_second": quantiles([settings.case.tokens / each for each in result.wall]),
            "step_seconds": quantiles(result.wall),
            "cpu_seconds": quantiles(result.cpu),
            "peak_memory_bytes": result.peak_memory,
            "floor_seconds": median(floor) if floor else None,
            "share_of_floor": median(shares) if floor else None,
            "ours_over_it": quantiles(ratios(walls, name)) if OURS in walls else None,
            **utilisation(settings, name, median(result.wall), peak),
        }
    return written


def utilisation(
    settings: Settings, name: str, seconds: float, peak: float | None
) -> dict[str, float | None]:
    """Shares of the peak: of the model's operations, and of those that the hardware was given."""
    if peak is None:
        return {"mfu": None, "hfu": None}
    case, size = settings.case, settings.tensor_parallel
    granularity = "full" if case.checkpoint_activations else "none"
    granularity = SETTINGS.get(name, {}).get("recompute_granularity", granularity)
    hardware = on_paper.flops(on_paper.shape(case, size, granularity), causal=False)
    return {
        "mfu": case.flops / (size * seconds * peak),
        "hfu": hardware / (seconds * peak),
    }


def table(record: dict[str, Any]) -> str:
    """Medians; of a ratio median and quartiles of the rounds. record: as the JSON file."""
    header = ["", "tokens/s", "this project's / its", "seconds", "CPU seconds", "share of floor"]
    written, walls = record["contenders"], record["seconds"]
    has_peak = any(each["mfu"] is not None for each in written.values())
    rows: list[list[object]] = []
    for name, each in written.items():
        has_ratio = name != OURS and OURS in walls
        rows.append(
            [
                name,
                f"{each['tokens_per_second']['median']:,.0f}",
                spread(ratios(walls, name), 3) if has_ratio else "",
                f"{each['step_seconds']['median']:.4f}",
                f"{each['cpu_seconds']['median']:.4f}",
                percent(each["share_of_floor"]),
                *([percent(each["mfu"]), percent(each["hfu"])] if has_peak else []),
                f"{each['peak_memory_bytes'] / 2**20:,.0f}",
            ]
        )
    if floor := walls.get(FLOOR):
        rows.append([FLOOR, "", "", f"{median(floor):.4f}", "", ""])
        rows[-1] += [""] * (3 if has_peak else 1)
    return markdown([*header, *(["MFU", "HFU"] if has_peak else []), "peak MiB"], rows)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def draw(file: Path, case: Case, about: str, written: dict[str, Any]) -> None:
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
    floor = next(iter(written.values()))["floor_seconds"]
    limit = case.tokens / floor if floor else 0.0
    if limit:
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
    axes.set_xlabel(f"tokens/s, {about}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def write_profiles(
    folder: Path, found: dict[str, Contender], steps: int
) -> dict[str, dict[str, float]]:
    """A trace of every rank, and a table of where the time of rank 0 goes; returns seconds of a
    step in which communication runs, and in which it is exposed, by contender."""
    folder.mkdir(parents=True, exist_ok=True)
    communication = {}
    for name, contender in found.items():
        if name == FLOOR:
            continue
        stem = name.replace(" ", "_").replace(",", "")
        first = contender.ask("profile", steps=steps, trace=str((folder / stem).resolve()))[0]
        text = f"# {name}\n\n{profile_tables(first)}\n"
        (folder / f"{stem}.md").write_text(text)
        print(text)
        communication[name] = first["communication"]
    return communication


def profile_tables(profile: dict[str, Any]) -> str:
    total = sum(profile["kinds"].values())
    kinds = [
        [kind, f"{1000 * seconds:.2f}", f"{100 * seconds / total:.1f} %"]
        for kind, seconds in profile["kinds"].items()
    ]
    operators: Sequence[Sequence[object]] = [
        [operator, f"{1000 * seconds:.2f}", f"{times:g}"]
        for operator, seconds, times in profile["operators"]
    ]
    tables = [markdown(["", "ms a step", "share"], kinds)]
    runs, exposed = (profile["communication"][key] for key in ("seconds", "exposed_seconds"))
    if runs:
        tables.append(
            f"Communication runs for {1000 * runs:.2f} ms of a step, {1000 * exposed:.2f} ms of "
            f"these ({100 * exposed / runs:.0f} %) exposed: nothing is computed beside it."
        )
    return "\n\n".join([*tables, markdown(["operator", "ms a step", "calls"], operators)])
