"""Questions whose turn is a whole run of a program: what they conclude, and each in miniature."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import finetuning, learning_curves, lm_harness
from benchmarks.harness import Flags, Rank
from benchmarks.program import training
from benchmarks.report import Results
from tests.benchmarks.run import figures, run
from tests.data.samples import write_data, write_tokenizer
from tests.tasks.made import write_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 60 ids, each followed by the next."""
    prefix = tmp_path_factory.mktemp("data") / "text_document"
    starts = np.random.default_rng(0).integers(0, 60, 60)
    write_data(prefix, [[*((start + np.arange(300)) % 60 + 1), 0] for start in starts])
    return prefix


def results(first: list[float], own: list[float], **facts: Any) -> Results:
    """Of two contenders of learning_curves, with these losses; facts: of the second."""
    record = {"group": "layouts", "first": "first", "reason": "", "facts": {}}
    contenders = [
        record | {"name": "first", "rounds": [{"losses": first}]},
        record | {"name": "own", "rounds": [{"losses": own}], "facts": facts},
    ]
    return Results(learning_curves.QUESTION, {"contenders": contenders, "steps": len(first)})


PROGRAM = """
import json, sys
from pathlib import Path
option = dict(zip(sys.argv, sys.argv[1:]))
file, last = Path(option["--save"], "metrics.jsonl"), int(option["--stop"])
step = len(file.read_text().splitlines()) if file.exists() else 0
with file.open("a") as stream:
    for number in range(step + 1, last + 1):
        ended = {"ended": "train_iters"} if number == 4 else {}
        line = {"step": number, "loss": 8.0 - number, "lr": 0.1, "seed": option.get("--seed")}
        print(json.dumps(line | ended), file=stream)
"""


def test_a_run_of_two_starts_is_one_record_and_a_round_has_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    turn = training(Rank(), [(1, ["--stop", "2"]), (1, ["--stop", "4"])], str(file))
    last = {"step": 4, "loss": 4, "lr": 0.1, "seed": None, "ended": "train_iters"}
    assert turn() == {"losses": [7, 6, 5, 4], "rates": [0.1] * 4, **last}
    with pytest.raises(RuntimeError):
        training(Rank(), [(1, ["--stop", "3"])], str(file))()
    seeds = [
        learning_curves.reseeded(Rank(round=number), ["--stop", "4"], str(file))()["seed"]
        for number in range(2)
    ]
    assert seeds == ["1", "2"]


def test_gaps_are_to_the_first_run_at_the_same_step() -> None:
    serial = [8.0 - 0.01 * step for step in range(200)]
    cut = [loss + (0.5 if step == 49 else 0.001) for step, loss in enumerate(serial)]
    found = results(serial, cut)
    row = [found.median("layouts", "own", title) for title in found.columns]
    np.testing.assert_allclose(row, [8.001, 6.011, 0.5, 50, (199 * 0.001 + 0.5) / 200])
    assert found.cell("layouts", "first", "largest gap") is None
    assert "5.0e-01" in learning_curves.QUESTION.result(found)


@pytest.mark.parametrize(
    ("gaps", "outside"),
    [((0.015, 0.002), False), ((0.017, 0.0), True), ((0.005, 0.005), True)],
    ids=["within", "largest", "mean"],
)
def test_tolerance_is_of_the_largest_and_of_the_mean_gap(
    gaps: tuple[float, float], outside: bool
) -> None:
    """gaps: of one step in 100, and of the others; in bf16."""
    bf16 = [5.0 + gaps[0]] + [5.0 + gaps[1]] * 99
    found = results([5.0] * 100, bf16, **learning_curves.TOLERANCES["bf16"])
    assert bool(learning_curves.QUESTION.failure(found)) is outside


def test_learning_curves_are_compared(tmp_path: Path, data: Path) -> None:
    names = ["serial", "transformers", *learning_curves.MASKS]
    words = ["--data-path", data, "--steps", 52, "--contenders", *names]
    record = run(tmp_path, "learning_curves", *words)
    serial, theirs = (figures(record, name, "layouts")["losses"] for name in names[:2])
    assert serial[-1] < serial[0]
    np.testing.assert_allclose(theirs, serial, atol=2e-5)
    first, second = (figures(record, name, "masks of dropout") for name in names[2:])
    assert first["first_loss"] != second["first_loss"]  # other elements are dropped
    # Of the same weights and samples.
    assert first["first_loss"] == pytest.approx(second["first_loss"], rel=0.02)


def test_fine_tuning_from_initial_weights(tmp_path: Path) -> None:
    labels = {"alpha": "entailment", "beta": "neutral", "gamma": "contradiction"}
    pretrained = write_model(tmp_path / "model", words=[*labels]).parent
    rows = [
        {"text_a": f"the {word}", "text_b": "the", "label": label} for word, label in labels.items()
    ]
    train, dev = tmp_path / "train", tmp_path / "dev"
    for file, count in ((train, 20), (dev, 8)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows * count))
    settings = "--task MNLI --seeds 2 --epochs 1 --lr 3e-3 --seq-length 16 --micro-batch-size 8"
    settings += " --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"
    words = ["--pretrained", pretrained, f"--settings={settings}", "--train-data", train]
    record = run(tmp_path, "finetuning", *words, "--valid-data", dev)
    ours = figures(record, "pretrained")
    assert ours["majority_accuracy"]["median"] == pytest.approx(1 / 3)
    theirs, initial = (
        load_file(next(Path(each.arguments["words"][-1]).glob("step_*/*.safetensors")))
        for each in finetuning.contenders(Flags(), pretrained, train, dev)
    )
    assert theirs.keys() == initial.keys()
    assert not all(torch.equal(theirs[key], initial[key]) for key in theirs)


@pytest.mark.slow
def test_three_ways_to_score_one_model(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_tokenizer(tmp_path)
    passages = [f"In the {word} there is a thing in the {word}" for word in ("inn", "tin", "bin")]
    (tmp_path / "lambada").write_text("".join(f"{text}\n" for text in passages))
    article = " = {0} = \n \n the {0} in the inn . \n the thing . \n \n"
    (tmp_path / "wiki").write_text(" \n" + article.format("One") + article.format("Two"))
    words = ["--lambada-data", tmp_path / "lambada", "--wikitext-data", tmp_path / "wiki"]
    record = run(tmp_path, "lm_harness", *words, "--tokenizer", tmp_path)
    titles = lm_harness.FIGURES
    reference, *others = ([each["rounds"][0][x] for x in titles] for each in record["contenders"])
    assert 0 < reference[0] < 1
    for own in others:
        assert own == pytest.approx(reference, rel=1e-5)
