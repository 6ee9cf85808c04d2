"""The expected shares of a job's time equal those of a simulated job, and the interval that is
called best is."""

import json
from functools import partial
from itertools import pairwise
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.refusals import refused
from tests.tools.report import pages
from tools.plan import __main__ as plan
from tools.plan.interruptions import (
    PARTS,
    SCALES,
    Times,
    best_interval,
    best_steps,
    daly,
    read_rates,
    shares,
    young,
)

STATED = "--detection-seconds 60 --restart-seconds 300 --stall-seconds 5"
NOTHING = Times(detection=0, restart=0, stall=0, save=0, step=None)
CASES = {  # (MTBF, interval, times), in seconds
    "synchronous": (100, 20, Times(detection=3, restart=10, stall=4, save=4, step=None)),
    "asynchronous": (100, 20, Times(detection=3, restart=10, stall=1, save=12, step=None)),
    "saves wait": (100, 8, Times(detection=0, restart=5, stall=2, save=25, step=None)),
    "restarts are interrupted": (20, 6, Times(detection=7, restart=25, stall=1, save=3, step=None)),
    "hardly ever": (10_000, 400, Times(detection=60, restart=300, stall=5, save=5, step=None)),
    "nothing is lost twice": (50, 10, NOTHING),
}


def simulate(mtbf: float, interval: float, times: Times, count: int) -> dict[str, float]:
    """Shares of the time of a job that is interrupted `count` times, from event to event."""
    random, spent = Random(1), dict.fromkeys(PARTS, 0.0)
    for _ in range(count):
        spent["detection"] += times.detection
        while (until := random.expovariate(1 / mtbf)) < times.restart:
            spent["restart"] += until
            spent["detection"] += times.detection
        spent["restart"] += times.restart
        left = random.expovariate(1 / mtbf)  # until the next interruption
        begin, computed, stalled, written = 0.0, 0.0, 0.0, [0.0]
        while (end := begin + interval) < left:
            computed += interval
            begin = max(end, written[-1]) + times.stall
            stalled += min(begin, left) - end
            written.append(begin + times.save - times.stall)
        computed += max(0.0, left - begin)
        kept = interval * (sum(time <= left for time in written) - 1)
        spent["useful"] += kept
        spent["repeated"] += computed - kept
        spent["save_stall"] += stalled
    whole = sum(spent.values())
    return {part: seconds / whole for part, seconds in spent.items()}


@pytest.mark.parametrize("case", CASES)
def test_expected_shares_are_those_of_a_simulated_job(case: str) -> None:
    mtbf, interval, times = CASES[case]
    expected = shares(mtbf, times, interval)
    assert tuple(expected) == PARTS
    assert sum(expected.values()) == pytest.approx(1, abs=1e-12)
    # 30,000 interruptions: a share is off by a few thousandths of itself or of the whole.
    found = simulate(mtbf, interval, times, 30_000)
    assert expected == pytest.approx(found, rel=0.01, abs=0.002)


@pytest.mark.parametrize("case", CASES)
def test_no_interval_is_better_than_the_best(case: str) -> None:
    mtbf, _, times = CASES[case]

    def useful(interval: float) -> float:
        return shares(mtbf, times, interval)["useful"]

    best = best_interval(mtbf, times)
    for factor in (0.01, 0.5, 0.9, 0.999, 1.001, 1.1, 2, 100):
        other = factor * best if best else factor  # nothing lost: any time is longer than the best
        assert useful(other) < useful(best)
    for step in (0.3, 7.0, 1000.0):
        of_step = Times(**{**vars(times), "step": step})
        number = best_steps(mtbf, of_step)
        assert number >= 1
        assert useful(number * step) >= max(useful((number + k) * step) for k in (1, 2))
        assert number == 1 or useful(number * step) >= useful((number - 1) * step)


def test_saves_that_take_longer_than_the_mean_time_between_interruptions_wait_for_it() -> None:
    times = Times(detection=0, restart=0, stall=1, save=500, step=None)
    assert best_interval(100, times) == pytest.approx(100)


