"""The program: its record, the paper beside it, what it refuses, several processes, own tasks."""

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from megatron.checkpoint.format import read_manifest
from tasks.main import TASKS, main
from tasks.record import ROOT
from tests.refusals import field_of, refusal
from tests.tasks.passages import passages, some_articles
from tests.tasks.peer import POSITIONS, Peer
from tests.tasks.program import figures_of, result, run
from tests.tools.convert.models import STEP


@pytest.fixture
def plain(tmp_path: Path, test_data: Path) -> Path:
    """LAMBADA's plain text, the passages of it in `passages`."""
    texts = [text for text in passages(test_data) if "\n" not in text]
    file = tmp_path / "plain.txt"
    file.write_text("\n".join([*texts, ""]), encoding="utf-8")
    return file


def flags(task: str, file: Path, peer: Peer, *more: str) -> list[str]:
    return ["--task", task, *of_file(file, peer, *more)]


def of_file(file: Path, peer: Peer, *more: str) -> list[str]:
    return ["--valid-data", str(file), "--load", str(peer.checkpoint), *more]


def test_the_record_says_what_was_evaluated_and_how_and_two_processes_write_the_same(
    peer: Peer, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    words = flags("lambada", plain, peer, "--compare-paper", "--output", str(output))
    main(words, {})  # tasks are known in small letters, too
    record = json.loads(output.read_text(encoding="utf-8"))
    printed = capsys.readouterr()
    assert json.loads(printed.out) == record
    assert [*record][:3] == ["paper", "task", "conventions"]
    assert [*record][-1] == "strict_accuracy", "the figures stand last"
    assert record["model"] == {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "vocab_size": 50_257,
        "parameters": sum(each.numel() for each in peer.model.parameters()),
    }
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
    rows = {row["model"]: row["strict_accuracy"] for row in record["paper"]["rows"]}
    assert rows == {"355M": 0.4518, "2.5B": 0.6173, "8.3B": 0.6651}
    assert [row["model"] for row in record["paper"]["rows"] if row["nearest"]] == ["355M"]
    assert "0.6651" in printed.err
    assert not list(tmp_path.glob("*.tmp*")), "nothing is left of the writing"

    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("tasks/main.py", *words, "--tensor-model-parallel-size", "2"),
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    again = json.loads(output.read_text(encoding="utf-8"))
    assert again.pop("layout") == {"data": 1, "tensor": 2}
    figures = [key for key in record["conventions"] if key in record]
    assert {key: again[key] for key in figures} == {
        key: pytest.approx(record[key], rel=1e-6) for key in figures
    }


def test_wikitext103_is_evaluated_in_bf16_beside_the_paper(
    peer: Peer, test_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wiki.tokens"
    file.write_text(some_articles(test_data, 2), encoding="utf-8")
    words = of_file(file, peer, "--compare-paper", "--dtype", "bf16")
    record = result(words, capsys, "WIKITEXT103")
    here = {"this_model": {"word_perplexity": record["word_perplexity"]}}
    assert (record["paper"]["here"], record["dtype"]) == (here, "bf16")


def test_input_is_refused_before_torch_is_imported(peer: Peer, tmp_path: Path) -> None:
    words = flags("LAMBADA", tmp_path / "none", peer)
    code = (
        "import sys; from tasks.main import main\n"
        f"try: main({words!r}, {{}})\n"
        "finally: assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert field_of(ended.stderr) == "--valid-data"


def test_the_task_of_the_readme_runs(
    peer: Peer,
    test_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (ROOT / "tasks" / "README.md").read_text(encoding="utf-8")
    code, _ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "answers.py").write_text(code, encoding="utf-8")
    pairs = [text.rsplit(" ", 1) for text in passages(test_data) if "\n" not in text]
    file = tmp_path / "questions.tsv"
    lines = ["\t".join(pair) for pair in pairs]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = result(of_file(file, peer), capsys, "mine.answers")
    assert own["conventions"].keys() == {"accuracy", "num_examples"}
    assert own["data"][0]["sha256"] == sha256(file.read_bytes()).hexdigest()

    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join([*map(" ".join, pairs), ""]), encoding="utf-8")
    lambada = figures_of("LAMBADA", 1, *of_file(plain, peer))
    assert own["accuracy"] == lambada["strict_accuracy"] > 0
    assert own["num_examples"] == lambada["num_examples"] == len(pairs)

    for line in ("no tab", "\tno question", "no answer\t", "a\tb\tc"):
        file.write_text("\n".join([*lines, line, ""]), encoding="utf-8")
        error = refusal(lambda: run(["mine.answers", *of_file(file, peer)]))
        assert str(error).startswith(f"--valid-data {file}, line {len(lines) + 1}: ")


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


def test_an_error_of_a_task_keeps_its_traceback_and_ctrl_c_is_one_word(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = "import signal; signal.raise_signal(signal.SIGINT)"  # to this thread, and at once
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "broken.py").write_text(BROKEN)
    stopped = BROKEN.replace("return 1 // 0", stop)
    (tmp_path / "faulty" / "stopped.py").write_text(stopped)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        main(flags("faulty.broken", tmp_path, peer), {})
    assert caught.traceback[-1].path.name == "broken.py"
    command = [sys.executable, "tasks/main.py", *flags("faulty.stopped", tmp_path, peer)]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (130, "", 1)


def test_help_without_a_task_lists_the_tasks_on_the_first_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--help"], {"RANK": "1"})
    assert capsys.readouterr().out == ""
    main(["-h"], {})
    assert {*TASKS, "tasks.mine"} <= {*capsys.readouterr().out.split()}
