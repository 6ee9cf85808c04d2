"""Fine-tuning as the paper did it: the presets of table 6, and table 5 beside a result."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.config.parse import parse
from tasks.main import find_module, main, split_task
from tasks.paper import PAPER, as_text, check_figures, compare
from tasks.protocol import FinetuneSettings
from tasks.record import ROOT
from tests.refusals import refusal
from tests.tasks.made import write_model

PRESETS = ROOT / "scripts" / "presets" / "finetune"
SIZES = ("336m", "1.3b", "3.9b")
# Batch, learning rate, epochs of the three models.
TABLE_6: dict[str, list[tuple[int, float, int]]] = {
    "mnli": [(128, 1e-5, 10), (128, 1e-5, 10), (128, 1e-5, 10)],
    "qqp": [(128, 5e-5, 12), (128, 3e-5, 12), (256, 4e-5, 12)],
    "squad1": [(64, 3e-5, 2), (48, 3e-5, 2), (48, 1e-5, 2)],
    "squad2": [(48, 3e-5, 2), (64, 3e-5, 2), (48, 1e-5, 2)],
    "race": [(32, 2e-5, 3), (16, 1e-5, 3), (32, 2e-5, 3)],
}


def settings_of(task: str, *words: str) -> FinetuneSettings:
    found: FinetuneSettings = parse(find_module(task).Settings, [*words, "--valid-data", "x"], {})
    return found


def test_presets_are_table_6_and_the_checkpoint_has_two_names() -> None:
    rows = {f"{name}_{size}": row for name, of in TABLE_6.items()
            for size, row in zip(SIZES, of, strict=True)}  # fmt: skip
    assert {file.stem for file in PRESETS.iterdir()} == rows.keys()
    for name, row in rows.items():
        task = name.partition("_")[0].rstrip("12").upper()
        found = settings_of(task, "--preset", str(PRESETS / f"{name}.toml"))
        assert (found.global_batch_size, found.lr, found.epochs) == row
        assert (found.load, found.save, found.train_data) == (None, None, ())
    for flag in ("--load", "--pretrained-checkpoint", "--pretrained_checkpoint"):
        assert settings_of(task, flag, "there").load == "there"


def test_table_5_stands_beside_a_result() -> None:
    figures = {"accuracy": 0.5, "middle_accuracy": 0.75, "high_accuracy": 0.375}
    found = compare("RACE", {"last_epoch": {**figures, "other": 1}}, 1_500_000_000)
    assert (found["table"], found["here"]) == (5, {"last_epoch": figures})
    assert [row["model"] for row in found["rows"]] == ["336M", "1.3B", "3.9B", "3.9B ensemble"]
    assert [row["model"] for row in found["rows"] if row["nearest"]] == ["1.3B"]
    assert found["rows"][3]["accuracy"] == 0.909
    lines = as_text(found, 1_500_000_000).splitlines()
    assert lines[2].split()[:4] == ["1.3B", "0.8730", "0.9040", "0.8610"]
    assert lines[5].split()[1:4] == ["0.8940", "-", "-"]
    assert lines[6].split()[2:5] == ["0.5000", "0.7500", "0.3750"]
    before = {task: {**columns.best_before} for task, columns in PAPER.items()}
    assert before["RACE"] == found["best_before"] == {"accuracy": 0.894}
    assert before["WIKITEXT103"] == {"word_perplexity": 15.8}
    assert before["LAMBADA"] == {"strict_accuracy": 0.632}
    assert "best before" not in as_text(compare("QQP", {}, 10**6), 10**6)
    # The accuracy of one level is not the paper's, which is of both.
    found = compare("RACE", {"this_model": {"accuracy": 0.5, "high_accuracy": 0.5}}, 10**6)
    assert [*found["here"]["this_model"].values()] == [None, None, 0.5]
    assert as_text(found, 10**6).splitlines()[6].split()[2:5] == ["-", "-", "0.5000"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "figures", "missing"),
    [
        ("MNLI", ["accuracy"], ["matched_accuracy", "mismatched_accuracy"]),
        ("MNLI", ["matched_accuracy"], ["mismatched_accuracy"]),
        ("QQP", ["a_accuracy", "b_accuracy"], ["accuracy"]),
        ("RACE", ["accuracy", "high_accuracy"], ["accuracy", "middle_accuracy"]),
    ],
)
def test_figures_of_the_table_that_will_be_missing_are_told(
    task: str, figures: list[str], missing: list[str]
) -> None:
    assert PAPER[task].missing(figures) == missing
    with pytest.warns(UserWarning, match="^--compare-paper: "):
        check_figures(task, figures)
    check_figures(task, PAPER[task].figures)  # all, which is not told


def test_the_commands_of_the_readme_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "tasks" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(commands) == 7
    for command in commands:
        name, rest = split_task(shlex.split(command.partition("tasks/main.py")[2]))
        parse(find_module(name).Settings, rest, {})


def test_the_fine_tuned_task_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "tasks" / "README.md").read_text(encoding="utf-8")
    _, code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) <= 42
    (tmp_path / "moods").mkdir()
    (tmp_path / "moods" / "lines.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = write_model(tmp_path / "model", words=["good", "bad", "it", "is"])
    lines = ["positive\tit is good", "negative\tin the bad", "negative\tit is the the the bad"]
    for name, count in (("train", 40), ("valid", 3)):
        (tmp_path / name).write_text("\n".join(lines * count), encoding="utf-8")
    words = ["--task", "moods.lines", "--load", str(model), "--seq-length", "7", "--lr", "1e-2"]
    files = ["--train-data", str(tmp_path / "train"), "--valid-data", str(tmp_path / "valid")]
    main([*words, *files], {})
    record = json.loads(capsys.readouterr().out)
    assert record["accuracy"] == 1.0
    assert record["notes"] == {"cut_texts": 43}
    (tmp_path / "valid").write_text("positive\tgood\nneutral\tgood\n", encoding="utf-8")
    error = refusal(lambda: main([*words, *files], {}))
    assert str(error).startswith(f"--valid-data {tmp_path / 'valid'}, line 2: ")


def test_figures_of_the_paper_are_of_the_unit_that_the_tasks_report() -> None:
    for name, columns in PAPER.items():
        low, high = (50, 100) if "SQUAD" in name else (0.5, 1) if columns.table == 5 else (0, 1e9)
        for values in columns.values.values():
            assert len(values) == len(columns.figures), name
            assert all(low < each < high for each in values), name
