"""The tool that looks at checkpoints: what it prints, and its status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.files import FILES, make_checkpoint

TOOL = Path(__file__).resolve().parents[2] / "tools" / "checkpoint.py"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 10 to 40: one abandoned, one with a flipped byte, one without a file, one whole."""
    make_checkpoint(tmp_path, 10).rename(tmp_path / "step_00000010.abandoned")
    for step in (20, 30, 40):
        make_checkpoint(tmp_path, step, validation_loss=step / 16)
    (tmp_path / "step_00000020" / "shard_00000.safetensors").write_bytes(b"first hald")
    (tmp_path / "step_00000030" / "shard_00001.safetensors").unlink()
    (tmp_path / ".step_00000050.partial").mkdir()
    (tmp_path / "latest").write_text("step_00000040\n")
    return tmp_path


def run(*words: object, status: int = 0) -> str:
    """What the tool prints; on an error its message."""
    command = [sys.executable, str(TOOL), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_ls_tells_of_all_that_is_there(directory: Path) -> None:
    lines = run("ls", directory).splitlines()
    names = ["step_00000040", "step_00000030", "step_00000020"]
    others = [".step_00000050.partial", "step_00000010.abandoned"]
    assert [line.split()[0] for line in lines] == ["checkpoint", *names, *others]
    assert "data 1 x tensor 2" in lines[1]
    assert "2.5000" in lines[1]
    assert lines[1].split()[-9] == "01234567"
    assert " 0123456" not in lines[2]  # it cannot be read
    assert lines[1].endswith("latest  complete")
    assert "shard_00001.safetensors is not there" in lines[2]
    assert "latest" not in lines[3]
    assert lines[4].endswith("partial, of a save that runs or was killed")
    assert lines[5].endswith("abandoned")
    # A line that is cut by columns: all begin where their header does.
    assert {line.find("data 1") for line in (lines[1], lines[3], lines[5])} == {
        lines[0].find("layout")
    }


def test_ls_says_where_latest_points_to_nothing(directory: Path) -> None:
    (directory / "latest").write_text("step_00000099\n")
    last = run("ls", directory).splitlines()[-1]
    assert last == "latest names step_00000099, which is not there"


def test_ls_as_json(directory: Path) -> None:
    rows = {row["checkpoint"]: row for row in json.loads(run("ls", directory, "--json"))}
    best = rows["step_00000040"]
    assert (best["step"], best["wrong"], best["latest"]) == (40, None, True)
    assert best["run"] == "0123456789abcdef"
    assert best["layout"] == {"data": 1, "tensor": 2}
    assert best["bytes"] > sum(map(len, FILES.values()))
    assert rows["step_00000010.abandoned"]["kind"] == "abandoned"
    assert rows["step_00000010.abandoned"]["step"] == 10


def test_verify_reads_every_byte_and_its_status_tells(directory: Path) -> None:
    text = run("verify", directory, status=1)
    assert "step_00000040  whole\n" in text
    assert "step_00000020  damaged\n" in text
    assert f"{directory / 'step_00000020' / 'shard_00000.safetensors'} is damaged" in text
    assert "shard_00001.safetensors is not there" in text
    assert run("verify", directory, "--step", 40) == "step_00000040  whole\n"
    assert run("verify", directory, "--newest") == "step_00000040  whole\n"
    run("verify", directory, "--step", 20, status=1)
    run("verify", directory / "step_00000040")
    found = json.loads(run("verify", directory, "--json", status=1))
    assert [len(lines) for lines in found.values()] == [0, 1, 1]


def test_show_tells_settings_counters_and_tensors(directory: Path) -> None:
    text = run("show", directory)
    assert text == run("show", directory / "step_00000040")
    words = [line.split() for line in text.splitlines()]
    assert ["parameters", "8"] in words  # those of the model, without Adam's moments
    assert ["counters.samples", "160"] in words
    assert ["run", "0123456789abcdef"] in words
    assert ["config.model.num_layers", "2"] in words
    assert ["environment.torch", "2.13.0"] in words
    assert ["exp_avg.weight", "float32", "[4,", "2]", "2"] in words
    shown = json.loads(run("show", directory, "--step", 20, "--json"))
    assert shown["counters"]["step"] == 20
    assert shown["tensors"]["model.weight"]["shape"] == [4, 2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ls", "nowhere"], "nowhere"),
        (["ls", "empty"], "empty"),
        (["show", "empty"], "empty"),
        (["verify", "some", "--step", "3"], "--step 3"),
        (["show", "bad"], "bad/step_00000001/manifest.json"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "some", 7)
    (make_checkpoint(tmp_path / "bad", 1) / "manifest.json").write_text("{")
    error = run(*words, status=2)
    assert error.startswith(f"error: {named}")
    assert error.count("\n") == 1
    run("verify", "some", "--step", 7)


def test_who_reads_the_first_lines_alone_gets_no_error(directory: Path) -> None:
    shown = subprocess.Popen(
        [sys.executable, str(TOOL), "ls", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shown.stdout is not None
    shown.stdout.close()  # before it has printed anything
    _, errors = shown.communicate()
    assert errors == b""


def test_the_tool_starts_without_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({str(TOOL)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
