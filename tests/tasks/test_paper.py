"""The paper's settings and results: the presets of table 6, and tables 3 and 5 beside a result."""

import pytest

from megatron.config.parse import parse
from tasks.main import find_module
from tasks.paper import PAPER, as_text, check_figures, compare
from tasks.protocol import FinetuneSettings
from tasks.record import ROOT

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


def test_presets_are_table_6() -> None:
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


def test_table_5_beside_a_result() -> None:
    figures = {"accuracy": 0.5, "middle_accuracy": 0.75, "high_accuracy": 0.375}
    found = compare("RACE", {"last_epoch": {**figures, "other": 1}}, 2_400_000_000)
    assert (found["table"], found["here"]) == (5, {"last_epoch": figures})
    assert [row["model"] for row in found["rows"]] == ["336M", "1.3B", "3.9B", "3.9B ensemble"]
    assert [row["model"] for row in found["rows"] if row["nearest"]] == ["3.9B"]  # by ratio
    assert found["rows"][3]["accuracy"] == 0.909
    lines = as_text(found, 2_400_000_000).splitlines()
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
def test_missing_figures_are_told(task: str, figures: list[str], missing: list[str]) -> None:
    assert PAPER[task].missing(figures) == missing
    with pytest.warns(UserWarning, match="^--compare-paper: "):
        check_figures(task, figures)
    check_figures(task, PAPER[task].figures)  # all of them: no warning
