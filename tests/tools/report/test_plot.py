"""Curves of runs: their names, their x axis, what is drawn of them and where it is written."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron.config.parse import parse_call
from megatron.train.callbacks import Callback
from megatron.train.metrics import mark_rewound, read_metrics
from megatron.train.step import StepResult
from tests.refusals import by_last_flag, refused
from tests.tools.report.pages import START, ParsedPage, step, write
from tests.train.test_callbacks import run
from tools.report import curves
from tools.report.plot import plot


def drawn(runs: curves.Runs, term: str = "loss", **options: Any) -> list[Any]:
    """The lines that are drawn of a term."""
    axes = Figure().subplots()
    curves.draw_panel(axes, runs, curves.term_panel(term), **options)
    return [line for line in axes.lines if len(line.get_xdata())]


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["a/x/run"], ["run"]),
        (["a/x/run", "b/x/run"], ["a", "b"]),
        (["a/x/run", "b/x/run", "a/y/run"], ["a/x", "b/x", "a/y"]),
        (["gpt2", "bert", "other/bert"], ["gpt2", "bert", "other/bert"]),
        (["a", "a/again"], ["a", "a/again"]),
        (["a/one.jsonl", "a/two.jsonl"], ["one", "two"]),
        (["a/metrics.jsonl", "b/metrics.jsonl"], ["a", "b"]),
        (["b/../a/x", "c/x"], ["a", "c"]),
        (["x/a", "x/a.jsonl"], ["a", "a.jsonl"]),
        (["x/a", "y/a.jsonl"], ["x", "y"]),
    ],
)
def test_a_run_is_called_by_what_differs(
    runs: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in runs:
        place = Path(name)
        (place.parent if place.suffix else place).mkdir(parents=True, exist_ok=True)
        if place.suffix:
            place.touch()
    (tmp_path / "b").mkdir(exist_ok=True)
    assert curves.run_names([Path(name) for name in runs]) == names


class Counter(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = [0]

    def post_step(self, result: StepResult) -> None:
        self.tokens.append(self.tokens[-1] + result.tokens)


def test_tokens_and_time_are_those_of_a_run(tmp_path: Path) -> None:
    counter = Counter()
    run(tmp_path, [counter], log_interval=2)
    lines = read_metrics(tmp_path / "m.jsonl")
    assert len(set(counter.tokens)) == 5
    assert [*curves.positions(lines, "tokens", [0, 2, 4])] == pytest.approx(counter.tokens[::2])
    totals = [0.0]
    for line in (each for each in lines if "step_seconds" in each):
        totals.append(totals[-1] + 2 * line["step_seconds"])
    assert [*curves.positions(lines, "time", [0, 2, 4])] == totals
    assert [*curves.positions(lines, "steps", [0, 2, 4])] == [0, 2, 4]


def test_a_resumed_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """It was killed after step 10 and saved at step 6; a step has 0.25 s, or later 0.5 s."""
    file = write(tmp_path, [START, step(5, 3.0), step(10, 9.0)]) / "metrics.jsonl"
    mark_rewound(file, 6)
    slower = {"step_seconds": 0.5, "tokens_per_second": 300.0}
    write(tmp_path, [{**START, "step": 6}, *(step(k, 2.0, **slower) for k in (10, 15))])
    write(tmp_path, [{"step": 15, "validation_loss": 2.5}])
    lines = read_metrics(file)
    seconds, tokens = [1.25, 3.75, 6.25], [500.0, 1250.0, 2000.0]
    assert [*curves.positions(lines, "time", [5, 10, 15])] == seconds
    assert [*curves.positions(lines, "tokens", [5, 10, 15])] == tokens
    for against, x in (("steps", [5, 10, 15]), ("time", seconds), ("tokens", tokens)):
        _, training, validation = drawn({"own": lines}, against=against)
        assert [*training.get_xdata()] == x
        assert [*training.get_ydata()] == [3.0, 2.0, 2.0]
        assert [*validation.get_xdata()] == x[-1:]


def test_time_begins_with_the_record() -> None:
    lines = [{**START, "step": 100}, step(104), step(108)]
    assert [*curves.positions(lines, "time", [100, 104, 108])] == [0.0, 1.0, 2.0]
    assert [*curves.positions(lines, "tokens", [104, 108])] == [10_400.0, 10_800.0]


def test_a_run_of_one_point_is_visible() -> None:
    *_, line = drawn({"own": [START, step(1)]})
    assert line.get_marker() == "o"
    assert line.get_markersize() > 0


def test_what_is_not_finite_is_left_out_and_said() -> None:
    lines = [START, step(1, 3.0), step(2, None), step(3, None, mfu=0.5)]
    assert [[*line.get_xdata()] for line in drawn({"own": lines})] == [[1], [1]]
    assert len(curves.left_out("own", [*lines, {"step": 3, "validation_loss": None}])) == 2
    assert not curves.left_out("own", lines[:2])
    keys = ["lr", "grad_norm", "tokens_per_second", "mfu"]
    assert [panel.key for panel in curves.panels({"own": [START, *lines[2:]]})] == keys


def test_panels_are_those_of_any_run() -> None:
    bert = [step(1, mlm_loss=1.0, sop_loss=0.5, peak_memory_bytes=2**31)]
    keys = [panel.key for panel in curves.panels({"gpt": [step(1)], "bert": bert})]
    assert keys[:3] == ["loss", "mlm_loss", "sop_loss"]
    assert keys[-1] == "peak_memory_bytes"
    assert len(drawn({"gpt": [step(1)], "bert": bert}, "sop_loss")) == 2


def test_smoothing_keeps_lines_and_averages_noise() -> None:
    line = [float(step) for step in range(200)]
    assert curves.smooth(line) == pytest.approx(line)
    noise = [math.cos(math.pi * step) for step in range(200)]
    assert max(map(abs, curves.smooth(noise)[20:])) < 0.2
    assert curves.smooth([0.0] * 50 + [1.0] + [0.0] * 49)[50] == pytest.approx(1 / 9)
    assert curves.smooth([5.0]) == [5.0]
    assert curves.smooth([0.1] * 3000) == [0.1] * 3000


def test_a_long_curve_keeps_its_spikes() -> None:
    values = [0.0] * 50_000
    values[12_345], values[40_000] = 9.0, -9.0
    x, y = curves.thinned(range(50_000), values)
    assert len(x) <= 2 * curves.BUCKETS + 2
    assert dict(zip(x.tolist(), y.tolist(), strict=True)).items() >= {(12_345, 9.0), (40_000, -9.0)}


def test_plot_writes_beside_a_run_and_here_for_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "large"):
        write(Path(name, "run"), [START, step(1), step(2)])
    plot((Path("small/run"),))
    files = [tmp_path / "small" / "run" / name for name in ("plot.png", "plot.html")]
    assert capsys.readouterr().out.splitlines() == [str(file) for file in files]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert {"svg", "table"} <= ParsedPage(files[1].read_bytes()).tags
    plot((Path("small/run"), Path("large/run/metrics.jsonl"), Path("small/run")))
    assert capsys.readouterr().out.split() == ["plot.png", "plot.html"]
    page = ParsedPage(Path("plot.html").read_bytes())
    assert page.text.count("small") == page.text.count("large") == 3 + 4  # a legend for each panel


def test_a_term_has_a_picture_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(Path(name), [step(1, mlm_loss=3.0), {"step": 1, "validation_mlm_loss": 3.5}])
    plot((Path("a"), Path("b")), Path("new/losses.svg"), term="mlm_loss", against="time")
    text = Path("new/losses.svg").read_text()
    for label in ("a, training", "a, validation", "b, training", "b, validation"):
        assert text.count(f">{label}</text>") == 1


def test_a_run_without_throughput_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(Path(name), [{"step": 1, "loss": 2.0}, {"loss": 1.0}])
    with Path("b/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": NaN}\n')
    plot((Path("a"), Path("b")))
    assert "b: 1 of 2 values" in ParsedPage(Path("plot.html").read_bytes()).text
    plot((Path("b"),), Path("term.html"), term="loss")
    assert "b: 1 of 2 values" in ParsedPage(Path("term.html").read_bytes()).text


LAST = """
gpt2 --output a.gif | gpt2 bert --term mlm_loss | bert --term step | gpt2 vit --against tokens
old --against time
"""
FIRST = [("started", "started/metrics.jsonl"), ("nothing", "nothing"), ("", "RUNS")]


@pytest.mark.parametrize(("words", "flag"), [*by_last_flag(LAST), *FIRST])
def test_refusals(words: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("gpt2"), [START, step(1)])
    write(Path("bert"), [START, step(1, mlm_loss=2.0)])
    images = {"images_per_second": 5.0, "step_seconds": 1.0}
    write(Path("vit"), [{"step": 1, "loss": 2.0, **images}])
    write(Path("old"), [{"step": 1, "loss": 2.0, "tokens_per_second": 5.0}])
    write(Path("started"), [START])
    assert refused(lambda given: parse_call(plot, given, {})(), words) == flag
    assert not [*tmp_path.rglob("plot.*")]
    assert json.loads(Path("started/metrics.jsonl").read_text()) == START
