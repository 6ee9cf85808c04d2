"""Pages of tools.report: texts stay texts, in HTML and in Markdown; figures, numbers, and the
losses of several runs in one picture."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse_call
from tests.refusals import refused
from tests.tools.report.pages import HOSTILE, ParsedPage
from tools.report import numbers
from tools.report.figures import PALETTE, draw, picture
from tools.report.plot import draw_losses, plot, smooth
from tools.report.sections import (
    Beside,
    Commands,
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
    quotes = Beside([Quote([text, Mark(text)], title=text, source=text)])
    inner = Section(text, [Items([(text, text)])], folded=True)
    parts = [text, Text(text, "warning"), figure, table, quotes, Commands([text]), inner]
    return Page(text, text, [Section(text, parts)], [Number(text, text, text)])


def test_texts_are_escaped() -> None:
    page = ParsedPage(everything(HOSTILE).html())
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


def test_smoothing_keeps_lines_and_averages_noise() -> None:
    line = [float(step) for step in range(200)]
    assert smooth(line) == pytest.approx(line)
    noise = [math.cos(math.pi * step) for step in range(200)]
    assert max(map(abs, smooth(noise)[20:-20])) < 0.2
    assert smooth([5.0]) == [5.0]


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


def write_losses(folder: Path, terms: tuple[str, ...]) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "device": "cpu"}]
    lines += [{"step": k, **dict.fromkeys(terms, 9 / k)} for k in (1, 2, 3)]
    lines += [{"step": 3, **{f"validation_{term}": 3.5 for term in terms}}]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_plot_of_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_losses(Path("gpt2"), ("loss",))
    write_losses(Path("bert"), ("loss", "mlm_loss"))
    write_losses(Path("other/bert"), ("loss",))
    plot((Path("gpt2"), Path("bert/metrics.jsonl"), Path("other/bert")), Path("new/losses.svg"))
    labels = re.findall(r">([\w/]+, \w+)</text>", Path("new/losses.svg").read_text())
    names, kinds = ("gpt2", "bert", "other/bert"), ("training", "validation")
    assert labels == [f"{name}, {kind}" for name in names for kind in kinds]
    for words in ("gpt2 --output loss.png --term mlm_loss", "bert --output a.png --term step"):
        assert refused(lambda given: parse_call(plot, given, {})(), words) == "--term"
    assert refused(lambda given: parse_call(plot, given, {})(), "gpt2 --output a.gif") == "--output"
