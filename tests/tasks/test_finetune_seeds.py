"""Seeds of a fine-tuned task: what each has of its own, finished ones, ones that go wrong."""

import re
from pathlib import Path
from shutil import copy, copytree
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.checkpoints import step_folders
from megatron.config.parse import parse
from megatron.optim.loss_scaler import LossScaler
from megatron.train.metrics import read_metrics
from megatron.train.objectives import answer_scores
from megatron.train.replicas import ReplicaDrift, check_replicas
from tasks import seeds as seeds_of
from tasks.finetune import prepare
from tasks.main import main
from tasks.seeds import fine_tune
from tasks.spread import medians, summarise
from tests.dist import Pool
from tests.tasks import made
from tests.tasks.made import COUNT
from tests.tasks.program import TASK, Capture, evaluating, refusal, result
from tests.tiny import mesh_of_ranks


def test_median_and_spread_are_of_the_seeds_and_the_best_epoch_is_the_highest(
    tuned: tuple[Path, Any],
) -> None:
    _, record = tuned
    runs = [[epoch["figures"] for epoch in each["epochs"]] for each in record["seeds"]]
    assert runs[0] != runs[1]
    for each, run in zip(record["seeds"], runs, strict=True):
        values = [figures["accuracy"] for figures in run]
        assert each["best_epoch"] == 1 + values.index(max(values))
    for name, rows in {
        "last_epoch": [run[-1] for run in runs],
        "best_epoch": [max(run, key=lambda figures: figures["accuracy"]) for run in runs],
    }.items():
        values = [row["near_accuracy"] for row in rows]
        assert record[name]["near_accuracy"] == {
            "median": median(values), "min": min(values), "max": max(values),
        }  # fmt: skip
    assert record["accuracy"] == record["last_epoch"]["accuracy"]["median"]
    near, far = record["near_accuracy"], record["far_accuracy"]
    assert record["accuracy"] == pytest.approx((2 * near + far) / 3)
    assert record["near_examples"] == COUNT


def test_figures_are_summarised_one_by_one() -> None:
    rows = [
        {"f1": each, "n": 7, "parts": {"em": each + 1, "words": "none"}, "best": each == 2}
        for each in (3.0, 1.0, 2.0, 9.0, 5.0)
    ]
    assert summarise(rows) == {
        "f1": {"median": 3.0, "min": 1.0, "max": 9.0},
        "parts": {"em": {"median": 4.0, "min": 2.0, "max": 10.0}},
    }
    assert medians(rows) == {"f1": 3.0, "n": 7, "parts": {"em": 4.0}}


