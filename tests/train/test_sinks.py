"""The sinks with the real libraries: no network, no account, and what they wrote read back."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.checks import UsageError
from megatron.config.pretrain import require_sinks
from megatron.config.training import LoggingConfig
from megatron.train.metrics import read_metrics
from megatron.train.sinks import TensorBoardSink, open_sinks, run_of
from tests.dist import PATIENCE

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")


# TensorBoard.


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


def test_an_event_file_holds_the_numbers_of_a_line_by_key_and_step(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0, "checkpoint": "step_2"}]
    to_tensorboard(tmp_path, 0, [*lines, {"step": 2, "validation_loss": 3.0}])
    assert scalars(tmp_path) == {"loss": [(1, 4.0), (2, 2.0)], "validation_loss": [(2, 3.0)]}


@pytest.mark.parametrize(("start", "kept"), [(2, [(1, 1.0), (2, 1.0)]), (0, [])])
def test_rewound_steps_vanish_from_the_event_files(
    tmp_path: Path, start: int, kept: list[tuple[int, float]]
) -> None:
    to_tensorboard(tmp_path, 0, [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4)])
    to_tensorboard(tmp_path, start, [{"step": start + 1, "loss": 0.5}])
    assert scalars(tmp_path) == {"loss": [*kept, (start + 1, 0.5)]}


# Weights & Biases: each part of a run is a process, as it is in training.

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import megatron.train.sinks
from megatron.config.training import LoggingConfig
from megatron.train.metrics import Metrics
from megatron.train.sinks import open_sinks

control = SimpleNamespace(gather=lambda value: [value])
mesh = SimpleNamespace(is_first=True, control=control)
path, start = Path(sys.argv[1]), int(sys.argv[2])
received, hooks = [], (sys.exit, sys.excepthook)
signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
if "WANDB_BASE_URL" in os.environ:  # of a server that does not answer
    megatron.train.sinks.INIT_SECONDS = 3
config, facts = LoggingConfig(wandb_project="tiny"), {"layers": 2}
sinks = open_sinks(config, path, os.environ, start, facts, mesh, received.append)
assert hooks == (sys.exit, sys.excepthook)
assert "torch" not in sys.modules
with Metrics(path, mesh, start=start, steps=9, sinks=sinks) as metrics:
    for step in range(start + 1, start + 4):
        metrics.write({"step": step, "loss": 1 / step, "checkpoint": "a"})
    metrics.write({"step": start + 3, "validation_loss": float("nan"), "validation_samples": 8})
    {ending}
print(*received)
"""
KILL_THE_SERVICE = """
    import psutil
    [service] = psutil.Process().children()
    service.kill()
    service.wait()
    step = start + 4
    while metrics.sinks and step < 20_000:  # the first writes may still find room in a buffer
        metrics.write({"step": step})
        step += 1
        time.sleep(0.1)
    metrics.write({"step": step})
"""
KEY = "k" * 40
FIRST = SimpleNamespace(is_first=True)
NO_SERVER = "http://127.0.0.1:9"  # nothing listens there


def train(folder: Path, start: int = 0, ending: str = "", **environ: str) -> tuple[int, str]:
    """(exit code, console) of a process with a home of its own and no key."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    program = PROGRAM.replace("{ending}", ending or "pass")
    process = subprocess.run(
        [sys.executable, "-c", program, str(folder / "save" / "metrics.jsonl"), str(start)],
        env=clean | {"HOME": str(home), "NETRC": str(home / ".netrc")} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    return process.returncode, process.stdout


def records(run: Path) -> list[dict[str, Any]]:
    """What wandb's own reader finds in the folder of a run."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    environ = os.environ | {"HOME": str(run), "WANDB_CACHE_DIR": str(run)}
    text = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout
    return [json.loads(line) for line in text.splitlines()]


def of_type(run: Path, kind: str) -> list[dict[str, Any]]:
    return [each[kind] for each in records(run) if each["type"] == kind]


def history(run: Path) -> list[dict[str, Any]]:
    """The lines, without wandb's own keys."""
    rows = (each["item"] for each in of_type(run, "history"))
    return [{key: row[key] for key in row if not key.startswith("_")} for row in rows]


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "save" / "wandb").glob("offline-run-*"))


def lines_of(*steps: int) -> list[dict[str, Any]]:
    """What wandb should have of the program's lines: not what is not finite."""
    training = [{"step": step, "loss": 1 / step, "checkpoint": "a"} for step in steps]
    return [*training, {"step": steps[-1], "validation_samples": 8}]


def test_wandb_keeps_a_run_and_its_resume_on_disk_without_network(
    tmp_path: Path,
) -> None:
    code, said = train(tmp_path)
    [run] = offline_runs(tmp_path)
    assert code == 0
    assert history(run) == lines_of(1, 2, 3)
    assert of_type(run, "run")[0]["config"]["update"]["layers"] == 2
    assert [each["exit_code"] for each in of_type(run, "exit")] == [0]
    assert {"name": "step", "options": {"defined": True}} in of_type(run, "metric")
    assert [each.get("step_metric") for each in of_type(run, "metric")] == [None, "step"]
    assert "wandb:" not in said  # how its own words begin
    assert f"wandb sync {run.parent}/offline-run-*" in said
    assert list((tmp_path / "home").iterdir()) == []
    names = {each.name for each in (tmp_path / "save").iterdir()}
    assert names == {"metrics.jsonl", "wandb", "wandb.json"}

    train(tmp_path, start=2)  # a later process continues the same run
    runs = offline_runs(tmp_path)
    kept = json.loads((tmp_path / "save" / "wandb.json").read_text())["id"]
    heads = [of_type(each, "run")[0] for each in runs]
    assert [(head["run_id"], head["resume"]) for head in heads] == [(kept, True)] * 2
    assert history(runs[1]) == lines_of(3, 4, 5)  # step 3 was rewound, and is not dropped


