"""tools/generate.py --interactive: at a terminal, from a pipe or a file, in several processes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.tools.convert.models import write_model
from tests.tools.texts import POSITIONS, TEXTS, generated
from tools.convert_hf import import_model
from tools.generate import main

ROOT = Path(__file__).parents[2]
Terminal: TypeAlias = tuple[int, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    import_model(str(write_model(folder / "model", n_positions=POSITIONS)), folder / "checkpoint")
    return folder / "checkpoint"


def test_typed_lines_are_continued_to_an_empty_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    lines = [TEXTS[0].encode(), b"the " * POSITIONS, b"\xff", TEXTS[1].encode(), b"", b"never"]
    typed, output = tmp_path / "typed", tmp_path / "texts.json"
    typed.write_bytes(b"\n".join(lines))
    with typed.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        words = ["--load", str(trained), "--max-new-tokens", "8", "--interactive"]
        main([*words, "--output", str(output)], {})
    records = json.loads(output.read_text(encoding="utf-8"))
    printed = capsys.readouterr()
    assert printed.out == "".join(record["text"] + "\n" for record in records)
    errors = printed.err.splitlines()
    assert [re.findall(r"line \d", each) for each in errors] == [["line 2"], ["line 3"]]
    words = ["--prompt", *TEXTS[:2], "--max-new-tokens", "8"]
    assert records == generated(capsys, trained, *words)


@pytest.fixture
def terminal(trained: Path) -> Iterator[Terminal]:
    """(what is typed, the program), on a terminal that stays open."""
    typed, seen = pty.openpty()
    command = [sys.executable, "tools/generate.py", "--load", str(trained), "--interactive"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--max-new-tokens", "8", "--greedy"],
        cwd=ROOT, env=environ, text=True, stdin=seen, stderr=seen, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        os.close(seen)
        yield typed, process
        process.kill()
    os.close(typed)


def read_until(typed: int, end: str) -> None:
    """Wait for these words on the screen."""
    seen = ""
    while not seen.endswith(end):
        seen += os.read(typed, 1).decode()


def rest(typed: int) -> str:
    """What is on the screen until the program has ended, which is told by an OSError."""
    seen = b""
    with suppress(OSError):
        while True:
            seen += os.read(typed, 1000)
    return seen.decode()


def test_a_blank_line_at_a_terminal_ends_in_silence(
    terminal: Terminal, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, process = terminal
    for line in (b"in\n", b"\n"):
        read_until(typed, "> ")
        os.write(typed, line)
    assert not rest(typed).strip()
    assert process.wait() == 0
    words = ["--prompt", "in", "--max-new-tokens", "8", "--greedy"]
    assert process.communicate()[0] == generated(capsys, trained, *words)[0]["text"] + "\n"


def test_ctrl_c_at_a_terminal_ends_without_a_traceback(terminal: Terminal) -> None:
    typed, process = terminal
    read_until(typed, "> ")
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in rest(typed)
    assert process.wait() == 130


def test_a_pipe_that_stays_open_does_not_keep_the_program(trained: Path) -> None:
    command = [sys.executable, "tools/generate.py", "--load", str(trained), "--interactive"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--max-new-tokens", "8"], cwd=ROOT, **pipes) as process:
        assert process.stdin is not None
        process.stdin.write(b"in\n\n")
        process.stdin.flush()
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_several_processes_type_and_continue_together(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load", str(trained), "--max-new-tokens", "8", "--greedy"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("tools/generate.py", *words, "--interactive", "--tensor-model-parallel-size", "2"),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    typed = "\n".join([*TEXTS[:2], ""])
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, input=typed
    )
    assert ended.returncode == 0, ended.stderr
    expected = generated(
        capsys, trained, "--prompt", *TEXTS[:2], "--max-new-tokens", "8", "--greedy"
    )
    assert ended.stdout == "".join(record["text"] + "\n" for record in expected)