def test_every_seed_has_a_head_an_order_and_dropout_of_its_own(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, masks, courses = [], [], []

    def looks(state: Any, course: Any, epoch: int, tell: Any) -> float:
        heads.append(state.model.head.weight.detach().clone())
        with state.streams.at(0, 0):
            masks.append(state.model.dropout(torch.ones(4, 32)))
        courses.append(course.seed)
        return 0.0

    monkeypatch.setattr(seeds_of, "train_epoch", looks)
    result([*words, "--epochs", "1", "--seeds", "3"], capsys)
    assert courses == [1234, 1235, 1236]
    for each in (heads, masks):
        pairs = [(one, other) for one in range(3) for other in range(one)]
        assert not any(torch.equal(each[one], each[other]) for one, other in pairs)


def test_a_run_that_diverges_ends_with_one_message(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = [*words, "--seed", "1235", "--clip-grad", "0", "--lr-warmup-fraction", "0"]
    error = refusal([*wild, "--lr", "1e30", "--save", str(tmp_path / "wild")], capsys)
    (line,) = [each for each in error.splitlines() if each.startswith("error: ")]
    assert line.startswith("error: seed 1235, epoch 1, step 2: the loss is not finite; first seen")
    assert line.endswith("; a lower --lr or a larger --lr-warmup-fraction may help")
    assert "Traceback" not in error
    assert "samples" not in error
    monkeypatch.setattr(LossScaler, "may_skip", lambda self: False)
    scaled = refusal([*wild, "--lr", "1e30", "--dtype", "fp16"], capsys)
    assert "is not finite at loss scale 65536; first seen in " in scaled
    assert "--lr-warmup-fraction or --dtype bf16 may help" in scaled


def test_logits_that_are_no_numbers_are_one_message(
    tuned: tuple[Path, Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, _ = tuned

    def broken(model: Any, batch: Any, device: Any) -> Any:
        return answer_scores(model, batch, device) * torch.nan

    monkeypatch.setattr("megatron.train.finetune.answer_scores", broken)
    error = refusal(["--load", str(save / "seed_1234"), *evaluating(save)], capsys)
    assert f"error: {TASK} near: logits are not numbers; a model that has not diverged" in error
    assert "Traceback" not in error


def drift(words: list[str]) -> str:
    """Training in which a weight of the second rank is another one after the first epoch."""
    mesh = mesh_of_ranks(1)
    epochs = []

    def drifts(state: Any, batches: Any) -> None:
        epochs.append(state.step)
        if mesh.data.rank:
            with torch.no_grad():
                state.model.head.bias.add_(1)
        check_replicas(state, batches)

    plan = prepare(TASK, made, parse(made.Settings, words, {}), ["a test"], mesh.size)
    with mock.patch("megatron.train.finetune.check_replicas", drifts):
        try:
            fine_tune(plan, mesh, {})
        except ReplicaDrift as error:
            return f"after {epochs}: {error}"
    return "unseen"


@pytest.mark.filterwarnings("ignore:nothing of the models")
def test_ranks_that_differ_after_an_epoch_end_the_run(gloo: Pool, words: list[str]) -> None:
    for told in gloo.run(2, drift, words):
        assert told.startswith("after [4]: ")
        assert "head.bias" in told


def test_a_seed_that_fails_loses_no_other(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "save"
    words = [*words, "--save", str(save)]
    whole = result([*words[:-1], str(tmp_path / "whole"), "--seeds", "2"], capsys)

    def fails(state: Any, course: Any, epoch: int, tell: Any) -> float:
        if (course.seed, epoch) == (1235, 1):
            raise RuntimeError("a node died")
        return train_epoch(state, course, epoch, tell)

    train_epoch = seeds_of.train_epoch
    monkeypatch.setattr(seeds_of, "train_epoch", fails)
    with pytest.raises(RuntimeError, match="a node died"):
        main(["--task", TASK, *words, "--seeds", "2"], {})
    (first,) = step_folders(save / "seed_1235")  # its first epoch, the best so far
    copytree(first, first.with_name("step_00000099"))
    before = (save / "seed_1234" / "metrics.jsonl").stat().st_mtime_ns
    monkeypatch.undo()
    record = result([*words, "--seeds", "2"], capsys)
    assert (save / "seed_1234" / "metrics.jsonl").stat().st_mtime_ns == before
    assert record["last_epoch"] == whole["last_epoch"]
    assert without_paths(record) == without_paths(whole)
    kept = {path for path in (save / "seed_1235").iterdir() if path.is_dir()}
    assert kept == {Path(path) for path in record["seeds"][1]["checkpoints"].values()}

    result([*words, "--seeds", "1", "--seed", "1235"], capsys)
    renamed = [str(tmp_path / "near"), str(copy(tmp_path / "far", tmp_path / "farther"))]
    for more, what in [
        (["--lr", "1e-3"], "with --lr 0.003, and here it is 0.001"),
        (["--head", "span"], "with --head classifier, and here it is span"),
        (
            ["--valid-data", str(tmp_path / "near")],
            "with other --valid-data: 2 files then, 1 now: far is missing",
        ),
        (
            ["--train-data", str(tmp_path / "near")],
            "with other --train-data: 1 file then, 1 now: train is missing, near is new",
        ),
        (["--valid-data", *renamed], "with the evaluations ['near', 'far'], and here it is ['n"),
    ]:
        error = refusal([*words, *more], capsys)
        assert f"--save {save} holds seeds of another run, {what}" in error
        assert "another --save would work" in error
    (tmp_path / "far").write_text("7 9", encoding="utf-8")
    error = refusal(words, capsys)
    said = r"2 files then, 2 now: far has changed \(sha256 [0-9a-f]{12} then, [0-9a-f]{12} now\);"
    assert re.search(f"with other --valid-data: {said}", error)
    (save / "seed_1234" / "result.json").write_text("{", encoding="utf-8")
    error = refusal(words, capsys)
    assert "result.json is damaged: " in error
    assert "without that file the seed is run again" in error


def without_paths(record: dict[str, Any]) -> list[Any]:
    return [{**each, "checkpoints": None} for each in record["seeds"]]


def test_metrics_come_a_few_times_an_epoch(tuned: tuple[Path, Any]) -> None:
    save, record = tuned
    lines = read_metrics(save / "seed_1235" / "metrics.jsonl")
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, 13)), "four an epoch, all are told"
    ends = [line for line in lines if "train_loss" in line]
    figures = [each["figures"]["near_accuracy"] for each in record["seeds"][1]["epochs"]]
    assert [line["near_accuracy"] for line in ends] == figures