def test_an_exception_reaches_wandb_and_the_console_once(tmp_path: Path) -> None:
    code, said = train(tmp_path, ending="raise ValueError('no more')")
    assert code == 1
    assert [each["exit_code"] for each in of_type(offline_runs(tmp_path)[0], "exit")] == [1]
    assert said.count("ValueError: no more") == 1


def test_the_stop_button_of_wandb_asks_and_a_signal_is_ours(tmp_path: Path) -> None:
    ending = "sinks[0]._run.settings.stop_fn(); os.kill(os.getpid(), signal.SIGTERM)"
    code, said = train(tmp_path, ending=ending)
    assert code == 0
    assert said.splitlines()[-1] == "wandb SIGTERM"


def test_a_run_outlives_the_service_process_of_wandb(tmp_path: Path) -> None:
    code, said = train(tmp_path, ending=KILL_THE_SERVICE)
    assert code == 0
    assert said.count("wandb did not get all of this run: ConnectionResetError") == 1, said
    steps = [line["step"] for line in read_metrics(tmp_path / "save" / "metrics.jsonl")]
    assert steps == [1, 2, 3, *range(3, steps[-1] + 1)]
    assert steps[-1] >= 5


@pytest.mark.parametrize(
    ("environ", "netrc", "reason"),
    [
        ({"WANDB_API_KEY": KEY}, "", "because of CommError"),
        ({"WANDB_API_KEY": "short"}, "", "because of AuthenticationError"),
        ({"WANDB_MODE": "online"}, "", "because of UsageError"),
        ({}, f"machine 127.0.0.1:9 login user password {KEY}", "because of CommError"),
        ({}, f"machine elsewhere login user password {KEY}", "; "),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "", "; "),
    ],
)
def test_wandb_out_of_reach_is_said_and_the_run_kept_on_disk(
    tmp_path: Path, environ: dict[str, str], netrc: str, reason: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(netrc)
    (tmp_path / "home" / ".netrc").chmod(0o600)
    code, said = train(tmp_path, WANDB_BASE_URL=NO_SERVER, **environ)
    assert code == 0
    assert re.search(f"kept on disk ?{reason}", said), said
    assert "wandb:" not in said
    assert KEY not in said
    assert {each.name for each in (tmp_path / "home").iterdir()} == {".netrc"}
    assert history(offline_runs(tmp_path)[0]) == lines_of(1, 2, 3)


def test_a_run_keeps_its_id_until_it_starts_from_scratch_or_changes_project(tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    first = run_of(path, "a", 0)
    assert run_of(path, "a", 5) == first
    scratch = run_of(path, "a", 0)
    other = run_of(path, "b", 5)
    assert len({first, scratch, other}) == 3
    assert run_of(path, "b", 6) == other


# Both.


def test_a_sink_that_cannot_open_is_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    logging = LoggingConfig(tensorboard_dir=str(tmp_path / "file"))
    assert open_sinks(logging, None, {}, 0, {}, FIRST, print) == []
    [text] = capsys.readouterr().out.splitlines()
    assert text.startswith("TensorBoard gets nothing of this run: ")


def test_other_ranks_open_no_sink(tmp_path: Path) -> None:
    logging = LoggingConfig(tensorboard_dir=str(tmp_path / "events"))
    assert open_sinks(logging, None, {}, 0, {}, SimpleNamespace(is_first=False), print) == []
    assert not (tmp_path / "events").exists()


def test_a_run_without_sinks_imports_neither_library(tmp_path: Path) -> None:
    program = (
        "import sys; from types import SimpleNamespace;"
        "from megatron.config.training import LoggingConfig;"
        "from megatron.train.sinks import open_sinks;"
        "from megatron.config.pretrain import require_sinks;"
        "require_sinks(LoggingConfig(wandb_project='a', tensorboard_dir='b'), 'm.jsonl');"
        "mesh = SimpleNamespace(is_first=True);"
        "assert open_sinks(LoggingConfig(), None, {}, 0, {}, mesh, print) == [];"
        "assert not {'wandb', 'tensorboard', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("field", "library"), [("wandb_project", "wandb"), ("tensorboard_dir", "tensorboard")]
)
@pytest.mark.parametrize("stray_folder", [False, True])
def test_a_missing_library_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, library: str, stray_folder: bool
) -> None:
    if stray_folder:  # such as wandb's own, in the folder of an earlier run
        (tmp_path / library).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(UsageError) as refused:
        require_sinks(LoggingConfig(**{field: "x"}), "m.jsonl")
    assert refused.value.flag == f"--{field.replace('_', '-')}"


def test_wandb_asks_for_a_folder() -> None:
    with pytest.raises(UsageError) as refused:
        require_sinks(LoggingConfig(wandb_project="a"), None)
    assert refused.value.works == ("--wandb-project", "a", "--save", "checkpoints")
    require_sinks(LoggingConfig(wandb_project="a"), "m.jsonl")
