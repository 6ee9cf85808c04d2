"""Reports of experiments, of made-up numbers: tables, facts, files."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from math import inf, nan
from operator import lt
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tests.tools.corpus.lines import write_jsonl
from tests.tools.experiments.test_commands import SIZES
from tests.tools.report.pages import HOSTILE, ParsedPage
from tools.corpus.files import Count, DocumentCounts
from tools.experiments import (
    architectures,
    context_memory,
    dropout_quality,
    figure6,
    figure7,
    learning_curves,
    lm_harness,
    quickstart,
)
from tools.experiments.miniature import judge_race
from tools.experiments.runner import StageError
from tools.report.sections import Figure

PNG = b"\x89PNG\r\n\x1a\n"
CHECK = {"step": 1000, "validation_mlm_loss": 3.5, "validation_sop_loss": 0.6}


@pytest.mark.parametrize(
    ("accuracy", "questions", "is_chance"),
    [(0.26, 4000, True), (0.27, 4000, False), (0.20, 400, True)],
)
def test_chance_is_two_standard_errors(accuracy: float, questions: int, is_chance: bool) -> None:
    text = judge_race({"accuracy": accuracy, "questions": questions})
    assert (": above chance" in text) != is_chance


def trained_figure7(
    settings: figure7.Settings, run: tuple[str, int, float], end: float, *more: dict[str, Any]
) -> None:
    """A run of 100 logged steps that falls to `end`."""
    folder = figure7.run_folder(settings, *run)
    lines = [
        {"step": 10 * k, "mlm_loss": end + 100 - k, "grad_norm": 1.0, "elapsed_seconds": k}
        for k in range(1, 101)
    ]
    write_jsonl(folder / "metrics.jsonl", [{"step": 0, "started": "now"}, *lines, *more])
    (folder / "run.json").write_text(json.dumps({"parameters": 1000 * run[1]}))


def test_figure_7_rows(tmp_path: Path) -> None:
    settings = figure7.Settings(output=tmp_path, rates=(2e-3, 5e-4), depths=(6, 48))
    for rate, depth in product(settings.rates, settings.depths):
        for order, end in (("pre-ln", 3.0), ("post-ln", 3.0 + depth / 10)):
            check = {**CHECK, "validation_mlm_loss": end + 0.5}
            trained_figure7(settings, (order, depth, rate), end, check)
    figure7.report(settings)
    rows = [line for line in (tmp_path / "figure7.md").read_text().splitlines() if "| 0.0" in line]
    # The last five of the hundred are 4, 3, 2, 1 and 0 above the end.
    assert rows == [
        "| 0.002 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.002 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
        "| 0.0005 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.0005 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
    ]
    assert (tmp_path / "figure7.png").read_bytes()[:8] == PNG
    assert "<svg" in (tmp_path / "figure7.html").read_text()


def test_figure_7_with_a_diverged_run(tmp_path: Path) -> None:
    settings = figure7.Settings(output=tmp_path, depths=(6,))
    ended = {"step": 1000, "ended": figure7.DIVERGED, "exit_code": 1}
    trained_figure7(settings, ("pre-ln", 6, 1e-3), 3.0, CHECK)
    trained_figure7(settings, ("post-ln", 6, 1e-3), 3.0, ended)
    figure7.report(settings)
    runs = json.loads((tmp_path / "figure7.json").read_text())["runs"]
    assert [run["diverged_at"] for run in runs] == [None, 1001]
    assert [run["train_loss"] for run in runs] == [5, None]


def test_last_evaluation_is_not_finite(tmp_path: Path) -> None:
    settings, run = figure7.Settings(output=tmp_path), ("pre-ln", 6, 2e-3)
    last = {"step": 1000, "validation_mlm_loss": None, "validation_sop_loss": None}
    trained_figure7(settings, run, 3.0, CHECK, last)
    facts = figure7.describe(settings, *run)
    assert figure7.loss_in_words(facts, "train_loss") == "5.000"
    assert not figure7.loss_in_words(facts, "validation_loss")[0].isdigit()
    assert facts["validation_curve"] == [(1000, 3.5)]


def test_order_of_sizes() -> None:
    for values, count in (([3, 2, 1], 0), ([300, 300, 310], 2), ([3, 2, nan], 1)):
        assert len(figure6.disordered(SIZES, values, lt)) == count
    curve = [(100, 6.0), (200, 4.0), (300, 3.0)]
    assert [figure6.first_step(curve, loss) for loss in (6.5, 4.0, 2.0)] == [100, 200, None]
    ends = {"validation_loss": 3.0, "steps": 300, "validation_curve": curve}
    for accuracy, is_near in ((0.62, True), (0.66, False)):  # standard errors: 0.05 of each
        lambada = ({"num_examples": 100, "strict_accuracy": each} for each in (0.5, accuracy))
        text = figure6.remarks([{"name": "x", **ends, "lambada": each} for each in lambada])
        assert ("standard errors" in text) is is_near


def test_run_without_an_evaluation(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "2x64" / "metrics.jsonl", [{"step": 0, "started": "now"}])
    refusal(partial(figure6.describe, tmp_path / "2x64"))
    settings, run = figure7.Settings(output=tmp_path), ("pre-ln", 6, 2e-3)
    trained_figure7(settings, run, 3.0)
    refusal(partial(figure7.describe, settings, *run))


def test_quickstart_page() -> None:
    counted = {"documents": 2, "bytes": 20}
    read, lost = Count(3, 40), Count(1, 10)  # of 20 bytes left; the other 10 were cut
    counts = DocumentCounts({"a": read}, {"a": Count(2, 20)}, {HOSTILE: {"a": lost}})
    step = {**counts.to_json(), "bad_lines": []}
    clean = {**step, "repaired": 1, "unit_of_length": "pieces"}
    names = ("token", "bigram", "unigram", "word")
    facts = {
        "corpus": {"clean": clean, "split": {**step, "sides": {"train": counted}}},
        "layout": {"device": "cpu", "tensor_parallel_size": 2, "data_parallel_size": 1},
        "seconds": {"clean": 1.5},
        "training": {"steps": 3, "tokens_per_second": 7.5, "compiled": True},
        "evaluation": {
            **{f"{name}_perplexity": 7.0 for name in names},
            **dict.fromkeys(("bits_per_byte", "xz_bits_per_byte", "cloze_accuracy"), 0.5),
            **dict.fromkeys(("tokens", "words", "bytes"), 9),
        },
        "samples": [{"prompt": HOSTILE, "text": HOSTILE + HOSTILE}],
        "commands": {"clean": [HOSTILE], "tokenizer": []},
    }
    page = quickstart.make_page(facts, Figure("<svg></svg>"), Path("runs"))
    assert ParsedPage(page.html()).text.count(HOSTILE) == 5
    text = page.markdown().decode()
    assert "| **Raw** | **3** | **40 B** |" in text
    assert " | \N{MINUS SIGN}10 B | 25.00 % |\n" in text


def compared(first: Sequence[float], own: Sequence[float], **facts: Any) -> dict[str, Any]:
    """The second of two runs of learning_curves with these losses. facts: of the second."""
    run = {"group": "layouts", "name": "own", "tolerance": None, "rates": [0.1]}
    found = {**run, "losses": own, **facts}
    learning_curves.compare(found, {**run, "losses": first})
    return found


@pytest.mark.parametrize(
    ("first", "own", "facts"),
    [
        ([5.0], [nan], {}),
        ([nan], [nan], {}),
        ([5.0], [None], {}),  # as metrics.jsonl has what is not finite
        ([5.0], [5.0], {"rates": [0.0]}),
        ([5.0], [5.0], {"rates": [nan]}),
        ([5.0], [5.0], {"rates": [0.2]}),
        ([5.0], [5.0], {"group": "masks of dropout, seed 1", "validation_loss": nan}),
    ],
)
def test_learning_curves_that_prove_nothing(
    first: Sequence[float], own: Sequence[float], facts: dict[str, Any]
) -> None:
    with pytest.raises(StageError):
        compared(first, own, **facts)


def test_rates_where_fp16_skips_a_step() -> None:
    assert compared([5.0], [5.0], rates=[0.2], skipped_steps=1)["gaps"] == [0.0]
    with pytest.raises(StageError):  # a warm-up that never ends
        compared([5.0], [5.0], rates=[0.0], skipped_steps=1)


def test_gaps_of_learning_curves() -> None:
    serial = [8.0 - 0.01 * step for step in range(200)]
    own = compared(serial, [x + (0.5 if k == 49 else 0.001) for k, x in enumerate(serial)])
    table = learning_curves.table([own])
    row = dict(zip(table.head, table.rows[0], strict=True))
    shown = {"": "own", "first loss": "8.001", "last loss": "6.0110"}
    shown |= {"largest gap": "5.0e-01", "at step": "50", "mean gap": "3.5e-03"}
    assert row == shown
    assert "5.0e-01" in learning_curves.lead([own], 200)
    with pytest.raises(StageError):
        compared(serial, serial, rates=[0.1 + 1e-6])


@pytest.mark.parametrize(
    ("gaps", "outside"),
    [((0.015, 0.002), False), ((0.017, 0.0), True), ((0.005, 0.005), True)],
    ids=["within", "largest", "mean"],
)
def test_tolerance_of_learning_curves(gaps: tuple[float, float], outside: bool) -> None:
    """gaps: of one step in 100, and of the others; in bf16."""
    bf16 = [5.0 + gaps[0]] + [5.0 + gaps[1]] * 99
    found = compared([5.0] * 100, bf16, tolerance=learning_curves.TOLERANCES["bf16"])
    assert (found["share"] > 1) is outside


def write_curve(settings: learning_curves.Settings, losses: dict[str, float]) -> None:
    """Runs of dropout 0 with a loss each, by name; the first is what others are compared with."""
    for run in learning_curves.chosen_runs(settings):
        line = {"step": 1, "loss": losses[run.name], "lr": 0.1}
        folder = learning_curves.folder_of(settings, run)
        write_jsonl(folder / "metrics.jsonl", [line, {"step": 1, "ended": "train_iters"}])


def test_learning_curves_that_fail(tmp_path: Path) -> None:
    names = ("fp32, t = 1", "bf16, t = 1")
    settings = learning_curves.Settings(output=tmp_path, steps=1, runs=names)
    write_curve(settings, dict.fromkeys(names, 5.0))
    learning_curves.report(settings)
    write_curve(settings, dict(zip(names, (5.0, 5.1), strict=True)))
    with pytest.raises(StageError):
        learning_curves.report(settings)
    files = [
        learning_curves.folder_of(settings, run) / "metrics.jsonl"
        for run in learning_curves.chosen_runs(settings)
    ]
    (whole,) = {file.read_text().replace("5.1", "5.0") for file in files}
    for lost in (whole.replace('"step": 1', '"step": 2'), whole.splitlines()[0]):  # a step, the end
        for file in files:
            file.write_text(lost)
        refusal(lambda: learning_curves.report(settings))


def test_dropout_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [dropout_quality.PROGRAM, "--output", str(tmp_path)])
    monkeypatch.setattr("megatron.train.machine.commit", lambda: "0123456789ab-dirty")
    settings = dropout_quality.Settings(rows=512, columns=64, output=tmp_path)
    text = dropout_quality.report(settings)
    facts = json.loads((tmp_path / "dropout_quality.json").read_text())
    assert all(f"| {name} | {value:+.2f} |" in text for name, value in facts["figures"].items())
    machine = facts["machine"]
    assert {"processor", "date", "torch", "numpy", "python", "cores"} <= machine.keys()
    assert machine["commit"] == "012345678-dirty"
    assert f"    {machine.pop('command')}\n" in text
    assert all(f"{name} {value}" in text for name, value in machine.items())
    monkeypatch.setattr(dropout_quality, "quality", lambda *_: {"rate": nan})
    refusal(lambda: dropout_quality.report(settings))


def test_context_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [context_memory.PROGRAM, "--output", str(tmp_path)])
    settings = context_memory.Settings(preset="quickstart", lengths=(256, 512), output=tmp_path)
    context_memory.report(settings)
    facts = json.loads((tmp_path / "context_memory.json").read_text())
    for ranks, kind in product((2, 4), ("a2a", "p2p")):
        short, long = facts[f"{ranks} ranks, {kind}"]
        assert short < facts["one rank"][0]
        assert short < long < facts["one rank"][1]
    assert (tmp_path / "context_memory.png").stat().st_size > 0


def test_lm_harness_that_differs(tmp_path: Path) -> None:
    def write(accuracy: float, reference: float = 0.5, others: float = 9.0) -> None:
        own = {"strict_accuracy": accuracy, "last_word_perplexity": others}
        pages = {f"{name}_per_document": others for name in ("word_perplexity", "bits_per_byte")}
        theirs = {task: {} for task in lm_harness.TASKS}
        for task, ours, name in lm_harness.FIGURES.values():
            theirs[task][name] = {**own, **pages, "strict_accuracy": reference}[ours]
        records = {"lambada": own, "wikitext103": pages, "harness": {"results": theirs}}
        for name, record in {**records, "harness_exported": {"results": theirs}}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(record))

    settings = lm_harness.Settings(output=tmp_path)
    write(0.5)
    assert "0.5000" in lm_harness.report(settings)
    for values in ((0.502,), (nan,), (0.5, nan), (0.5, inf), (inf, inf), (0.0, 0.0, 0.0)):
        write(*values)
        with pytest.raises(StageError):
            lm_harness.report(settings)


def test_architectures(tmp_path: Path) -> None:
    row = partial(architectures.Row, difference=1e-15, shares=(0.5, 0.25))
    rows = [row("one", "exact"), row("one", "exact", changes='"a": 1')]
    rows.append(architectures.Row("two", "refused", f"{architectures.NO_LAYER}mixers"))
    text = architectures.report(rows, ["three"], architectures.Settings(output=tmp_path))
    assert "1 of 1 dense architectures" in text
    assert '| one | "a": 1 | exact | 1e-15 | 50 % | 25 % |' in text
    assert "three" in text
    facts = json.loads((tmp_path / "architectures.json").read_text())
    assert facts["machine"]["commit"] in text
    assert [each["outcome"] for each in facts["architectures"]] == ["exact", "exact", "refused"]
