"""The tool that looks at checkpoints: what it prints, and its status."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config.parse import parse_call
from tests.checkpoint.files import FILES, make_checkpoint
from tests.refusals import field_of, refusal
from tools.checkpoint import ls, show, verify

Capture = pytest.CaptureFixture[str]

COMMANDS = {"ls": ls, "verify": verify, "show": show}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 10 to 40: one abandoned, one with a flipped byte, one without a file, one whole."""
    make_checkpoint(tmp_path, 10).rename(tmp_path / "step_00000010.abandoned")
    for step in (20, 30, 40):
        make_checkpoint(tmp_path, step, validation_loss=step / 16)
    (tmp_path / "step_00000020" / "shard_00000.safetensors").write_bytes(b"first hald")
    (tmp_path / "step_00000030" / "shard_00001.safetensors").unlink()
    (tmp_path / ".step_00000050.partial").mkdir()
    (tmp_path / ".step_00000060.partial").touch()  # no folder, so it is not listed
    (tmp_path / "latest").write_text("step_00000040\n")
    return tmp_path


def call(words: Sequence[object]) -> int | None:
    return parse_call(COMMANDS, [*map(str, words)], {})()


def printed(capsys: Capture, *words: object, status: int | None = None) -> str:
    capsys.readouterr()
    assert call(words) == status
    return capsys.readouterr().out


def test_ls(directory: Path, capsys: Capture) -> None:
    rows = {
        row["checkpoint"]: row for row in json.loads(printed(capsys, "ls", directory, "--json"))
    }
    whole = [f"step_000000{step}" for step in (40, 30, 20)]
    others = {".step_00000050.partial": "partial", "step_00000010.abandoned": "abandoned"}
    assert list(rows) == [*whole, *others]
    best = rows["step_00000040"]
    assert (best["step"], best["wrong"], best["latest"]) == (40, None, True)
    assert best["run"] == "0123456789abcdef"
    assert best["layout"] == {"data": 1, "tensor": 2}
    assert best["bytes"] > sum(map(len, FILES.values()))
    assert "shard_00001.safetensors" in rows["step_00000030"]["wrong"]
    assert {name: rows[name]["kind"].split(",")[0] for name in others} == others
    assert rows["step_00000010.abandoned"]["step"] == 10
    (directory / "latest").write_text("step_00000099\n")
    lines = printed(capsys, "ls", directory).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(rows)
    assert "step_00000099" in lines[-1]


def test_verify(directory: Path, capsys: Capture) -> None:
    found = json.loads(printed(capsys, "verify", directory, "--json", status=1))
    assert found["step_00000040"] == []
    assert "shard_00000.safetensors" in "".join(found["step_00000020"])
    assert "shard_00001.safetensors" in "".join(found["step_00000030"])
    for words in (["--step", 40], ["--newest"]):
        text = printed(capsys, "verify", directory, *words, status=0)
        assert text.split()[0] == "step_00000040"
    assert call(["verify", directory, "--step", 20]) == 1
    assert call(["verify", directory / "step_00000040"]) == 0


def test_show(directory: Path, capsys: Capture) -> None:
    text = printed(capsys, "show", directory)
    assert text == printed(capsys, "show", directory / "step_00000040")
    words = [line.split() for line in text.splitlines()]
    assert ["parameters", "8"] in words  # those of the model, without Adam's moments
    assert ["config.model.num_layers", "2"] in words
    shown = json.loads(printed(capsys, "show", directory, "--step", 20, "--json"))
    assert shown["counters"]["step"] == 20
    assert shown["tensors"]["model.weight"]["shape"] == [4, 2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("ls nowhere", "nowhere"),
        ("ls empty", "empty"),
        ("show empty", "empty"),
        ("verify some --step 3", "--step"),
        ("show bad", "bad/step_00000001/manifest.json"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "some", 7)
    (make_checkpoint(tmp_path / "bad", 1) / "manifest.json").write_text("{")
    assert field_of(refusal(lambda: call(words.split()))) == named
    assert call(["verify", "some", "--step", 7]) == 0
