"""SQuAD: its files, windows, answers and figures, and answers that are saved and scored alone."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.tokenizer import read_tokenizer
from tasks.protocol import ChecksConfig
from tasks.readers.inputs import Shape, shape_of
from tasks.readers.squad import Settings, SquadTask, prepare, score_only
from tasks.readers.squad_data import (
    Squad,
    Windows,
    best_contexts,
    cut_passage,
    make_windows,
    nearest,
    read_answers,
    read_squad,
)
from tasks.readers.squad_scorer import (
    best_figures,
    figures,
    mark,
    normalise,
    score_file,
    unanswered,
)
from tests.refusals import field_of, refusal
from tests.tasks.made import wordpiece, write_model
from tests.tasks.program import result, warnings_of

WORDS = ["rain", "spain", "stays", "mainly", "plain", "where", "does", "it", "stay"]
PASSAGE = "The rain in Spain stays mainly in the plain."
MANIFEST = {"config": {"model": {"max_position_embeddings": 64}}}
TOKENIZER = wordpiece(*WORDS)  # others are spelt letter by letter
SMALL: dict[str, Any] = {"load": "x", "seq_length": 16, "max_query_length": 8, "doc_stride": 2}
IDS = ("plain", "spain", "snow", "hail")


def question(name: str, answers: dict[str, int], **more: Any) -> dict[str, Any]:
    """answers: {text: first character}."""
    found = [{"text": text, "answer_start": start} for text, start in answers.items()]
    return {"id": name, "question": "Where does it stay?", "answers": found, **more}


def squad_of(*questions: dict[str, Any], passage: str = PASSAGE) -> dict[str, Any]:
    """One article of one paragraph."""
    paragraphs = [{"context": passage, "qas": questions}]
    return {"version": "any", "data": [{"title": "Rain", "paragraphs": paragraphs}]}


def write_json(file: Path, content: Any) -> Path:
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def write_squad(file: Path, *questions: dict[str, Any], passage: str = PASSAGE) -> Path:
    return write_json(file, squad_of(*questions, passage=passage))


def write_v2(file: Path) -> Path:
    """Two questions with an answer, two without."""
    return write_squad(
        file,
        question("plain", {"the plain": 34, "in the plain": 31}, is_impossible=False),
        question("spain", {"Spain": 12}, is_impossible=False),
        question("snow", {}, is_impossible=True, plausible_answers=[{"text": "rain"}]),
        question("hail", {}, is_impossible=True),
    )


@pytest.fixture
def squad(tmp_path: Path) -> Squad:
    return read_squad("--valid-data", write_v2(tmp_path / "dev.json"))


def read(tmp_path: Path, *questions: dict[str, Any], passage: str = PASSAGE) -> Squad:
    file = write_squad(tmp_path / "read.json", *questions, passage=passage)
    return read_squad("--valid-data", file)


# Files


@pytest.mark.filterwarnings("error")
def test_version(tmp_path: Path, squad: Squad) -> None:
    assert (squad.version, squad.moved, squad.lost) == ("2.0", [], [])
    assert squad.has_answer.tolist() == [True, True, False, False]
    first = read(tmp_path, question("q", {"The": 0}))
    assert (first.version, first.passages) == ("1.1", [PASSAGE])
    assert first.questions[0].placed.start == 0


@pytest.mark.parametrize(
    ("start", "found"), [(-3, 5), (5, 5), (9, 5), (10, 14), (15, 14), (32, 25), (33, 40), (99, 40)]
)
def test_nearest(start: int, found: int) -> None:
    assert nearest(PASSAGE, "ain", start) == found


def test_misplaced_answers(tmp_path: Path) -> None:
    right = [question(f"q{number}", {"Spain": 12}) for number in range(198)]
    wrong = [question("moved", {"Spain": 10}), question("lost", {"snow": 4})]
    right[0]["question"] = "\u200b \n"
    file = write_squad(tmp_path / "train.json", *right, *wrong)
    with pytest.warns(UserWarning, match=f"^--train-data {file}: "):
        squad = read_squad("--train-data", file)
    assert squad.questions[198].placed.start == 12
    assert squad.questions[199].placed is None
    assert (squad.moved, squad.lost) == (["moved"], ["lost"])
    with pytest.warns(UserWarning, match="train.json") as warned:
        task = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert len(warned) == 2
    counted = task.notes["input"]["valid"][""]
    names = ("blank_questions", "moved_answers", "answers_not_in_passage")
    assert [counted[name] for name in names] == [1, 1, 1]
    file = write_squad(tmp_path / "train.json", *right[1:], *wrong)
    assert field_of(refusal(lambda: read_squad("--train-data", file))) == "--train-data"


# Windows


def shape(length: int, first: int = 8) -> Shape:
    return shape_of(TOKENIZER, length, cut="second", first=first)


def texts(windows: Windows) -> list[tuple[str, str]]:
    """For each window the words of its part of the passage and of its label."""
    found = []
    for example in windows:
        (sequence,), (first, last) = example.options, example.label
        part = sequence.tokens[sequence.second : -1].tolist()
        found.append((TOKENIZER.decode(part), TOKENIZER.decode(sequence.tokens[first : last + 1])))
    return found


@pytest.mark.parametrize(
    ("size", "room", "stride", "expected"),
    [
        (4, 4, 2, [(0, 4)]), (5, 4, 2, [(0, 4), (2, 5)]), (6, 4, 2, [(0, 4), (2, 6)]),
        (7, 4, 2, [(0, 4), (2, 6), (4, 7)]), (9, 4, 8, [(0, 4), (4, 8), (8, 9)]),
        (1, 4, 2, [(0, 1)]),
    ],
)  # fmt: skip
def test_cut_passage(size: int, room: int, stride: int, expected: list[tuple[int, int]]) -> None:
    assert list(cut_passage(size, room, stride)) == expected


def perfect(example: Any) -> NDArray[np.float32]:
    """Logits of a model that knows the label."""
    logits = np.zeros((len(example.options[0].tokens), 2), np.float32)
    logits[example.label, (0, 1)] = 1
    return logits


# "been" and "is" are spelt by letters: an answer that cuts a word has the letters it has. One
# within a token is labelled with all of it. White space of any kind parts words.
@pytest.mark.parametrize(
    ("passage", "answer", "start", "labelled", "read_back"),
    [
        (PASSAGE, "Spain", 12, "spain", "Spain"),
        (PASSAGE, "lain", 39, "plain", "plain"),
        ("been Is. it", "ee", 1, "##ee", "ee"),
        ("been Is. it", "been Is", 0, "been is", "been Is"),
        ("been Is. it", "s.", 6, "##s.", "s."),
        ("rain\vin\x85\tSpain", "Spain", 9, "spain", "Spain"),
        ("(É,  Rain`s\vÎn) SPAIN\u200b does", "Rain`s\vÎn", 5, "rain [UNK] s in", "Rain`s\vÎn"),
    ],
)
def test_sequence_and_answer(
    tmp_path: Path, passage: str, answer: str, start: int, labelled: str, read_back: str
) -> None:
    squad = read(tmp_path, question("q", {answer: start}), passage=passage)
    windows = make_windows(squad, TOKENIZER, shape(64), 8, training=True)
    (example,) = windows
    (sequence,), (first, last) = example.options, example.label
    cls, sep, encode = TOKENIZER.cls, TOKENIZER.sep, TOKENIZER.encode
    asked, own = encode("where does it stay?"), encode(" ".join(passage.split()))
    assert sequence.tokens.tolist() == [cls, *asked, sep, *own, sep]
    assert (sequence.tokens.dtype, sequence.second) == (np.int32, len(asked) + 2)
    found = TOKENIZER.decode(sequence.tokens[first : last + 1])
    assert found == labelled
    assert read_answers(windows, [perfect(example)], 30).texts == [read_back]


def test_windows_are_labelled(tmp_path: Path) -> None:
    squad = read(tmp_path, question("q", {"Spain stays": 12}))
    windows = make_windows(squad, TOKENIZER, shape(12), 2, training=True)
    assert texts(windows) == [
        ("the rain in spain", "[CLS]"),
        ("in spain stays mainly", "spain stays"),
        ("stays mainly in the", "[CLS]"),
        ("in the plain.", "[CLS]"),
    ]
    assert (windows.without_answer, windows.cut_answers) == (3, 0)


def test_unlabelled_questions(tmp_path: Path) -> None:
    questions = [question(f"q{number}", {"Spain": 12}) for number in range(99)]
    passage = PASSAGE + " \u200b"
    lost = question("lost", {"snow": 3})
    file = write_squad(tmp_path / "dev.json", *questions, lost, passage=passage)
    with pytest.warns(UserWarning, match="--train-data"):
        squad = read_squad("--train-data", file)
    assert squad.lost == ["lost"]
    some = {training: make_windows(squad, TOKENIZER, shape(64), 8, training=training)
            for training in (True, False)}  # fmt: skip
    assert [each.id for each in some[True].questions] == [each["id"] for each in questions]
    assert len(some[False].questions) == 100
    assert some[False][99].label == (0, 0)
    nothing = read(tmp_path, question("blank", {"\u200b": len(PASSAGE) + 1}), passage=passage)
    assert not make_windows(nothing, TOKENIZER, shape(64), 8, training=True).questions


def test_cut_questions_and_answers(tmp_path: Path) -> None:
    squad = read(tmp_path, question("q", {"in Spain stays": 9}), question("r", {"The": 0}))
    windows = make_windows(squad, TOKENIZER, shape(8, first=2), 9, training=True)
    assert texts(windows)[:2] == [("the rain in", "[CLS]"), ("spain stays mainly", "[CLS]")]
    assert windows.cut_answers == 1
    assert all(len(each.options[0].tokens) <= 8 for each in windows)


# Answers


def spans(windows: Windows, logits: list[NDArray[Any]], number: int, longest: int) -> Iterator[Any]:
    """(score, text) of every span of a question that counts, one after another."""
    own = [row for row in range(len(windows)) if windows.table[row, 0] == number]
    asked = windows.questions[number]
    offsets = windows.passages.spans_of(asked.passage)
    passage = windows.squad.passages[asked.passage]
    bounds = [windows.table[row, 1:3].tolist() for row in own]

    def context(token: int, begin: int, end: int) -> float:
        return min(token - begin, end - 1 - token) + 0.01 * (end - begin)

    for row, (begin, end) in zip(own, bounds, strict=True):
        ahead = windows[row].options[0].second
        for first in range(begin, end):
            best = max(context(first, *each) for each in bounds if each[0] <= first < each[1])
            if context(first, begin, end) == best:
                for last in range(first, min(end, first + longest)):
                    score = (
                        logits[row][ahead + first - begin, 0] + logits[row][ahead + last - begin, 1]
                    )
                    yield score, passage[offsets[first, 0] : offsets[last, 1]]


def test_best_spans(squad: Squad) -> None:
    windows = make_windows(squad, TOKENIZER, shape(12), 2, training=False)
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(20):
        logits = [rng.normal(size=(len(each.options[0].tokens), 2)) for each in windows]
        found = read_answers(windows, logits, 3)
        for number, (text, odds) in enumerate(zip(found.texts, found.odds, strict=True)):
            score, expected = max(spans(windows, logits, number, 3))
            rows = windows.table[:, 0] == number
            null = min(sum(logits[row][0]) for row in np.flatnonzero(rows))
            assert text == expected
            assert odds == pytest.approx(null - score)
            seen.add(len(text.split()))
    assert seen == {1, 2, 3}


def test_best_contexts_of_unequal_windows() -> None:
    # A long window has no say in the tokens after its end.
    assert best_contexts(np.array([[0, 300], [290, 302]]))[1][-2:].all()
    # It decides between contexts that are nearly equal.
    assert best_contexts(np.array([[0, 300], [250, 350]]))[0][275]


def test_real_questions_are_read_back(test_data: Path) -> None:
    """But for the six of 2,910 answers that have more than 30 tokens."""
    tokenizer = read_tokenizer("BertWordPieceLowerCase", test_data / "bert")
    squad = read_squad("--valid-data", test_data / "squad" / "cs224n_dev-v2.0.json")
    windows = make_windows(squad, tokenizer, shape(96, 40), 32, training=True)
    assert len(windows.questions) == len(squad.questions)
    assert windows.cut_answers == 0
    logits = [perfect(each) for each in windows]
    assert max(map(len, logits)) <= 96
    found = read_answers(windows, logits, 30)
    ids = [each.id for each in squad.questions]
    marks = mark(squad, dict(zip(ids, found.texts, strict=True)))
    score = figures(squad, unanswered(squad, marks, found.odds > 0))
    assert score["no_answer_exact_match"] == 100
    assert score["has_answer_exact_match"] == pytest.approx(100 * 2904 / 2910)


# Figures


def test_official_figures(test_data: Path) -> None:
    folder = test_data / "squad"
    squad = read_squad("--valid-data", folder / "dev-v2.0.json")
    found = score_file(squad, folder / "bert_single_v2.0_predictions.json", None, 1.0)
    assert (round(found["exact_match"], 3), round(found["f1"], 3)) == (78.742, 81.775)
    counted = [found[f"{kind}questions"] for kind in ("", "has_answer_", "no_answer_")]
    assert (*counted, found["missing_predictions"]) == (11873, 5928, 5945, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Rain,\tin Spain.", "rain in spain"), ("An a-z", "az"), ("a.the b", "athe b"),
        ("theatre a the", "theatre"), ("U.S.", "us"), ("“the”", "“ ”"), ("the", ""),
    ],
)  # fmt: skip
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("The plain!", 1, 1), ("plain", 1, 1), ("mainly in the plain", 0, 4 / 5),
        ("plain plain", 0, 2 / 3), ("Spain", 0, 0), ("", 0, 0),
    ],
)  # fmt: skip
def test_best_right_answer(squad: Squad, answer: str, exact: float, f1: float) -> None:
    marks = mark(squad, {"plain": answer})
    assert (marks.exact[0], marks.f1[0]) == pytest.approx((exact, f1))
    assert marks.exact[1:].sum() == marks.f1[1:].sum() == 0  # without a prediction: wrong


def test_no_answer(squad: Squad) -> None:
    marks = mark(squad, {"plain": "", "spain": "Spain", "snow": "", "hail": "rain"})
    assert marks.exact.tolist() == marks.f1.tolist() == [0, 1, 1, 0]
    # Nothing is left of "the", and the official scorer takes it for no answer.
    assert mark(squad, {"snow": "the"}).f1.tolist() == [0, 0, 1, 0]
    assert figures(squad, marks) == {
        "questions": 4, "exact_match": 50.0, "f1": 50.0,
        "has_answer_questions": 2, "has_answer_exact_match": 50.0, "has_answer_f1": 50.0,
        "no_answer_questions": 2, "no_answer_exact_match": 50.0, "no_answer_f1": 50.0,
    }  # fmt: skip
    closed = unanswered(squad, marks, np.array([False, True, False, True]))
    assert closed.exact.tolist() == [0, 0, 1, 1]


def test_answers_of_articles(tmp_path: Path) -> None:
    """Nothing is left of "the"; the versions differ in what counts then."""
    has_answer = {"is_impossible": False}
    rows: list[Any] = [({"Spain": 12}, {}, (1, 0)), ({"Spain": 12}, has_answer, (0, 0)),
                       ({}, has_answer, (1, 1))]  # fmt: skip
    for answers, more, marks in rows:
        found = mark(read(tmp_path, question("q", {"The": 0, **answers}, **more)), {"q": "the"})
        assert (found.exact[0], found.f1[0]) == marks


def test_best_threshold(squad: Squad) -> None:
    """The highest figure of all thresholds, also where answers are empty or all are wrong."""
    rng = np.random.default_rng(5)
    said = ["the plain", "in the plain", "Spain", "rain", "wrong", "", ""]
    for trial in range(200):
        texts = dict(zip(IDS, rng.permutation(said)[:4].tolist(), strict=True))
        odds = rng.integers(-2, 3, 4) + 0.0  # some are equal
        marks = mark(squad, texts)
        tried = {
            threshold: figures(squad, unanswered(squad, marks, odds > threshold))
            for threshold in sorted({0.0, odds.min() - 1, *odds})
        }
        answered = np.array([bool(text) for text in texts.values()])
        found = best_figures(squad, marks, answered, odds)
        for name, of in (("best_exact", "exact_match"), ("best_f1", "f1")):
            most = max(each[of] for each in tried.values())
            assert found[name] == pytest.approx(most), trial
            assert tried[found[f"{name}_threshold"]][of] == pytest.approx(most), trial


def test_na_prob_file(squad: Squad, tmp_path: Path) -> None:
    said = {"plain": "plain", "spain": "Spain", "snow": "rain", "hail": "rain"}
    odds = {"plain": 0.1, "spain": 0.6, "snow": 0.4, "hail": 0.9}
    files = write_json(tmp_path / "said.json", said), write_json(tmp_path / "odds.json", odds)
    found = score_file(squad, *files, 0.5)
    assert (found["exact_match"], found["has_answer_exact_match"]) == (50, 50)  # plain, hail
    assert (found["best_exact"], found["best_exact_threshold"]) == (75, 0.1)
    assert score_file(squad, *files, 0.6)["has_answer_exact_match"] == 100
    found = score_file(squad, *files, 1.0)
    assert (found["exact_match"], found["no_answer_exact_match"]) == (50, 0)


def test_missing_predictions(squad: Squad, tmp_path: Path) -> None:
    file = write_json(tmp_path / "said.json", {"plain": "plain", "snow": "", "fog": "rain"})
    with pytest.warns(UserWarning, match="said.json") as warned:
        found = score_file(squad, file, None, 1.0)
    assert len(warned) == found["missing_predictions"] == 2
    assert found["exact_match"] == 50


EVERY = dict.fromkeys(IDS, "")


@pytest.mark.parametrize(
    ("said", "odds", "named", "question"),
    [
        (["plain"], None, "--predictions", ""),
        ({"plain": 1}, None, "--predictions", "question plain"),
        ({"fog": ""}, None, "--predictions", ""),
        (EVERY, {"plain": "x"}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": float("nan")}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": True}, "--na-prob-file", "question plain"),
        (EVERY, {"plain": 1}, "--na-prob-file", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:--na-prob-file")
def test_answer_files_are_refused(
    squad: Squad, tmp_path: Path, said: Any, odds: Any, named: str, question: str
) -> None:
    other = None if odds is None else write_json(tmp_path / "odds.json", odds)
    error = refusal(lambda: score_file(squad, write_json(tmp_path / "said.json", said), other, 1.0))
    assert field_of(error) == named
    assert question in str(error)


# The task


def make_task(tmp_path: Path, **more: Any) -> SquadTask:
    file = write_v2(tmp_path / "dev.json")
    return prepare(Settings(valid_data=(file,), **SMALL | more), MANIFEST, TOKENIZER)


def logits_of(task: SquadTask, answered: float) -> list[Any]:
    """Logits of a model that knows the labels; those of no answer are lower by this number."""
    found = []
    for example in task.evaluations[""]:
        logits = np.zeros((len(example.options[0].tokens), 2), np.float32)
        logits[0] = -answered
        logits[-3] += 0.1  # else the first span, "the", of which nothing is left to compare
        logits[example.label, (0, 1)] += 1
        found.append(logits)
    return found


def test_task(tmp_path: Path) -> None:
    only = question("q", {"the plain": 34}, is_impossible=False)
    task = make_task(tmp_path, train_data=(write_squad(tmp_path / "train.json", only),))
    assert (task.head, task.labels, task.best) == ("span", (), "f1")
    assert task.paper == "SQUAD 2.0"
    assert all(len(example.label) == 2 for example in task.train)
    assert task.notes["squad_version"] == "2.0"
    counted = task.notes["input"]["train"]
    assert {name: count for name, count in counted.items() if count} == {
        "texts_with_letters": 2, "texts_with_capitals": 2, "tokens": 15, "questions": 1,
        "windows": 2, "windows_without_answer": 1,
    }  # fmt: skip
    assert len(counted) == 13
    counted = task.notes["input"]["valid"][""]
    assert counted["questions"] == 4
    assert counted["windows"] == len(task.evaluations[""]) == 8


def test_threshold(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    figures = task.score({"": logits_of(task, 0)})
    assert figures["exact_match"] == figures["f1"] == figures["best_f1"] == 100
    # With the mark of no answer 2 x 3 lower every question is answered ...
    figures = task.score({"": logits_of(task, 3)})
    assert (figures["has_answer_f1"], figures["no_answer_f1"], figures["f1"]) == (100, 0, 50)
    assert figures["best_exact"] == figures["best_f1"] == 100
    assert figures.keys() == task.conventions.keys()
    # ... and the best threshold gives the figure that it is reported with.
    threshold = figures["best_f1_threshold"]
    task = make_task(tmp_path, null_score_diff_threshold=threshold)
    assert task.score({"": logits_of(task, 3)})["f1"] == 100


def test_first_version_always_answers(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "dev.json", question("q", {"Spain": 12}))
    task = prepare(Settings(valid_data=(file,), **SMALL), MANIFEST, TOKENIZER)
    assert task.paper == "SQUAD 1.1"
    figures = task.score({"": logits_of(task, -9)})
    assert figures == {"questions": 1, "exact_match": 100, "f1": 100}
    assert task.conventions.keys() == figures.keys()
    files = [write_json(tmp_path / f"{each}.json", {"q": each}) for each in ("The", 1)]
    error = refusal(lambda: score_file(read_squad("--valid-data", file), *files, 1.0))
    assert field_of(error) == "--na-prob-file"


def test_predictions_of_misplaced_answers(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "dev.json", question("q", {"snow": 3}))
    said = write_json(tmp_path / "said.json", {"q": "Snow"})
    with pytest.warns(UserWarning, match="dev.json"):
        found = score_only(Settings(valid_data=(file,), predictions=said))
    assert found["exact_match"] == 100


def test_losses_are_told(tmp_path: Path) -> None:
    lost = str(refusal(lambda: make_task(tmp_path, max_query_length=4)))
    assert "--max-query-length 4" in lost
    with pytest.warns(UserWarning, match="--max-query-length 4") as warned:
        task = make_task(tmp_path, max_query_length=4, checks=ChecksConfig(max_truncated=1.0))
    assert len(warned) == 1
    assert task.notes["input"]["valid"][""]["truncated_questions"] == 4
    with pytest.warns(UserWarning, match="dev.json"):
        make_task(tmp_path, seq_length=12, doc_stride=99, max_query_length=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_task(tmp_path)


RAIN = ["rain", *(f"w{each}" for each in "abcdefghijklmnopqrst")]
CUT = ["--seq-length", "24", "--max-query-length", "4", "--doc-stride", "8"]


def write_questions(file: Path, count: int, seed: int) -> str:
    """Where a passage has rain, if it has; most passages are longer than a window."""
    paragraphs = []
    for number in range(count):
        random = np.random.default_rng([seed, number])
        words = [RAIN[each] for each in random.integers(1, len(RAIN), size=30)]
        has_answer = bool(random.integers(2))
        if has_answer:
            words[random.integers(30)] = "Rain"
        answers = {"Rain": " ".join(words).index("Rain")} if has_answer else {}
        asked = question(str(number), answers, is_impossible=not has_answer)
        paragraphs.append({"context": " ".join(words), "qas": [{**asked, "question": "Rain?"}]})
    return str(write_json(file, {"data": [{"paragraphs": paragraphs}]}))


def test_trained_evaluated_and_scored_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", words=RAIN)
    train = write_questions(tmp_path / "train.json", 96, 0)
    dev = write_questions(tmp_path / "dev.json", 24, 1)
    save, said, odds = tmp_path / "save", tmp_path / "said.json", tmp_path / "odds.json"
    flags = ["--load", str(model), "--train-data", train, "--valid-data", dev, *CUT, "--lr", "3e-3"]
    sizes = ["--global-batch-size", "16", "--micro-batch-size", "16"]
    tuned = result([*flags, *sizes, "--epochs", "3", "--save", str(save)], "SQUAD")
    assert tuned["notes"]["input"]["train"]["windows"] > 200
    assert tuned["f1"] > 60 > 100 * tuned["no_answer_questions"] / tuned["questions"]

    flags = ["--load", tuned["seeds"][0]["checkpoints"]["last"], "--valid-data", dev, *CUT]
    saves = ["--save-predictions", str(said), "--save-null-odds", str(odds)]
    asked = result([*flags, *saves], "SQUAD")
    assert {key: asked[key] for key in asked["conventions"]} == pytest.approx(
        {key: tuned[key] for key in asked["conventions"]}, rel=1e-5
    )
    assert json.loads(odds.read_text(encoding="utf-8")).keys() == {str(n) for n in range(24)}
    words = ["--valid-data", dev, "--predictions", str(said)]
    alone = result(words, "SQUAD")
    shared = alone["conventions"].keys() & asked.keys()
    assert {"f1", "has_answer_f1", "no_answer_f1", "exact_match"} < shared
    assert {key: asked[key] for key in shared} == {key: alone[key] for key in shared}
    assert [Path(each["file"]).name for each in alone["data"]] == ["dev.json", "said.json"]
    by_odds = result([*words, "--na-prob-file", str(odds), "--na-prob-thresh", "0"], "SQUAD")
    shared = {key for key in by_odds["conventions"].keys() & asked.keys() if "best" not in key}
    assert {key: by_odds[key] for key in shared} == {key: asked[key] for key in shared}
    assert "--lr" in "".join(warnings_of([*words, "--lr", "3", "--epochs", "9"], "SQUAD"))
