"""The comparison of sentence splitters in miniature."""

from pathlib import Path

import pytest

from benchmarks import sentences
from tests.benchmarks.run import figures, run
from tests.tools.corpus.lines import write_jsonl


def test_ours_is_right_in_50_of_the_60_cases(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": "One. Two."}] * 10)
    two = write_jsonl(tmp_path / "two.jsonl", [{"text": "A é.\nb"}])
    record = run(tmp_path, "sentences", "--text", one, two)
    found = figures(record, sentences.OURS, "one")
    assert (found["right"], found["extra"], found["missed"]) == (50, 11, 3)
    assert (found["bytes"], found["lower"], found["changed"]) == (90, 0, 0)
    found = figures(record, sentences.OURS, "two")
    assert (found["bytes"], found["lower"], found["sentences"]) == (7, 1, 2)
    assert figures(record, "sentencex", "one")["right"] == 48
    assert "cuts 50 of 60 cases as wanted" in record["page"]


@pytest.mark.parametrize(
    ("split", "right", "extra", "missed"),
    [
        (lambda text: text.replace("! ", "!|").split("|"), 2, 0, 0),
        (lambda text: [text], 1, 0, 1),
        (str.split, 0, 3, 0),
    ],
)
def test_marks(monkeypatch, tmp_path: Path, split, right: int, extra: int, missed: int) -> None:
    file = tmp_path / "cases.txt"
    file.write_text("# a case a line\nA b! | C d.\nE\\n f.\n")
    monkeypatch.setattr(sentences, "CASES", file)
    assert sentences.marks(split) == {"right": right, "extra": extra, "missed": missed}
