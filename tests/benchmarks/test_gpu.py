"""The one command for a GPU: its time, what is wanted, and runs of it in miniature on a CPU."""

import json
import os
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import COORDINATES, DROPOUT, FULL, LONG, OURS, RUNS, WANTED, Place, Wanted


def test_what_takes_too_long_is_ended_whole() -> None:
    status, printed = gpu.done(["bash", "-c", "sleep 600 & echo $!; sleep 600"], 5.0)
    assert status is None
    state = Path(f"/proc/{printed.strip()}/stat")
    deadline = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "a process of the run is still there"
        os.sched_yield()


def test_every_group_and_all_short_ones_have_the_time_that_they_need() -> None:
    seconds = Counter[str]()
    for run in RUNS:
        seconds[run.group] += run.seconds
    assert sum(each for group, each in seconds.items() if group not in LONG) < 560
    assert all(0 < each < 560 for each in seconds.values())
    assert {wanted.run for wanted in WANTED} <= {run.name for run in RUNS}


def test_what_is_wanted_is_read_from_the_records(tmp_path: Path) -> None:
    place = Place(tmp_path, "cuda", False, 80.0)
    facts = {"useful": 5e14, "executed": 6e14, "peak": 1e15}
    seconds = {OURS: 1.0, FULL: 1.3, COORDINATES: 1.15, DROPOUT: 1.0}
    found = [{"name": name, "facts": facts, "rounds": [{"wall": [each, each]}]}
             for name, each in seconds.items()]  # fmt: skip
    for run in ("1.2B", "124M, dropout"):
        place.file(run, "json").write_text(json.dumps([{"contenders": found}]))
    rows = {
        ("1.2B", OURS, "MFU", "at least", 0.55): ["0.50", "no"],
        ("1.2B", FULL, "HFU", "at least", 0.4): ["0.46", "yes"],
        ("1.2B", FULL, OURS, "at most", 1.33): ["1.30", "yes"],
        ("124M, dropout", COORDINATES, DROPOUT, "at most", 1.1): ["1.15", "no"],
        ("1.2B", "transformers", OURS, "at least", 1.3): ["not measured", ""],
        ("355M", OURS, "MFU", "at least", 0.45): ["not measured", ""],
    }
    for wanted, expected in rows.items():
        assert Wanted(*wanted).row(place)[2:] == expected


def test_groups_run_in_miniature_and_what_others_left_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [
        run._replace(seconds=3600.0) for run in RUNS if run.group in ("hardware", "host", "loss")
    ]
    last = RUNS[-1]._replace(seconds=3600.0)
    wrong = RUNS[0]._replace(name="wrong", group="matrix", seconds=3600.0, command="-c 1/0")
    late = last._replace(name="late", group="sizes", seconds=1.0)
    monkeypatch.setattr(gpu, "RUNS", (*short, wrong, last, late))
    with pytest.raises(SystemExit, match="wrong"):
        gpu.main(output=tmp_path, device="cpu", small=True, seconds=7200.0)
    with pytest.raises(SystemExit, match="late"):
        gpu.main(("sizes",), output=tmp_path, device="cpu", small=True, seconds=3600.0)
    page = (tmp_path / "gpu.md").read_text()
    for words in ("Left out: there was no time left", "ZeroDivisionError", "| a step of ", "HFU"):
        assert words in page
    stubbed = json.loads((tmp_path / "8.3B_one_rank_of_8.json").read_text())[0]
    assert [each["name"] for each in stubbed["contenders"] if each["rounds"]] == [FULL, OURS]
    assert tomllib.loads((tmp_path / "hardware.toml").read_text())["peak"]["bf16"]["value"] > 0


@pytest.mark.sweep
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    groups = tuple(dict.fromkeys(run.group for run in RUNS))
    gpu.main(groups, output=tmp_path, device="cpu", small=True, seconds=3600.0)
