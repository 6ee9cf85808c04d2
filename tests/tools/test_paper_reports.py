"""The reports of scripts/paper, of made-up numbers: golden tables, a page that fetches nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron.train.diagnose import NonFiniteError
from tasks.paper import compare
from tests.tools.test_quickstart import Links
from tools.paper.corpus import CORPUS_STEPS, DEV_SHARD
from tools.paper.figure7 import report as figure7
from tools.paper.figure7.plan import Run, metrics_file, parse_name
from tools.paper.miniature.plan import BUDGET
from tools.paper.miniature.report import report
from tools.paper.miniature.tables import verdict
from tools.paper.tables import Table
from tools.stages import own_folder, stamp_file

GOLDEN = """\
# The paper in miniature

| GPT-2 | WikiText103 perplexity per word | LAMBADA accuracy |
| --- | --- | --- |
| paper, 355M | 19.31 | 45.2 % |
| paper, 2.5B | 12.76 | 61.7 % |
| paper, 8.3B | 10.81 | 66.5 % |
| **this run, 5.3 M** | **1,234.50** | **2.0 %** |

| BERT | RACE | middle | high |
| --- | --- | --- | --- |
| paper, 336M | 83.0 % | 86.9 % | 81.5 % |
| paper, 1.3B | 87.3 % | 90.4 % | 86.1 % |
| paper, 3.9B | 89.5 % | 91.8 % | 88.6 % |
| paper, 3.9B ensemble | 90.9 % | 93.1 % | 90.0 % |
| **this run, 5.4 M** | **26.0 %** | **\N{EN DASH}** | **26.0 %** |
| always the commonest letter | 28.0 % | \N{EN DASH} | 28.0 % |
| chance, one of four | 25.0 % | 25.0 % | 25.0 % |