def test_without_detection_and_asynchronous_saves_the_share_is_that_of_daly() -> None:
    mtbf, interval, stall, restart = 1000.0, 120.0, 30.0, 45.0
    of_work = mtbf * exp(restart / mtbf) * (exp((interval + stall) / mtbf) - 1) / interval
    times = Times(detection=0, restart=restart, stall=stall, save=stall, step=None)
    assert shares(mtbf, times, interval)["useful"] == pytest.approx(1 / of_work, rel=1e-12)


def test_young_and_daly_are_limits_for_short_saves() -> None:
    off = []
    for stall in (1.0, 0.01, 0.0001):
        times = Times(detection=9, restart=99, stall=stall, save=stall, step=None)
        best = best_interval(10_000, times)
        off.append((abs(young(10_000, stall) / best - 1), abs(daly(10_000, stall) / best - 1)))
    assert all(after[0] < before[0] / 9 for before, after in pairwise(off))  # as the root of C
    assert off[0][0] < 0.01
    assert all(of_daly < of_young / 100 for of_young, of_daly in off)
    assert daly(10, 20) == 10


def test_published_rates_are_those_that_their_sources_print() -> None:
    llama, rsc = read_rates("published", None)
    assert llama.at(16_384) / 3600 == pytest.approx(3.1, abs=0.05)
    assert rsc.at(16_384) / 3600 == pytest.approx(1.8, abs=0.05)
    assert rsc.at(131_072) / 3600 == pytest.approx(0.23, abs=0.01)
    assert llama.at(32) == 2 * llama.at(64)


