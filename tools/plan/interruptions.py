"""The save interval that loses least, and the useful share of a job's time. Needs no torch.

Interruptions of a job are a Poisson process: each comes after an exponential time of mean M. A job
computes T seconds, then saves, and so on. A save holds it for C seconds, and counts once it is
written, W seconds after its start; W is C, or more if saves are asynchronous. The next save waits
for that. After an interruption D seconds pass until it is detected, and R in which the job starts
and loads the last save that counts; an interruption of the restart is detected and starts it again.
So a save counts if none comes for T + W seconds from the start of the job, and each further one if
none comes for a period P = max(T + C, W) after the one before. The useful share of all time is

    M / (M + D)  e^(-R / M)  (T / M)  e^(-(T + W) / M) / (1 - e^(-P / M))

For W = C and D = 0 its inverse is the expected time of Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (Future Generation Computer Systems 22, 2006):
M e^(R / M) (e^((T + C) / M) - 1) / T for each second. D, R and W scale the share but do not move
its maximum over T, where

    C / M = -T / M - log(1 - T / M)    (= (T / M)^2 / 2 + (T / M)^3 / 3 + ...)

The first term alone is the interval of Young, "A first order approximation to the optimum
checkpoint interval" (Communications of the ACM 17, 1974), sqrt(2 C M). If the optimum is below
W - C, saves wait for each other, and W - C is better.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, exp, expm1, floor, log1p, sqrt
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

from megatron.errors import UsageError
from tools.report.figures import picture
from tools.report.numbers import NONE, aligned, decimal, duration, percent, whole
from tools.report.record import read_record, record_of

PUBLISHED = Path(__file__).resolve().parents[2] / "scripts" / "interruptions.toml"
SCALES = tuple(4**power for power in range(2, 8))  # numbers of GPUs in the table, to 16,384
PARTS = ("useful", "save_stall", "repeated", "detection", "restart")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A mean time between interruptions, in seconds, of a job on `gpus` GPUs (None: not stated)."""

    name: str
    mtbf: float
    gpus: int | None
    source: str

    def at(self, gpus: int | None) -> float:
        """The mean time of a job on other numbers of GPUs, each interrupted as often."""
        return self.mtbf if gpus is None or self.gpus is None else self.mtbf * self.gpus / gpus


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of what an interruption and a save cost; of a step, None if it is not known."""

    detection: float
    restart: float
    stall: float
    save: float  # from the start of a save until it counts, at least the stall
    step: float | None


def young(mtbf: float, stall: float) -> float:
    """Young's interval, in seconds."""
    return sqrt(2 * stall * mtbf)


def daly(mtbf: float, stall: float) -> float:
    """Daly's interval of higher order, in seconds."""
    if stall >= 2 * mtbf:
        return mtbf
    half = stall / (2 * mtbf)
    return young(mtbf, stall) * (1 + sqrt(half) / 3 + half / 9) - stall


def best_interval(mtbf: float, times: Times) -> float:
    """Seconds of computation between two saves for the largest useful share."""
    low, high = 0.0, 1.0  # of the interval, as a share of the MTBF
    for _ in range(200):
        middle = (low + high) / 2
        is_below = middle < 1 and -middle - log1p(-middle) < times.stall / mtbf
        low, high = (middle, high) if is_below else (low, middle)
    # Where saves wait for each other, the share grows with the interval, up to one of the MTBF.
    return mtbf * max(high if times.stall else 0.0, min((times.save - times.stall) / mtbf, 1.0))


def best_steps(mtbf: float, times: Times) -> int:
    """Steps between two saves, at least one. The seconds of a step have to be known."""
    assert times.step is not None
    steps = best_interval(mtbf, times) / times.step
    near = (max(1, floor(steps)), max(1, ceil(steps)))
    return max(near, key=lambda number: shares(mtbf, times, number * times.step)["useful"])


def shares(mtbf: float, times: Times, interval: float) -> dict[str, float]:
    """Expected shares of all time, by PARTS, with a save after each `interval` seconds."""
    running, stall = mtbf / (mtbf + times.detection) * exp(-times.restart / mtbf), times.stall
    useful = computed = 1.0  # of the time that the job runs
    if period := max(interval + stall, times.save):
        lost = -expm1(-period / mtbf)  # the probability of an interruption in a period
        useful = interval / mtbf * exp(-(interval + times.save) / mtbf) / lost
        later = exp(-(interval + stall) / mtbf) / lost  # computations that begin after the first
        computed = -expm1(-interval / mtbf) * (1 + later)
    return {
        "useful": running * useful,
        "save_stall": running * max(0.0, 1 - computed),
        "repeated": running * max(0.0, computed - useful),
        "detection": times.detection / (mtbf + times.detection),
        "restart": mtbf / (mtbf + times.detection) * -expm1(-times.restart / mtbf),
    }