RACE: 26.0 % of 400 questions, where guessing gives 25.0 % with a standard error of 2.2 %: not to \
be told from chance."""


def result(task: str, parameters: int, **figures: Any) -> dict[str, Any]:
    """A record of tasks/main.py."""
    names = ("word_perplexity", "strict_accuracy", "accuracy")
    known = {name: f"what {name} <means>" for name in names}
    record: dict[str, Any] = {"task": task, "conventions": known, "device": "cpu"}
    record |= {"model": {"parameters": parameters}, **figures}
    if task != "HELDOUT":
        record["paper"] = compare(task, {"this_model": figures}, parameters)
    return record


RESULTS = {
    "heldout": result(
        "HELDOUT", 5_300_000, token_perplexity=50.0, word_perplexity=200.0, bits_per_byte=1.5,
        bigram_perplexity=90.0, unigram_perplexity=600.0, xz_bits_per_byte=2.0,
    ),
    "wikitext103": result(
        "WIKITEXT103", 5_300_000, word_perplexity=1234.5, num_original_tokens=217_642, window=256,
        stride=32,
    ),
    "lambada": result("LAMBADA", 5_300_000, strict_accuracy=0.02, num_examples=500),
    "race": result(
        "RACE", 5_400_000, accuracy=0.26, high_accuracy=0.26, majority_accuracy=0.28,
        high_majority_accuracy=0.28, questions=400, notes={"input": {"train": {"questions": 2400}}},
        hyper_parameters={"seq_length": 256, "epochs": 1},
    ),
}  # fmt: skip


def finished(output: Path) -> None:
    """A folder as the stages of the miniature leave it."""
    own_folder(output, [], fresh=False)
    for name in BUDGET:
        stamp = {"seconds": 30.0, "commands": [f"run {name} <now>"], "facts": {}, "outputs": {}}
        stamp_file(output, name).write_text(json.dumps(stamp))
    count = {"documents": 9, "bytes": 12_345, "sources": {}}
    step = {"input": count, "output": count, "dropped": {}, "unit_of_length": "pieces"}
    step |= {"repaired": 1, "sides": {"train": count, "valid": count}, "documents_cut": 7}
    found = {"ngrams": 1000, "before": 0.15, "after": 0.002}
    step |= {"leakage": {"wiki.valid.tokens": found, DEV_SHARD: found}}
    for name in CORPUS_STEPS:
        (output / "corpus" / name).mkdir(parents=True)
        (output / "corpus" / name / "manifest.json").write_text(json.dumps(step))
    for model, term in (("gpt2", "loss"), ("bert", "mlm_loss")):
        (output / model).mkdir()
        (output / model / "run.json").write_text(json.dumps({"parameters": 5_300_000}))
        lines = [{"step": k, "samples": 4 * k, "loss": 9 / k, term: 8 / k, "tokens_per_second": 50}
                 for k in (1, 2, 3)]  # fmt: skip
        lines.append({"step": 3, "validation_loss": 3.5, f"validation_{term}": 2.5})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (output / model / "metrics.jsonl").write_text(text)
    for name, record in RESULTS.items():
        (output / f"{name}.json").write_text(json.dumps(record))


def test_the_tables_stand_beside_the_papers(tmp_path: Path) -> None:
    finished(tmp_path)
    report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(GOLDEN)
    assert "Fine-tuned on 2,400 of the 87,866 questions" in text
    assert "217,642 tokens of wiki.valid.tokens, in windows of 256 with a stride of 32" in text
    assert "| RACE, development set | 1,000 | 15.000 % | 0.200 % |" in text
    assert "| gpt2 | 30 s | 12 min |" in text
    assert "    run race <now>" in text
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["results"] == RESULTS
    assert facts["training"]["bert"]["validation"] == 2.5


def test_the_page_shows_the_same_and_fetches_nothing(tmp_path: Path) -> None:
    finished(tmp_path)
    report(tmp_path)
    html = (tmp_path / "report.html").read_text()
    seen = Links()
    seen.feed(html)
    assert all(link.startswith("#") for link in seen.links)
    assert html.count("<svg") == 2
    assert not re.search(r"url\(http|@import|<script", html)
    for cell in re.findall(r"[^|*\s][^|*]*", GOLDEN.partition("\n\nRACE:")[0].partition("\n\n")[2]):
        if cell.strip("- \n"):
            assert cell.strip() in seen.text
    assert "not to be told from chance" in seen.text
    assert "run race <now>" in seen.text
    assert "what accuracy <means>" in seen.text


def test_an_unfinished_run_says_which_stage(tmp_path: Path) -> None:
    finished(tmp_path)
    stamp_file(tmp_path, "lambada").unlink()
    with pytest.raises(ValueError, match="--output .*: stage lambada has not finished"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("accuracy", "questions", "said"),
    [(0.26, 4000, "not to be told from chance"), (0.27, 4000, "above chance"),
     (0.20, 400, "not to be told from chance")],
)  # fmt: skip
def test_chance_is_told_from_more_than_two_standard_errors(
    accuracy: float, questions: int, said: str
) -> None:
    assert f": {said}." in verdict({"accuracy": accuracy, "questions": questions})


def test_a_tables_marked_rows_are_bold() -> None:
    shown = Table(("a", "b"), [("1", "<2>"), ("3", "4")], frozenset([1]))
    assert shown.markdown().splitlines()[2:] == ["| 1 | <2> |", "| **3** | **4** |"]
    assert '<tr class="ours"><td>3</td>' in shown.html()
    assert "&lt;2&gt;" in shown.html()


def trained(output: Path, run: Run, end: float) -> None:
    """A run of 100 logged steps that falls to `end`."""
    file = metrics_file(output, run)
    file.parent.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "started": "now"}]
    for k in range(1, 101):
        line = {"step": 10 * k, "mlm_loss": end + 100 - k, "grad_norm": 1.0, "elapsed_seconds": k}
        lines.append(line)
    check = {"step": 1000, "validation_mlm_loss": end + 0.5, "validation_sop_loss": 0.6}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, check]))
    file.with_name("run.json").write_text(json.dumps({"parameters": 1000 * run.depth}))


def test_figure_7_has_a_line_for_each_rate_and_depth_and_a_picture(tmp_path: Path) -> None:
    names = []
    for rate in (2e-3, 5e-4):
        for depth in (6, 48):
            for order, end in (("pre-ln", 3.0), ("post-ln", 3.0 + depth / 10)):
                run = Run(order, depth, rate)  # type: ignore[arg-type]
                assert parse_name(run.name) == run
                trained(tmp_path, run, end)
                names.append(run.name)
    figure7.report(tmp_path, tuple(names))
    # The last five of the hundred are 4, 3, 2, 1 and 0 above the end.
    assert (tmp_path / "figure7.md").read_text().splitlines()[2:] == [
        "| 0.002 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.002 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
        "| 0.0005 | 6 | 6,000 | 5.000 | 5.600 | 3.500 | 4.100 |",
        "| 0.0005 | 48 | 48,000 | 5.000 | 9.800 | 3.500 | 8.300 |",
    ]
    assert (tmp_path / "figure7.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    runs = json.loads((tmp_path / "figure7.json").read_text())["runs"]
    assert [(run["order"], run["depth"], run["rate"]) for run in runs][:3] == [
        ("pre-ln", 6, 0.002),
        ("post-ln", 6, 0.002),
        ("pre-ln", 48, 0.002),
    ]
    assert len(runs[0]["curve"]) == 100


def diverged(output: Path, run: Run, done: int) -> None:
    """A run whose loss grew, and was no number in the step after `done`."""
    trained(output, run, 3.0)
    file = metrics_file(output, run)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["step"] <= done]
    if done:
        lines[-1]["mlm_loss"] = 1e6
    lines.append({"step": done, "ended": NonFiniteError.__name__, "exit_code": 1})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("done", [0, 57, 437])
def test_figure_7_shows_where_a_run_diverged(tmp_path: Path, done: int) -> None:
    whole, cut = Run("pre-ln", 6, 2e-3), Run("post-ln", 6, 2e-3)
    trained(tmp_path, whole, 3.0)
    diverged(tmp_path, cut, done)
    figure7.report(tmp_path, (whole.name, cut.name))
    end = f"diverged at step {done + 1}"
    row = f"| 0.002 | 6 | 6,000 | 5.000 | {end} | 3.500 | {end} |"
    assert (tmp_path / "figure7.md").read_text().splitlines()[2:] == [row]
    assert (tmp_path / "figure7.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    runs = json.loads((tmp_path / "figure7.json").read_text())["runs"]
    assert [run["diverged_at"] for run in runs] == [None, done + 1]
    reached = [runs[1][name] for name in ("steps", "train_loss", "validation_loss")]
    assert reached == [done, None, None]
    assert [step for step, _ in runs[1]["curve"]] == list(range(10, done + 1, 10))

    panel = Figure().subplots()
    figure7.fill(panel, runs)
    figure7.bound(panel, runs)
    assert [text.get_text().strip() for text in panel.texts] == [end]
    bottom, top = panel.get_ylim()
    assert 0 < bottom < top < 120, "the other curve fills the picture"


def test_a_last_evaluation_that_is_not_finite_is_told(tmp_path: Path) -> None:
    run = Run("pre-ln", 6, 2e-3)
    trained(tmp_path, run, 3.0)
    check = {"step": 1000, "validation_mlm_loss": None, "validation_sop_loss": None}
    with metrics_file(tmp_path, run).open("a") as file:
        file.write(json.dumps(check) + "\n")
    facts = figure7.describe(tmp_path, run)
    losses = [figure7.told_loss(facts, kind) for kind in ("train_loss", "validation_loss")]
    assert losses == ["5.000", "not finite"]
    assert facts["validation_curve"] == [(1000, 3.5)]


def test_a_curve_is_smoothed_without_moving_its_end() -> None:
    steps, losses = figure7.smooth([(k, float(k)) for k in range(1, 21)])
    assert (steps[0], steps[-1], len(steps)) == (10, 20, 11)
    assert (losses[0], losses[-1]) == (5.5, 15.5)
    assert figure7.smooth([(1, 2.0), (2, 4.0)]) == ([1, 2], [2.0, 4.0])


def test_a_run_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    run = Run("pre-ln", 6, 2e-3)
    trained(tmp_path, run, 3.0)
    file = metrics_file(tmp_path, run)
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ValueError, match="no evaluation"):
        figure7.describe(tmp_path, run)