def study(tmp_path: Path, words: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert plan.main([*words.split(), "--json", str(file)], {}) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def run_of(folder: Path, *, start_seconds: bool = True) -> Path:
    """A run of 4 steps that resumed from step 2, where it was slower to start and to save."""
    saved = {"checkpoint": "c", "save_seconds": 6.0}
    starts = [
        {"imports": 1.0, "data and model": 2.0},
        {"imports": 4.0, "load": 16.0, "evaluation": 7.0},
    ]
    first, second = ([{"start_seconds": each}] if start_seconds else [] for each in starts)
    lines = [
        pages.START,
        *({"step": 1, **each} for each in first),
        pages.step(1, step_seconds=3.0),
        pages.step(2, step_seconds=0.5),
        {"step": 2, **saved, "stall_seconds": 1.0},
        {"step": 3, "stall_seconds": 99.0, "save_seconds": 99.0, "rewound": True},
        {**pages.START, "step": 2},
        *({"step": 3, **each} for each in second),
        pages.step(3, step_seconds=0.25),
        pages.step(4, step_seconds=0.5),
        {"step": 4, **saved, "stall_seconds": 2.0},
    ]
    return pages.write(folder, lines)


def test_a_run_gives_the_medians_of_its_times(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    picture = tmp_path / "found.png"
    words = "--mtbf 2 --gpus 48 --detection-seconds 30"
    found = study(tmp_path, f"{words} --run {run} --picture {picture}")
    times = {"detection": 30, "restart": 20, "stall": 1.5, "save": 6, "step": 0.5}
    assert found["times_seconds"] == times
    assert picture.read_bytes().startswith(b"\x89PNG")
    (rate,) = found["rates"]
    rows = {row["gpus"]: row for row in rate["rows"]}
    assert set(rows) == {*SCALES, 48}
    assert rows[48]["mtbf_seconds"] == 7200
    assert rows[16]["mtbf_seconds"] == 3 * 7200
    row = rows[48]
    assert row["best_interval_seconds"] == best_interval(7200, Times(**times))
    interval = 0.5 * row["save_interval_steps"]
    assert interval == pytest.approx(row["best_interval_seconds"], abs=0.5)
    assert row["shares"] == shares(7200, Times(**times), interval)
    # A file of settings may have the flags, too, as for every program.
    file = tmp_path / "times.toml"
    file.write_text("".join(f"{name}_seconds = {value}\n" for name, value in times.items()))
    assert study(tmp_path, f"--mtbf 2 --gpus 48 --preset {file}")["rates"] == found["rates"]
    # A synchronous save holds training until older checkpoints are removed, after it is on disk.
    other = study(tmp_path, f"{words} --run {run} --stall-seconds 7")
    assert other["times_seconds"] == {**times, "stall": 7, "save": 7}
    # Flags win over the record; the record itself may be named, too.
    other = study(
        tmp_path, f"{words} --run {run}/metrics.jsonl --stall-seconds 5 --restart-seconds 7"
    )
    assert other["times_seconds"] == {**times, "stall": 5, "restart": 7}


def test_a_run_under_faults_gives_the_mean_of_its_detection(tmp_path: Path) -> None:
    """Over the faults that ended it and that it noticed: others have no cause."""
    run_of(tmp_path / "run")
    faults = [(2.0, True, "lost"), (None, False, None), (7.0, True, "lost"), (90.0, True, None)]
    keys = ("detection_seconds", "ended", "cause")
    rows = [dict(zip(keys, each, strict=True)) for each in faults]
    (tmp_path / "report.json").write_text(json.dumps({"faults": rows}))
    times = study(tmp_path, f"--mtbf 2 --run {tmp_path}")["times_seconds"]
    assert times == {"detection": 4.5, "restart": 20, "stall": 1.5, "save": 6, "step": 0.5}
    other = study(tmp_path, f"--mtbf 2 --run {tmp_path} --detection-seconds 9")
    assert other["times_seconds"] == {**times, "detection": 9}


def test_a_file_of_rates_and_a_job_of_unknown_size(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[ours]\ninterruptions = 4\nhours = 10\ngpus = 8\nsource = "the log"\n')
    own, hours = (
        study(tmp_path, f"--mtbf {rate} {STATED}")["rates"][0]["rows"] for rate in (file, 2.5)
    )
    assert {row["gpus"]: row["mtbf_seconds"] for row in own}[16] == 4500
    (row,) = hours
    assert (row["gpus"], row["mtbf_seconds"], row["save_interval_steps"]) == (None, 9000, None)
    wrong = [file.read_text().replace("= 10", f"= {hours}") for hours in ("0", "inf")]
    for text in ("", "[ours]\n", *wrong):
        file.write_text(text)
        assert refused(partial(plan.main, environ={}), f"--mtbf {file} {STATED}") == "--mtbf"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (f"--mtbf 0 {STATED}", "--mtbf"),
        (f"--mtbf nan {STATED}", "--mtbf"),
        (f"--mtbf 1e306 {STATED}", "--mtbf"),
        (f"--mtbf 1e-320 {STATED}", "--mtbf"),
        (f"--mtbf meta {STATED}", "--mtbf"),
        (f"--mtbf none.toml {STATED}", "--mtbf"),
        (f"--mtbf scripts/hardware/cpu.toml {STATED}", "--mtbf"),
        (f"--mtbf 3 --gpus 0 {STATED}", "--gpus"),
        (f"--mtbf 3 {STATED} --save-seconds 4", "--save-seconds"),
        (f"--mtbf 3 {STATED} --step-seconds 0", "--step-seconds"),
        (f"--mtbf 3 {STATED} --restart-seconds -1", "--restart-seconds"),
        (f"--mtbf 3 {STATED} --run none", "--run"),
        (f"--mtbf 3 {STATED} --hardware h200", "--hardware"),
        ("--mtbf 3 --detection-seconds 60 --restart-seconds 300", "--stall-seconds"),
        ("--mtbf 3 --restart-seconds 300 --stall-seconds 5", "--detection-seconds"),
    ],
)
def test_what_has_no_answer_is_refused(words: str, flag: str) -> None:
    assert refused(partial(plan.main, environ={}), words) == flag


def test_a_run_without_times_of_starts_needs_the_flag(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", start_seconds=False)
    words = f"--mtbf 3 --run {run} --detection-seconds 60"
    assert refused(partial(plan.main, environ={}), words) == "--restart-seconds"
    assert study(tmp_path, f"{words} --restart-seconds 9")["times_seconds"]["restart"] == 9
