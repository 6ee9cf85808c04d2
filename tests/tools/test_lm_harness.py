"""lm-evaluation-harness's tasks on local files, and errors before anything slow has started."""

import json
import sys
from pathlib import Path

import pytest

from tests.refusals import refusal, refused
from tools.harness.definitions import READERS, read_pages, write_definition
from tools.lm_harness import main

WIKI = " \n = One = \n \n Text of one . \n = = Part = = \n \n = Two = \n Text of two . \n"


def program(words: list[str]) -> None:
    main(["--load", "nowhere", *words], {})


def test_without_the_harness_the_error_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "lm-eval" in str(refusal(lambda: program(["--tasks", "wikitext"])))


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--tasks wikitext --lambada-data x", "--lambada-data"),
        ("--tasks mine --include-path none", "--include-path"),
        ("--tasks ,", "--tasks"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(words: str, field: str) -> None:
    assert refused(program, words, whole=False) == field


def test_pages_are_the_articles_of_the_raw_file(tmp_path: Path) -> None:
    file = tmp_path / "wiki.tokens"
    file.write_text(WIKI)
    one, two = read_pages(file)
    assert one == " = One = \n \n Text of one . \n = = Part = = \n "
    assert two == " = Two = \n Text of two . \n"


@pytest.mark.parametrize("form", ['{{"text": "{}"}}', "{}"], ids=["json", "plain"])
def test_passages_are_read_in_both_forms_and_kept_as_they_are(tmp_path: Path, form: str) -> None:
    file = tmp_path / "lambada"
    file.write_text("".join(form.format(text) + "\n" for text in ("a  b", " c d ")))
    assert READERS["lambada_openai"](file) == ["a  b", " c d "]


@pytest.mark.parametrize("line", ["{", '{"page": "a"}', '{"text": 1}', "[]", '"text"'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lambada.jsonl"
    file.write_text('{"text": "a b"}\n' + line + "\n")
    assert "lambada.jsonl, line 2" in str(refusal(lambda: READERS["lambada_openai"](file)))


def test_a_definition_is_the_harness_s_own_on_local_documents(tmp_path: Path) -> None:
    write_definition(tmp_path, Path("installed"), "wikitext", ["é", "b"])
    definition = json.loads((tmp_path / "wikitext.yaml").read_text())
    (data,) = definition["dataset_kwargs"]["data_files"].values()
    pages = [json.loads(line) for line in Path(data).read_text().splitlines()]
    assert pages == [{"page": "é"}, {"page": "b"}]
    assert definition["include"] == "installed/tasks/wikitext/wikitext.yaml"
    changed = {"dataset_path", "dataset_name", "dataset_kwargs", "training_split"}
    changed |= {"validation_split", "test_split"}
    assert definition.keys() - {"include", "task"} == changed
