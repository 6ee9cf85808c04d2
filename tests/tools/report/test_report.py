"""Pages of tools.report: texts stay texts, in HTML and in Markdown; figures and numbers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dist import PATIENCE
from tests.tools.report.pages import HOSTILE, ParsedPage
from tools.report import numbers
from tools.report.curves import draw_losses
from tools.report.figures import PALETTE, draw, picture
from tools.report.sections import (
    Commands,
    Grid,
    Items,
    Mark,
    Number,
    Page,
    Quote,
    Section,
    Share,
    Table,
    Text,
)


def everything(text: str) -> Page:
    """A page with each kind of part, and the text wherever one can stand."""
    figure = draw(lambda axes: axes.set_title(text), text, legend=[(PALETTE["c0"], text)])
    table = Table((text, "b"), [(text, Share(0.2, before=0.5)), ("", Share(None))], {0}, note=text)
    quotes = Grid([Quote([text, Mark(text)], title=text, source=text)])
    inner = Section(text, [Items([(text, text)])], folded=True)
    parts = [text, Text(text, "warning"), figure, table, quotes, Commands([text]), inner]
    return Page(text, text, [Section(text, parts)], [Number(text, text, text)])


def test_texts_are_escaped() -> None:
    page = ParsedPage(everything(HOSTILE).html())
    assert page.text.count(HOSTILE) == 23
    assert {"table", "svg", "mark", "details", "pre"} <= page.tags


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_same(tmp_path: Path) -> None:
    file, profile = tmp_path / "page.html", tmp_path / "profile"
    file.write_bytes(everything(HOSTILE).html())
    command = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={profile}"]
    command += ["--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE)
    page = ParsedPage(shown.stdout)
    assert page.text.count(HOSTILE) == 23
    assert {"table", "svg", "mark", "details", "pre"} <= page.tags


def test_markdown_has_the_same_texts() -> None:
    content = everything("some words").markdown().decode()
    assert content.count("some words") == 20  # without <title>, and a figure is its caption
    hostile = everything(HOSTILE).markdown().decode().splitlines()
    outside = [line for line in hostile if not line.startswith("    ")]  # of blocks of code
    assert not any(line.replace(r"\<", "").count("<") for line in outside)
    rows = [line for line in hostile if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in rows} == {3}


def test_invalid_unicode_is_shown_as_a_question_mark() -> None:
    assert "half ? of a pair" in ParsedPage(Page("t", "half \ud800 of a pair", []).html()).text


def test_figure_has_the_colours_of_the_page() -> None:
    lines = [{"step": step, "loss": 9 / step, "validation_loss": None} for step in range(1, 9)]
    lines.append({"step": 8, "validation_loss": 2.0})
    figure = draw(lambda axes: draw_losses(axes, {"run": lines}))
    assert "var(--c0)" in figure.svg
    assert "var(--accent)" in figure.svg
    assert not any(colour in figure.svg for colour in PALETTE.values())
    assert figure == draw(lambda axes: draw_losses(axes, {"run": lines}))
    both = {"a": lines, "b": lines}
    assert picture(lambda axes: draw_losses(axes, both), "png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.percent(None), numbers.NONE),
        (numbers.percent(0.0), "0.0 %"),
        (numbers.percent(1e-9, 2), "< 0.01 %"),
        (numbers.percent(0.12345), "12.3 %"),
        (numbers.percent(1 - 1e-9, 2), "> 99.99 %"),
        (numbers.percent(1.0), "100.0 %"),
        (numbers.size(999), "999 B"),
        (numbers.size(999_700), "999.7 kB"),
        (numbers.size(999_970), "1.0 MB"),
        (numbers.size(1.2e18), "1,200.0 PB"),
        (numbers.duration(8.31), "8.3 s"),
        (numbers.duration(119.7), "2.0 min"),
        (numbers.duration(7200), "2.0 h"),
    ],
)
def test_numbers(shown: str, expected: str) -> None:
    assert shown == expected
