"""The instrument: rounds that start anew, turns, what is left out, and what the page says."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank
from benchmarks.processes import Agents, Processes, Running, measure, timed
from benchmarks.report import Results, cell, others_in, write_page
from tests.benchmarks import small_question
from tests.benchmarks.run import forked
from tests.benchmarks.small_question import failing, hungry, on_a_gpu, steady, working
from tests.refusals import refusal

COLUMNS = (
    Column("number", "number", "{:.1f}"),
    Column("double", "number", "{:.1f}", unit=0.5),
    Column("per second", "number", "{:.1f}", per="wall"),
    Column("times the first", "number", "{:.2f}", "its / first"),
    Column("the first over it", "number", "{:.2f}", "first / its"),
    Column("less the first", lambda own, first: own["number"] - first.get("number", 0)),
)


@pytest.fixture(autouse=True)
def starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes are forked, but where the memory of a new one counts."""
    with nullcontext() if "memory" in request.node.name else forked():
        yield


def question(
    contenders: Sequence[Contender] = (), columns: Sequence[Column] = COLUMNS, **changes: Any
) -> Question:
    usual: dict[str, Any] = {"rounds": 1, "warm_up": 1}
    result = lambda found: f"{found.range('number', '{:.0f}')}."  # noqa: E731
    return Question(steady, columns, result, **(usual | changes))


def measured(
    contenders: Sequence[Contender], flags: Flags | None = None, **changes: Any
) -> list[dict[str, Any]]:
    *_, (_, found) = measure(question(**changes), contenders, flags or Flags(), Agents())
    return found


def contender(name: str, number: float = 1.0, **fields: Any) -> Contender:
    arguments = {"number": number} | fields.pop("arguments", {})
    return Contender(name, steady, arguments, **fields)


def test_turns_alternate_in_new_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [contender(str(k), k, arguments={"log": str(log)}) for k in (1, 2)]
    found = measured(both, rounds=2, turns=2)
    lines = [line.split() for line in log.read_text().splitlines()]
    # In each round two warm-ups, and then two turns of each; who is first changes in both.
    assert "".join(number for _, number in lines) == "121221212112"
    pids = [{pid for pid, number in part if number == each}
            for part in (lines[:6], lines[6:]) for each in "12"]  # fmt: skip
    assert [len(each) for each in pids] == [1, 1, 1, 1]
    assert len(set.union(*pids)) == 4
    assert [each["rounds"][0]["wall"] for each in found] == [[1, 1], [2, 2]]
    assert [len(each["rounds"]) for each in found] == [2, 2]
    log.unlink()
    measured(both, turns=2, warm_up=0, together=False)
    assert [line.split()[1] for line in log.read_text().splitlines()] == [*"1122"]


