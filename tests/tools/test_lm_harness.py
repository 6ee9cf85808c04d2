"""lm-evaluation-harness's tasks on local files, and errors before anything slow has started."""

import json
import sys
from pathlib import Path

import pytest

from tools.harness.definitions import READERS, read_pages, write_definition
from tools.lm_harness import main

WIKI = " \n = One = \n \n Text of one . \n = = Part = = \n \n = Two = \n Text of two . \n"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the program prints when it ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(["--load", "nowhere", *map(str, arguments)], {})
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_without_the_harness_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install lm-eval would work" in error_of(capsys, "--tasks", "wikitext")


def test_a_file_for_a_task_that_is_not_asked_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, "--tasks", "wikitext", "--lambada-data", tmp_path / "x")
    assert "--tasks wikitext,lambada_openai works" in error


def test_an_include_path_that_is_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, "--tasks", "mine", "--include-path", tmp_path / "none")
    assert f"--include-path {tmp_path / 'none'}: must be a folder" in error


def test_no_task_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tasks: must be" in error_of(capsys, "--tasks", ",")


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
    with pytest.raises(ValueError, match=r"lambada.jsonl, line 2, .* would work"):
        READERS["lambada_openai"](file)


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
