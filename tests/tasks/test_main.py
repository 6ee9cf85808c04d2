"""The program: its record, tasks of one's own, and the pages about it."""

import json
import os
import re
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron.checkpoint.format import read_manifest
from megatron.config.parse import parse
from tasks.cifar10 import Classification, draw
from tasks.main import TASKS, find_module, main, split_task
from tasks.record import ROOT, identify
from tests.programs import refused_before_torch
from tests.refusals import field_of, refusal
from tests.tasks.made import write_model
from tests.tasks.peer import POSITIONS, Peer, passages
from tests.tasks.program import figures_of, printed, result, run
from tests.tools.convert.models import STEP

README = (ROOT / "tasks" / "README.md").read_text(encoding="utf-8")


def test_a_folder_is_known_by_the_names_and_the_content_of_its_files(tmp_path: Path) -> None:
    files, found = [tmp_path / name for name in ("a", "b", "folder/b")], set[str]()
    files[2].parent.mkdir()
    files[0].write_text("1")
    for change in (
        lambda: None,
        lambda: files[0].rename(files[1]),
        lambda: files[1].rename(files[2]),
        lambda: files[2].write_text("2"),
    ):
        change()
        found.add(identify(tmp_path)["sha256"])
    assert len(found) == 4


def test_pictures_are_spread_over_the_images(tmp_path: Path) -> None:
    images = MagicMock()
    images.splits[0].labels = np.zeros(100, np.int64)
    images.batch.return_value.images = np.zeros((1, 4, 4, 3))
    draw(tmp_path / "x.png", images, np.arange(100) % 2, ("a", "b"))
    drawn = [call.args[0][0] for call in images.batch.call_args_list]
    assert [drawn[each] for each in (0, 15, 16, 31)] == [0, 98, 1, 99]
    images.splits[0].labels = np.array([0, 0, 1])
    found = Classification(MagicMock(picture=None), images, ("a", "b"), {})
    figures = found.score(np.array([[0], [1], [1]]))
    assert figures["by_class"] == {"a": 0.5, "b": 1}  # by label
    assert figures["confusions"] == [["a", "b", 1]]


def of_file(file: Path, peer: Peer, *more: str) -> list[str]:
    return ["--valid-data", str(file), "--load", str(peer.checkpoint), *more]


def test_record(peer: Peer, test_data: Path, tmp_path: Path) -> None:
    texts, plain = [x for x in passages(test_data) if "\n" not in x], tmp_path / "plain.txt"
    plain.write_text("\n".join([*texts, ""]), encoding="utf-8")
    output = tmp_path / "result.json"
    flags = of_file(plain, peer, "--compare-paper", "--json", str(output))
    words = ["--task", "lambada", *flags]
    out, said = printed(flags, "lambada")  # tasks are known in small letters, too
    record = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(out) == record
    assert record["model"] == {
        "num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 50_257,
        "max_position_embeddings": POSITIONS,
        "parameters": sum(each.numel() for each in peer.model.parameters()),
    }  # fmt: skip
    step = peer.checkpoint / STEP
    assert record["checkpoint"] == str(step)
    assert record["checkpoint_hash"] == read_manifest(step)["checksum"]
    assert (record["task"], record["dtype"], record["step"]) == ("LAMBADA", "fp32", 0)
    assert record["layout"] == {"data": 1, "tensor": 1}
    assert record["command"] == ["tasks/main.py", *words]
    assert record["micro_batch_size"] == 8
    content = plain.read_bytes()
    checksum = sha256(content).hexdigest()
    assert record["data"] == [{"file": str(plain), "bytes": len(content), "sha256": checksum}]
    rows = [(row["model"], row["nearest"]) for row in record["paper"]["rows"]]
    assert rows == [("355M", True), ("2.5B", False), ("8.3B", False)]
    assert "0.6651" in said
    assert not list(tmp_path.glob("*.tmp*")), "nothing is left of the writing"


def test_input_is_refused_before_torch_is_imported(peer: Peer, tmp_path: Path) -> None:
    words = ["--task", "LAMBADA", *of_file(tmp_path / "none", peer)]
    (said,) = refused_before_torch("tasks.main", [({}, words)])
    assert field_of(said) == "--valid-data"


