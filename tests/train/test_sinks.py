"""The sinks with the real libraries: no network, no account, and what they wrote read back."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.training import LoggingConfig
from megatron.errors import UsageError
from megatron.train.metrics import TensorBoardSink, open_sinks, run_of
from tests.config.test_checks import settings

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def to_tensorboard(directory: Path, start: int, lines: Sequence[dict[str, Any]]) -> None:
    sink = TensorBoardSink(directory, start)
    for line in lines:
        sink.write(line)
    sink.close(0)


def test_tensorboard_holds_the_numbers_of_a_line_by_key_and_step(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0, "checkpoint": "step_2"}]
    to_tensorboard(tmp_path, 0, [*lines, {"step": 2, "validation_loss": 3.0}])
    assert scalars(tmp_path) == {"loss": [(1, 4.0), (2, 2.0)], "validation_loss": [(2, 3.0)]}


@pytest.mark.parametrize(("start", "kept"), [(2, [(1, 1.0), (2, 1.0)]), (0, [])])
def test_rewound_steps_vanish(tmp_path: Path, start: int, kept: list[tuple[int, float]]) -> None:
    to_tensorboard(tmp_path, 0, [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4)])
    to_tensorboard(tmp_path, start, [{"step": start + 1, "loss": 0.5}])
    assert scalars(tmp_path) == {"loss": [*kept, (start + 1, 0.5)]}


# Each part of a run of wandb is a process, as it is in training.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import megatron.train.metrics
from megatron.config.training import LoggingConfig
from megatron.train.metrics import Metrics, open_sinks

control = SimpleNamespace(gather=lambda value: [value])
mesh = SimpleNamespace(is_first=True, control=control)
path, start, stops = Path(sys.argv[1]), int(sys.argv[2]), []
signal.signal(signal.SIGTERM, lambda *_: stops.append("SIGTERM"))
megatron.train.metrics.INIT_SECONDS = 3  # of a server that does not answer
config, facts = LoggingConfig(wandb_project="tiny"), {"layers": 2}
sinks = open_sinks(config, path, {}, start, facts, mesh, stops.append)
with Metrics(path, mesh, start=start, steps=9, sinks=sinks) as metrics:
    for step in range(start + 1, start + 4):
        metrics.write({"step": step, "loss": 1 / step, "checkpoint": "a"})
    metrics.write({"step": start + 3, "validation_loss": float("nan"), "validation_samples": 8})
    import wandb
    wandb.run.settings.stop_fn()  # as wandb's page does
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops == ["wandb", "SIGTERM"]
    if start: raise ValueError("no more")
"""
KEY = "k" * 40
NO_SERVER = "http://127.0.0.1:9"  # nothing listens there


def train(folder: Path, start: int = 0, **environ: str) -> tuple[int, str]:
    """(exit code, console) of a process with a home of its own and no key."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "save" / "metrics.jsonl"), str(start)],
        env=clean | {"HOME": str(home), "NETRC": str(home / ".netrc")} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process.returncode, process.stdout


def of_wandb(folder: Path) -> list[dict[str, list[dict[str, Any]]]]:
    """Of each run, by type, the records that wandb's own reader finds."""
    found = []
    for run in sorted((folder / "save" / "wandb").glob("offline-run-*")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
        environ = os.environ | {"HOME": str(run), "WANDB_CACHE_DIR": str(run)}
        text = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout
        records = [json.loads(line) for line in text.splitlines()]
        kinds = {each["type"] for each in records}
        found.append({k: [each[k] for each in records if each["type"] == k] for k in kinds})
    return found


def history(run: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines, without wandb's own keys."""
    rows = (each["item"] for each in run["history"])
    return [{key: row[key] for key in row if not key.startswith("_")} for row in rows]


def lines_of(*steps: int) -> list[dict[str, Any]]:
    """What wandb should have of the program's lines: not what is not finite."""
    training = [{"step": step, "loss": 1 / step, "checkpoint": "a"} for step in steps]
    return [*training, {"step": steps[-1], "validation_samples": 8}]


def test_wandb_keeps_a_run_and_its_resume_on_disk_without_network(tmp_path: Path) -> None:
    code, said = train(tmp_path)
    assert (code, list((tmp_path / "home").iterdir())) == (0, []), said
    names = {each.name for each in (tmp_path / "save").iterdir()}
    assert names == {"metrics.jsonl", "wandb", "wandb.json"}
    code, said = train(tmp_path, start=2)  # a later process continues the same run, and fails
    assert (code, said.count("ValueError: no more")) == (1, 1)
    first, second = runs = of_wandb(tmp_path)
    ids = [(run["run"][0]["run_id"], run["run"][0]["resume"]) for run in runs]
    kept = json.loads((tmp_path / "save" / "wandb.json").read_text())["id"]
    assert ids == [(kept, True)] * 2
    assert history(first) == lines_of(1, 2, 3)
    assert history(second)[:-1] == lines_of(3, 4, 5)  # step 3 was rewound, and is not dropped
    assert first["run"][0]["config"]["update"]["layers"] == 2
    assert [run["exit"][0]["exit_code"] for run in runs] == [0, 1]
    assert [each.get("step_metric") for each in first["metric"]] == [None, "step"]


@pytest.mark.parametrize(
    ("environ", "netrc"),
    [
        ({"WANDB_API_KEY": KEY}, ""),
        ({"WANDB_MODE": "online"}, ""),
        ({}, f"machine 127.0.0.1:9 login user password {KEY}"),
    ],
)
def test_wandb_out_of_reach_keeps_the_run_on_disk(
    tmp_path: Path, environ: dict[str, str], netrc: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(netrc)
    (tmp_path / "home" / ".netrc").chmod(0o600)
    code, said = train(tmp_path, WANDB_BASE_URL=NO_SERVER, **environ)
    assert (code, KEY in said) == (0, False), said
    assert {each.name for each in (tmp_path / "home").iterdir()} == {".netrc"}
    assert history(of_wandb(tmp_path)[0]) == lines_of(1, 2, 3)


def test_a_run_keeps_its_id_until_it_starts_from_scratch_or_changes_project(tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    first = run_of(path, "a", 0)
    assert run_of(path, "a", 5) == first
    scratch, other = run_of(path, "a", 0), run_of(path, "b", 5)
    assert len({first, scratch, other}) == 3
    assert run_of(path, "b", 6) == other


@pytest.mark.parametrize(("place", "is_first"), [("file", True), ("events", False)])
def test_a_sink_that_cannot_open_is_left_out(tmp_path: Path, place: str, is_first: bool) -> None:
    (tmp_path / "file").touch()
    logging, mesh = LoggingConfig(tensorboard_dir=f"{tmp_path}/{place}"), SimpleNamespace()
    mesh.is_first = is_first
    assert open_sinks(logging, None, {}, 0, {}, mesh, print) == []
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("stray_folder", [False, True])
@pytest.mark.parametrize("flag", ["--wandb-project", "--tensorboard-dir"])
def test_a_missing_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, stray_folder: bool
) -> None:
    library, field = flag[2:].partition("-")[0], flag[2:].replace("-", "_")
    if stray_folder:  # such as wandb's own, in the folder of an earlier run
        (tmp_path / library).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(UsageError) as refused:
        settings(**{field: "x"}, metrics_file="m.jsonl").check(1)
    assert refused.value.flag == flag


def test_wandb_asks_for_a_folder() -> None:
    with pytest.raises(UsageError) as refused:
        settings(wandb_project="a").check(1)
    assert refused.value.works == ("--wandb-project", "a", "--save", "checkpoints")
    settings(wandb_project="a", metrics_file="m.jsonl").check(1)