def read_rates(words: str, gpus: int | None) -> list[Rate]:
    """The rates that --mtbf means: hours of a job on `gpus` GPUs, "published", or a file like
    scripts/interruptions.toml. Raises UsageError."""
    file = PUBLISHED if words == "published" else Path(words)
    if file.suffix != ".toml":
        try:
            hours = float(words)
        except ValueError:
            hours = 0.0
        if not 1e-12 < hours < 1e12:
            allowed = "hours above 0, published, or a file like scripts/interruptions.toml"
            raise UsageError("--mtbf", words, allowed, works=("--mtbf", "published"))
        return [Rate(name="stated", mtbf=3600 * hours, gpus=gpus, source="--mtbf")]
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        if not tables:
            raise ValueError("no table")
        if bad := [name for name, each in tables.items() if not _counts(each)]:
            raise ValueError(f"{bad[0]} has a number that is not above 0")
        return [
            Rate(
                name=name,
                mtbf=3600 * each["hours"] / each["interruptions"],
                gpus=each["gpus"],
                source=each["source"],
            )
            for name, each in tables.items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a file like scripts/interruptions.toml ({type(error).__name__}: {error})"
        raise UsageError("--mtbf", file, allowed, works=("--mtbf", "published")) from error


def _counts(table: Mapping[str, Any]) -> bool:
    numbers = [table[key] for key in ("interruptions", "hours", "gpus")]
    return all(0 < each < 1e12 for each in numbers) and table["interruptions"] > 1e-12


def measured(run: Path) -> dict[str, tuple[float, str]]:
    """{time: (seconds, source)} of a run: medians of its saves, its logged steps, and the starts
    that resumed it (all its starts if none did); of an --output of tools.chaos, also the mean
    seconds until a fault that ended it was noticed. Times that its record lacks are omitted.
    Raises UsageError where there is no record."""
    report = run / "report.json"
    faults = json.loads(report.read_text()).get("faults") if report.is_file() else None
    file = record_of(run if faults is None else run / "run")
    if not file.is_file():
        raise UsageError("--run", run, "a folder of a run, with its metrics.jsonl, or that file")
    lines = read_record(file)
    starts = [line for line in lines if line.get("start_seconds")]
    starts = [line for line in starts if line["step"] > 1] or starts  # those that resumed
    phases = [line["start_seconds"] for line in starts]
    found = {
        "restart": [sum(each.values()) - each.get("evaluation", 0.0) for each in phases],
        "stall": [line["stall_seconds"] for line in lines if "stall_seconds" in line],
        "save": [line["save_seconds"] for line in lines if "save_seconds" in line],
        "step": [line["step_seconds"] for line in lines if "step_seconds" in line],
    }
    times = {
        name: (median(each), f"median of {len(each)} in {file}")
        for name, each in found.items()
        if each
    }
    if ended := [row["detection_seconds"] for row in faults or () if row["ended"] and row["cause"]]:
        times["detection"] = mean(ended), f"mean of {len(ended)} faults in {report}"
    return times


def times_of(run: Path | None, stated: Mapping[str, float | None]) -> tuple[Times, dict[str, str]]:
    """The times, and the source of each: `stated` ones, by name, then those of the run. Raises
    UsageError for those that neither has."""
    found = {} if run is None else measured(run)
    found |= {
        name: (value, f"--{name}-seconds") for name, value in stated.items() if value is not None
    }
    for name in ("stall", "restart", "detection"):
        if name not in found:
            where = "given" if name == "detection" else "given, or --run with a record that has it"
            raise UsageError(f"--{name}-seconds", None, where)
    stall, _ = found["stall"]
    if (save := stated.get("save")) is not None and save < stall:
        works = ("--save-seconds", str(stall))
        raise UsageError("--save-seconds", save, f"at least the stall, {stall} s", works=works)
    if "save" not in found or found["save"][0] < stall:  # a synchronous one ends with its stall
        found["save"] = stall, "the stall"
    seconds = {name: value for name, (value, _) in found.items()}
    return Times(**{"step": None, **seconds}), {name: source for name, (_, source) in found.items()}


def study(
    rates: Sequence[Rate], times: Times, sources: Mapping[str, str], gpus: int | None
) -> Record:
    """The JSON: for each rate a row by number of GPUs, `gpus` and SCALES, or one row if the rate is
    not that of a number of GPUs. Times are the same on any number. Shares are those of the interval
    in whole steps, if the seconds of a step are known, else of the best one."""
    sizes = sorted({*SCALES, gpus or SCALES[0]})
    return {
        "times_seconds": asdict(times),
        "sources": dict(sources),
        "rates": [
            {
                "name": rate.name,
                "source": rate.source,
                "mtbf_seconds": rate.mtbf,
                "gpus": rate.gpus,
                "rows": [
                    _row(rate.at(each), times, each) for each in (sizes if rate.gpus else [None])
                ],
            }
            for rate in rates
        ],
    }


def _row(mtbf: float, times: Times, gpus: int | None) -> Record:
    best = best_interval(mtbf, times)
    steps = None if times.step is None else best_steps(mtbf, times)
    interval = best if steps is None or times.step is None else steps * times.step
    return {
        "gpus": gpus,
        "mtbf_seconds": mtbf,
        "best_interval_seconds": best,
        "save_interval_steps": steps,
        "young_seconds": young(mtbf, times.stall),
        "daly_seconds": daly(mtbf, times.stall),
        "shares": shares(mtbf, times, interval),
    }


def text(found: Record) -> str:
    """The record as readable text."""

    def seconds(value: float) -> str:
        return decimal(value, 0 if value >= 100 else 2)

    times = [
        [f"{name}, s", NONE if value is None else f"{value:,.4g}", found["sources"].get(name, "")]
        for name, value in found["times_seconds"].items()
    ]
    titles = ("rate", "GPUs", "MTBF", "save each, s", "steps", "Young, s", "Daly, s")
    rows = [[*titles, *(part.replace("_", " ") for part in PARTS)]]
    for rate in found["rates"]:
        for row in rate["rows"]:
            steps = row["save_interval_steps"]
            rows.append(
                [
                    rate["name"],
                    NONE if row["gpus"] is None else whole(row["gpus"]),
                    duration(row["mtbf_seconds"]),
                    seconds(row["best_interval_seconds"]),
                    NONE if steps is None else whole(steps),
                    *map(seconds, (row["young_seconds"], row["daly_seconds"])),
                    *(percent(row["shares"][part]) for part in PARTS),
                ]
            )
    rates = [
        fill(f"{rate['name']}: {rate['source']}", 100, subsequent_indent="    ")
        for rate in found["rates"]
    ]
    return "\n".join([aligned(times), "", *rates, "", aligned(rows)])


def draw(ending: str, found: Record) -> bytes:
    """Lost shares by number of GPUs for each rate, and the useful share by interval for the first:
    a dot where it is largest, or at one step if that is longer."""
    rates, times = found["rates"], Times(**found["times_seconds"])

    def paint(grid: Any) -> None:
        *bars, curves = grid
        for axes, rate in zip(bars, rates, strict=True):
            names = [_label(row) for row in rate["rows"]]
            left = [0.0] * len(names)
            for part in PARTS[1:]:
                values = [100 * row["shares"][part] for row in rate["rows"]]
                axes.barh(names, values, left=left, label=part.replace("_", " "))
                left = [sum(pair) for pair in zip(left, values, strict=True)]
            axes.invert_yaxis()
            axes.set_xlabel(f"% of all time that is lost ({rate['name']})")
        for row in rates[0]["rows"]:
            middle = max(row["best_interval_seconds"], times.step or 0.0) or 1.0
            intervals = [middle * 10 ** (power / 40) for power in range(-40, 41)]
            mtbf = row["mtbf_seconds"]
            useful = [100 * shares(mtbf, times, each)["useful"] for each in intervals]
            curves.plot(intervals, useful, label=_label(row), marker="o", markevery=[40])
        curves.set(xscale="log", xlabel=f"seconds between saves ({rates[0]['name']})")
        curves.set_ylabel("% useful")
        curves.legend(fontsize=8)
        legend = bars[0].get_legend_handles_labels()
        curves.figure.legend(*legend, loc="outside lower center", ncols=4)

    panels = len(rates) + 1
    return picture(paint, ending, (6 * panels, 5), (1, panels))


def _label(row: Record) -> str:
    mtbf = duration(row["mtbf_seconds"])
    return f"MTBF {mtbf}" if row["gpus"] is None else f"{row['gpus']:,} GPUs"
