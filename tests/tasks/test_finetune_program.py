"""tasks/main.py of fine-tuned tasks: what is trained, kept, taken up, evaluated and refused."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from megatron.config.checkpoints import read_manifest, step_folders
from megatron.config.model import ResidualOrder
from megatron.config.parse import parse
from tasks import seeds as seeds_of
from tasks.finetune import evaluate_models, prepare
from tasks.finetuning import Head
from tasks.judging import mean_logits
from tasks.main import ROOT
from tasks.record import identify
from tasks.seeds import fine_tune, with_dtype
from tests.dist import Pool
from tests.tasks import made
from tests.tasks.made import small_section, write_files, write_model
from tests.tasks.program import FEW, SIZES, TASK, Capture, evaluating, refusal, result
from tests.tiny import mesh_of_ranks, tiny_section

HEADS: tuple[Head, ...] = get_args(Head)


@pytest.mark.parametrize(
    ("head", "order"), [*((head, "pre-ln") for head in HEADS), ("classifier", "post-ln")]
)
def test_every_head_learns_its_task(
    tmp_path: Path, capsys: Capture, head: Head, order: ResidualOrder
) -> None:
    # Of smaller random weights [CLS] of post-LN is all but its own embedding, and learns nothing.
    model = write_model(tmp_path, small_section(residual_order=order, init_method_std=0.1))
    words = ["--load", str(model), *write_files(tmp_path, 400), *FEW, "--head", head]
    record = result([*words, "--epochs", "4"], capsys)
    losses = [epoch["train_loss"] for epoch in record["seeds"][0]["epochs"]]
    assert losses[-1] < 0.4 * losses[0]
    assert record["accuracy"] > 0.85, "by chance a half, a third and less"
    assert (record["model"]["head"], record["model"]["residual_order"]) == (head, order)


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
        record["hyper_parameters"] | {"lr": 1e-2, "epochs": 3, "head": "classifier"}
        == (record["hyper_parameters"])
    )
    assert not {"load", "seed", "save", "train_data"} & record["hyper_parameters"].keys()
    assert [each["seed"] for each in record["seeds"]] == [1234, 1235]
    assert all(len(each["epochs"]) == 3 for each in record["seeds"])
    assert "accuracy on the very data" in record["protocol"]["best_epoch"]


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
            assert found["finetuned"]["hyper_parameters"]["lr"] == 1e-2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_formats_train_and_are_evaluated_as_they_were(
    words: list[str], tmp_path: Path, capsys: Capture, dtype: str
) -> None:
    save = tmp_path / "save"
    record = result([*words, "--dtype", dtype, "--save", str(save)], capsys)
    manifest = read_manifest(Path(record["seeds"][0]["checkpoints"]["last"]))
    assert manifest["precision"] == record["dtype"] == dtype
    again = result(["--load", str(save / "seed_1234"), *evaluating(save)], capsys)
    assert (again["accuracy"], again["dtype"]) == (record["accuracy"], dtype)
    wide = ["--load", str(save / "seed_1234"), *evaluating(save), "--dtype", "fp32"]
    assert result(wide, capsys)["dtype"] == "fp32"


def test_devices_that_would_compute_in_two_formats_are_refused() -> None:
    plan: Any = SimpleNamespace(settings=SimpleNamespace(dtype=None))
    peers = SimpleNamespace(gather=lambda own: [own, {"bf16": "fp32", "fp32": "bf16"}[own]])
    mesh: Any = SimpleNamespace(control=peers, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="compute in bf16 and fp32; --dtype fp32, for all of them"):
        with_dtype(plan, mesh)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_training_takes_the_precision_of_the_device(
    pretrained: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    monkeypatch.setattr(seeds_of, "default_precision", lambda device: dtype)
    words = ["--load", str(pretrained), *write_files(tmp_path, 16), *SIZES, "--epochs", "1"]
    save = ["--save", str(tmp_path / "save")]
    record = result([*words, *save], capsys)
    assert record["dtype"] == record["hyper_parameters"]["dtype"] == dtype
    folder = Path(record["seeds"][0]["checkpoints"]["last"])
    assert read_manifest(folder)["precision"] == dtype
    other = {"bf16": "fp32", "fp32": "bf16"}[dtype]
    error = refusal([*words, *save, "--dtype", other], capsys)
    assert f"with --dtype {dtype}, and here it is {other}" in error


def test_an_ensemble_is_the_mean_of_the_logits(tuned: tuple[Path, Any], capsys: Capture) -> None:
    save, trained = tuned
    loads = [str(save / "seed_1234"), str(save / "seed_1235")]
    record = result(["--ensemble", *loads, *evaluating(save)], capsys)
    figures = [each["epochs"][-1]["figures"] for each in trained["seeds"]]
    assert [each["figures"] for each in record["models"]] == figures
    assert [each["finetuned"]["seed"] for each in record["models"]] == [1234, 1235]
    twice = result(["--ensemble", loads[0], loads[0], *evaluating(save)], capsys)
    assert twice["accuracy"] == figures[0]["accuracy"]
    assert [each["dtype"] for each in record["models"]] == ["fp32", "fp32"]
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
