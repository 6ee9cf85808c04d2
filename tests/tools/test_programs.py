"""Rules that all programs of tools/ follow."""

import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT

PROGRAMS = [*sorted(ROOT.glob("tools/*.py")), ROOT / "tasks" / "main.py"]
PROGRAMS += [ROOT / "benchmarks" / "models.py", ROOT / "tools" / "experiments" / "passages.py"]
WORDS = {"corpus": ["clean"], "main": ["--task", "LAMBADA"], "plan": ["--preset", "quickstart"]}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C comes while a program reads its flags."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("cli", "extras.subcommand_cli_from_dict"):
        monkeypatch.setattr(f"tyro.{name}", interrupt)
    monkeypatch.setattr("sys.path", [*sys.path])
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_ctrl_c_is_one_line(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = program.stem
    if name in ("__init__", "start", "dashboard"):  # Ctrl-C is how the dashboard is ended
        return
    monkeypatch.setattr("sys.argv", [str(program), *WORDS.get(name, [])])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        runpy.run_path(str(program), run_name="__main__")
    assert isinstance(stop.value, SystemExit)
    assert (stop.value.code, capsys.readouterr().err.count("\n")) == (130, 1)
