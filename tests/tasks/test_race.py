"""RACE: the released folders, the order of a sequence, levels together and apart, bad files."""

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.tokenizer import BertWordPieceLowerCase
from tasks.protocol import ChecksConfig, by_evaluation
from tasks.readers.race import Race, Settings, prepare
from tests.refusals import refusal
from tests.tasks.made import small_config, wordpiece, write_model
from tests.tasks.program import result

TOKENIZER = wordpiece()
MANIFEST = {"config": {"model": {"max_position_embeddings": 64}}}
PASSAGE = {
    "article": "The cat sits.\nIt is in the  house .",
    "questions": ["Who sits?", "The cat is in  _  ."],
    "options": [["the cat", "a dog", "no one", "all"], ["a tree", "the car", "bed", "the house"]],
    "answers": ["A", "D"],
    "id": "middle1.txt",
}
OTHER = PASSAGE | {
    "article": "A dog.",
    "questions": ["Who?"],
    "options": [["me", "you", "dog", "cat"]],
    "answers": ["C"],
}
NONE = PASSAGE | {"questions": [], "options": [], "answers": []}


def write(folder: Path, *passages: object) -> Path:
    """1.txt, 2.txt, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, passage in enumerate(passages, start=1):
        content = passage if isinstance(passage, bytes) else json.dumps(passage).encode()
        (folder / f"{number}.txt").write_bytes(content)
    return folder


def race(*valid: Path, **settings: Any) -> Race:
    chosen = Settings(**{"seq_length": 64, "max_qa_length": 40, "valid_data": valid} | settings)
    return prepare(chosen, MANIFEST, TOKENIZER)


def test_sequence(tmp_path: Path) -> None:
    task = race(write(tmp_path / "middle", PASSAGE))
    passage = "[SEP] the cat sits. it is in the house. [SEP]"
    for example, text, options, right in zip(
        task.evaluations["middle"],
        ("[CLS] who sits? {}", "[CLS] the cat is in {}."),
        (["the cat", "a dog", "no one", "all"], ["a tree", "the car", "bed", "the house"]),
        (0, 3),
        strict=True,
    ):
        found = [TOKENIZER.decode(each.tokens.tolist()) for each in example.options]
        assert found == [f"{text.format(option)} {passage}" for option in options]
        assert example.label == (right,)
    blanks = OTHER | {"questions": ["_ is _"]}
    (twice,) = race(write(tmp_path / "high", blanks)).evaluations["high"]
    assert TOKENIZER.decode(twice.options[2].tokens.tolist()).startswith("[CLS] dog is dog [SEP]")
    first = task.evaluations["middle"][0].options[0]
    assert first.tokens.dtype == np.int32
    assert TOKENIZER.decode(first.tokens[first.second :].tolist()) == passage.removeprefix("[SEP] ")
    assert (task.head, task.labels, list(task.train)) == ("choice", (), [])


@pytest.mark.filterwarnings("ignore:.* lose their end")
def test_long_passages_and_questions(tmp_path: Path) -> None:
    long = OTHER | {"article": "b " * 99, "options": [["x " * 30, "y", "z", "z"]]}
    folder = write(tmp_path / "high", long)
    with pytest.warns(UserWarning, match="--seq-length 64"):
        task = race(folder, max_qa_length=20, checks=ChecksConfig(max_truncated=1))
    options = task.evaluations["high"][0].options
    assert [len(each.tokens) for each in options] == [64] * 4
    question = len(TOKENIZER.encode("Who?"))
    assert [each.second for each in options] == [22, *[question + 3] * 3]
    b = TOKENIZER.encode("b")
    assert options[0].tokens[22:-1].tolist() == b * 41
    with pytest.warns(UserWarning, match="--seq-length 64"):
        wide = race(folder, max_qa_length=45, checks=ChecksConfig(max_truncated=1))
    kept = wide.evaluations["high"][0].options[0]
    assert (len(kept.tokens), kept.second) == (64, question + 30 + 2), "only the passage is cut"
    counted = task.notes["input"]["valid"]["high"]
    assert (counted["truncated"], counted["truncated_options"]) == (4, 1)
    assert counted["longest"] == question + 30 + 99 + 3
    assert Settings(seq_length=63, valid_data=(folder,)).kept_qa == 16  # a quarter, rounded up


def test_cut_options(tmp_path: Path) -> None:
    folder = write(tmp_path / "high", PASSAGE, OTHER)
    longest = max(race(folder).evaluations["high"].options.lengths)
    message = str(refusal(lambda: race(folder, max_qa_length=6)))
    cures = (f"--max-qa-length {longest} would cut none", "--max-truncated 0.92")
    for part in (f"--valid-data {folder}: ", *cures):
        assert part in message


def test_levels(tmp_path: Path) -> None:
    for split, passage in (("train", PASSAGE), ("dev", OTHER)):
        write(tmp_path / "RACE" / split / "middle", passage)
        write(tmp_path / "RACE" / split / "high", OTHER, passage)
    top = tmp_path / "RACE"
    tasks = {
        "the folder of splits": race(top, train_data=(top,)),
        "what holds it": race(tmp_path, train_data=(tmp_path,)),
        "splits": race(top / "dev", train_data=(top / "train",)),
        "levels": race(
            *(top / "dev" / level for level in ("high", "middle")),
            train_data=tuple(top / "train" / level for level in ("middle", "high")),
        ),
    }
    for name, task in tasks.items():
        sizes = {level: len(each) for level, each in task.evaluations.items()}
        assert sizes == {"middle": 1, "high": 2}, name
        assert list(sizes) == ["middle", "high"], name
        assert [each.label for each in task.train] == [(0,), (3,), (2,), (0,), (3,)], name
    assert list(race(top / "dev" / "high").evaluations) == ["high"]
    refusal(lambda: race(top / "dev" / "high", top / "dev"), field="--valid-data")
    counted = tasks["splits"].notes["input"]["train"]
    assert (counted["passages"], counted["questions"]) == (3, 5)
    sizes = [option.tokens.size for each in task.train for option in each.options]
    assert task.train.whole.tolist() == sizes
    assert counted["answers"] == {"A": 2, "B": 0, "C": 1, "D": 2}


def logits_for(answers: str) -> list[Any]:
    return [np.eye(4, dtype=np.float32)["ABCD".index(each)] for each in answers]


def test_figures(tmp_path: Path) -> None:
    middle = write(tmp_path / "middle", PASSAGE, OTHER)
    task = race(middle, write(tmp_path / "high", OTHER))
    figures = task.score({"middle": logits_for("ABC"), "high": logits_for("A")})
    assert figures == by_evaluation({
        "middle": {"questions": 3, "majority_accuracy": 1 / 3, "accuracy": 2 / 3},
        "high": {"questions": 1, "majority_accuracy": 1, "accuracy": 0},
        "": {"questions": 4, "majority_accuracy": 0.5, "accuracy": 0.5},
    })  # fmt: skip
    assert task.best == "accuracy"
    assert task.conventions.keys() == figures.keys()
    equal = task.score({"middle": [np.zeros(4, np.float32)] * 3})
    assert equal["accuracy"] == pytest.approx(1 / 3), "of equal scores the first option counts"


@pytest.mark.filterwarnings("ignore:.*has no question")
def test_passages_without_questions(tmp_path: Path) -> None:
    folder = write(tmp_path / "high", NONE, OTHER, NONE, OTHER | {"article": " \n"})
    with pytest.warns(UserWarning, match=str(folder)) as seen:
        task = race(folder)
    assert [str(each.message).split()[1] for each in seen] == [f"{folder}/1.txt", f"{folder}/4.txt"]
    counted = task.notes["input"]["valid"]["high"]
    names = ("", "_without_a_question_left_out", "_with_a_blank_text")
    assert [counted[f"passages{name}"] for name in names] == [2, 2, 1]
    with pytest.warns(UserWarning, match="--valid-data"):  # all are C, as if answers had been lost
        race(write(tmp_path / "lost" / "high", *[OTHER] * 20))


@pytest.mark.filterwarnings("ignore:.*has no question")
def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    archive, folder = tmp_path / "RACE.tar.gz", tmp_path / "folder"
    folder.mkdir()
    archive.touch()
    empty = write(tmp_path / "empty" / "middle")
    bare, unanswered = write(tmp_path / "bare", OTHER), write(tmp_path / "un" / "high", NONE)
    for path in (archive, tmp_path / "none", folder, empty, bare, unanswered):
        message = str(refusal(partial(race, path)))
        assert message.startswith(f"--valid-data {path}")
    message = str(refusal(lambda: race(empty, train_data=(folder,))))
    assert message.startswith(f"--train-data {folder} ")


def test_program(tmp_path: Path) -> None:
    pretrained = write_model(tmp_path / "bert", small_config(max_position_embeddings=64))
    for split in ("train", "dev"):
        for level in ("middle", "high"):
            write(tmp_path / "RACE" / split / level, PASSAGE, OTHER)
    folder = str(tmp_path / "RACE")
    words = ["--load", str(pretrained), "--train-data", folder, "--valid-data", folder]
    words += ["--epochs", "2", "--seq-length", "64", "--compare-paper"]
    record = result(words, "RACE")
    assert (record["questions"], record["middle_questions"], record["high_questions"]) == (6, 3, 3)
    levels = [record["middle_accuracy"], record["high_accuracy"]]
    assert record["accuracy"] == pytest.approx(sum(levels) / 2)
    assert set(record["last_epoch"]) <= set(record["conventions"])
    assert record["notes"]["max_qa_length"] == 16
    assert record["paper"]["here"]["last_epoch"]["high_accuracy"] == levels[1]
    assert record["hyper_parameters"]["global_batch_size"] == 32
    assert record["checks"]["max_truncated"] == 0.25


def test_real_passages(test_data: Path, tmp_path: Path) -> None:
    with tarfile.open(test_data / "race" / "RACE_dev.tar.xz", "r|xz") as stream:
        for number, member in enumerate(stream):
            if number % 6 == 0 and member.isfile():
                stream.extract(member, tmp_path, filter="data")
    tokenizer = BertWordPieceLowerCase(str(test_data / "bert" / "vocab.txt"))
    manifest = {"config": {"model": {"max_position_embeddings": 512}}}
    with pytest.warns(UserWarning, match="--seq-length 512"):
        task = prepare(Settings(valid_data=(tmp_path / "dev",)), manifest, tokenizer)
    counted = task.notes["input"]["valid"]
    assert {name: each["passages"] for name, each in counted.items()} == {"middle": 61, "high": 170}
    assert [each["unknown_tokens"] for each in counted.values()] == [0, 0]
    middle = task.evaluations["middle"]
    (file, *_) = sorted((tmp_path / "dev" / "middle").iterdir())
    record = json.loads(file.read_text(encoding="utf-8"))
    first = middle[0]
    assert "ABCD"[first.label[0]] == record["answers"][0]
    read = tokenizer.decode(first.options[1].tokens[first.options[1].second : -1].tolist())
    assert "".join(read.split()).startswith("".join(record["article"].lower().split())[:200])
    assert max(each.longest for each in task.evaluations["high"]) == 512
