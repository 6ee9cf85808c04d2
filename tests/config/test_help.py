"""-h and --help-all of every program, and the reader of the output that goes away."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tools.corpus.__main__ import MODULES

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools", "tasks", "benchmarks")
PROGRAMS = sorted(
    str(file.relative_to(ROOT))
    for file in (
        *ROOT.glob("*.py"),
        *(ROOT / "tasks").glob("*.py"),
        *(ROOT / "tools").rglob("*.py"),
        ROOT / "benchmarks" / "context.py",  # as all of them are started
    )
    if 'if __name__ == "__main__":' in file.read_text() and file.name != "conftest.py"
)


def module_of(program: str) -> str:
    return program.removesuffix(".py").replace("/", ".").removesuffix(".__main__")


def start(program: str, *arguments: str, folder: Path, stdout: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / program), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_printed_without_a_word_beside_it(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """As its user starts it in any folder: the programs of a folder of tools/ as modules. It finds
    the project's folders by itself."""
    file = ROOT / program
    is_module = Path(program).parent.name not in ("", *FOLDERS)
    for name in [each for each in sys.modules if each.partition(".")[0] in FOLDERS]:
        monkeypatch.delitem(sys.modules, name)
    others = [each for each in sys.path if Path(each).resolve() not in (ROOT, Path.cwd())]
    monkeypatch.setattr(sys, "path", [str(ROOT if is_module else file.parent), *others])
    monkeypatch.setattr(sys, "argv", [str(file), "-h"])
    monkeypatch.chdir(tmp_path)
    code: object = None
    try:
        if is_module:
            runpy.run_module(module_of(program), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    for each in [each for each in sys.modules if each.partition(".")[0] in FOLDERS]:
        del sys.modules[each]  # those from before come back
    output, errors = capfd.readouterr()
    assert (code or 0, errors, recwarn.list) == (0, "", [])
    assert 5 < len(output.splitlines()) < 80
    commands = re.findall(r"^ *(?:python|torchrun|bash) .+(?:\\\n.+)*", output, re.MULTILINE)
    assert len({" ".join(x.split()) for x in commands}) >= 2


def test_every_step_of_a_corpus_is_a_program() -> None:
    """Python ends a module that starts nothing without a word."""
    steps = {name.removesuffix(".step") for name in MODULES.values()}
    assert steps <= {*map(module_of, PROGRAMS)}


def test_short_help_has_every_flag_and_help_all_explains_each(tmp_path: Path) -> None:
    shown = []
    for flag in ("-h", "--help-all"):
        with start("pretrain_gpt2.py", flag, folder=tmp_path, stdout=subprocess.PIPE) as running:
            shown.append(running.communicate()[0])
    short, whole = shown
    names = set(re.findall(r"^  (--[a-z][\w-]*)", whole, re.MULTILINE))
    assert len(names) > 100
    assert {name for name in names if name[:5] != "--no-"} <= set(re.findall(r"--[\w-]+", short))
    assert "--no-" not in short
    assert len(whole.splitlines()) > 3 * len(names) > 3 * len(short.splitlines())


@pytest.mark.parametrize("flag", ["-h", "--help-all"])
def test_help_of_a_subcommand_in_plain_letters(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for words in (["tools/checkpoint.py", flag], ["tools/checkpoint.py", "ls", flag]):
        with start(*words, folder=tmp_path, stdout=subprocess.PIPE) as running:
            output, errors = running.communicate()
        assert (running.returncode, errors) == (0, "")
        assert "Examples:" in output
        assert max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize("words", ["pretrain_gpt2.py", "tasks/main.py --task SQUAD"])
def test_a_reader_that_went_away_is_no_error(words: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(*words.split(), "--help", folder=tmp_path, stdout=writing) as running:
        os.close(writing)
        _, errors = running.communicate()
    assert (running.returncode, errors) == (141, "")


def test_without_the_environment_a_line_says_what_makes_it() -> None:
    outside = [sys.executable, "-S", "pretrain_gpt2.py", "--help"]  # -S: no site-packages
    run = subprocess.run(outside, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert len(run.stderr.splitlines()) == 1
    assert "scripts/setup.sh" in run.stderr
