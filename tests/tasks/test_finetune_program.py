"""tasks/main.py of fine-tuned tasks: what is trained, kept, taken up, evaluated and refused."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from statistics import median
from typing import Any, get_args

import numpy as np
import pytest

from megatron.config.checkpoints import read_manifest, step_folders
from megatron.config.parse import parse
from megatron.train.metrics import read_metrics
from tasks import seeds as seeds_of
from tasks.finetune import evaluate_models, prepare
from tasks.finetuning import Head
from tasks.judging import mean_logits
from tasks.main import ROOT, main
from tasks.record import identify
from tasks.seeds import fine_tune
from tasks.spread import medians, summarise
from tests.dist import Pool
from tests.tasks import made
from tests.tasks.made import COUNT, write_files, write_model
from tests.tiny import mesh_of_ranks, tiny_section

HEADS: tuple[Head, ...] = get_args(Head)
TASK = "tests.tasks.made"
FEW = ["--epochs", "2", "--lr", "3e-3", "--global-batch-size", "16", "--micro-batch-size", "16"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def words(pretrained: Path, tmp_path: Path) -> list[str]:
    """The flags of a short training."""
    return ["--load", str(pretrained), *write_files(tmp_path, 64), *FEW]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> tuple[Path, Any]:
    """(--save of a classifier trained with two seeds, its record)."""
    folder = tmp_path_factory.mktemp("tuned")
    words = ["--load", str(pretrained), *write_files(folder, 64), *FEW, "--epochs", "3"]
    output = folder / "result.json"
    more = ["--seeds", "2", "--save", str(folder / "save"), "--output", str(output)]
    main(["--task", TASK, *words, *more], {})
    return folder / "save", json.loads(output.read_text(encoding="utf-8"))


def result(words: list[str], capsys: Capture) -> dict[str, Any]:
    capsys.readouterr()
    main(["--task", TASK, *words], {})
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def refusal(words: list[str], capsys: Capture, task: str = TASK) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(["--task", task, *words], {})
    return capsys.readouterr().err


def evaluating(save: Path) -> list[str]:
    """The flags that evaluate on what was evaluated in training."""
    return ["--valid-data", str(save.parent / "near"), str(save.parent / "far")]


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_its_task(
    pretrained: Path, tmp_path: Path, capsys: Capture, head: Head
) -> None:
    words = ["--load", str(pretrained), *write_files(tmp_path, 400), *FEW, "--head", head]
    record = result([*words, "--epochs", "6"], capsys)
    losses = [epoch["train_loss"] for epoch in record["seeds"][0]["epochs"]]
    assert losses[-1] < 0.4 * losses[0]
    assert record["accuracy"] > 0.85, "by chance a half, a third and less"
    assert record["model"]["head"] == head


def test_the_record_says_what_was_trained_and_how(
    tuned: tuple[Path, Any], pretrained: Path
) -> None:
    save, record = tuned
    assert [*record][:4] == ["task", "conventions", "protocol", "labels"]
    assert (record["task"], record["labels"], record["dtype"]) == (TASK, ["key", "alike"], "fp32")
    assert (record["notes"], record["layout"]) == ({"made": True}, {"data": 1, "tensor": 1})
    assert record["checkpoint_hash"] == read_manifest(pretrained)["checksum"]
    assert record["checkpoint"] == str(pretrained)
    parameters = sum(
        int(np.prod(tensor["shape"]))
        for tensor in read_manifest(step_folders(save / "seed_1234")[0])["tensors"].values()
    )
    assert record["model"]["parameters"] == parameters
    files = [Path(each["file"]).name for each in record["data"]]
    assert files == ["train", "near", "far"]
    assert (
        record["hyper_parameters"] | {"lr": 3e-3, "epochs": 3, "head": "classifier"}
        == (record["hyper_parameters"])
    )
    assert not {"load", "seed", "save", "train_data"} & record["hyper_parameters"].keys()
    assert [each["seed"] for each in record["seeds"]] == [1234, 1235]
    assert all(len(each["epochs"]) == 3 for each in record["seeds"])
    assert "accuracy on the very data" in record["protocol"]["best_epoch"]


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


def test_checkpoints_of_the_last_and_the_best_epoch_give_the_figures_of_that_time(
    tuned: tuple[Path, Any], capsys: Capture
) -> None:
    save, record = tuned
    for each in record["seeds"]:
        paths = each["checkpoints"]
        assert {str(path) for path in step_folders(save / f"seed_{each['seed']}")} == {
            *paths.values()
        }
        for which, epoch in (("last", 3), ("best", each["best_epoch"])):
            found = result(["--load", paths[which], *evaluating(save)], capsys)
            figures = each["epochs"][epoch - 1]["figures"]
            assert {name: found[name] for name in figures} == figures
            assert found["finetuned"]["epoch"] == epoch
            assert found["finetuned"]["task"] == TASK
            assert "lr" not in found["hyper_parameters"], "nothing is trained"
            assert found["finetuned"]["hyper_parameters"]["lr"] == 3e-3


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_formats_train_and_are_evaluated_as_they_were(
    words: list[str], tmp_path: Path, capsys: Capture, dtype: str
) -> None:
    save = tmp_path / "save"
    record = result([*words, "--dtype", dtype, "--save", str(save)], capsys)
    manifest = read_manifest(Path(record["seeds"][0]["checkpoints"]["last"]))
    assert manifest["precision"] == record["dtype"] == dtype
    again = ["--load", str(save / "seed_1234"), *evaluating(save), "--dtype", dtype]
    assert result(again, capsys)["accuracy"] == record["accuracy"]


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
    for more, what in [
        (["--lr", "1e-3"], "with --lr 0.003, and here it is 0.001"),
        (["--head", "span"], "with --head classifier, and here it is span"),
        (["--valid-data", str(tmp_path / "near")], "with --train-data and --valid-data ["),
    ]:
        error = refusal([*words, *more], capsys)
        assert f"--save {save} holds seeds of another run, {what}" in error
        assert "another --save would work" in error
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


def test_an_ensemble_is_the_mean_of_the_logits(tuned: tuple[Path, Any], capsys: Capture) -> None:
    save, trained = tuned
    loads = [str(save / "seed_1234"), str(save / "seed_1235")]
    record = result(["--ensemble", *loads, *evaluating(save)], capsys)
    figures = [each["epochs"][-1]["figures"] for each in trained["seeds"]]
    assert [each["figures"] for each in record["models"]] == figures
    assert [each["finetuned"]["seed"] for each in record["models"]] == [1234, 1235]
    twice = result(["--ensemble", loads[0], loads[0], *evaluating(save)], capsys)
    assert twice["accuracy"] == figures[0]["accuracy"]
    rows = [{"a": [np.array([0.0, 1.0]), np.array([[4.0]])]}, {"a": [np.array([4.0, 2.0]), [[0]]]}]
    mean = mean_logits(rows)["a"]  # type: ignore[arg-type]
    assert [each.tolist() for each in mean] == [[2.0, 1.5], [[2.0]]]


def ranks(words: list[str], tensor_size: int) -> dict[str, Any]:
    mesh = mesh_of_ranks(tensor_size)
    plan = prepare(TASK, made, parse(made.Settings, words, {}), ["a test"], mesh.size)
    act = fine_tune if plan.settings.train_data else evaluate_models
    return act(plan, mesh, {})[0]


@pytest.mark.filterwarnings("ignore:nothing of the models")
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_several_processes_train_keep_and_evaluate(
    gloo: Pool, words: list[str], tmp_path: Path, tensor_size: int
) -> None:
    save = tmp_path / "save"
    words = [*words, "--hidden-dropout", "0", "--attention-dropout", "0", "--seeds", "2"]
    cut = ["--tensor-model-parallel-size", str(tensor_size)]
    record, nothing = gloo.run(2, ranks, [*words, *cut, "--save", str(save)], tensor_size)
    assert nothing == {}
    alone = ranks(words, 1)
    for one, other in zip(record["seeds"], alone["seeds"], strict=True):
        for epoch, expected in zip(one["epochs"], other["epochs"], strict=True):
            assert epoch["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    again, _ = gloo.run(2, ranks, [*words, *cut, "--save", str(save)], tensor_size)
    assert again["seeds"] == record["seeds"]
    models = ["--ensemble", str(save / "seed_1234"), str(save / "seed_1235"), *evaluating(save)]
    both, _ = gloo.run(2, ranks, [*models, *cut], tensor_size)
    expected = ranks(models, 1)
    assert [each["figures"] for each in both["models"]] == [
        each["epochs"][-1]["figures"] for each in record["seeds"]
    ]
    assert both["accuracy"] == expected["accuracy"]


def test_a_model_of_another_kind_or_task_is_refused(
    tuned: tuple[Path, Any],
    pretrained: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    save, _ = tuned
    files, fine = write_files(tmp_path), str(save / "seed_1234")
    valid, pre = files[2:], str(pretrained)
    gpt2 = str(write_model(tmp_path / "gpt2", tiny_section()))
    other = str(write_model(tmp_path / "other", made.small_section(), words=["word"]))
    cases = [
        (["--load", gpt2, *files], "a model of the kind gpt2; a checkpoint of the kind bert or fi"),
        (["--load", pre, *valid], "is pretrained alone, so its head would be random; --train-d"),
        (["--load", fine, *files], "is fine-tuned already; without --train-data it is evaluated"),
        (["--load", fine, *valid, "--head", "span"], "its head is a classifier (key, alike), and"),
        (["--load", fine, *valid, "--names", "more"], "of this task a classifier (alike, key); a"),
        (["--load", pre, *files, "--seq-length", "25"], "--seq-length 24 would work"),
        (["--load", pre, "--ensemble", fine, *valid], "either --load, one checkpoint, or --ens"),
        (valid, "either --load, one checkpoint, or --ensemble, several of fine-tuned models"),
        (["--ensemble", fine, *files], "--ensemble evaluates fine-tuned models and --train-data"),
        (["--ensemble", fine, pre, *valid], "is pretrained alone"),
        (["--load", fine, *valid, "--save", "x"], "--save and --seeds are about training"),
        (["--load", fine, *valid, "--seeds", "2"], "--save and --seeds are about training"),
        (["--load", pre, *files, "--compare-paper"], "the paper's tables have no tests.tasks.ma"),
        (["--load", pre, *files, "--lr-warmup-fraction", "1.5"], "should be in [0, 1)"),
        (["--load", pre, *files, "--epochs", "0"], "--epochs 0 should be above 0"),
        (["--load", str(tmp_path / "none"), *files], "no checkpoint there"),
    ]
    for words, message in cases:
        assert message in refusal(words, capsys), words
    alien = ["--load", other, *files, *FEW, "--epochs", "1", "--save", str(tmp_path / "alien")]
    result(alien, capsys)
    both = ["--ensemble", fine, str(tmp_path / "alien" / "seed_1234"), *valid]
    assert "with another tokenizer than" in refusal(both, capsys)
    for task in ("WIKITEXT103", "LAMBADA"):
        error = refusal(["--load", pre, "--valid-data", str(tmp_path / "near")], capsys, task)
        assert "holds a model of the kind bert; a checkpoint of the kind gpt2 would work" in error


def test_other_settings_than_those_of_training_are_told(
    tuned: tuple[Path, Any], capsys: Capture
) -> None:
    save, _ = tuned
    words = ["--load", str(save / "seed_1234"), *evaluating(save), "--seq-length", "20"]
    main(["--task", TASK, *words, "--micro-batch-size", "3", "--dtype", "bf16"], {})
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(warned) == 1
    assert "--seq-length is 20, but" in warned[0]
    assert "was fine-tuned with 24; --seq-length 24 would give the figures" in warned[0]


def test_answers_in_a_file_are_judged_without_a_model(tmp_path: Path, capsys: Capture) -> None:
    files = write_files(tmp_path)
    (tmp_path / "answers").write_text("four", encoding="utf-8")
    words = [*files[2:], "--answers", str(tmp_path / "answers")]
    record = result(words, capsys)
    assert record["answers"] == 4
    assert [Path(each["file"]).name for each in record["data"]] == ["near", "far", "answers"]
    assert record["conventions"] == {"answers": "in the file"}
    assert "--compare-paper compares models" in refusal([*words, "--compare-paper"], capsys)


def test_input_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gpt2", tiny_section())
    words = ["--task", TASK, "--load", str(model), "--valid-data", str(tmp_path)]
    code = (
        "import sys; import tasks.main, tasks.finetune, tasks.glue, tasks.race, tasks.squad.task\n"
        "tasks.main.TASKS['X'] = 'tasks.race'\n"
        f"try: tasks.main.main(['--task', 'X', *{words[2:]!r}], {{}})\n"
        "finally: assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {model} holds a model of the kind gpt2")


def test_a_folder_is_identified_by_the_names_and_contents_in_it(tmp_path: Path) -> None:
    def fill(name: str, *files: tuple[str, str]) -> dict[str, Any]:
        for file, content in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(content, encoding="utf-8")
        return identify(tmp_path / name)

    one = fill("one", ("high/2.txt", "b"), ("high/1.txt", "a"))
    assert (one["files"], one["bytes"]) == (2, 2)
    assert fill("two", ("high/1.txt", "a"), ("high/2.txt", "b"))["sha256"] == one["sha256"]
    assert fill("three", ("high/1.txt", "b"), ("high/2.txt", "a"))["sha256"] != one["sha256"]
    assert fill("four", ("low/1.txt", "a"), ("high/2.txt", "b"))["sha256"] != one["sha256"]
