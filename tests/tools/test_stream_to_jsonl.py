"""Streams of `datasets` to JSON lines, which training reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.data.documents import open_documents
from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import read_jsonl
from tools.stream_to_jsonl import alone, stream_to_jsonl

Capture = pytest.CaptureFixture[str]

TEXTS = ["one", "zwei\n漢字", '"three"', " four "]
ROWS = [TEXTS[0], None, TEXTS[1], "", TEXTS[2], " \n", TEXTS[3]]


def json_lines(folder: Path) -> Path:
    lines = [json.dumps({"text": text, "number": 1}) for text in ROWS]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def parquet(folder: Path) -> Path:
    columns = {"number": range(len(ROWS)), "text": pa.array(ROWS, pa.string())}
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


@pytest.fixture
def source(tmp_path: Path, datasets_cache: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize("kind", [json_lines, parquet])
def test_texts(source: Path, kind: Callable[[Path], Path], capsys: Capture) -> None:
    output = source.parent / "new folder" / "out.jsonl"
    stream_to_jsonl(str(kind(source)), output)
    documents = open_documents(str(output))  # which would warn of a line that holds none
    assert [documents.text(number) for number in range(documents.num_documents)] == TEXTS
    printed = capsys.readouterr()
    assert {"4", str(output.stat().st_size)} <= set(printed.out.split())
    assert f"--data-path '{output}'" in printed.out
    assert "3 rows" in printed.err


def test_broken_stream(source: Path) -> None:
    """It is read as far as --documents asks."""
    json_lines(source)
    (source / "b.jsonl").write_text("no JSON")
    output = source.parent / "out.jsonl"
    stream_to_jsonl(str(source), output, documents=3)
    assert [each["text"] for each in read_jsonl(output)] == TEXTS[:3]
    output.rename(output.with_name("out.jsonl.0123.part"))  # as a run that was killed leaves it
    error = str(refusal(lambda: stream_to_jsonl(str(source), output)))
    assert error.startswith("--dataset-name ")
    assert " 7 rows" in error
    assert list(source.parent.iterdir()) == [source]
    (source / "b.jsonl").unlink()
    stream_to_jsonl(str(source), output)
    assert len(output.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("--text-column", {"text_column": "body"}),
        ("--text-column", {"text_column": "number"}),
        ("--dataset-split", {"dataset_split": "test"}),
        ("--dataset-config", {"dataset_config": "other"}),
        ("--documents", {"documents": 0}),
        ("--output", {"output": Path("lines.txt")}),
        ("--output", {"output": Path("lines.jsonl.gz")}),
        ("--output", {"output": Path(__file__)}),
    ],
)
def test_refusals(source: Path, flag: str, more: dict[str, object]) -> None:
    arguments = {"output": source.parent / "out.jsonl", **more}
    for kind in (json_lines, parquet):
        place = str(kind(source))
        assert field_of(refusal(lambda place=place: stream_to_jsonl(place, **arguments))) == flag
    assert list(source.parent.iterdir()) == [source]


def test_another_run(source: Path) -> None:
    """It has a name with the signs of a glob, too."""
    output = source.parent / "o[ut]*.jsonl"
    other, others = source.parent / "out*.jsonl.1.part", json_lines(source)
    other.touch()
    with alone(output):
        at_it = output.with_name(f"{output.name}.2.part")
        at_it.touch()
        assert field_of(refusal(lambda: stream_to_jsonl(str(others), output))) == "--output"
        assert at_it.exists()
    stream_to_jsonl(str(others), output)
    assert (other.exists(), at_it.exists()) == (True, False)
    assert set(source.parent.iterdir()) == {source, output, other}
    assert field_of(refusal(lambda: stream_to_jsonl(str(others), output))) == "--output"


def test_long_text(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("tools.stream_to_jsonl.LONGEST_LINE", 18)
    output = source.parent / "out.jsonl"
    stream_to_jsonl(str(json_lines(source)), output)
    assert [each["text"] for each in read_jsonl(output)] == ["one", " four "]
    assert re.findall(r"(\d+) rows", capsys.readouterr().err) == ["3", "2"]


def test_no_text(source: Path) -> None:
    for text in ('{"text": ""}\n{"text": " "}\n', ""):
        (source / "a.jsonl").write_text(text)
        error = refusal(lambda: stream_to_jsonl(str(source), source.parent / "out.jsonl"))
        assert field_of(error) == "--dataset-name"
    assert list(source.parent.iterdir()) == [source]


def test_no_network(tmp_path: Path, datasets_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal(lambda: stream_to_jsonl("nobody/nothing", tmp_path / "out.jsonl"), lines=1)
    assert field_of(error) == "--dataset-name"
    assert not list(tmp_path.iterdir())