def test_commands_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(commands) == 7
    for command in commands:
        name, rest = split_task(shlex.split(command.partition("tasks/main.py")[2]))
        parse(find_module(name).Settings, rest, {})


@pytest.fixture
def of_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The names of the two tasks that the page adds, whose modules are written as it says."""
    (tmp_path / "mine").mkdir()
    for name, code in zip(
        ("answers", "lines"), re.findall(r"```python\n(.*?)```", README, re.DOTALL), strict=True
    ):
        assert len(code.splitlines()) <= 42
        (tmp_path / "mine" / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "mine.answers", "mine.lines"


def test_zero_shot_task_of_the_readme(
    peer: Peer, test_data: Path, tmp_path: Path, of_readme: tuple[str, str]
) -> None:
    name, _ = of_readme
    pairs = [text.rsplit(" ", 1) for text in passages(test_data) if "\n" not in text]
    file = tmp_path / "questions.tsv"
    lines = ["\t".join(pair) for pair in pairs]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    own = result(of_file(file, peer), name)
    assert own["conventions"].keys() == {"accuracy", "num_examples"}
    assert own["data"][0]["sha256"] == sha256(file.read_bytes()).hexdigest()

    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join([*map(" ".join, pairs), ""]), encoding="utf-8")
    lambada = figures_of("LAMBADA", 1, *of_file(plain, peer))
    assert own["accuracy"] == lambada["strict_accuracy"] > 0
    assert own["num_examples"] == lambada["num_examples"] == len(pairs)

    for line in ("no tab", "\tno question", "no answer\t", "a\tb\tc"):
        file.write_text("\n".join([*lines, line, ""]), encoding="utf-8")
        error = refusal(lambda: run([name, *of_file(file, peer)]))
        assert str(error).startswith(f"--valid-data {file}, line {len(lines) + 1}: ")


def test_fine_tuned_task_of_the_readme(tmp_path: Path, of_readme: tuple[str, str]) -> None:
    _, name = of_readme
    model = write_model(tmp_path / "model", words=["good", "bad", "it", "is"])
    lines = ["positive\tit is good", "negative\tin the bad", "negative\tit is the the the bad"]
    for file, count in (("train", 40), ("valid", 3)):
        (tmp_path / file).write_text("\n".join(lines * count), encoding="utf-8")
    words = ["--load", str(model), "--seq-length", "7", "--lr", "1e-2"]
    files = ["--train-data", str(tmp_path / "train"), "--valid-data", str(tmp_path / "valid")]
    record = result([*words, *files], name)
    assert record["accuracy"] == 1.0
    assert record["notes"] == {"cut_texts": 43}
    (tmp_path / "valid").write_text("positive\tgood\nneutral\tgood\n", encoding="utf-8")
    error = refusal(lambda: run([name, *words, *files]))
    assert str(error).startswith(f"--valid-data {tmp_path / 'valid'}, line 2: ")


BROKEN = """
from dataclasses import dataclass
from pathlib import Path

from tasks.protocol import Task, TaskSettings


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    valid_data: Path


class Broken(Task):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        return 1 // 0

    def score(self, scores, continuations):
        return {}


def prepare(settings, manifest, tokenizer):
    return Broken()
"""


def test_traceback_and_ctrl_c(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = "import signal; signal.raise_signal(signal.SIGINT)"  # to this thread, and at once
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "broken.py").write_text(BROKEN)
    stopped = BROKEN.replace("return 1 // 0", stop)
    (tmp_path / "faulty" / "stopped.py").write_text(stopped)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        run(["faulty.broken", *of_file(tmp_path, peer)])
    assert caught.traceback[-1].path.name == "broken.py"
    words = ["--task", "faulty.stopped", *of_file(tmp_path, peer)]
    command = [sys.executable, "tasks/main.py", *words]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (130, "", 1)


def test_help_lists_the_tasks_on_the_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"], {"RANK": "1"})
    assert capsys.readouterr().out == ""
    main(["-h"], {})
    assert {*TASKS, "tasks.mine"} <= {*capsys.readouterr().out.split()}
