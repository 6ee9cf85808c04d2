"""MNLI and QQP: the released columns, JSON, label maps, bad rows, figures."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokenizer import BertWordPieceLowerCase
from tasks.readers.glue import MNLI, QQP, Classified
from tests.refusals import field_of, refusal
from tests.tasks.made import wordpiece

TOKENIZER = wordpiece()
MANIFEST = {"config": {"model": {"max_position_embeddings": 64}}}
PARSES = [f"sentence{number}_{kind}" for kind in ("binary_parse", "parse") for number in (1, 2)]
TRAIN_COLUMNS = [
    *("index", "promptID", "pairID", "genre"), *PARSES,
    *("sentence1", "sentence2", "label1", "gold_label"),
]  # fmt: skip
DEV_COLUMNS = [*TRAIN_COLUMNS[:-1], "label2", "label3", "label4", "label5", "gold_label"]
QQP_COLUMNS = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
MNLI_ROWS = [
    ("The cat sits.", "A cat is there.", "entailment"),
    ("The cat sits.", "The dog sits.", "neutral"),
    ("The cat sits.", "No cat sits.", "contradiction"),
]
QQP_ROWS = [("Who is it?", "Who is that?", "1"), ("Who is it?", "Why is that?", "0")]


def write_tsv(file: Path, columns: list[str], rows: list[tuple[str, str, str]]) -> Path:
    """Rows of two texts and a label, which have the last three columns but those between."""
    texts = [name for name in columns if name in ("sentence1", "sentence2", *QQP_COLUMNS[3:5])]
    lines = ["\t".join(columns)]
    for number, (first, second, label) in enumerate(rows):
        values = {columns[0]: str(number), texts[0]: first, texts[1]: second, columns[-1]: label}
        lines.append("\t".join(values.get(name, "neutral") for name in columns))
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return file


def classified(task: Any, *valid: Path, tokenizer: Any = TOKENIZER, **settings: Any) -> Classified:
    chosen = task.Settings(**{"seq_length": 64, "valid_data": valid} | settings)
    found: Classified = task.prepare(chosen, MANIFEST, tokenizer)
    return found


mnli, qqp = partial(classified, MNLI), partial(classified, QQP)


def simple(rows: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [{"text_a": a, "text_b": b, "label": label} for a, b, label in rows]


def read_back(
    task: Classified, name: str, tokenizer: BertWordPieceLowerCase = TOKENIZER
) -> list[Any]:
    """(first text, second text, class) of each example as the model reads it."""
    rows = []
    for example in task.evaluations[name]:
        (sequence,) = example.options
        parts = sequence.tokens[: sequence.second], sequence.tokens[sequence.second :]
        texts = [tokenizer.decode(part.tolist()) for part in parts]
        rows.append((*texts, task.labels[example.label[0]]))
    return rows


def test_columns_by_name(tmp_path: Path) -> None:
    train = write_tsv(tmp_path / "train.tsv", TRAIN_COLUMNS, MNLI_ROWS)
    rows = [*MNLI_ROWS, ("The dog.", "A dog.", "-")]  # on the last of which nobody agreed
    matched = write_tsv(tmp_path / "dev_matched.tsv", DEV_COLUMNS, rows)
    mismatched = write_tsv(tmp_path / "dev_mismatched.tsv", DEV_COLUMNS, MNLI_ROWS[::-1])
    task = mnli(matched, mismatched, train_data=(train,))
    assert list(task.evaluations) == ["matched", "mismatched"]
    assert task.best == "matched_accuracy"
    assert (task.head, task.labels) == ("classifier", ("contradiction", "entailment", "neutral"))
    assert [example.label for example in task.train] == [(1,), (2,), (0,)]
    assert [example.label for example in task.evaluations["mismatched"]] == [(0,), (2,), (1,)]
    rows = read_back(task, "matched")
    assert rows[0] == ("[CLS] the cat sits. [SEP]", "a cat is there. [SEP]", "entailment")
    assert task.notes["labels"] == {"0": "contradiction", "1": "entailment", "2": "neutral"}
    counted = task.notes["input"]["train"]
    assert counted["classes"] == {"contradiction": 1, "entailment": 1, "neutral": 1}
    assert (counted["pairs"], counted["unlabelled_rows_left_out"]) == (3, 0)
    counted = task.notes["input"]["valid"]["matched"]
    assert (counted["pairs"], counted["unlabelled_rows_left_out"]) == (3, 1)
    one = write_tsv(tmp_path / "one.tsv", TRAIN_COLUMNS, MNLI_ROWS[:1])  # of one class
    error = refusal(lambda: mnli(matched, train_data=(one,)))
    assert str(error).startswith(f"--train-data {one}: ")


def test_forms_of_json(tmp_path: Path) -> None:
    rows = simple(MNLI_ROWS)
    named = [{"sentence1": a, "sentence2": b, "gold_label": label} for a, b, label in MNLI_ROWS]
    forms = {
        "object": json.dumps({str(number): row for number, row in enumerate(rows)}),
        "indented": json.dumps(dict(enumerate(rows)), indent=4),
        "lines": "\n".join(map(json.dumps, rows)) + "\n\n",
        "names": "\n".join(map(json.dumps, named)),
        "mark": "\ufeff" + json.dumps(dict(enumerate(rows))),
    }
    tsv = write_tsv(tmp_path / "dev.tsv", TRAIN_COLUMNS, MNLI_ROWS)
    forms["line ends"] = tsv.read_text().replace("\n", "\r\n")
    expected = read_back(mnli(tsv), "")
    for name, text in forms.items():
        file = tmp_path / f"{name}.json"
        file.write_text(text, encoding="utf-8", newline="")
        assert read_back(mnli(file), "") == expected, name


def test_labels_of_qqp(tmp_path: Path) -> None:
    file = tmp_path / "dev.json"
    labels = ["0", 1, "duplicate", "not_duplicate", 0]
    file.write_text("\n".join(map(json.dumps, simple([("A cat.", "A dog.", x) for x in labels]))))
    assert qqp(file).evaluations[""].classes.tolist() == [0, 1, 1, 0, 0]
    for bad in (2, "2", -1, 0.5, True, None, "", " 1", "Duplicate", ["1"], {"1": 1}):
        file.write_text(json.dumps(simple([("A cat.", "A dog.", bad)])[0]))
        assert "line 1" in str(refusal(partial(qqp, file))), bad


def test_torn_rows(tmp_path: Path) -> None:
    quoted = ('"Who is it?', 'Who "is" it?"', "1")  # quotes are ordinary characters
    bad = ["7\t8\t9\tWho is", "it?\tWho?\t1", "7\t8\t9\t\tWho?\t1", "7\t8\t9\tWho?\t \t1"]
    for good, are_many in ((400, False), (396, False), (394, True)):
        file = write_tsv(
            tmp_path / "dev.tsv", QQP_COLUMNS, [quoted, *QQP_ROWS * (good // 2)][:good]
        )
        with file.open("a", encoding="utf-8") as stream:
            stream.write("\n".join([*bad, ""]))
        place = f"{file}, line {good + 2}"
        if are_many:  # more than one of a hundred
            assert place in str(refusal(partial(qqp, file)))
            continue
        with pytest.warns(UserWarning, match=place) as warned:
            task = qqp(file)
        assert [place in str(each.message) for each in warned] == [True]
        rows = read_back(task, "")
        assert len(rows) == good
        assert (rows[0][0].count('"'), rows[0][1].count('"'), rows[0][2]) == (1, 3, "duplicate")
        assert task.notes["input"]["valid"][""]["bad_rows_left_out"] == 4


def test_names_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    names = ("dev", "more", "train", "other/dev", "other/train")
    dev, more, train, again, other = (
        write_tsv(tmp_path / f"{name}.tsv", QQP_COLUMNS, QQP_ROWS) for name in names
    )
    task = qqp(dev, more)
    assert list(task.evaluations) == ["dev", "more"]
    assert "dev_f1" in task.conventions
    assert field_of(refusal(lambda: qqp(dev, again))) == "--valid-data"
    task = qqp(dev, train, train_data=(other, again))
    assert (len(task.train), task.notes["input"]["train"]["pairs"]) == (4, 4)
    assert [*task.notes["input"]["valid"]] == ["dev", "train"]


def test_figures(tmp_path: Path) -> None:
    rows = [("A cat.", "A dog.", each) for each in "11100000"]
    task = qqp(write_tsv(tmp_path / "dev.tsv", QQP_COLUMNS, rows))
    said = [1, 1, 0, 1, 0, 0, 0, 0]
    logits = [np.array([0.5, 1.0 if each else -1.0], np.float32) for each in said]
    figures = task.score({"": logits})
    assert figures == {"pairs": 8, "majority_accuracy": 5 / 8, "accuracy": 6 / 8, "f1": 2 / 3}
    assert set(figures) == set(task.conventions)
    ties = task.score({"": [np.zeros(2, np.float32)] * 8})
    assert ties["accuracy"] == 5 / 8, "of equal scores the first class's counts"
    plain = mnli(write_tsv(tmp_path / "mnli.tsv", TRAIN_COLUMNS, MNLI_ROWS))
    logits = [np.array(each, np.float32) for each in ([0, 1, 0], [0, 0, 1], [0, 0, 1])]
    assert plain.score({"": logits}) == {
        "pairs": 3, "majority_accuracy": 1 / 3, "accuracy": 2 / 3,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*--seq-length 64")
def test_real_files(test_data: Path) -> None:
    tokenizer = BertWordPieceLowerCase(str(test_data / "bert" / "vocab.txt"))
    paths = {name: test_data / "glue" / name for name in ("QQP", "MNLI")}
    task = mnli(paths["MNLI"] / "dev.json", tokenizer=tokenizer)
    counted = task.notes["input"]["valid"][""]
    assert counted["classes"] == {"contradiction": 320, "entailment": 347, "neutral": 333}
    assert (counted["tokens"], counted["unknown_tokens"]) == (36186, 0)
    assert max(each.longest for each in task.evaluations[""]) == 64
    assert (counted["truncated"], counted["longest"]) == (83, 156)
    row = json.loads((paths["MNLI"] / "dev.json").read_text(encoding="utf-8"))["0"]
    first, second = (row[name].lower() for name in ("text_a", "text_b"))
    expected = (f"[CLS] {first} [SEP]", f"{second} [SEP]", row["label"])
    assert read_back(task, "", tokenizer)[0] == expected

    train = paths["QQP"] / "train.tsv"
    task = qqp(paths["QQP"] / "dev.tsv", train_data=(train,), tokenizer=tokenizer)
    assert task.notes["input"]["valid"][""]["classes"] == {"not_duplicate": 16, "duplicate": 16}
    train = paths["MNLI"] / "train.tsv"
    task = mnli(paths["MNLI"] / "dev_matched.tsv", train_data=(train,), tokenizer=tokenizer)
    counted = task.notes["input"]["train"]
    assert counted["classes"] == {"contradiction": 16, "entailment": 16, "neutral": 16}
    first, second, _ = read_back(task, "matched", tokenizer)[0]
    assert first.startswith("[CLS] did you ” while you happened to be alone for a few seconds")
    assert second == "did you open the poison cupboard and study the bottle? [SEP]"