def test_turns_on_a_gpu(tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [Contender(str(k), on_a_gpu, {"number": k, "log": str(log)}) for k in (1, 2)]
    with patch.object(Contender, "reason", return_value=""):
        measured(both, Flags(device="cuda"), turns=2)
    assert [line.split()[1] for line in log.read_text().splitlines()] == [*"111222"]


def test_until() -> None:
    (late,) = measured([contender("late")], Flags(until=0.0))
    assert (late["reason"].partition(":")[0], late["rounds"]) == ("left out", [])
    (in_time,) = measured([contender("in time")], Flags(until=time.time() + 1e6))
    assert (in_time["reason"], len(in_time["rounds"])) == ("", 1)


def test_memory_and_cpu_of_a_turn() -> None:
    large = Contender(name="large", run=hungry, arguments={"megabytes": 200})
    own = {"megabytes": 1, "prepared": 200}
    prepared = Contender(name="prepared", run=hungry, arguments=own)
    alone = Contender(name="turns", run=hungry, arguments=own, memory_of_turns=True)
    busy = Contender(name="busy", run=working, arguments={"seconds": 0.3}, ranks=2)
    found = measured([large, prepared, alone, busy], warm_up=0)
    memory = {each["name"]: each["rounds"][0]["peak_bytes"] for each in found}
    for name in ("large", "prepared"):
        assert 200 * 2**20 <= memory[name] < 500 * 2**20
    assert max(memory["turns"], memory["busy"]) < 50 * 2**20
    assert found[-1]["rounds"][0]["cpu"][0] >= 1.2  # of both processes and their children


def test_a_turn_takes_as_long_as_its_slowest_rank() -> None:
    answers = [{"wall": 1.0, "cpu": 0.5, "loss": 2}, {"wall": 3.0, "cpu": 0.25, "loss": 4}]
    own = Mock(ask=lambda command: answers)
    assert Processes.turn(own) == {"wall": 3.0, "cpu": 0.75, "loss": 2}


def test_reasons_not_to_measure() -> None:
    full = {"error": MemoryError(), "at": "turn"}
    found = measured(
        [
            contender("first"),
            contender("lacks a module", needs=("json", "no_such.module")),
            contender("is not meant for this", missing="takes a GPU"),
            Contender(name="does not fit", run=failing, arguments=full, ranks=2),
            contender("last"),
        ],
        rounds=2,
    )
    reasons = [each["reason"] for each in found]
    assert [bool(reason) for reason in reasons] == [False, True, True, True, False]
    assert "no_such.module" in reasons[1]
    assert reasons[2] == "takes a GPU"
    assert [len(each["rounds"]) for each in found] == [2, 0, 0, 0, 2]


@pytest.mark.parametrize("error", [KeyError("odd"), EOFError("odd")], ids=repr)
def test_an_error_of_a_rank_ends_the_run(error: Exception) -> None:
    for at in ("start", "turn"):
        wrong = Contender(name="wrong", run=failing, arguments={"error": error, "at": at})
        ends = partial(measured, [contender("right"), wrong])
        refusal(ends, str(error), field="wrong", kind=RuntimeError, lines=99)


@pytest.mark.parametrize(("at", "groups"), [("second round", ["both"] * 2), ("turn", ["1", "2"])])
def test_record_before_a_failure(at: str, groups: list[str], tmp_path: Path) -> None:
    """In the second round, or in the first one after another group."""
    wrong = Contender("wrong", failing, {"error": KeyError("odd"), "at": at}, group=groups[1])
    flags = Flags(json=tmp_path / "record.json")
    with pytest.raises(RuntimeError):
        question(rounds=3).ask([contender("right", group=groups[0]), wrong], flags, {})
    (found,) = json.loads((tmp_path / "record.json").read_text())
    rounds = [len(each["rounds"]) for each in found["contenders"]]
    assert (found["rounds"], rounds) == (1, [1, int(at == "second round")])


@pytest.mark.parametrize(
    ("first", "number", "tolerance", "is_same"),
    [
        (1.0, 1.0, 0, True),
        (1.0, 1.01, 0, False),
        (1.0, 1.01, 0.1, True),
        (1.0, 2.0, 0.1, False),
        (0.0, 0.0, 0.1, False),
    ],
)
def test_figures_must_be_the_same(
    first: float, number: float, tolerance: float, is_same: bool
) -> None:
    both = [contender("first", first), contender("other", number, same={"checked": tolerance})]
    with nullcontext() if is_same else pytest.raises(SystemExit):
        assert "checked" not in measured(both)[0]["rounds"][0]


def test_turns_in_a_row() -> None:
    waits, turns = list[int](), list[int]()
    rank = Rank()
    rank.wait = lambda: waits.append(len(turns))  # type: ignore[method-assign]

    def turn() -> Figures:
        turns.append(len(turns))
        return {"loss": torch.tensor(turns[-1] / 2), "losses": turns, "wall": 8.0}

    found = timed(Running(turn, rank, lambda: 0), count=4)
    assert waits == [0, 4]
    assert found["loss"] == 1.5
    assert type(found["loss"]) is float
    assert (found["losses"], found["wall"]) == ([0, 1, 2, 3], 8.0)
    with patch("benchmarks.processes.time.perf_counter", iter([0.0, 2.0]).__next__):
        assert timed(Running(lambda: None, rank, lambda: 0), count=4)["wall"] == 0.5


def record(numbers: dict[str, list[float]], **facts: Any) -> dict[str, Any]:
    contenders = [
        {"group": "", "name": name, "first": "a", "x": None, "facts": {"known": 7}}
        | {"reason": "" if values else "takes a GPU"}
        | {"rounds": [{"wall": [0.5], "cpu": [1.0], "number": each} for each in values]}
        for name, values in numbers.items()
    ]
    usual = {"command": "python x", "processor": "P", "cores": 2, "others_share_of_cores": 0.0}
    return usual | facts | {"contenders": contenders}


def test_cells() -> None:
    asked = question(columns=(*COLUMNS, Column("known", "known")))
    found = Results(
        asked, record({"a": [1.0, 2.0, 4.0], "b": [3.0, 4.0, 4.0], "c": [], "d": [0.0]})
    )
    assert [found.median("", "b", each.title) for each in COLUMNS] == [4, 8, 8, 2, 0.5, 2]
    assert (found.cell("", "a", "times the first"), found.cell("", "c", "number")) == (None, None)
    interval = found.cell("", "b", "times the first")
    assert interval is not None
    assert (interval.low, interval.high) == (1, 3)
    assert found.median("", "d", "the first over it") == inf
    *_, b, c, _ = found.table().splitlines()
    assert b == "| b | 4.0 | 8.0 | 8.0 | 2.00 (1.00 to 3.00) | 0.50 (0.33 to 1.00) | 2 | 7 |"
    assert c == "| c (not measured: takes a GPU) | | | | | | | 7 |"
    assert cell([1.0, 2.0]).low is None
    assert (cell(range(8))[1:], cell(range(9))[1:]) == ((0, 7), (1, 7))


def test_page(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    asked = question()
    write_page(file, asked, [record({"a": [2.0]}), record({"a": [3.0]}, processor="Q")])
    title, text = str(small_question.__doc__).strip().rstrip("."), file.read_text()
    assert text.startswith(f"# {title}\n\n2.\n\n    python x\n")
    assert "\n## On Q\n\n3.\n" in text
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    file.write_text(text + "\n## Notes\n\nFound by hand.\n")
    write_page(file, asked, [record({"a": [9.0]}, others_share_of_cores=0.5)])
    text = file.read_text()
    assert text.splitlines()[2] == "9."
    assert text.endswith("\n## Notes\n\nFound by hand.\n")
    assert "50 % of the cores" in text
    assert "## On Q" not in text


def test_records_of_other_processors_stay(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    asked = question(failure=lambda found: "too small" * (found.median("", "a", "number") < 2))
    flags = Flags(json=file, page=tmp_path / "page.md")
    for number in (1.0, 2.0, 3.0):
        with pytest.raises(SystemExit) if number < 2 else nullcontext():
            asked.ask([contender("a", number)], flags, {"size": 5})
        if number < 2:  # as another machine has left it
            file.write_text(json.dumps([json.loads(file.read_text())[0] | {"processor": "Q"}]))
    own, other = json.loads(file.read_text())
    assert (own["processor"] != "Q", other["processor"]) == (True, "Q")
    assert [x["contenders"][0]["rounds"][0]["number"] for x in (own, other)] == [3.0, 1.0]
    assert own["contenders"][0]["rounds"][0]["notes"] == ["number 3"]  # of a turn
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", own["date"])
    assert (own["cores"], own["size"]) == (os.cpu_count(), 5)
    assert 0 <= own["others_share_of_cores"] <= 1
    file.write_text(json.dumps([own | {"gpu": "H"}]))
    assert len(others_in(file, own)) == 1
    wrong: dict[str, Any] = {"contenders": ("z",), "rounds": 0, "turns": 0}
    for name, value in wrong.items():
        flags = Flags(**{name: value})
        refusal(partial(asked.ask, [contender("a")], flags, {}), field=f"--{name}")


def test_a_miniature_stands_before_the_words_given(capsys: pytest.CaptureFixture[str]) -> None:
    def contenders(flags: Flags, size: int = 9) -> list[Contender]:
        """Compare nothing."""
        return []

    def given(*words: str, **changes: Any) -> Any:
        asked = replace(question(), contenders=contenders, **changes)
        with patch.object(sys, "argv", ["q.py", *words]), patch.object(Question, "ask") as ask:
            asked.run()
        return ask.call_args.args[2]

    assert given("--small", small="--size 1") == {"size": 1}
    assert given("--small", "--size", "2", small="--size 1") == {"size": 2}
    assert given(small="--size 1") == {"size": 9}
    with pytest.raises(SystemExit):
        given("--small")
    assert "--small: must be left out" in capsys.readouterr().err
